"""What decisions were made on: kept once a second, packed without loss, bounded in memory and on disk."""

from __future__ import annotations

from dataclasses import replace

import pytest
from control_fakes import COST as FLEET_COST
from control_fakes import Fleet, MemoryStore, prompts
from memory_fakes import NOW, open_store

from controller.clock import FakeClock
from controller.recorder import Recorder, basis_of
from controller.settings import ControllerSettings, RetentionSettings
from controller.store import history
from controller.store.snapshots import pack, unpack
from fluidpd.cost import CostModel
from fluidpd.decision import Decision, Flip
from fluidpd.names import Action, Mode, Reason, Role, Trigger, UnknownWhy, WorkerState
from fluidpd.record import SnapshotRow
from fluidpd.simulator.rejudge import Rejudge, terms_of
from fluidpd.telemetry import ConfirmedIdle, Known, OpenMove, Readings, Snapshot, Unknown, WaitingPrompt, WorkerView

COST = CostModel("made", (0.0, 0.01), 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 1, 1000, 1, 0.0, 1e9)
FLIP = Flip("w2", Role.DECODE, Role.PREFILL, Trigger.AUTO)
SEEN = Snapshot(
    now_s=1234.5678901234,
    workers=(
        WorkerView(
            name="w1",
            role=Role.PREFILL,
            state=WorkerState.SERVING,
            received_s=1234.5,
            readings=Readings(waiting=Known(2.0, 1234.5), step_s=ConfirmedIdle(1234.5), batch=Known(0.1 + 0.2, 1233.0, True)),
            queue=(WaitingPrompt(room=2**62, prompt_tokens=900, uncached_tokens=7, waited_s=1 / 3),),
            queue_total=400,
            pinned_role=Role.DECODE,
        ),
        WorkerView(
            name="w2",
            role=Role.DECODE,
            state=WorkerState.STALE,
            incarnation=7,
            received_s=1230.0,
            readings=Readings(batch=Unknown(UnknownWhy.STALE, 1200.0), tbt_p99_s=ConfirmedIdle(1199.0)),
            flippable=False,
            not_flippable_why="speculative decoding",
            retry_after_s=1300.0,
        ),
        WorkerView(name="w3", role=Role.DECODE, state=WorkerState.LOST),
    ),
    mode=Mode.ADVISORY,
    paused="ana: incident 17",
    open_moves=(OpenMove("m1", "w9", Role.PREFILL, Role.DECODE, "pin"),),
)


def a_row(second: int = int(NOW), **over: object) -> SnapshotRow:
    row = SnapshotRow(second, 3, "b", SEEN, "flip", "pin_move", ({"worker": "w2", "to": "prefill"},), ("w3",))
    return replace(row, **over)  # type: ignore[arg-type]


def test_a_snapshot_is_unpacked_as_it_was_to_the_last_digit() -> None:
    snapshot, told = unpack(pack(a_row()))
    assert snapshot == SEEN
    assert told == {"action": "flip", "reason": "pin_move", "flips": [{"worker": "w2", "to": "prefill"}], "lenders": ["w3"]}


def test_an_empty_fleet_is_packed_too_and_usual_values_take_no_space() -> None:
    nobody = a_row(snapshot=Snapshot(1.0, ()))
    assert unpack(pack(nobody))[0] == Snapshot(1.0, ())
    many = tuple(WorkerView(f"w{i}", Role.DECODE, WorkerState.SERVING, received_s=1.0) for i in range(64))
    assert len(pack(a_row(snapshot=Snapshot(1.0, many)))) < 1000


async def test_a_snapshot_is_read_back_oldest_first_and_in_pieces(database: str) -> None:
    async with open_store(database) as store:
        for second in (3, 1, 2):
            store.buffer_snapshot(a_row(second))
        await store.flush()
        first = await store.queries.snapshots(0, 10, limit=2)
        assert [row.second for row in first] == [1, 2]
        assert await store.queries.snapshots(3, 10) == (a_row(3),)
        assert await store.queries.recorded_scopes() == (store.scope,)


async def test_two_minutes_of_snapshots_wait_for_a_database_and_no_more(database: str) -> None:
    async with open_store(database) as store:
        for second in range(130):
            store.buffer_snapshot(a_row(second))
        assert (len(store.snapshots), store.snapshots.dropped_total) == (120, 10)
        await store.flush()
        assert (await store.queries.snapshots(0, 200, 1000))[0].second == 10


async def test_retention_deletes_old_snapshots_and_the_settings_that_none_of_the_rest_was_made_on(database: str) -> None:
    keep = {"snapshots": 1.0, "seconds": 9.0, "minutes": 9.0, "five_minutes": 9.0, "hours": 9.0, "records": 9.0}
    day = 86_400
    async with open_store(database) as store:
        old = basis_of(ControllerSettings(), COST, NOW - 3 * day)
        for id, wall_s in (("gone", NOW - 3 * day), ("used", NOW - 3 * day), ("now", NOW)):
            await store.keep_basis(replace(old, id=id, wall_s=wall_s))
        store.buffer_snapshot(a_row(int(NOW) - 2 * day, basis="gone"))
        store.buffer_snapshot(a_row(int(NOW) - 10, basis="used"))
        await store.flush()
        assert await history.prune(store, NOW, keep) == 2
        assert [row.second for row in await store.queries.snapshots(0, NOW)] == [int(NOW) - 10]
        assert {basis.id for basis in await store.queries.bases()} == {"used", "now"}


class Place:
    def __init__(self, snapshots_days: float = 1.0) -> None:
        self.clock, self.store = FakeClock(), MemoryStore()
        settings = ControllerSettings(retention=RetentionSettings(snapshots_days=snapshots_days))
        self.recorder = Recorder(self.store, self.clock, settings, COST)
        self.seen = SEEN

    async def look(self, *reasons: tuple[Reason, tuple[Flip, ...]]) -> None:
        """Looks that share a second, at most four."""
        for reason, flips in reasons:
            now_s = self.clock.now()
            decision = Decision(now_s, Action.FLIP if flips else Action.HOLD, reason, flips=flips)
            self.recorder.look(replace(self.seen, now_s=now_s), decision, 5)
            await self.clock.advance(0.25)
        await self.clock.advance(1.0 - 0.25 * len(reasons))


async def test_the_last_look_of_a_second_is_kept_unless_one_moved_somebody() -> None:
    p = Place()
    await p.recorder.begin()
    await p.look((Reason.IDLE, ()), (Reason.BALANCED, ()))
    await p.look((Reason.BALANCED, ()), (Reason.PREFILL_SUSTAINED_FLIP, (FLIP,)), (Reason.TRANSITION_IN_FLIGHT, ()))
    await p.look((Reason.TRANSITION_IN_FLIGHT, ()))
    assert [row.reason for row in p.store.snapshots] == ["balanced", "prefill_sustained_flip"]
    assert p.store.snapshots[1].flips[0]["worker"] == "w2"
    assert {row.basis for row in p.store.snapshots} == {basis.id for basis in p.store.bases}
    assert [row.epoch for row in p.store.snapshots] == [5, 5]


async def test_of_a_large_fleet_one_look_is_kept_every_few_seconds_and_each_that_moved_somebody() -> None:
    p = Place()
    await p.recorder.begin()
    p.seen = replace(SEEN, workers=tuple(replace(SEEN.workers[0], name=f"w{n}") for n in range(1000)))
    began = int(p.clock.wall())
    for second in range(11):
        await p.look((Reason.PREFILL_SUSTAINED_FLIP, (FLIP,)) if second in (5, 6) else (Reason.BALANCED, ()))
    assert [row.second - began for row in p.store.snapshots] == [3, 5, 6, 10][: len(p.store.snapshots)]
    assert [bool(row.flips) for row in p.store.snapshots[:3]] == [False, True, True]


async def test_what_a_controller_recorded_is_judged_again_from_the_disk_as_it_decided_then() -> None:
    """The loop's own snapshots, packed and unpacked, once a second as the loop looks once a second here."""
    f = await Fleet({"p1": "prefill", "p2": "prefill", "d1": "decode", "d2": "decode"}).up()
    await f.controller._recorder.begin()
    f.store.snapshots.clear()
    f.sidecars["p1"].queue = prompts(60)
    await f.run(8.0, step_s=1.0)
    f.sidecars["p1"].queue = ()
    await f.run(4.0, step_s=1.0)
    rows = [replace(row, snapshot=unpack(pack(row))[0]) for row in f.store.snapshots]
    assert len(rows) >= 11 and [row.snapshot for row in rows] == [row.snapshot for row in f.store.snapshots]
    settings = f.settings
    terms = terms_of("thresholds", settings.policy, settings.slo, FLEET_COST)
    found = Rejudge({f.store.bases[-1].id: (terms, terms)})
    for row in rows:
        found.look(row)
    assert found.as_recorded >= found.judged - 2, "a memory that begins with the record has not seen what held before it"
    assert found.differences == [] and found.recorded.lending_s > 0


async def test_who_wants_no_record_gets_none() -> None:
    p = Place(snapshots_days=0)
    await p.recorder.begin()
    await p.look((Reason.IDLE, ()))
    await p.look((Reason.IDLE, ()))
    assert p.store.snapshots == p.store.bases == []


def test_a_basis_keeps_its_name_as_long_as_nothing_differs_that_a_judgement_depends_on() -> None:
    usual = basis_of(ControllerSettings(), COST, 1.0)
    assert basis_of(ControllerSettings(), COST, 2.0).id == usual.id
    assert basis_of(ControllerSettings(), replace(COST, overhead_s=0.001), 1.0).id != usual.id
    other = ControllerSettings.model_validate({"policy": {"prefill_high": 1.5}})
    assert basis_of(other, COST, 1.0).id != usual.id


@pytest.mark.parametrize("field", ["a_newer_field", "queue_of_tomorrow"])
def test_a_snapshot_of_a_newer_version_is_read_without_what_is_not_known(field: str) -> None:
    import zlib

    import orjson

    body = orjson.loads(zlib.decompress(pack(a_row())))
    body["workers"][0][field] = 1
    body["workers"][0]["readings"]["new_reading"] = 4.0
    assert unpack(zlib.compress(orjson.dumps(body)))[0] == SEEN
