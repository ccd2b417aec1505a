"""Stand-ins for SGLang's scheduler and requests: the attributes that the plugin reads, and a record of what it called."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from sidecar.plugin.engine import Engine


@dataclass(eq=False)
class FakeKeeper:
    """The KV manager of either side."""

    request_status: dict[int, int] = field(default_factory=dict)
    transfer_infos: dict[int, Any] = field(default_factory=dict)
    req_to_decode_prefix_len: dict[int, int] = field(default_factory=dict)
    deferred_bootstrap: Any = None


@dataclass(eq=False)
class FakeEnd:
    """A sender or a receiver of KV."""

    kv_mgr: FakeKeeper
    conclude_state: int | None = None
    cleared: int = 0
    aborted: int = 0

    def clear(self) -> None:
        self.cleared += 1

    def abort(self) -> None:
        self.aborted += 1


@dataclass(eq=False)
class FakeReq:
    bootstrap_room: int
    tokens: int = 100
    rid: str = ""
    bootstrap_host: str = "10.0.0.2"
    bootstrap_port: int = 41001
    output_ids: list[int] = field(default_factory=list)
    extend_end: int | None = None
    prefix_len: int = 0
    finished_reason: Any = None
    to_finish: Any = None
    is_retracted: bool = False
    prefill_attempt_count: int = 0
    return_logprob: bool = False
    return_hidden_states: bool = False
    return_routed_experts: bool = False
    multimodal_inputs: Any = None
    session: Any = None
    beam_group: Any = None
    grammar: Any = None
    lora_id: Any = None
    pending_bootstrap: bool = True
    last_node: Any = None
    lock: Any = None
    disagg_kv_sender: Any = None

    def __post_init__(self) -> None:
        self.rid = self.rid or f"r{self.bootstrap_room}"
        self.origin_input_ids = [1] * self.tokens
        self.kv = SimpleNamespace(
            holds_kv=False, holds_mamba=False, cache_protected_len=0, cache_inserted_len=0, kv_committed_len=0
        )
        self.time_stats = SimpleNamespace(set_wait_queue_entry_time=lambda: None, set_completion_time=lambda: None)

    def finished(self) -> bool:
        return self.finished_reason is not None


@dataclass(eq=False)
class FakeRoom:
    """SGLang's DecodeRequest."""

    req: FakeReq
    kv_receiver: Any
    is_rebootstrap: bool = False
    host_staged: bool = False
    metadata_buffer_index: int = 3


class FakeBatch:
    def __init__(self, reqs: list[FakeReq] | None = None) -> None:
        self.reqs = reqs or []

    def batch_size(self) -> int:
        return len(self.reqs)

    def is_empty(self) -> bool:
        return not self.reqs


class FakeScheduler:
    def __init__(self, role: str) -> None:
        self.disaggregation_mode = SimpleNamespace(value=role)
        self.keeper = FakeKeeper()
        self.calls: list[str] = []
        self.waiting_queue: list[FakeReq] = []
        self.running_batch = FakeBatch()
        self.last_batch: Any = None
        self.chunked_req: Any = None
        self.idle = True
        self.max_total_num_tokens = 10_000
        self.chunked_prefill_size: int | None = 8192
        self.schedule_policy, self.enable_priority_scheduling, self.dllm_config = "fcfs", False, None
        self._engine_paused = False
        self.free = 10_000
        self.disagg_prefill_bootstrap_queue = SimpleNamespace(queue=[], kv_manager=self.keeper)
        self.disagg_prefill_inflight_queue: list[FakeReq] = []
        self.freed: list[int] = []
        self.transfer_released: list[FakeRoom] = []
        self.disagg_decode_prealloc_queue = SimpleNamespace(queue=[], pending_reqs=[], retracted_queue=[], kv_manager=self.keeper)
        self.disagg_decode_transfer_queue = SimpleNamespace(
            queue=[],
            _release_request=self.transfer_released.append,
            metadata_buffers=SimpleNamespace(clear_slot=lambda index: self.freed.append(index)),
            req_to_metadata_buffer_idx_allocator=SimpleNamespace(free=lambda index: self.freed.append(index)),
        )
        self.token_to_kv_pool_allocator = SimpleNamespace(available_size=lambda: self.free)
        self.tree_cache = SimpleNamespace(evictable_size=lambda: 0)

    def is_fully_idle(self) -> bool:
        return self.idle

    def clear_pending_chunk_send(self, req: FakeReq) -> None:
        self.calls.append(f"clear_pending {req.bootstrap_room}")

    def _release_aborted_request(self, req: FakeReq) -> None:
        self.calls.append(f"release {req.bootstrap_room}")

    # ------------------------------------------------------------ putting work in

    def prefill_room(self, room: int, *, bootstrapping: bool = False, **fields: Any) -> FakeReq:
        req = FakeReq(room, disagg_kv_sender=FakeEnd(self.keeper), **fields)
        (self.disagg_prefill_bootstrap_queue.queue if bootstrapping else self.waiting_queue).append(req)
        return req

    def decode_room(self, room: int, *, has_kv: bool = True, **fields: Any) -> FakeRoom:
        made = FakeRoom(FakeReq(room, **fields), FakeEnd(self.keeper))
        if has_kv:
            made.req.extend_end = made.req.tokens  # as SGLang's preallocation does, long before any KV has come
            self.disagg_decode_transfer_queue.queue.append(made)
        else:
            self.disagg_decode_prealloc_queue.queue.append(made)
            self.disagg_decode_prealloc_queue.pending_reqs.append(made)
        return made


class FakeEngine(Engine):
    """The real one without SGLang behind it: what it would call is recorded."""

    _dp = _pp = False

    def __init__(self, role: str) -> None:
        self.scheduler = FakeScheduler(role)
        self.is_first_rank = True
        self.ended_empty: list[FakeReq] = []
        self.ended_aborted: list[FakeReq] = []

    def release_metadata_buffer(self, req: Any) -> None:
        self.scheduler.calls.append(f"metadata {req.bootstrap_room}")

    def end_empty(self, req: Any) -> None:
        req.finished_reason = "length"
        self.ended_empty.append(req)

    def end_aborted(self, req: Any, finished_reason: Any) -> None:
        self.ended_aborted.append(req)
