"""A record judged again: the same settings say the same, others differ where and as they should, and restarts begin anew."""

from __future__ import annotations

from dataclasses import replace
from importlib.resources import files
from typing import Any

import pytest

from fluidpd.cost import CostModel, parse_cost_table
from fluidpd.policy.decide import decide
from fluidpd.policy.settings import PolicySettings
from fluidpd.record import SnapshotRow, flips_as_dicts
from fluidpd.simulator.rejudge import CannotJudge, Rejudge, terms_of
from fluidpd.simulator.run import Simulation
from fluidpd.simulator.settings import SimSettings
from fluidpd.simulator.workload import Request, Workload
from fluidpd.slo import SloTargets

COST: CostModel = parse_cost_table(
    files("config").joinpath("costs/h100_h200.json").read_text(), "h100_sxm|sglang|70B|w=fp8|kv=fp8|tp=2"
)
# A burst of long prompts that two prefill workers cannot hold: decode workers lend, and one is moved.
SURGE = Workload("surge", tuple(Request(0.05 * i, 4000, 60) for i in range(240)), True)
USUAL = PolicySettings(home_prefill=2)


def recorded(policy: PolicySettings = USUAL) -> list[SnapshotRow]:
    """Every look of a simulated controller, as if its period were a second."""
    rows: list[SnapshotRow] = []

    def judge(snapshot: Any, *asked: Any) -> Any:
        told, memory = decide(snapshot, *asked)
        acted = (told.action.value, told.reason.value, flips_as_dicts(told), told.lenders)
        rows.append(SnapshotRow(1000 + len(rows), 1, "b", snapshot, *acted))
        return told, memory

    Simulation(SURGE, COST, SimSettings(), "recorded", policy, judge).run()
    return rows


def judged(rows: list[SnapshotRow], name: str = "thresholds", policy: PolicySettings = USUAL) -> Rejudge:
    found = Rejudge({"b": (terms_of("thresholds", USUAL, SloTargets(), COST), terms_of(name, policy, SloTargets(), COST))})
    for row in rows:
        found.look(row)
    return found


def test_the_same_settings_decide_what_was_decided_then_every_time() -> None:
    rows = recorded()
    found = judged(rows)
    assert found.judged == found.as_recorded == len(rows)
    assert found.differences == [] and found.gaps == 0
    assert found.a == found.recorded
    assert len(found.a.flips) == sum(len(row.flips) for row in rows) > 0
    assert found.a.lending_s == sum(bool(row.lenders) for row in rows) > 0


def test_other_thresholds_differ_from_their_first_act_on_and_what_was_at_stake_is_counted() -> None:
    never = USUAL.model_copy(update={"prefill_over": 9.0, "prefill_high": 9.5, "prefill_stop": 8.0, "trend_high": 50.0})
    found = judged(recorded(), policy=never)
    first = found.first_act
    assert first is not None and first.a.lenders and not first.b.lenders
    assert first.ppi is not None and first.ppi > USUAL.prefill_over
    assert found.b.lending_s < found.a.lending_s
    assert found.differing_s(acts=True) >= found.a.lending_s - found.b.lending_s
    assert found.differing.share is not None and found.differing.share > (found.calm.share or 0.0)


def test_seconds_in_a_row_with_the_same_difference_are_one_line() -> None:
    found = judged(recorded(), "static")
    assert found.b.flips == [] and found.b.lending_s == 0
    assert all(d.is_act for d in found.differences), "who never acts gives no reasons to compare"
    assert len(found.differences) < found.differing_s(acts=True)


def test_a_wish_that_is_repeated_because_the_record_does_not_obey_counts_once() -> None:
    eager = USUAL.model_copy(update={"borrow": False, "persist_s": 0.0})
    found = judged(recorded(), policy=eager)
    assert 0 < found.b.spells < len(found.b.flips)


def test_a_restarted_controller_begins_with_nothing_held_and_a_hole_in_the_record_ends_what_held() -> None:
    rows = recorded()
    restarted = [replace(row, epoch=2) if i >= len(rows) // 2 else row for i, row in enumerate(rows)]
    assert judged(restarted).gaps == 1
    holed = [replace(row, second=row.second + 60 * (i >= len(rows) // 2)) for i, row in enumerate(rows)]
    assert judged(holed).gaps == 1


def test_rows_of_settings_that_nobody_knows_are_counted_and_left_out() -> None:
    rows = recorded()[:5]
    found = judged([replace(rows[0], basis="gone"), *rows[1:]])
    assert (found.judged, found.unjudged) == (4, 1)


@pytest.mark.parametrize("name", ["colocated_chunked", "static_tuned", "clairvoyant"])
def test_a_policy_that_needs_requests_is_sent_to_a_trace(name: str) -> None:
    with pytest.raises((CannotJudge, ValueError), match=r"replay a trace|no policy"):
        terms_of(name, USUAL, SloTargets(), COST)
    assert terms_of("seed", USUAL, SloTargets(), COST).judge is not decide
