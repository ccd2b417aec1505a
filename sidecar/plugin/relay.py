"""The engine's HTTP-side state of one generation, as handoffs need it: what can move, the cut, and rows fed back into a stream.

Never waits and never talks to the sidecar. All of SGLang's names that the HTTP side depends on are in this module.
"""

from __future__ import annotations

import importlib
import json
from array import array
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any

from fluidpd.names import Role
from sidecar.plugin.adopt import Adopted, parse_rid

MARK = "fluidpd: continued on another worker"  # the abort message of our own cut; it comes back in the row that ends the request
HIDDEN_RID = "HEALTH_CHECK_fluidpd"  # the engine skips rows of this prefix in silence
LONGEST_TOKENS = 400_000  # its ids must fit into one line of the plugin protocol
_LOGPROB_FIELDS = ("output_token_logprobs_val", "output_token_logprobs_idx", "output_top_logprobs_val", "output_top_logprobs_idx")
_CARRIED = ("custom_logit_processor", "priority", "extra_key", "cache_salt", "routing_key", "return_logprob", "top_logprobs_num")


@dataclass(slots=True)
class Cut:
    """What a generation's last row here said."""

    prompt_tokens: int
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class Delta:
    """Tokens that were made elsewhere, as they enter a client's stream here."""

    ids: tuple[int, ...]
    text: str
    completion_tokens: int
    prompt_tokens: int
    cached_tokens: int = 0
    finish: dict[str, Any] | None = None
    logprobs: Mapping[str, Any] = field(default_factory=dict)


class EngineStreams:
    """The open requests of one TokenizerManager."""

    def __init__(self, manager: Any) -> None:
        self.manager = manager
        self._io: Any = importlib.import_module("sglang.srt.managers.io_struct")

    # ------------------------------------------------------------ what is open

    @property
    def role(self) -> Role | None:
        said = self.manager.disaggregation_mode.value
        return Role(said) if said in (Role.PREFILL, Role.DECODE) else None

    @property
    def serves(self) -> bool:
        return bool(self.manager.is_ready())

    def open_rids(self) -> tuple[str, ...]:
        return tuple(rid for rid in self.manager.rid_to_state if not rid.startswith("HEALTH_CHECK"))

    def is_open(self, rid: str) -> bool:
        return rid in self.manager.rid_to_state

    def remember(self, asked: Any) -> None:
        """The request as it goes to the scheduler: with the ids of its prompt, and its sampling parameters in full."""
        state = self.manager.rid_to_state.get(asked.rid)
        if state is not None:
            state.fluidpd_asked = asked

    def why_not(self, rid: str) -> str:
        """Why this generation cannot continue elsewhere, or nothing if it can."""
        state = self.manager.rid_to_state.get(rid)
        asked = getattr(state, "fluidpd_asked", None)
        if state is None or state.finished:
            return "ended"
        if asked is None or not hasattr(state.obj, "sampling_params"):
            return "not a single generation"
        if not state.output_ids:
            return "no first token yet"
        return self._why_not_kind(rid, state, asked)

    def _why_not_kind(self, rid: str, state: Any, asked: Any) -> str:
        params = asked.sampling_params
        if asked.mm_inputs is not None or asked.input_embeds is not None or asked.positional_embed_overrides is not None:
            return "multimodal"
        if asked.session_params is not None or asked.session_id:
            return "session"
        if getattr(params, "beam_width", None) not in (None, 0, 1):
            return "beam search"
        if asked.return_hidden_states or asked.return_routed_experts or asked.return_indexer_topk or asked.return_sampling_mask:
            return "hidden states"
        if asked.return_logprob and state.obj.token_ids_logprob is not None:
            return "logprobs of chosen tokens"
        if getattr(state.obj, "lora_path", None):
            return "lora"
        if asked.require_reasoning:
            return "reasoning"
        if len(asked.input_ids) + len(state.output_ids) > LONGEST_TOKENS:
            return "too long"
        if any(other != rid and other.startswith(rid) for other in self.manager.rid_to_state):
            return "its id begins another one"  # the engine aborts by prefix
        try:
            json.dumps(state.obj.sampling_params, allow_nan=False)
        except (TypeError, ValueError):
            return "its parameters cannot be said"
        return ""

    def left_tokens(self, rid: str) -> int:
        """How many tokens it may still make at most."""
        state = self.manager.rid_to_state[rid]
        most = state.fluidpd_asked.sampling_params.max_new_tokens
        return 1_000_000_000 if most is None else int(most) - len(state.output_ids)

    def forget_registration(self) -> None:
        """The bootstrap server of this process keeps the prefill ranks that once registered, though their ports are gone.

        A decode worker that asks it before the next switch would be told of them, believe it for ever, and hang.
        """
        server = self.manager.bootstrap_server
        if server is not None and self.role is not Role.PREFILL:
            server._registered_count = 0
            server.prefill_port_table.clear()

    # ------------------------------------------------------------ cut

    def cut(self, rid: str) -> None:
        self.manager._dispatch_to_scheduler(self._io.AbortReq(rid=rid, abort_message=MARK))

    def take_cut(self, row: Any, index: int) -> Cut:
        """The row that ends a cut generation: its tokens are kept, but not the last, and the client does not see it.

        All tokens but the last were found not to end the generation; the last was made in the pass that the cut won, so whether
        it is an end is not known: it is made again elsewhere. Its text is left out: the peer's text is of the whole output.
        """
        state = self.manager.rid_to_state[row.rids[index]]
        ids = [int(i) for i in row.output_ids[index]][:-1]
        if getattr(state.obj, "return_logprob", False) and ids:
            for name in _LOGPROB_FIELDS:
                values = getattr(row, name, None)
                if values and values[index]:
                    values[index] = list(values[index])[: len(ids)]
            obj = state.obj
            self.manager.convert_logprob_style({}, state, obj.top_logprobs_num, None, False, row, index, finished=False)
        state.output_ids.extend(ids)
        cut = Cut(int(row.prompt_tokens[index]), int(row.cached_tokens[index]))
        row.rids[index] = HIDDEN_RID
        return cut

    # ------------------------------------------------------------ what a peer needs

    def produced(self, rid: str) -> int:
        """Tokens of the whole output so far, those of earlier workers included."""
        adopted = parse_rid(rid)
        return len(self.manager.rid_to_state[rid].output_ids) + (adopted.history if adopted else 0)

    def prompt_tokens(self, rid: str) -> int:
        adopted = parse_rid(rid)
        return len(self.manager.rid_to_state[rid].fluidpd_asked.input_ids) - (adopted.history if adopted else 0)

    def payload(self, rid: str) -> dict[str, Any]:
        """Everything with which another worker can go on exactly."""
        state = self.manager.rid_to_state[rid]
        asked, obj = state.fluidpd_asked, state.obj
        adopted = parse_rid(rid)
        ids = [int(i) for i in asked.input_ids]
        history = adopted.history if adopted else 0
        prompt, before = ids[: len(ids) - history], ids[len(ids) - history :]
        sampling = {**obj.sampling_params, "n": 1}
        if asked.sampling_params.max_new_tokens is not None:
            sampling["max_new_tokens"] = int(asked.sampling_params.max_new_tokens) - len(state.output_ids)
        if sampling.get("min_new_tokens"):
            sampling["min_new_tokens"] = max(0, sampling["min_new_tokens"] - len(state.output_ids))
        said = {name: value for name in _CARRIED if (value := getattr(obj, name, None))}
        where = [obj.bootstrap_host, obj.bootstrap_port] if obj.bootstrap_host and adopted is None else None
        return {
            "prompt": prompt,
            "output": before + [int(i) for i in state.output_ids],
            "text_chars": len(state.get_text()),
            "sampling": sampling,
            "said": said,
            "via": where or getattr(obj, "fluidpd_via", None),
        }

    def continuation(self, payload: Mapping[str, Any], adopted: Adopted, bootstrap: tuple[str, int | None], room: int) -> Any:
        """The request with which this engine goes on: the output so far ends its input, and its id says how much that is."""
        made = self._io.GenerateReqInput(
            rid=adopted.rid,
            input_ids=[*payload["prompt"], *payload["output"]],
            sampling_params=dict(payload["sampling"]),
            stream=True,
            bootstrap_host=bootstrap[0],
            bootstrap_port=bootstrap[1],
            bootstrap_room=room,
            **payload["said"],
        )
        made.fluidpd_via = payload.get("via")
        return made

    # ------------------------------------------------------------ rows into a stream

    async def feed(self, rid: str, delta: Delta) -> None:
        """A row as the engine's own detokenizer would have sent it. Goes through the stock way to the client."""
        if rid in self.manager.rid_to_state:
            await self.manager._handle_batch_output(self._row(rid, delta))

    async def fail(self, rid: str, message: str, status: HTTPStatus | None) -> None:
        """End a stream as an aborted one. Without a status it is the client's own doing."""
        finish = {"type": "abort", "message": message, "status_code": status}
        if status is not None:
            finish["err_type"] = "ServiceUnavailableError"
        await self.feed(rid, Delta((), "", self.produced(rid) if self.is_open(rid) else 0, 0, finish=finish))

    def _row(self, rid: str, delta: Delta) -> Any:
        fields: dict[str, Any] = dict.fromkeys(self._io.BatchStrOutput.__struct_fields__)
        fields |= {
            "rids": [rid],
            "http_worker_ipcs": [None],
            "finished_reasons": [delta.finish],
            "output_strs": [delta.text],
            "output_ids": [array("q", delta.ids)],
            "prompt_tokens": [delta.prompt_tokens],
            "completion_tokens": [delta.completion_tokens],
            "reasoning_tokens": [0],
            "cached_tokens": [delta.cached_tokens],
            "retraction_counts": [0],
        }
        if delta.logprobs:
            chosen: Iterable[Any] = delta.logprobs.get("chosen") or ()
            fields["output_token_logprobs_val"] = [[pair[0] for pair in chosen]]
            fields["output_token_logprobs_idx"] = [[pair[1] for pair in chosen]]
            top = delta.logprobs.get("top")
            if top is not None:
                fields["output_top_logprobs_val"] = [[[p[0] for p in row] if row else None for row in top]]
                fields["output_top_logprobs_idx"] = [[[p[1] for p in row] if row else None for row in top]]
        return self._io.BatchStrOutput(**fields)
