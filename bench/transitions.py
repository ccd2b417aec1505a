"""What a role change costs on the real SGLang (CPU): a cold restart, a move in place phase by phase, and a move that is none.

    python bench/transitions.py                              # ten rounds of each, about ten minutes
    python bench/transitions.py --rounds 2 --json out.json   # a look, and the figures with every single measurement

One fleet, one run: 1 prefill and 2 decode workers behind the real router, our sidecars and the controller. A CPU's times say how
the parts compare, not what a GPU would take. Never changes anything outside its own temporary folder.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx

from fluidpd.slo import nearest_rank

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "sglang")]

if TYPE_CHECKING:
    from real_clients import Answer, Api
    from real_fleet import RealFleet

PHASES = ("preflight", "drain", "remap", "switch", "verify")
LONG_TOKENS = 400
POLL_S = 0.005
RESTART = "cold restart of a decode worker"
PARTS = {
    "to prefill": "decode to prefill, idle",
    "handoff": "decode to prefill, long generations handed off",
    "to decode": "prefill to decode, idle",
    "late": "decode to prefill, idle, registered after the switch",
    "late to decode": "prefill to decode, idle, registered after the switch",
}
NOTE = """\
All times in milliseconds, of SGLang 0.5.23 on a CPU (engine: sglang-cpu). While a worker moves, and once a started one is
healthy, two clients send short requests through the router. The worker is idle when asked, except where it hands generations off.
"out of service": from the moment the router has dropped the worker until it has served a request in its new role.
"registered after": the same move by a worker whose sidecar does not wait for the plugin's promise to hold early requests
(limits.hold_s next to 0): the controller then registers it only once the switch is verified. Compare "switch to first request".
"re-admit" holds what is left to wait for at the router. The cold restart is of the same role: SIGTERM while nothing is in flight
(SIGKILL after 10 s), start beside a fleet that is idle, until a request through the router is served again. It shares the
machine's processors with the others. The ratio leaves out how long the process took to stop."""


@dataclass
class Figures:
    """Seconds by row; whatever else is worth telling by name."""

    rows: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    counts: dict[str, int] = field(default_factory=lambda: defaultdict(int))

    def table(self) -> dict[str, dict[str, float]]:
        return {name: summary(values) for name, values in self.rows.items()}


def summary(values: list[float]) -> dict[str, float]:
    ms = [1e3 * v for v in values]
    found = {"median": nearest_rank(ms, 0.5), "p90": nearest_rank(ms, 0.9), "min": min(ms), "max": max(ms)}
    return {"n": len(ms), **{name: round(value, 2) for name, value in found.items()}}


class Pump:
    """Two clients that send short requests through the router, one after the other, while the block runs."""

    def __init__(self, url: str, figures: Figures, during: str, pause_s: float) -> None:
        self._url, self._figures, self._during, self._pause_s = url, figures, during, pause_s
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._run, args=(seed,), daemon=True) for seed in range(2)]

    def __enter__(self) -> Pump:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(60)

    def _run(self, seed: int) -> None:
        from real_clients import Answer, generate, prompt

        while not self._stop.is_set():
            answer = Answer(self._url, "/generate", generate(prompt(40, seed), 4, stream=False))
            answer.join(60)
            self._figures.counts[f"requests during {self._during}"] += 1
            self._figures.counts[f"requests failed during {self._during}"] += not answer.is_done
            self._stop.wait(self._pause_s)


class Bench:
    def __init__(self, fleet: RealFleet, api: Api, say: Callable[[str], None]) -> None:
        self.figures = Figures()
        self._fleet, self._api, self._say = fleet, api, say
        self._calm: list[dict[str, Any]] = []  # what the long generations are when nothing happens

    # ------------------------------------------------------------ moves

    def move(self, name: str, role: str, part: str) -> dict[str, Any]:
        """One move, and the figures of its phases under `part`."""
        from real_clients import until

        before = self._served(name, role)
        with Pump(self._fleet.router_url, self.figures, "moves", 0.02):
            self._api.move(name, role)
            served_wall_s = self._first_request(name, role, before)
            record = self._api.moved(name, role)
        until(lambda: self._state(name) == "serving", 20, f"{name} to serve as {role}")
        rows = self.figures.rows
        ok = {p["phase"]: p for p in record["phases"] if p["event"] == "ok" and p["phase"] in PHASES}
        router = {p["event"]: p for p in record["phases"] if p["event"] in ("left_router", "joined_router")}
        for phase in PHASES:
            rows[f"{part}: {phase}"].append(ok[phase]["took_s"])
            if phase == "preflight":
                rows[f"{part}: leave the router"].append(router["left_router"]["took_s"])
        rows[f"{part}: re-admit"].append(router["joined_router"]["took_s"])
        rows[f"{part}: asked to done"].append(record["ended_wall_s"] - record["started_wall_s"])
        rows[f"{part}: switch to first request"].append(max(0.0, served_wall_s - ok["switch"]["wall_s"]))
        rows[f"{part}: out of service"].append(served_wall_s - router["left_router"]["wall_s"])
        return record

    def move_with_handoff(self) -> None:
        """d1 leaves while two long generations run on it; their clients must not notice."""
        from real_clients import until

        running = [self._long(seed) for seed in range(2)]
        until(lambda: all(a.tokens >= 12 for a in running), 60, "the generations to be under way")
        record = self.move("d1", "prefill", PARTS["handoff"])
        for a in running:
            a.join(120)
        self.figures.counts["generations handed off"] += sum(int(p["numbers"].get("handed_off") or 0) for p in record["phases"])
        differ = sum(a.told() != calm for a, calm in zip(running, self._calm, strict=True))
        self.figures.counts["long generations that differ"] += differ
        self.figures.rows[f"{PARTS['handoff']}: longest gap in a stream"].append(max(a.longest_gap_s for a in running))

    def _long(self, seed: int) -> Answer:
        from real_clients import generate, pair, prompt

        workers = (self._fleet.worker(name) for name in ("p1", "d1"))
        return pair(*workers, "/generate", generate(prompt(20, seed), LONG_TOKENS))

    def no_op(self) -> None:
        """Ask for the role it has."""
        began_s = time.perf_counter()
        answer = self._api.post("workers/d1/move", role="decode", reason="asked for the role it has", force=True)
        self.figures.rows["a move to the role it has: refused"].append(time.perf_counter() - began_s)
        assert answer.status_code == 409 and answer.json()["rule"] == "same_role", answer.text

    # ------------------------------------------------------------ restarts

    def restart(self, name: str) -> None:
        from real_clients import until

        rows = self.figures.rows
        began_s = time.time()
        self._fleet.stop_worker(name, within_s=10.0)
        stopped_s = time.time()
        self._fleet.start_worker(name)
        self._fleet.wait(f"{self._fleet.worker(name).url}/health", 300, name)
        healthy_s = time.time()
        with Pump(self._fleet.router_url, self.figures, "restarts", 0.02):  # not before: the start needs the processors
            served_s = self._first_request(name, "decode", self._served(name, "decode"))
        rows[f"{RESTART}: stop"].append(stopped_s - began_s)
        rows[f"{RESTART}: start"].append(healthy_s - stopped_s)
        rows[f"{RESTART}: healthy to first request"].append(served_s - healthy_s)
        rows[f"{RESTART}: start to first request"].append(served_s - stopped_s)
        rows[f"{RESTART}: out of service"].append(served_s - began_s)
        until(lambda: self._state(name) == "serving", 60, f"{name} to be registered again")

    # ------------------------------------------------------------ looking

    def _served(self, name: str, role: str) -> float:
        """Tokens that this worker has computed in `role`."""
        from real_clients import loads

        said = loads(self._fleet.worker(name))
        return float(said["total_prefill_uncached_tokens"] if role == "prefill" else said["decode_moments"][5])

    def _first_request(self, name: str, role: str, before: float) -> float:
        """When the worker has computed something in `role` that it had not before, by the wall clock."""
        until_s = time.monotonic() + 120
        while time.monotonic() < until_s:
            for _ in range(50):
                try:
                    if self._served(name, role) > before:
                        return time.time()
                except (httpx.HTTPError, KeyError, IndexError):
                    pass  # it is switching
                time.sleep(POLL_S)
            newest = self._api.get("transitions", worker=name, limit=1)
            assert not newest or newest[0]["end"] in (None, "done"), newest
        raise AssertionError(f"{name} served nothing as {role} within 120 s")

    def _state(self, name: str) -> str:
        return str(next(w["state"] for w in self._api.get("workers") if w["name"] == name))

    # ------------------------------------------------------------ the run

    def run(self, rounds: int, keep: Callable[[], None]) -> None:
        """`keep` is called after each round: what was measured survives whatever ends the run."""
        for seed in range(2):
            answer = self._long(seed)
            answer.join(120)
            self._calm.append(answer.told())
        for i in range(rounds):
            began_s = time.monotonic()
            self.no_op()
            self.move("d1", "prefill", PARTS["to prefill"])
            self.move("d1", "decode", PARTS["to decode"])
            self.move_with_handoff()
            self.move("d1", "decode", PARTS["to decode"])
            self.move("d2", "prefill", PARTS["late"])
            self.move("d2", "decode", PARTS["late to decode"])
            out = ", ".join(f"{self._last(PARTS[part])} {part}" for part in ("to prefill", "to decode", "handoff", "late"))
            self._say(f"moves {i + 1}/{rounds}: out of service {out} (in {time.monotonic() - began_s:.0f} s)")
            keep()
        for i in range(rounds):
            self.restart("d2")
            self._say(f"restarts {i + 1}/{rounds}: out of service {self._last(RESTART)}")
            keep()

    def _last(self, part: str) -> str:
        return f"{1e3 * self.figures.rows[f'{part}: out of service'][-1]:.0f} ms"


def result(figures: Figures, rounds: int) -> dict[str, Any]:
    table = figures.table()

    def ratio(part: str) -> float | None:
        cold = table.get(f"{RESTART}: start to first request")
        return round(cold["median"] / table[f"{part}: out of service"]["median"], 1) if cold else None

    early, late = (table[f"{PARTS[part]}: switch to first request"]["median"] for part in ("to prefill", "late"))
    return {
        "engine": "sglang-cpu",
        "rounds": rounds,
        "unit": "ms",
        "rows": table,
        "restart_over_move": {part: ratio(PARTS[part]) for part in ("to prefill", "handoff", "to decode")},
        "early_registration_hides_ms": round(late - early, 2),
        "counts": dict(figures.counts),
        "measured_s": {name: [round(v, 5) for v in values] for name, values in figures.rows.items()},
    }


def shown(found: dict[str, Any]) -> str:
    lines = ["| | n | median | p90 | min | max |", "|---|---|---|---|---|---|"]
    for name, row in found["rows"].items():
        lines.append(f"| {name} | {row['n']} | {row['median']:.1f} | {row['p90']:.1f} | {row['min']:.1f} | {row['max']:.1f} |")
    ratios = ", ".join(f"{ratio} ({part})" for part, ratio in found["restart_over_move"].items())
    lines += ["", f"cold restart (start to first request) / move (out of service), medians: {ratios}"]
    lines.append(f"early registration hides, median: {found['early_registration_hides_ms']:g} ms")
    lines.append("; ".join(f"{name}: {count}" for name, count in sorted(found["counts"].items())))
    return "\n".join(lines)


def main() -> int:
    ask = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ask.add_argument("--rounds", type=int, default=10, help="how many of each; default 10")
    ask.add_argument("--json", type=Path, metavar="PATH", help="write the figures there, every single measurement included")
    options = ask.parse_args()
    if options.rounds < 1:
        ask.error("--rounds: at least 1")

    from real_clients import Api
    from real_environment import NoEnvironment, environment
    from real_fleet import RealSpec, running

    def say(text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    def keep() -> None:
        if options.json is not None:
            options.json.write_text(json.dumps(result(bench.figures, options.rounds), indent=1) + "\n", encoding="utf-8")

    spec = RealSpec(sidecar_of={"d2": {"limits": {"hold_s": 1e-6}}})
    folder = Path(tempfile.mkdtemp(prefix="fluidpd-transitions-"))
    try:
        say(f"starting 1 prefill and 2 decode workers, the router, sidecars and the controller; logs: {folder / 'logs'}")
        with running(spec, environment(), folder) as fleet:
            bench = Bench(fleet, Api(fleet.controller_url), say)
            bench.run(options.rounds, keep)
    except NoEnvironment as problem:
        print(f"transitions: {problem}", file=sys.stderr)
        return 2
    print(f"{NOTE}\n\n{shown(result(bench.figures, options.rounds))}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
