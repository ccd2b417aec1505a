from __future__ import annotations

import re

import pytest
from dashboard_fleet import NOW, busy_fleet, move, second, spans_of, worker

from dashboard.pages import lanes, pressure
from dashboard.pages.lanes import Lane
from dashboard.reading import Records, nice_step_s
from dashboard.rendering import render
from dashboard.urls import Window
from fluidpd.names import End, Role, WorkerState
from fluidpd.record import IndexSecond, PinRow, RoleSpan, WorkerRow, WorkerSecond

WINDOW = Window.of({"from": "now-5m"}, NOW)
START = int(NOW) - 300


def lane(rows: list[WorkerSecond], row: WorkerRow | None = None, **more: object) -> Lane:
    view = lanes.view(WINDOW, 1, [row or worker()], spans_of(rows, 1), more.get("moves", ()), more.get("pins", ()))  # type: ignore[arg-type]
    return view.lanes[0]


def kinds(found: Lane) -> list[str]:
    return [s.kind for s in found.base]


def steady(since: int, until: int, **over: object) -> list[WorkerSecond]:
    return [second(s, **over) for s in range(since, until)]  # type: ignore[arg-type]


def test_a_hole_of_one_second_is_drawn_as_no_data() -> None:
    found = lane(steady(START, START + 100) + steady(START + 101, int(NOW)))
    assert kinds(found) == ["decode", "unknown", "decode"]


def test_stale_and_lost_workers_are_no_data_and_quarantine_is_a_failure() -> None:
    rows = steady(START, START + 100) + steady(START + 100, START + 150, state=WorkerState.STALE)
    rows += steady(START + 150, int(NOW), state=WorkerState.QUARANTINED)
    assert kinds(lane(rows)) == ["decode", "unknown", "failed"]


def test_every_stretch_has_a_colour_or_a_pattern_of_its_own() -> None:
    rows = [second(START + i, state=state) for i, state in enumerate(WorkerState)]
    view = lanes.view(WINDOW, 1, [worker()], spans_of(rows, 1), [move("m-1", "w1", NOW - 100)], [])
    plain = re.findall(r'class="s-(\w+)"(?! fill="url)', str(render(view)))
    assert set(plain) <= {"prefill", "decode", "lent", "pin"}


def test_rows_still_in_the_buffer_leave_no_hole_at_the_right_edge() -> None:
    assert kinds(lane(steady(START, int(NOW) - 3))) == ["decode"]
    assert kinds(lane(steady(START, int(NOW) - 10))) == ["decode", "unknown"]


def test_before_a_worker_existed_there_is_nothing_to_know() -> None:
    found = lane(steady(START + 200, int(NOW)), worker(registered_wall_s=START + 200.4))
    assert kinds(found) == ["decode"]
    assert found.base[0].start == pytest.approx(200 / 300, abs=0.01)


def test_a_worker_that_has_gone_keeps_its_history_and_no_more() -> None:
    found = lane(steady(START, START + 60), worker(state=WorkerState.GONE))
    assert kinds(found) == ["decode"]
    assert found.base[0].length == pytest.approx(0.2)
    assert lanes.view(WINDOW, 1, [worker(state=WorkerState.GONE)], [], [], []).lanes == ()


def test_a_move_is_drawn_as_draining_then_switching_and_a_failure_is_marked() -> None:
    found = lane(steady(START, int(NOW)), moves=[move("m-1", "w1", NOW - 100, end=End.ROLLED_BACK)])
    assert [s.kind for s in found.moves] == ["draining", "switching"]
    assert found.moves[0].length == pytest.approx(2.198 / 300, rel=0.01)
    assert len(found.failures) == 1


def test_an_open_move_reaches_to_now() -> None:
    found = lane(steady(START, int(NOW)), moves=[move("m-1", "w1", NOW - 4, end=None)])
    assert found.moves[-1].start + found.moves[-1].length == pytest.approx(1.0)


def test_lending_is_one_stripe_and_a_pin_ends_at_now() -> None:
    rows = [second(s, lending=START + 50 <= s < START + 80) for s in range(START, int(NOW))]
    found = lane(rows, pins=[PinRow("w1", Role.DECODE, "why", "ana", NOW - 30, NOW + 900)])
    assert [s.length for s in found.lent] == [pytest.approx(0.1)]
    assert found.pins[0].start + found.pins[0].length == pytest.approx(1.0)


def test_workers_are_in_the_order_a_person_counts() -> None:
    rows = [worker(n) for n in ("w10", "w2", "w1")]
    assert [x.worker for x in lanes.view(WINDOW, 1, rows, [], [], []).lanes] == ["w1", "w2", "w10"]


def test_coarse_steps_are_whole_minutes() -> None:
    assert [nice_step_s(x) for x in (0.3, 1.0, 4.0, 24.0, 96.0, 9999.0)] == [1, 1, 4, 60, 120, 10_800]


# ---------------------------------------------------------------- the chart's numbers


class Series:
    """Only what the chart asks for."""

    def __init__(self, seconds: dict[int, float | None]) -> None:
        self.seconds = seconds

    async def index_history(self, index: str, since_s: float, until_s: float, step_s: int) -> tuple[IndexSecond, ...]:
        return tuple(IndexSecond(s, index, v, v, v) for s, v in self.seconds.items() if since_s <= s < until_s)

    async def status(self) -> None:
        return None

    async def decisions(self, **_: object) -> tuple[object, ...]:
        return ()


async def test_a_missing_second_and_an_unknown_second_both_break_the_line() -> None:
    at = int(NOW) - 10
    records = Records(Series({at: 1.0, at + 2: None, at + 3: 2.0}), lambda: NOW)  # type: ignore[arg-type]
    data = await pressure.read_data(records, WINDOW, at)
    assert data["t"][-4:] == [at, at + 1, at + 2, at + 3]
    assert data["ppi_mean"][-4:] == [1.0, None, None, 2.0]


async def test_the_chart_asks_only_for_what_it_lacks() -> None:
    records = Records(Series(dict.fromkeys(range(START, int(NOW)), 1.0)), lambda: NOW)  # type: ignore[arg-type]
    whole = await pressure.read_data(records, WINDOW, None)
    rest = await pressure.read_data(records, WINDOW, int(NOW) - 3)
    assert len(whole["t"]) == 300
    assert rest["t"] == list(range(int(NOW) - 3 - pressure.LATE_S, int(NOW)))  # the newest may have been incomplete


async def test_of_a_long_window_only_the_newest_hours_are_read_again() -> None:
    fleet = busy_fleet(lambda: NOW)
    asked: list[tuple[float, float]] = []
    was = fleet.role_spans

    async def role_spans(since_s: float, until_s: float, step_s: int) -> tuple[RoleSpan, ...]:
        asked.append((since_s, until_s))
        return await was(since_s, until_s, step_s)

    fleet.role_spans = role_spans  # type: ignore[method-assign]
    records = Records(fleet, lambda: NOW)
    for start in ("now-24h", "now-23h"):
        window = Window.of({"from": start}, NOW)
        spans, step_s = await records.lanes(window)
        assert step_s == 60 and min(s.end_s for s in spans) > window.since_s
        drawn = lanes.view(window, step_s, fleet.worker_rows, spans, (), ()).lanes
        assert [s.kind for s in drawn[1].base] == ["decode" if drawn[1].role == "decode" else "prefill"]
    settled = int(NOW - 900) // 3600 * 3600
    assert asked[0][1] == settled and asked[0][0] <= NOW - 86_400
    assert asked[1:] == [(settled, NOW), (settled, NOW)]
