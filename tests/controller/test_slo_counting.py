"""Judged requests are summed once: through restarts of engines, of controllers, and gaps in telemetry."""

from __future__ import annotations

from dataclasses import replace

from memory_fakes import open_store

from controller.alerting.counting import Reading, SloCounts
from controller.store.alert_queries import Counts, Mark
from controller.store.alerting import AlertStore

KEY = ("m", "joint")


def reading(total: float | None = None, good: float | None = None, worker: str = "w1", **more: object) -> Reading:
    counted = {} if total is None else {"requests_total": total, "requests_good_total": good if good is not None else total}
    base: dict[str, object] = {"boot": "a", "model": "m", "owns": True, "heard": True, "warming": False}
    return Reading(worker, counted=counted, **{**base, **more})  # type: ignore[arg-type]


def counted(*looks: list[Reading] | Reading, counts: SloCounts | None = None, every_s: float = 1.0) -> Counts:
    made = counts or SloCounts()
    for i, look in enumerate(looks):
        made.look(look if isinstance(look, list) else [look], i * every_s)
    return made.totals.get(KEY, Counts())


def test_what_a_worker_had_counted_before_is_not_counted() -> None:
    assert counted(reading(1000), reading(1010, 1005)) == Counts(5.0, 10.0, 1.0)


def test_an_engine_that_restarted_counts_from_zero() -> None:
    assert counted(reading(1000), reading(7, 5, boot="b")).total == 7
    assert counted(reading(1000), reading(7, 5)).total == 7  # a fall is a restart, whatever it calls itself


def test_a_target_that_changes_while_a_histogram_is_counted_is_a_beginning_and_no_restart() -> None:
    assert counted(reading(1000, 900), reading(1010, 300), reading(1020, 305)) == Counts(5.0, 10.0, 2.0)


def test_an_engine_that_warms_up_after_its_start_is_not_judged() -> None:
    looks = (
        reading(1000),
        reading(5, 0, boot="b", warming=True),
        reading(9, 0, boot="b", warming=True),
        reading(12, 3, boot="b"),
    )
    assert counted(*looks).total == 3


def test_a_new_leader_finds_every_worker_warming_and_loses_nothing_of_it() -> None:
    counts = SloCounts()
    counts.restore({KEY: Counts(90, 100, 60)}, {"w1": Mark("a", {"requests_total": 100, "requests_good_total": 90})})
    assert counted(reading(130, 110, warming=True), counts=counts) == Counts(110.0, 130.0, 60.0)


def test_silence_is_not_known_and_what_was_missed_is_counted_when_it_is_heard_again() -> None:
    found = counted(reading(100), reading(heard=False), reading(heard=False), reading(150, 140))
    assert (found.total, found.good, found.known_s) == (50, 40, 1.0)


def test_half_of_the_owners_known_is_half_the_time_known() -> None:
    both = [reading(10), reading(10, worker="w2")]
    found = counted(both, [reading(20), reading(worker="w2", heard=False)], [reading(20), reading(30, worker="w2")])
    assert (found.known_s, found.total) == (1.5, 30)


def test_prefill_workers_are_not_waited_for() -> None:
    pair = [reading(10), reading(0, worker="p", owns=False)]
    assert counted(pair, [reading(20), reading(worker="p", owns=False)]).known_s == 1.0


def test_two_models_are_counted_apart() -> None:
    counts = SloCounts()
    for i in range(3):
        counts.look([reading(10.0 * i, 0, model="a"), reading(100.0 * i, 100.0 * i, worker="w2", model="b")], i)
    assert counts.totals["a", "joint"] == Counts(0, 20, 2) and counts.totals["b", "joint"] == Counts(200, 200, 2)


def test_without_the_plugin_joint_is_not_known_and_that_is_said() -> None:
    counts = SloCounts()
    for i in range(2):
        counts.look([_by_histogram(i)], i)
    assert ("m", "joint") not in counts.totals and counts.totals["m", "ttft"].total == 1
    assert "without the plugin" in counts.basis("m", "joint") and "histogram" in counts.basis("m", "tbt")


def test_a_plugin_that_comes_or_goes_is_a_beginning_and_no_fall() -> None:
    counts = SloCounts()
    plugin = dict.fromkeys((*_by_histogram(0).counted, "requests_total", "requests_good_total"), 5.0)
    looks = (_by_histogram(1000), replace(_by_histogram(0), counted=plugin), _by_histogram(1000), _by_histogram(1003))
    for i, look in enumerate(looks):
        counts.look([look], i)
    assert counts.totals["m", "ttft"].total == 3


def _by_histogram(i: int) -> Reading:
    names = ("ttft_judged_total", "ttft_good_total", "tbt_judged_total", "tbt_good_total")
    return Reading("w1", "a", "m", owns=True, heard=True, warming=False, counted=dict.fromkeys(names, float(i)))


async def test_a_minute_and_how_far_it_was_counted_are_written_together_and_add_up(database: str) -> None:
    async with open_store(database) as opened:
        store = AlertStore(opened)
        await store.count({600: {KEY: Counts(9, 10, 60)}}, {KEY: Counts(9, 10, 60)}, {"w1": Mark("a", {"requests_total": 10})})
        await store.count({600: {KEY: Counts(1, 2, 5)}}, {KEY: Counts(10, 12, 65)}, {"w2": Mark("b", {"requests_total": 2})})
        left = await store.remembered()
        assert left.totals == {KEY: Counts(10, 12, 65)} and left.marks == {"w2": Mark("b", {"requests_total": 2})}
        assert [(b.second, b.counts) for b in await store.buckets(KEY, 0, 1e9)] == [(600, Counts(10, 12, 65))]
        assert await store.sums(0) == {KEY: Counts(10, 12, 65)} and await store.sums(601) == {}
        assert await store.judged("joint", 0, 1e9) == (10, 12)
