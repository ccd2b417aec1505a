"""The plugin's part in SGLang's HTTP process: what holds, hands off, adopts and counts there, and the hooks that connect it.

Never works on another thread than the engine's own event loop: what the sidecar says is passed on to it.
"""

from __future__ import annotations

import asyncio
import importlib
import logging
import random
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from functools import partial
from typing import Any

from fluidpd.names import Role
from fluidpd.slo import SloTargets
from sidecar.gate import Gate
from sidecar.plugin import entry
from sidecar.plugin.adopt import Adopted, parse_rid
from sidecar.plugin.adoption import Adoptions
from sidecar.plugin.arming import Hook, Original
from sidecar.plugin.gate import HELD_S, GateInFront
from sidecar.plugin.handoff import Handoffs
from sidecar.plugin.hello import BOOT
from sidecar.plugin.relay import EngineStreams
from sidecar.plugin.tally import Tally, Timing
from sidecar.protocol import (
    CAN_ADOPT,
    CAN_HANDOFF,
    CAN_HOLD,
    HandoffState,
    Message,
    Order,
    PluginHello,
    PluginSample,
    PluginWelcome,
    Reply,
)

log = logging.getLogger(__name__)

PART: HttpPart | None = None
SAY_COUNTS_EVERY_S = 0.25
ORPHAN_S = 10.0  # a drain or a closed gate outlives its sidecar by this much, then the worker serves again


class HttpPart:
    def __init__(self, manager: Any, version: str) -> None:
        self.manager = manager
        self.version = version
        self.streams = EngineStreams(manager)
        self.gate = Gate()
        self.tally = Tally(SloTargets())
        self.why_no_handoff = _why_no_handoff(manager)
        self._can_hold = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._heard: asyncio.Queue[tuple[Callable[[Any], Any], Any]] = asyncio.Queue()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._orphaned: asyncio.TimerHandle | None = None
        self.link = entry.link(self.hello)
        self.handoffs = Handoffs(
            self.streams,
            self.send,
            self._go_on_here,
            self._stop_here,
            boot=BOOT,
            kv_bytes_per_token=_kv_bytes_per_token(manager),
            clock=time.monotonic,
        )
        self.adoptions = Adoptions(self, self.send, draining=lambda: self.handoffs.draining)
        handlers: dict[str, Callable[[Any], Any]] = {
            "welcome": self._welcome,
            "order": self._order,
            "adopt": lambda m: self.adoptions.adopt(m.state),
            "handoff_taken": lambda m: self.handoffs.taken(m.id),
            "handoff_failed": lambda m: self.handoffs.failed(m.id, m.why),
            "tokens": self.handoffs.tokens,
            "relay_gone": lambda m: self.adoptions.gone(m.id),
        }
        for type_, handler in handlers.items():
            self.link.on(type_, partial(self._pass_on, handler))
        self.link.on_lost(lambda: self._pass_on(lambda _: self._lost(), None))
        entry.GUARD.on_disarm(lambda why: self._pass_on(lambda _: self._disarmed(), None))

    # ------------------------------------------------------------ the sidecar

    def hello(self) -> PluginHello:
        able = not self.why_no_handoff
        capabilities = [CAN_HANDOFF, CAN_ADOPT] if able else []
        if self._can_hold:
            capabilities.append(CAN_HOLD)
        if not entry.GUARD.armed:
            capabilities = []
        return PluginHello(
            part="http",
            engine="sglang",
            engine_version=self.version,
            boot=BOOT,
            role=self.streams.role or Role.DECODE,
            capabilities=tuple(capabilities),
            disarmed_why=entry.GUARD.disarmed_why,
        )

    def send(self, message: Message) -> bool:
        return self.link.send(message)

    def in_front_of(self, app: Any) -> None:
        """Put the gate before the application. Only possible before it serves."""
        port = int(self.manager.server_args.disaggregation_bootstrap_port)
        app.add_middleware(GateInFront, gate=self.gate, own_bootstrap_port=port, loop_started=self.loop_started)
        self._can_hold = True

    def loop_started(self) -> None:
        """Called in the engine's event loop, once it runs."""
        if self._loop is not None:
            return
        self._loop = asyncio.get_running_loop()
        self._keep(self._hear())
        self._keep(self._say_counts())
        self.link.start()

    def _pass_on(self, handler: Callable[[Any], Any], message: Any) -> None:
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._heard.put_nowait, (handler, message))

    async def _hear(self) -> None:
        """One message after the other, in the order in which they came."""
        while True:
            handler, message = await self._heard.get()
            try:
                result = handler(message)
                if isinstance(result, Awaitable):
                    await result
            except Exception as error:
                entry.GUARD.failed("http: a message of the sidecar", error)

    def _welcome(self, message: PluginWelcome) -> None:
        if self._orphaned is not None:
            self._orphaned.cancel()
            self._orphaned = None
        self.tally.targets = SloTargets(ttft_s=message.ttft_slo_s, tbt_s=message.tbt_slo_s)

    def _lost(self) -> None:
        self.adoptions.sidecar_lost()
        self.handoffs.sidecar_lost()
        if self._orphaned is None and self._loop is not None:
            self._orphaned = self._loop.call_later(ORPHAN_S, self._orphan)

    def _disarmed(self) -> None:
        """Our hooks are passed by from now on: nothing new is begun, what a peer has comes home, and the sidecar is told."""
        self.adoptions.sidecar_lost()
        self.handoffs.sidecar_lost()
        self._orphan()
        self.link.renew()

    def _orphan(self) -> None:
        self._orphaned = None
        self.handoffs.give_up_drain()
        if self.gate.awaited is not None:
            if self.gate.awaited is self.streams.role:
                self.gate.open()
            else:
                self.gate.drop()

    def _order(self, order: Order) -> None:
        if order.what == "drain":
            self.handoffs.drain(order)  # replies when nothing runs here any more
            return
        ok, detail, numbers = True, "", dict[str, float]()
        if order.what == "undrain":
            self.handoffs.undrain()
        elif order.what == "hold":
            ok = self._can_hold and order.role is not None
            if ok and order.role is not None:
                self.streams.forget_registration()  # the router may send decode workers here from now on
                self.gate.hold(order.role)
            else:
                detail = "early requests cannot be held here" if order.role else "hold needs a role"
        elif order.what == "open_gate":
            self.handoffs.undrain()  # the new role is there: new requests of it are welcome
            self.streams.forget_registration()
            numbers = {"admitted": float(self.gate.open())}
        elif order.what == "drop_held":
            numbers = {"dropped": float(self.gate.drop())}
        else:
            ok, detail = False, f"{order.what} is not this part's"
        self.send(Reply(id=order.id, ok=ok, detail=detail, numbers=numbers))

    async def _say_counts(self) -> None:
        """The counters are totals: a sample that is lost loses nothing."""
        while True:
            role = self.streams.role
            if role is not None:
                self.link.send_sample(PluginSample(part="http", role=role, values=self.tally.values()))
            await asyncio.sleep(SAY_COUNTS_EVERY_S)

    # ------------------------------------------------------------ the engine, as adoptions need it

    @property
    def role(self) -> Role | None:
        return self.streams.role

    @property
    def serves(self) -> bool:
        return self.streams.serves

    def free_tokens(self) -> int | None:
        loads = self.manager.load_snapshot_reader.read_all()
        if not loads or not loads[0].max_total_num_tokens:
            return None
        return int(loads[0].max_total_num_tokens - loads[0].num_used_tokens)

    def run(self, payload: Mapping[str, Any], adopted: Adopted) -> AsyncIterator[dict[str, Any]]:
        where = ("127.0.0.1", None) if adopted.rebuild == "local" else (payload["via"][0], payload["via"][1])
        request = self.streams.continuation(payload, adopted, where, random.getrandbits(62))
        found: AsyncIterator[dict[str, Any]] = self.manager.generate_request(request, None)
        return _whole(found) if self.manager.incremental_streaming_output else found

    def abort(self, rid: str) -> None:
        self.manager.abort_request(rid)

    def _stop_here(self, handoff_id: str) -> None:
        self.adoptions.gone(handoff_id)

    def _go_on_here(self, state: HandoffState) -> bool:
        adopted = self.adoptions.go_on_here(state, self.handoffs.tokens)
        if adopted is not None:
            self.handoffs.stays(adopted.rid)
        return adopted is not None

    # ------------------------------------------------------------ what the hooks tell

    def asked(self, request: Any) -> None:
        self.streams.remember(request)
        state = self.manager.rid_to_state.get(request.rid)
        if state is None or self.streams.role is not Role.DECODE or not state.obj.log_metrics or parse_rid(request.rid):
            return
        asked_s = float(state.time_stats.created_time) - HELD_S.get()
        state.fluidpd_timing = Timing(asked_s, bool(getattr(state.obj, "stream", False)))

    def rows(self, batch: Any) -> None:
        now_s = time.perf_counter()
        states = self.manager.rid_to_state
        for index in range(len(batch.rids)):
            self.handoffs.row(batch, index)
            timing = getattr(states.get(batch.rids[index]), "fluidpd_timing", None)
            if timing is None:
                continue
            ids = batch.output_ids[index] if batch.output_ids is not None else ()
            timing.row(len(ids), now_s)
            finish = batch.finished_reasons[index]
            if finish is not None:
                self.tally.ended(timing, finish)

    def _keep(self, work: Any) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


async def _whole(outputs: AsyncIterator[dict[str, Any]]) -> AsyncIterator[dict[str, Any]]:
    """Outputs of a server that streams only what is new, as outputs of all so far."""
    text, ids = "", list[int]()
    async for out in outputs:
        text += out.get("text") or ""
        ids.extend(out.get("output_ids") or ())
        yield {**out, "text": text, "output_ids": ids}


def _why_no_handoff(manager: Any) -> str:
    arguments = manager.server_args
    if arguments.tokenizer_worker_num > 1:
        return "several HTTP workers: a stream's owner cannot be told"
    if arguments.skip_tokenizer_init:
        return "no tokenizer: texts cannot be continued"
    if arguments.dp_size > 1 or arguments.enable_dp_attention:
        return "data parallel attention"
    if arguments.pp_size > 1:
        return "pipeline parallelism"
    if arguments.speculative_algorithm:
        return "speculative decoding"
    return ""


def _kv_bytes_per_token(manager: Any) -> int:
    """What one token's KV takes on the wire, both K and V of all layers; 0 where the model does not say."""
    model = manager.model_config
    try:
        size = importlib.import_module("torch").empty((), dtype=model.dtype).element_size()
        return int(2 * model.num_hidden_layers * model.num_key_value_heads * model.head_dim * size)
    except (AttributeError, TypeError):
        return 0


# ---------------------------------------------------------------- hooks


def manager_init(original: Original, manager: Any, *args: Any, **kwargs: Any) -> Any:
    global PART
    result = original(manager, *args, **kwargs)
    if manager.disaggregation_mode.value not in ("prefill", "decode"):
        return result
    part = HttpPart(manager, str(importlib.import_module("sglang").__version__))
    server = sys.modules.get("sglang.srt.entrypoints.http_server")
    if server is not None:
        part.in_front_of(server.app)
    PART = part
    if part.why_no_handoff:
        log.warning("fluidpd: this worker hands nothing off: %s", part.why_no_handoff)
    return result


async def send_one_request(original: Original, manager: Any, request: Any) -> Any:
    if PART is not None:
        PART.asked(request)
    return await original(manager, request)


async def handle_batch_output(original: Original, manager: Any, batch: Any) -> Any:
    if PART is not None and hasattr(batch, "output_ids"):
        PART.rows(batch)
    return await original(manager, batch)


def handle_abort_req(original: Original, manager: Any, said: Any) -> Any:
    if PART is not None and PART.handoffs.aborted(said.rid):
        return None
    return original(manager, said)


def abort_request(original: Original, manager: Any, rid: str = "", abort_all: bool = False) -> Any:
    if PART is not None:
        if abort_all:
            PART.handoffs.everyone_left()
        elif PART.handoffs.client_left(rid):
            return None
    return original(manager, rid, abort_all)


_MANAGER = "sglang.srt.managers.tokenizer_manager.TokenizerManager"
HOOKS = (
    Hook(f"{_MANAGER}.__init__", manager_init),
    Hook(f"{_MANAGER}._send_one_request", send_one_request),
    Hook(f"{_MANAGER}._handle_batch_output", handle_batch_output),
    Hook(f"{_MANAGER}._handle_abort_req", handle_abort_req),
    Hook(f"{_MANAGER}.abort_request", abort_request),
)
USES = (
    f"{_MANAGER}.generate_request",
    f"{_MANAGER}._dispatch_to_scheduler",
    f"{_MANAGER}.convert_logprob_style",
    f"{_MANAGER}.is_ready",
    "sglang.srt.disaggregation.common.conn.CommonKVBootstrapServer._is_ready",
)
