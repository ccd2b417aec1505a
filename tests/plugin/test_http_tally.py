"""Whether a client's stream met its objectives is judged once, by what the client saw."""

from __future__ import annotations

import pytest

from fluidpd.slo import SloTargets
from sidecar.plugin.tally import Tally, Timing

TARGETS = SloTargets(ttft_s=1.0, tbt_s=0.1)
LENGTH = {"type": "length", "length": 4}


@pytest.mark.parametrize(
    ("rows", "streaming", "good"),
    [
        pytest.param([(1, 0.9), (1, 0.95), (1, 1.0)], True, True, id="both met"),
        pytest.param([(1, 1.1), (1, 1.15)], True, False, id="first token late"),
        pytest.param([(1, 0.5), (1, 0.7)], True, False, id="one gap too long"),
        pytest.param([(1, 0.5), (4, 0.8)], True, False, id="a stream's tokens that come together come in one gap"),
        pytest.param([(1, 0.5), (4, 0.8)], False, True, id="without a stream their mean counts"),
        pytest.param([], True, False, id="ended without a token"),
        pytest.param([(1, 0.5), (0, 0.9)], True, True, id="a row without tokens is no gap"),
    ],
)
def test_good_means_both_objectives(rows: list[tuple[int, float]], streaming: bool, good: bool) -> None:
    tally, timing = Tally(TARGETS), Timing(asked_s=0.0, is_streaming=streaming)
    for tokens, at_s in rows:
        timing.row(tokens, at_s)
    tally.ended(timing, LENGTH)
    assert (tally.requests_total, tally.requests_good_total) == (1, int(good))


def test_a_client_that_left_is_not_counted_and_a_failure_is() -> None:
    tally = Tally(TARGETS)
    tally.ended(Timing(0.0, True), {"type": "abort", "message": "request was cancelled", "status_code": None})
    assert tally.requests_total == 0
    tally.ended(Timing(0.0, True), {"type": "abort", "message": "Lost connection with prefill", "status_code": 500})
    assert (tally.requests_total, tally.requests_good_total) == (1, 0)
