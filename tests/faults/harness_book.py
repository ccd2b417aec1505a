"""What was injected, the proof that it happened, and what it broke: by promise, written as JSON for docs/reliability.md.

Never counts a fault without a proof: an injection that did nothing would make every promise look kept.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

PROMISES = {
    "P1": "never below the floor of serving workers of a role by our action; a worker in transit counts as absent",
    "P2": "at most one open move a worker, and max_concurrent overall",
    "P3": "a crash in any phase of a move ends in a named, recoverable state within 30 s",
    "P4": "a restart goes on or goes home by asking the worker, not by the log; a broken engine is never admitted",
    "P5": "commands are fenced and idempotent",
    "P6": "one controller acts",
    "P7": "a sidecar without its controller keeps its role, keeps serving, and finishes or undoes what is open",
    "P8": "lost telemetry holds; a stale worker is never chosen",
    "P9": "no flapping",
    "P10": "jumps of the wall clock cause nothing",
    "P11": "without the database nothing new begins; it recovers by itself",
    "P12": "a full disk corrupts nothing; it recovers by itself",
    "P13": "a drain loses no request and no token",
    "P14": "verify is positive: role, probe and router agree before a worker serves",
    "P15": "a pin outranks automation; a pause lets open moves finish or rolls them back, as chosen",
    "P16": "a partition, also in one direction only, loses nothing and decides nothing wrong",
    "P17": "a slow network blocks no decision",
    "P18": "versions that differ by one work together, others are refused clearly",
    "P19": "SIGTERM is clean within 25 s",
    "P20": "memory, descriptors, threads and rows stay bounded",
}


class NotProven(AssertionError):
    """A fault without a proof that it happened."""


@dataclass
class Injection:
    """One fault of one promise. `proof` must be set before its block ends; `found` are violations seen by a checker."""

    promise: str
    fault: str
    proof: str = ""
    found: list[str] = field(default_factory=list)


@dataclass
class Book:
    """All injections of one process of a run."""

    seed: int
    folder: Path | None = None
    run: str = ""  # the same in all its processes
    injections: list[Injection] = field(default_factory=list)
    notes: dict[str, Any] = field(default_factory=dict)  # further figures of the run, such as how often a watcher looked
    started_wall_s: float = field(default_factory=time.time)

    @contextmanager
    def fault(self, promises: str, fault: str) -> Iterator[Injection]:
        """A fault that tests `promises` ("P3" or "P3 P4"). A failure inside is a violation of each, and is raised on."""
        one = Injection("", fault)
        try:
            yield one
            if not one.proof:
                raise NotProven(f"{fault}: no proof that it happened")
        except NotProven:
            raise
        except BaseException as error:
            if isinstance(error, Exception):
                one.found.append(f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}")
            one.proof = one.proof or "none: it failed before its proof"
            raise
        finally:
            for promise in promises.split():
                assert promise in PROMISES, promise
                self.injections.append(Injection(promise, fault, one.proof, list(one.found)))
        assert not one.found, f"{fault}: {one.found}"

    def inject(self, promises: str, fault: str, proof: str, found: list[str] | None = None) -> None:
        """A fault whose consequences are judged over the whole history rather than one by one."""
        if not proof:
            raise NotProven(f"{fault}: no proof that it happened")
        for promise in promises.split():
            assert promise in PROMISES, promise
            self.injections.append(Injection(promise, fault, proof, list(found or ())))

    def rows(self) -> list[dict[str, Any]]:
        """By promise and fault: how often it was injected, every violation, and one proof as an example."""
        found: dict[tuple[str, str], dict[str, Any]] = {}
        for one in self.injections:
            row = found.setdefault(
                (one.promise, one.fault),
                {"promise": one.promise, "fault": one.fault, "injected": 0, "violations": [], "proof": one.proof},
            )
            row["injected"] += 1
            row["violations"] += one.found
        return sorted(found.values(), key=lambda r: (int(r["promise"][1:]), r["fault"]))

    def write(self) -> Path | None:
        """The run as a file in the book's folder; None if there is nothing to say or nowhere to write it."""
        if self.folder is None or not self.injections:
            return None
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / f"faults-{self.seed}-{int(self.started_wall_s)}-{os.getpid()}.json"
        said = {
            "seed": self.seed,
            "run": self.run,
            "started_wall_s": self.started_wall_s,
            "took_s": round(time.time() - self.started_wall_s, 1),
            "rows": self.rows(),
            "notes": self.notes,
        }
        path.write_text(json.dumps(said, indent=1) + "\n", encoding="utf-8")
        return path
