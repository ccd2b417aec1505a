"""Judges a whole run by what its sidecars wrote down: P1, P2, P5 and P6 over every command and every event.

Never looks at a controller's word. All times are monotonic seconds of one machine.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

KNOWN_AFTER_S = 4.0  # how old telemetry may get before a silent worker counts as absent (policy.flip_max_age_s), and a little
REMEMBERED = ("accepted", "busy", "refused")
IN_FLIGHT_S = 1.0  # a command that left before its sender was deposed may arrive so much later


@dataclass(frozen=True, slots=True)
class Entry:
    """One line of one sidecar."""

    at_s: float
    worker: str
    kind: str  # start, role, command, event
    facts: Mapping[str, Any]

    def __getattr__(self, name: str) -> Any:
        try:
            return self.facts[name]
        except KeyError:
            raise AttributeError(name) from None


@dataclass(frozen=True, slots=True)
class Gone:
    """A worker's engine, or its sidecar, was taken by a fault."""

    worker: str
    since_s: float
    until_s: float = math.inf


@dataclass(slots=True)
class Transit:
    """A worker on the move, by its own sidecar: from the accepted order until nothing of it is left to do."""

    worker: str
    move_id: str
    since_s: float
    from_role: str
    phase: str = "preflight"
    drained_s: float | None = None  # when it began to leave its old role; None: it never did
    arrived_s: float = math.inf  # when it was whole again, in either role, and only the router had to be told
    until_s: float = math.inf
    end: str = ""  # "" while open


@dataclass
class History:
    """Every sidecar's file, in order. `roles` are those of the start."""

    roles: Mapping[str, str]
    entries: list[Entry] = field(default_factory=list)

    @classmethod
    def read(cls, files: Mapping[str, Path], roles: Mapping[str, str]) -> History:
        """A torn last line of a killed sidecar is left out; any other that cannot be read raises."""
        found = []
        for worker, path in files.items():
            lines = path.read_text(encoding="utf-8").split("\n") if path.exists() else []
            for number, line in enumerate(lines):
                if not line:
                    continue
                try:
                    facts = json.loads(line)
                except ValueError:
                    if number == len(lines) - 1:
                        continue
                    # A process that was killed while it wrote, and its successor's first line right behind.
                    start = line.rfind('{"kind"')
                    facts = json.loads(line[start:])
                found.append(Entry(facts["at_s"], worker, facts["kind"], facts))
        return cls(roles, sorted(found, key=lambda e: e.at_s))

    def of(self, kind: str) -> list[Entry]:
        return [e for e in self.entries if e.kind == kind]

    def acted(self) -> list[Entry]:
        return [e for e in self.of("command") if e.acted]

    def transits(self) -> list[Transit]:
        """Every accepted order with its end. What a sidecar could not write because it was killed shows as `cut off`."""
        open_: dict[str, Transit] = {}
        found: list[Transit] = []

        def close(t: Transit, at_s: float, end: str) -> None:
            t.until_s, t.arrived_s, t.end = at_s, min(t.arrived_s, at_s), end
            open_.pop(t.worker, None)

        def begin(e: Entry, from_role: str) -> None:
            older = open_.get(e.worker)
            if older is not None:
                restarted = any(
                    s.kind == "start" and s.worker == e.worker and older.since_s < s.at_s < e.at_s for s in self.entries
                )
                close(older, e.at_s, "superseded" if older.phase == "admit" else "cut off" if restarted else "overtaken")
            open_[e.worker] = Transit(e.worker, e.move_id, e.at_s, from_role)
            found.append(open_[e.worker])

        for e in self.entries:
            if e.kind == "command" and e.what == "move" and e.acted:
                begin(e, e.from_role)
            elif e.kind == "event":
                if e.worker not in open_ or open_[e.worker].move_id != e.move_id:
                    begin(e, self.role_at(e.worker, e.at_s))  # the line of its order was lost with its process
                t = open_[e.worker]
                t.phase = e.after
                if e.event == "left_router" and e.end is None:
                    t.drained_s = e.at_s
                if e.after == "admit":
                    t.arrived_s = min(t.arrived_s, e.at_s)
                if e.end is not None:
                    close(t, e.at_s, e.end)
        return found

    def role_at(self, worker: str, at_s: float) -> str:
        """What its engine had last said by then."""
        role = self.roles[worker]
        for e in self.entries:
            if e.at_s > at_s:
                break
            if e.kind == "role" and e.worker == worker:
                role = e.facts["role"]
        return role

    # ------------------------------------------------------------ the judgement

    def violations(
        self, *, floors: Mapping[str, int], max_concurrent: int, gone: Sequence[Gone] = (), frozen: Sequence[Gone] = ()
    ) -> dict[str, list[str]]:
        """What breaks each promise; an empty list where it was kept. `frozen`: sidecars that read late what was sent before."""
        return {
            "P1": list(self._floors(floors, gone)),
            "P2": list(self._concurrency(max_concurrent)),
            "P5": list(self._fences()),
            "P6": list(self._one_leader(frozen)),
        }

    def _floors(self, floors: Mapping[str, int], gone: Sequence[Gone]) -> Iterable[str]:
        """At each moment in which a worker began to leave: did enough others of its role serve, as far as anybody could know?"""
        transits = self.transits()
        for t in transits:
            if t.drained_s is None:
                continue
            at_s = t.drained_s
            dead = {g.worker for g in gone if g.since_s + KNOWN_AFTER_S <= at_s < g.until_s}
            away = {o.worker for o in transits if o is not t and o.drained_s is not None and o.drained_s <= at_s < o.until_s}
            broken = {
                o.worker
                for o in transits
                if o.end == "quarantined"
                and o.until_s <= at_s
                and not any(g.worker == o.worker and o.until_s < g.until_s <= at_s for g in gone)  # its engine was started anew
            }
            others = [
                w
                for w in self.roles
                if w != t.worker and self.role_at(w, at_s) == t.from_role and w not in dead and w not in away and w not in broken
            ]
            if len(others) < floors[t.from_role]:
                yield (
                    f"{t.worker} began to leave {t.from_role} at {at_s:.3f} s with {len(others)} others serving "
                    f"({', '.join(others) or 'nobody'}); the floor is {floors[t.from_role]}; "
                    f"dead {sorted(dead)}, away {sorted(away)}"
                )

    def _concurrency(self, max_concurrent: int) -> Iterable[str]:
        transits = self.transits()
        for t in transits:
            if t.end == "overtaken":
                yield f"{t.worker} began another move at {t.until_s:.3f} s while {t.move_id} was open in {t.phase}"
            at_once = [o for o in transits if o.since_s <= t.since_s < o.arrived_s or o is t]
            if len(at_once) > max_concurrent:
                yield f"{len(at_once)} moves open at {t.since_s:.3f} s, allowed {max_concurrent}: {[o.worker for o in at_once]}"

    def _fences(self) -> Iterable[str]:
        highest: dict[str, int] = defaultdict(int)
        acted: dict[tuple[str, str], Entry] = {}
        answers: dict[tuple[str, str], str] = {}
        for e in self.entries:
            if e.kind == "start":
                if e.highest_epoch < highest[e.worker]:
                    yield f"{e.worker} forgot epoch {highest[e.worker]} over a restart: it knows {e.highest_epoch}"
            elif e.kind == "command":
                key = (e.worker, e.id)
                if e.acted:
                    if e.epoch < highest[e.worker]:
                        yield f"{e.worker} acted on {e.what} of epoch {e.epoch} after it had seen {highest[e.worker]}"
                    if key in acted:
                        yield f"{e.worker} acted twice on command {e.id} ({e.what})"
                    acted[key] = e
                if e.detail.startswith("replay") and answers.get(key, e.answer) != e.answer:
                    yield f"{e.worker} answered command {e.id} with {answers[key]} first and {e.answer} again"
                if e.answer in REMEMBERED:
                    answers.setdefault(key, e.answer)
                highest[e.worker] = max(highest[e.worker], e.highest_epoch)

    def _one_leader(self, frozen: Sequence[Gone]) -> Iterable[str]:
        first: dict[int, float] = {}
        for e in self.acted():
            first.setdefault(e.epoch, e.received_s)
        for e in self.acted():
            later = [at_s for epoch, at_s in first.items() if epoch > e.epoch]
            if not later or e.received_s <= min(later) + IN_FLIGHT_S:
                continue
            if any(g.worker == e.worker and g.since_s <= e.received_s <= g.until_s + IN_FLIGHT_S for g in frozen):
                continue
            yield f"{e.worker} acted on {e.what} of epoch {e.epoch} at {e.received_s:.3f} s, after a newer leader had acted"
