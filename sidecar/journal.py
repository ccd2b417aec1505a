"""What a sidecar must still know after it died: the highest epoch, its incarnation, the commands it answered, its newest move.

Append-only JSON lines, each on the disk before anything acts on it. Never guesses: a torn last line was never acted on and is
dropped; damage anywhere else is refused, and the file set aside.
"""

from __future__ import annotations

import fcntl
import json
import os
import threading
from collections import OrderedDict
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from fluidpd.command import MoveOrder
from fluidpd.names import Answer, Heading, Phase
from fluidpd.transition import START, Effect, Event, Move, step

ANSWERS_KEPT = 512


class JournalDamaged(Exception):
    """The journal cannot be trusted. The text says where it was put and what to do."""


class JournalInUse(Exception):
    """Another sidecar holds this state directory."""


@dataclass(frozen=True, slots=True)
class MoveEvent:
    """One event of a move. `seq` counts the events this sidecar reports; 0 marks one that the controller told it."""

    seq: int
    phase: Phase
    heading: Heading
    event: Event
    took_s: float = 0.0
    detail: str = ""
    numbers: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class JournaledMove:
    """A move as its events tell it. The state is always the fold of the events over the table."""

    order: MoveOrder
    with_plugin: bool = False  # a plugin took part, so undoing needs it back
    engine_boot: str = ""  # the engine's own boot as the move began; empty if it was not known
    events: tuple[MoveEvent, ...] = ()
    state: Move = START
    effects: tuple[Effect, ...] = (Effect.PREFLIGHT,)
    closed: str = ""  # why this sidecar closed it without its last event, if it did

    @property
    def open(self) -> bool:
        return self.state.open and not self.closed

    @property
    def next_seq(self) -> int:
        return max((e.seq for e in self.events), default=0) + 1

    def after(self, event: MoveEvent) -> JournaledMove:
        state, effects = step(self.state, event.event)
        return replace(self, events=(*self.events, event), state=state, effects=effects)


@dataclass(slots=True)
class Facts:
    highest_epoch: int = 0
    incarnation: int = 0
    answered: OrderedDict[str, tuple[Answer, str]] = field(default_factory=OrderedDict)
    move: JournaledMove | None = None

    def apply(self, entry: dict[str, Any]) -> None:
        """Fold one line in. Raises KeyError, ValueError or IllegalMove on a line that means nothing here."""
        match entry["kind"]:
            case "epoch":
                self.highest_epoch = max(self.highest_epoch, int(entry["epoch"]))
            case "incarnation":
                self.incarnation = int(entry["incarnation"])
            case "answered":
                self.remember(str(entry["id"]), Answer(entry["answer"]), str(entry["detail"]))
            case "move":
                self.move = JournaledMove(
                    MoveOrder.model_validate(entry["order"]), bool(entry["with_plugin"]), str(entry.get("engine_boot", ""))
                )
            case "event":
                if self.move is None or self.move.order.move_id != entry["move_id"]:
                    raise ValueError(f"an event of move {entry['move_id']}, which is not the newest")
                self.move = self.move.after(
                    MoveEvent(
                        int(entry["seq"]),
                        Phase(entry["phase"]),
                        Heading(entry["heading"]),
                        Event(entry["event"]),
                        float(entry["took_s"]),
                        str(entry["detail"]),
                        dict(entry["numbers"]),
                    )
                )
            case "closed":
                if self.move is not None and self.move.order.move_id == entry["move_id"]:
                    self.move = replace(self.move, closed=str(entry["why"]))
            case other:
                raise ValueError(f"a line of kind {other!r}")

    def remember(self, id_: str, answer: Answer, detail: str) -> None:
        self.answered[id_] = (answer, detail)
        while len(self.answered) > ANSWERS_KEPT:
            self.answered.popitem(last=False)

    def lines(self) -> list[dict[str, Any]]:
        """The shortest journal with these facts."""
        found: list[dict[str, Any]] = [epoch_line(self.highest_epoch), incarnation_line(self.incarnation)]
        found += [answered_line(id_, answer, detail) for id_, (answer, detail) in self.answered.items()]
        if self.move is not None:
            found.append(move_line(self.move.order, self.move.with_plugin, self.move.engine_boot))
            found += [event_line(self.move.order.move_id, e) for e in self.move.events]
            if self.move.closed:
                found.append(closed_line(self.move.order.move_id, self.move.closed))
        return found


def epoch_line(epoch: int) -> dict[str, Any]:
    return {"kind": "epoch", "epoch": epoch}


def incarnation_line(incarnation: int) -> dict[str, Any]:
    return {"kind": "incarnation", "incarnation": incarnation}


def answered_line(id_: str, answer: Answer, detail: str) -> dict[str, Any]:
    return {"kind": "answered", "id": id_, "answer": answer.value, "detail": detail}


def move_line(order: MoveOrder, with_plugin: bool, engine_boot: str = "") -> dict[str, Any]:
    return {"kind": "move", "order": order.model_dump(mode="json"), "with_plugin": with_plugin, "engine_boot": engine_boot}


def event_line(move_id: str, e: MoveEvent) -> dict[str, Any]:
    return {
        "kind": "event",
        "move_id": move_id,
        "seq": e.seq,
        "phase": e.phase.value,
        "heading": e.heading.value,
        "event": e.event.value,
        "took_s": e.took_s,
        "detail": e.detail,
        "numbers": e.numbers,
    }


def closed_line(move_id: str, why: str) -> dict[str, Any]:
    return {"kind": "closed", "move_id": move_id, "why": why}


class Journal:
    """One file, one writer. `append` returns once the lines are on the disk and folded into `facts`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.facts = Facts()
        self.lines_written = 0
        self._lock = threading.Lock()
        self._file: Any = None
        self._guard: Any = None

    @classmethod
    def open(cls, directory: Path) -> Journal:
        """Read, compact and lock the journal of a state directory. Raises JournalDamaged, JournalInUse or OSError."""
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        journal = cls(directory / "journal.jsonl")
        journal._guard = (directory / "lock").open("a")
        try:
            fcntl.flock(journal._guard, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            journal._guard.close()
            raise JournalInUse(f"another sidecar uses {directory}: stop it, or give this one its own state_dir") from error
        try:
            journal._read()
            journal._compact()
        except BaseException:
            journal._guard.close()
            raise
        return journal

    def append(self, *entries: dict[str, Any]) -> None:
        """Write lines and wait for the disk. A line that does not fit the facts is refused before anything is written."""
        with self._lock:
            text = "".join(json.dumps(e, separators=(",", ":"), allow_nan=False) + "\n" for e in entries)
            after = replace(self.facts, answered=self.facts.answered.copy())
            for entry in entries:
                after.apply(entry)
            whole = os.fstat(self._file.fileno()).st_size
            try:
                os.write(self._file.fileno(), text.encode())
                os.fsync(self._file.fileno())
            except OSError:
                os.ftruncate(self._file.fileno(), whole)  # half a line on a full disk must not become a torn middle
                raise
            self.facts = after
            self.lines_written += len(entries)

    def close(self) -> None:
        with self._lock:
            if self._file is not None:
                self._file.close()
                self._file = None
            if self._guard is not None:
                self._guard.close()
                self._guard = None

    def _read(self) -> None:
        raw = self.path.read_bytes() if self.path.exists() else b""
        lines = raw.split(b"\n")
        lines.pop()  # what follows the last newline was never acted on: fsync returns after the newline
        for number, line in enumerate(lines, start=1):
            try:
                self.facts.apply(json.loads(line))
            except Exception as error:
                if number == len(lines):
                    break  # a disk may keep the newline of a block it lost: still the last line, never acted on
                aside = self._set_aside()
                raise JournalDamaged(
                    f"{self.path} is damaged at line {number} of {len(lines)} ({error}); it was moved to {aside}. "
                    "Keep that file, check the disk, and start again: the sidecar then asks the engine what role it has"
                ) from error

    def _set_aside(self) -> Path:
        n = 1
        while (aside := self.path.with_suffix(f".damaged-{n}")).exists():
            n += 1
        self.path.rename(aside)
        return aside

    def _compact(self) -> None:
        fresh = self.path.with_suffix(".new")
        with fresh.open("wb") as out:
            for entry in self.facts.lines():
                out.write(json.dumps(entry, separators=(",", ":"), allow_nan=False).encode() + b"\n")
            out.flush()
            os.fsync(out.fileno())
        fresh.rename(self.path)
        where = os.open(self.path.parent, os.O_RDONLY)
        try:
            os.fsync(where)
        finally:
            os.close(where)
        self._file = self.path.open("ab", buffering=0)
