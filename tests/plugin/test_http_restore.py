"""In the scheduler an adopted request gets its history back, as if it had been retracted there."""

from __future__ import annotations

from array import array
from types import SimpleNamespace
from typing import Any

import pytest

from sidecar.plugin.adopt import add_to_queue

PROMPT, HISTORY = [1, 2, 3], [7, 8]


def request(rid: str, **fields: Any) -> Any:
    whole = array("q", [*PROMPT, *HISTORY])
    base = {
        "rid": rid,
        "origin_input_ids": whole,
        "origin_input_ids_unpadded": whole,
        "output_ids": array("q"),
        "sampling_params": SimpleNamespace(max_new_tokens=5),
        "return_logprob": False,
        "grammar": None,
        "time_stats": SimpleNamespace(set_retract_time=lambda: None, set_decode_prealloc_queue_entry_time=lambda: None),
    }
    return SimpleNamespace(**{**base, **fields})


class Scheduler:
    def __init__(self, role: str = "decode", overlap: bool = False) -> None:
        self.disaggregation_mode = SimpleNamespace(value=role)
        self.enable_overlap = overlap
        self.rebootstrapped: list[Any] = []
        self.disagg_decode_prealloc_queue = SimpleNamespace(add=self._add)
        self.queued: list[Any] = []

    def _add(self, req: Any, is_rebootstrap: bool) -> None:
        assert is_rebootstrap
        self.rebootstrapped.append(req)

    def original(self, scheduler: Any, req: Any, is_retracted: bool = False) -> None:
        self.queued.append(req)


def test_local_splits_input_and_output_and_counts_the_whole_output() -> None:
    scheduler, req = Scheduler(), request("fluidpd-local-2-j-1")
    add_to_queue(scheduler.original, scheduler, req)
    assert scheduler.queued == [req]
    assert req.fluidpd_local
    assert (list(req.origin_input_ids), list(req.output_ids)) == (PROMPT, HISTORY)
    assert req.sampling_params.max_new_tokens == 7
    assert req.send_token_offset == 2


def test_via_replays_the_last_token_through_the_engines_own_rebootstrap() -> None:
    scheduler, req = Scheduler(), request("fluidpd-via-2-j-1")
    add_to_queue(scheduler.original, scheduler, req)
    assert scheduler.queued == []
    assert scheduler.rebootstrapped == [req]
    assert req.pd_rebootstrap_forced_output_id == 8
    assert list(req.output_ids) == [7]


def test_a_grammar_has_seen_the_history() -> None:
    seen: list[int] = []
    scheduler = Scheduler()
    req = request("fluidpd-local-2-j-1", grammar=SimpleNamespace(accept_token=seen.append))
    add_to_queue(scheduler.original, scheduler, req)
    assert seen == HISTORY


@pytest.mark.parametrize(("overlap", "counted"), [(False, [7, 8]), (True, [7, 7])])
def test_penalties_count_what_the_engine_would_have_counted_by_now(overlap: bool, counted: list[int]) -> None:
    scheduler, req = Scheduler(overlap=overlap), request("fluidpd-local-2-j-1")
    add_to_queue(scheduler.original, scheduler, req)
    assert req.fluidpd_counted == counted


@pytest.mark.parametrize(
    ("scheduler", "rid", "retracted"),
    [
        pytest.param(Scheduler(), "r1", False, id="an ordinary request"),
        pytest.param(Scheduler("prefill"), "fluidpd-via-2-j-1", False, id="the prefill worker that computes it again"),
        pytest.param(Scheduler(), "fluidpd-local-2-j-1", True, id="one that was retracted here"),
        pytest.param(Scheduler(), "fluidpd-local-5-j-1", False, id="more history than there is input"),
        pytest.param(Scheduler(), "fluidpd-local-0-j-1", False, id="no history"),
    ],
)
def test_everything_else_is_left_to_the_engine(scheduler: Scheduler, rid: str, retracted: bool) -> None:
    req = request(rid)
    add_to_queue(scheduler.original, scheduler, req, retracted)
    assert scheduler.queued == [req]
    assert list(req.origin_input_ids) == [*PROMPT, *HISTORY]
    assert not hasattr(req, "fluidpd_local")
