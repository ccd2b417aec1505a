"""An emulated fleet of real processes behind the real router, which a test may kill, freeze, stop at a failpoint, and restart.

Every fault returns the proof that it happened, as text. Never waits for less than a slow machine needs: limits are generous, and
what is asserted is that something happened, not how fast.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from fleet_tools import Api, until
from harness_history import Gone, History
from harness_load import Load
from harness_time import Timed
from harness_tools import overlapping, process_state

from cli.children import Child

__all__ = ["FLOORS", "NAMED_ENDS", "OTHER", "Api", "FaultFleet", "overlapping", "process_state", "until"]

FLOORS = {"prefill": 1, "decode": 1}
OTHER = {"prefill": "decode", "decode": "prefill"}
NAMED_ENDS = ("done", "rolled_back", "cancelled", "quarantined")


@dataclass
class FaultFleet(Timed):
    """A running fleet under test. Faults name children: controller, router, sidecar-w1..; a worker's name means its engine."""

    api: Api
    roles: Mapping[str, str]  # of the start
    gone: list[Gone] = field(default_factory=list)  # engines taken by faults
    frozen: list[Gone] = field(default_factory=list)  # sidecars that read late

    # ------------------------------------------------------------ names

    @property
    def workers(self) -> tuple[str, ...]:
        return tuple(self.roles)

    def child(self, name: str) -> Child:
        """A child by its own name; a worker's name means its engine's process."""
        return self.fleet.emulator_of(name) if name in self.roles else self.fleet.children[name]

    def url(self, worker: str) -> str:
        return self.fleet.worker(worker).url

    # ------------------------------------------------------------ faults of processes

    def kill(self, name: str) -> str:
        """SIGKILL. The proof: waiting for the process says so."""
        self._taken(name)
        child = self.child(name)
        os.kill(child.pid, signal.SIGKILL)
        return self.died(name)

    def died(self, name: str, within_s: float = 90) -> str:
        """Wait until a child that was to be killed (by a failpoint, say) is, and return the proof."""
        self._taken(name)
        child = self.child(name)
        assert child.process is not None
        code = child.process.wait(within_s)
        assert code == -signal.SIGKILL, f"{name} ended with {code}, not by SIGKILL:\n{child.tail(15)}"
        assert process_state(child.pid) in ("gone", "Z")
        return f"{name} (pid {child.pid}): killed by signal {-code}"

    def freeze(self, name: str) -> str:
        """SIGSTOP. The proof: its state in /proc is T."""
        child = self.child(name)
        os.kill(child.pid, signal.SIGSTOP)
        if name.startswith("sidecar-"):
            self.frozen.append(Gone(name.removeprefix("sidecar-"), time.monotonic()))
        return self.stopped(name)

    def stopped(self, name: str, within_s: float = 90) -> str:
        pid = self.child(name).pid
        until(lambda: process_state(pid) == "T", within_s, f"{name} in state T", lambda: f"(it is in {process_state(pid)})")
        return f"{name} (pid {pid}): state T in /proc/{pid}/stat"

    def thaw(self, name: str) -> str:
        pid = self.child(name).pid
        os.kill(pid, signal.SIGCONT)
        until(lambda: process_state(pid) != "T", 10, f"{name} going on")
        worker = name.removeprefix("sidecar-")
        self.frozen = [
            Gone(g.worker, g.since_s, min(g.until_s, time.monotonic())) if g.worker == worker else g for g in self.frozen
        ]
        return f"{name} (pid {pid}): state {process_state(pid)} again"

    def terminated(self, name: str) -> str:
        """SIGTERM, and a clean end within the 25 s that are promised. The proof."""
        child = self.child(name)
        assert child.process is not None
        since = self.mark()
        child.process.terminate()
        code, took_s = child.process.wait(180), since.passed_s
        assert code == 0, child.tail(20)
        assert self.in_time(since, 25.0), f"it took {took_s:.1f} s"
        return f"{name} (pid {child.pid}) ended with code 0 after {took_s:.1f} s"

    def restart(self, name: str) -> None:
        """Start a dead child again, as a process manager would."""
        child = self.child(name)
        assert child.process is not None
        child.process.wait(30)
        child.start()
        if name in self.roles:
            until(lambda: httpx.get(f"{self.url(name)}/health", timeout=2).status_code == 200, 60, f"the engine {name}")
            now_s = time.monotonic()
            self.gone = [Gone(g.worker, g.since_s, min(g.until_s, now_s)) if g.worker == name else g for g in self.gone]

    def _taken(self, name: str) -> None:
        if name in self.roles and not any(g.worker == name and g.until_s == float("inf") for g in self.gone):
            self.watch.broken(name, self.watch.at(name).role)
            self.gone.append(Gone(name, time.monotonic()))

    def whole_again(self, *workers: str) -> None:
        """These count for themselves again: they were restarted, and serve."""
        for worker in workers:
            self.watch.mended(worker)

    # ------------------------------------------------------------ failpoints

    def _failpoint(self, name: str) -> Path:
        return self.fleet.folder / "failpoints" / name

    def arm(self, name: str, point: str, action: str = "kill") -> None:
        """From now on `name` is killed (or stopped) at this point, once."""
        path = self._failpoint(name)
        path.with_name(path.name + ".reached").unlink(missing_ok=True)
        fresh = path.with_name(path.name + ".new")
        fresh.write_text(f"{point}:{action}\n", encoding="utf-8")
        fresh.rename(path)

    def disarm(self, name: str) -> bool:
        """Take it back. False: it was reached already."""
        path = self._failpoint(name)
        path.unlink(missing_ok=True)
        return not self.reached(name)

    def reached(self, name: str) -> bool:
        path = self._failpoint(name)
        return path.with_name(path.name + ".reached").exists()

    def at_failpoint(self, name: str, within_s: float = 90) -> str:
        """Wait until the armed point was reached and its action done. The proof: the marker file, and the process's state."""
        path = self._failpoint(name)
        marker = path.with_name(path.name + ".reached")
        until(
            marker.exists, within_s, f"{name} at its failpoint", lambda: f"({path.read_text() if path.exists() else 'not armed'})"
        )
        point, _, action = marker.read_text(encoding="utf-8").strip().partition(":")
        state = self.died(name, within_s) if action == "kill" else self.stopped(name, within_s)
        return f"marker of {point}; {state}"

    def provoke(self, name: str, point: str, worker: str, action: str = "kill", within_s: float = 180) -> str:
        """Arm `name`, and have `worker` moved until the point is reached. The proof; the move is the worker's newest.

        On a starved machine a move may end before its point, for want of time: then it is asked for anew.
        """
        self.arm(name, point, action)
        until_s = time.monotonic() + within_s
        while not self.reached(name) and time.monotonic() < until_s:
            with contextlib.suppress(httpx.HTTPError):
                if not self.api.moves(worker=worker, open_only=True):
                    if point.startswith("restore."):
                        self.engine_answers(worker, "busy")
                    self.posted(worker, OTHER[self.engine(worker)["role"]])
            time.sleep(0.05)
        return self.at_failpoint(name)

    def newest(self, worker: str) -> str:
        """The id of its newest move, once a controller answers."""
        until(lambda: self.api.get("status"), 120, "the controller")
        return str(self.api.moves(worker=worker, limit=1)[0]["id"])

    # ------------------------------------------------------------ faults of engines

    def engine_answers(self, worker: str, what: str, times: int = 1) -> None:
        """The next `times` role switches of this engine, preparations aside, are answered so (sidecar/emulator/switch.py)."""
        body = {"what": what, "times": times, "spares_preparation": True}
        httpx.post(f"{self.url(worker)}/emulator/fault", json=body, timeout=5).raise_for_status()

    def moved_with(self, worker: str, what: str, end: str) -> tuple[dict[str, Any], dict[str, Any]]:
        """What the engine said of itself before a move whose switch it answers with `what`; and that move, at its end.

        Asked for anew while none came as far as the switch, or ended in another way on a machine that was starved meanwhile.
        """
        before: dict[str, Any] = {}
        row: dict[str, Any] = {}
        for _ in range(6):
            if self.faults_left(worker) == 0:
                self.engine_answers(worker, what)
            before, since = self.engine(worker), self.mark()
            row = self.ended(self.move(worker, OTHER[before["role"]]))
            if self.faults_left(worker) == 0 and (row["end"] == end or not self.starved(since)):
                return before, row
            self.settled()
        raise AssertionError(f"{worker} was not asked to switch, or not in time: {row}")

    def faults_left(self, worker: str) -> int:
        """How many of those answers it has not given yet."""
        return int(self.engine(worker)["faults_left"])

    def sidecar(self, worker: str) -> dict[str, Any]:
        """What its sidecar says of itself."""
        return dict(httpx.get(f"{self.fleet.worker(worker).sidecar_url}/state", timeout=5).raise_for_status().json())

    def engine(self, worker: str) -> dict[str, Any]:
        """What the engine says of itself."""
        return dict(httpx.get(f"{self.url(worker)}/emulator", timeout=5).raise_for_status().json())

    # ------------------------------------------------------------ moves, and what is true

    def move(self, worker: str, role: str, within_s: float = 120, **body: Any) -> str:
        """Begin a move; guards that pass with time (a start, a report that is late) are waited out. Its id."""
        said = {"reason": "asked by the fault suite", "force": True, **body}
        last: list[str] = [""]

        def accepted() -> str:
            answer = self.api.post(f"workers/{worker}/move", role=role, **said)
            last[0] = answer.text
            return str(answer.json()["id"]) if answer.status_code == 202 else ""

        return str(until(accepted, within_s, f"a move of {worker} to {role}", lambda: f"({last[0][:300]})"))

    def posted(self, worker: str, role: str) -> str:
        """Ask for a move of a controller that may stop or die before it answers. The move's id, or ""."""
        body = {"role": role, "reason": "asked by the fault suite", "force": True}
        try:
            answer = httpx.post(f"{self.fleet.controller_url}/api/v1/workers/{worker}/move", json=body, timeout=3)
        except httpx.HTTPError:
            return ""
        return str(answer.json().get("id", ""))

    def ended(self, move_id: str, within_s: float = 120) -> dict[str, Any]:
        """The move, once it has its end."""

        def row() -> dict[str, Any] | None:
            found = self.api.get(f"transitions/{move_id}")
            return dict(found) if found["end"] is not None else None

        return dict(until(row, within_s, f"the end of move {move_id}", lambda: f"({self._last(move_id)})"))

    def _last(self, move_id: str) -> str:
        try:
            row = self.api.get(f"transitions/{move_id}")
            return f"{row['phase']} {row['heading']}: {row['detail']}; {[p['event'] for p in row['phases']]}"
        except httpx.HTTPError as error:
            return f"the controller does not say: {error!r}"

    def members(self) -> dict[str, str]:
        """Who the real router lists, by worker name, and as what."""
        names = {self.url(w): w for w in self.workers}
        rows = httpx.get(f"{self.fleet.router_url}/workers", timeout=5).json()["workers"]
        return {names[r["url"].rstrip("/")]: r["worker_type"] for r in rows if r["url"].rstrip("/") in names}

    def agreed(self, worker: str) -> str | None:
        """The role in which engine, router and controller agree that this worker serves; None while they do not."""
        engine, row = self.engine(worker), next(w for w in self.api.get("workers") if w["name"] == worker)
        role = str(engine["role"])
        serving = engine["state"] == "serving" and not engine["draining"] and row["state"] == "serving"
        return role if serving and row["role"] == role and self.members().get(worker) == role else None

    def settled(self, within_s: float = 120) -> None:
        """Everybody serves, nothing is open, and engine, router and controller agree on every role."""
        until(
            self._is_settled,
            within_s,
            "a settled fleet",
            lambda: f"(states {self.api.states()}, router {self.members()}, open {self.api.moves(open_only=True)})",
        )
        self.whole_again(*self.workers)

    def _is_settled(self) -> bool:
        """Asks as little as it can: it is asked ten times a second, of a machine that has other work."""
        if self.api.moves(open_only=True) or set(self.api.states().values()) != {"serving"}:
            return False
        roles = self.api.roles()
        return set(roles) == set(self.workers) and self.members() == roles and all(self.agreed(w) for w in self.workers)

    def mend(self) -> None:
        """Whatever a test left dead or frozen runs again, nothing is armed, and the fleet settles. Raises if it does not."""
        for path in (self.fleet.folder / "failpoints").iterdir():
            path.unlink()
        for name, child in list(self.fleet.children.items()):
            if child.dead():
                worker = next((w for w in self.workers if self.fleet.emulator_of(w).name == name), name)
                self.restart(worker)
            elif process_state(child.pid) == "T":
                self.thaw(name)
        until(lambda: self.api.get("status"), 60, "the controller")
        for worker in self.workers:
            self.engine_answers(worker, "ok", 0)
        self.settled()

    def mend_all(self) -> None:
        """`mend`, and engines that were put in quarantine are started anew, until everybody serves."""
        for _ in range(4):
            try:
                self.mend()
                return
            except AssertionError:
                ill = [w for w, state in self.api.states().items() if state == "quarantined"]
                if not ill:
                    raise
                for worker in ill:
                    self.kill(worker)
        self.mend()

    def spare(self, turn: int) -> tuple[str, str]:
        """A worker of the role that can spare one, and its other role; another worker each time."""
        roles = self.api.roles()
        counts = {r: list(roles.values()).count(r) for r in FLOORS}
        role = max(counts, key=lambda r: (counts[r] - FLOORS[r], r == ("prefill", "decode")[turn % 2]))
        of_role = sorted(w for w in roles if roles[w] == role)
        return of_role[turn % len(of_role)], "prefill" if role == "decode" else "decode"

    def home(self) -> None:
        """Back to the roles of the start, however a test left them: those that grow a role first."""
        self.settled()
        for _ in range(2 * len(self.roles)):
            now = self.api.roles()
            away = [w for w in self.workers if now[w] != self.roles[w]]
            if not away:
                return
            counts = {r: list(now.values()).count(r) for r in FLOORS}
            worker = next(w for w in away if counts[now[w]] > FLOORS[now[w]])
            self.ended(self.move(worker, self.roles[worker]))
            self.settled()

    def load(self, **how: Any) -> Load:
        return Load(self.fleet.router_url, **how).start()

    def excused(self, after_s: float = 6.0) -> list[tuple[float, float]]:
        """When a fault of ours may have lost a stream: its engine was gone, or the router had not noticed that yet."""
        return [(g.since_s - 0.5, g.until_s + after_s) for g in self.gone]

    def history(self) -> History:
        return History.read({w: self.fleet.folder / f"history-{w}.jsonl" for w in self.workers}, self.roles)

    def violations(self, max_concurrent: int = 1) -> list[str]:
        """Of the whole run so far, by the sidecars' histories, the record of moves, and what was seen from outside."""
        judged = self.history().violations(floors=FLOORS, max_concurrent=max_concurrent, gone=self.gone, frozen=self.frozen)
        found = [f"{promise}: {text}" for promise, texts in judged.items() for text in texts]
        found += [f"P1: {text}" for text in self.watch.violations]
        return found + [f"P2: {text}" for text in overlapping(self.api.moves(limit=1000), max_concurrent)]
