"""Reading SGLang's requests: which prefill worker a room belongs to, what is left of it, and whether it may change hands at all.

Never changes a request. Every refusal has a name.
"""

from __future__ import annotations

from typing import Any

LOST_HOSTS = ("2.2.2.2",)  # SGLang's FAKE_BOOTSTRAP_HOST: a warm-up request without a peer
_FAILED = 0  # KVPoll.Failed
_SAME = {"localhost": "127.0.0.1", "[::1]": "127.0.0.1", "::1": "127.0.0.1"}


def normal_address(address: str) -> str:
    """One spelling of host:port: a router may say localhost where a sidecar says 127.0.0.1."""
    host, _, port = address.strip().lower().rpartition(":")
    return f"{_SAME.get(host, host)}:{port}"


def address_of(req: Any) -> str:
    return normal_address(f"{req.bootstrap_host}:{req.bootstrap_port}")


def rest_of(req: Any) -> int:
    """Prompt tokens that are not prefilled yet (with the history of an adopted request)."""
    return max(0, len(req.origin_input_ids) + len(req.output_ids) - (req.extend_end or 0))


def prompt_of(req: Any) -> int:
    """Tokens that a claimed room would have prefilled here: all of them. (Where KV waits for its transfer, SGLang has set
    extend_end to the whole prompt already: `rest_of` is 0 there.)"""
    return len(req.origin_input_ids) + len(req.output_ids)


def arrived_s(req: Any, now_s: float) -> float:
    """When it came to this engine, monotonic seconds; `now_s` for one that came before the plugin."""
    return float(getattr(req, "fluidpd_at_s", now_s))


def depth_of(req: Any) -> int:
    return int(req.extend_end or 0)


def context_of(batch: Any) -> int:
    return sum(len(r.origin_input_ids) + len(r.output_ids) for r in batch.reqs)


class Contexts:
    """What the running decodes hold, without asking each of them in each step: a step adds a token to each.

    Counted anew when SGLang has changed the batch (it makes another list, or lengthens it) and once in RECOUNT steps.
    """

    RECOUNT = 64

    def __init__(self) -> None:
        self._reqs: Any = None
        self._many = 0
        self._steps = 0
        self._tokens = 0
        self._is_fresh = False  # counted since the last step

    def step(self, batch: Any) -> tuple[int, int]:
        """(B, K) of a decode step that is about to run: its decodes, and the sum of their contexts in tokens."""
        reqs = batch.reqs
        many = len(reqs)
        self._steps += 1
        if reqs is not self._reqs or many != self._many or self._steps >= self.RECOUNT:
            self._count(batch)
        elif not self._is_fresh:
            self._tokens += many
        self._is_fresh = False
        return many, self._tokens

    def of(self, batch: Any) -> int:
        """K as it is now."""
        if batch.reqs is not self._reqs or len(batch.reqs) != self._many:
            self._count(batch)
        return self._tokens

    def forget(self) -> None:
        """Nothing runs: keep no request alive."""
        self._reqs = None

    def _count(self, batch: Any) -> None:
        self._reqs, self._many, self._steps = batch.reqs, len(batch.reqs), 0
        self._tokens, self._is_fresh = context_of(batch), True


def unsafe_feature(req: Any) -> str:
    """What a request asks for that a borrowed prefill was not proven to give the same; "" if nothing."""
    if req.return_logprob:
        return "logprobs"  # the router merges the prompt's from the prefill half
    if req.return_hidden_states or req.return_routed_experts:
        return "hidden states or routed experts"
    if req.multimodal_inputs is not None or getattr(req, "input_embeds", None) is not None:
        return "multimodal or embeddings"
    if req.session is not None:
        return "session"
    if req.beam_group is not None:
        return "beam search"
    if req.grammar is not None or getattr(req, "grammar_key", None) is not None:
        return "grammar"
    if req.lora_id is not None:
        return "LoRA"
    return ""


def why_not_given(scheduler: Any, req: Any) -> str:
    """Prefill side: why this waiting room must stay here, in the words of the protocol; "" if it may go."""
    sender = req.disagg_kv_sender
    keeper = sender.kv_mgr
    if req.kv.holds_kv or req.kv.holds_mamba or req is scheduler.chunked_req:
        return "started"
    if req.finished() or req.to_finish is not None or sender.conclude_state is not None:
        return "failed"
    if keeper.request_status.get(req.bootstrap_room) == _FAILED:
        return "failed"
    if req.is_retracted or req.prefill_attempt_count > 1:
        return "started"  # it was begun once: chunks may have left
    if keeper.deferred_bootstrap is not None:
        return "not_claimable"  # under this allocation policy, forgetting a room tells the decode side that it failed
    if req.bootstrap_host in LOST_HOSTS or unsafe_feature(req):
        return "not_claimable"
    return ""


def why_not_claimed(decode_req: Any) -> str:
    """Decode side: why this room is not asked for; "" if it may be."""
    req = decode_req.req
    if decode_req.is_rebootstrap or req.is_retracted:
        return "retracted"
    if decode_req.host_staged:
        return "staged on the host"
    if req.output_ids:
        return "has output already"
    if req.finished() or req.to_finish is not None or decode_req.kv_receiver is None:
        return "ending"
    if decode_req.kv_receiver.conclude_state is not None:
        return "failed"
    if req.bootstrap_host in LOST_HOSTS:
        return "no peer"
    return unsafe_feature(req)
