"""Tensor parallelism: what the first rank decides, by its own clock and its own measured times, every rank does the same of."""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
from engine_fakes import FakeBatch, FakeEngine, FakeReq
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_plugin_borrow import Prefilling
from test_plugin_claims import grant

from sidecar.plugin import entry
from sidecar.plugin import scheduler as plugin
from sidecar.plugin.arming import Guard
from sidecar.plugin.scheduler import SchedulerPart
from sidecar.plugin.steps import Shape
from sidecar.protocol import ClaimResult, ClaimWanted


class RankEngine(FakeEngine):
    def __init__(self, rank: int, role: str = "decode") -> None:
        super().__init__(role)
        self.is_first_rank = rank == 0
        s = self.scheduler
        s.device, s.server_args = "cuda", SimpleNamespace(tp_size=2)  # type: ignore[attr-defined]
        s._engine_paused, s._request_dispatcher = False, SimpleNamespace(_mapping={})  # type: ignore[attr-defined]
        self.prefilling = Prefilling(self)
        s.running_batch = FakeBatch([FakeReq(900), FakeReq(901)])

    def why_no_claims(self) -> str:
        return ""


@dataclass
class Ranks:
    parts: list[SchedulerPart]
    sent: list[Any]
    now_s: float = 10.0

    def arrive(self, room: int, tokens: int) -> None:
        for part in self.parts:
            part.scheduler.decode_room(room, tokens=tokens, has_kv=room % 2 == 0)

    def iterate(self) -> None:
        """One iteration of both loops: the first rank decides, the others get its commands by SGLang's broadcast."""
        self.now_s += 0.02
        commands = pickle.dumps(self.parts[0].decide(self.now_s))
        for part in self.parts:
            for command in pickle.loads(commands):
                part.run(command)
            s = part.scheduler
            part.borrow.plan(lambda batch: SimpleNamespace(batch_to_run=batch, running_batch=batch), s.running_batch)

    def asked(self) -> list[ClaimWanted]:
        return [m for m in self.sent if isinstance(m, ClaimWanted)]

    def seen(self) -> list[Any]:
        """What must be the same on all ranks."""
        return [
            (
                [r.bootstrap_room for r in part.borrow.waiting],
                part.scheduler.chunked_req and (part.scheduler.chunked_req.bootstrap_room, part.scheduler.chunked_req.extend_end),
                [d.req.bootstrap_room for d in part.scheduler.disagg_decode_transfer_queue.queue],
                [d.req.bootstrap_room for d in part.scheduler.disagg_decode_prealloc_queue.queue],
                part.engine.prefilling.seen,  # type: ignore[attr-defined]
                part.wants.is_holding,
            )
            for part in self.parts
        ]


def ranks(monkeypatch: pytest.MonkeyPatch, role: str = "decode") -> Ranks:
    sent: list[Any] = []
    monkeypatch.setattr(entry, "GUARD", Guard())
    monkeypatch.setattr(entry, "version", lambda: "0.5.23")
    monkeypatch.setattr(entry, "link", lambda hello: SimpleNamespace(send=lambda m: sent.append(m) or True, connected=True))
    monkeypatch.setattr(plugin, "Engine", lambda engine: engine)
    parts = []
    for rank in (0, 1):
        engine = RankEngine(rank, role)
        # The part asks for its engine by its scheduler; here both are made together.
        monkeypatch.setattr(plugin, "Engine", lambda scheduler, engine=engine: engine)
        part = SchedulerPart(engine.scheduler)
        for c in (64, 128, 256, 512) * 4:  # each rank has measured other times
            part.telemetry.model.learn(Shape(c, 100, 2, 200), (1 + rank) * (0.004 + c * 1e-5))
            part.telemetry.model.learn(Shape(0, 0, 2, 200), (1 + rank) * 0.004)
        parts.append(part)
    assert parts[0].link is not None and parts[1].link is None
    return Ranks(parts, sent)


EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("arrive"), st.integers(50, 900)),
        st.tuples(st.just("grant"), st.integers(20, 60)),
        st.tuples(st.just("answer"), st.booleans()),
        st.tuples(st.just("lost"), st.just(0)),
        st.tuples(st.just("iterate"), st.integers(1, 4)),
    ),
    min_size=5,
    max_size=60,
)


@given(events=EVENTS)
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_every_rank_holds_adopts_and_prefills_the_same_in_the_same_iteration(
    events: list[tuple[str, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    both = ranks(monkeypatch)
    room, answered, epoch = 1, 0, 0
    for what, value in events:
        if what == "arrive":
            both.arrive(room, value)
            room += 1
        elif what == "grant":
            epoch += 1
            both.parts[0]._inbox.append(grant(dict.fromkeys(range(1, room), 60.0), epoch=epoch, tbt_slo_s=value / 1000))
        elif what in ("answer", "lost") and answered < len(both.asked()):
            claim = both.asked()[answered]
            answered += 1
            if what == "answer":
                both.parts[0]._inbox.append(ClaimResult(id=claim.id, room=claim.room, given=bool(value), why="started"))
        for _ in range(value if what == "iterate" else 1):
            both.iterate()
            first, second = both.seen()
            assert first == second
    assert entry.GUARD.errors_total == 0


def test_a_second_ranks_slower_clockwork_changes_no_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    both = ranks(monkeypatch)
    both.arrive(2, 900)
    both.parts[0]._inbox.append(grant({2: 60.0}))
    both.iterate()
    (claim,) = both.asked()
    both.parts[0]._inbox.append(ClaimResult(id=claim.id, room=2, given=True))
    for _ in range(12):
        both.iterate()
    chunks = [part.engine.prefilling.seen for part in both.parts]  # type: ignore[attr-defined]
    assert chunks[0] == chunks[1] and chunks[0] and entry.GUARD.errors_total == 0
