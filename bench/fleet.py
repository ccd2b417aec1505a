"""What a fleet costs the controller: the real one, in its own process on one core, with N synthetic sidecars on real WebSockets.

    python bench/fleet.py                                    # 8, 64, 256 and 1,000 workers, calm and busy
    python bench/fleet.py --sizes 8,64 --seconds 10 --load calm
    python bench/fleet.py --sizes 1000 --load busy --json out.json
    python bench/fleet.py --sizes 256 --profile 30           # leaves time to attach a profiler; prints the process id
    python bench/fleet.py --write docs/scale.md              # and puts the table there

**Synthetic**: no engine, no GPU, no network but loopback. Real: the controller with all its tasks, its SQLite file, its sockets,
the wire of docs/protocol.md, and one reader of the event stream. A quarter are prefill workers. Calm: 2 prompts wait at each,
nobody lends. Busy: 30 wait at each, and every decode worker with room is to lend. No move is begun, alternatives are weighed all
the same (the settings ask that a move be the best for a minute). Two cores are used where there are two: one for the controller,
one for the sidecars. What else runs on them shows in wall times (lag), hardly in CPU times.

Columns: decision = snapshot, derive and decide; lag = how late a tick began; CPU and memory are of the controller's process;
us per message = what one message more costs (the same fleet at full and at half rate), in brackets all CPU over all messages;
dropped = samples sent and not used, or held back as the controller did not read; late = older than 250 ms when read.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import IO, Any

ROOT = Path(__file__).resolve().parent.parent
SIZES = "8,64,256,1000"
LOADS = ("calm", "busy")
UP_WITHIN_S, CALM_DOWN_S = 120.0, 5.0
LAG_TARGET_S, MEMORY_TARGET_MB = 0.1, 500
ENOUGH_PER_S = 300  # messages: what fewer cost is lost among the rest
BEGIN, END = "<!-- the table of bench/fleet.py -->", "<!-- end of the table -->"
SETTINGS = """\
server: {{port: 0}}
database: {{url: "sqlite+aiosqlite:///{folder}/fluidpd.db"}}
# No move is begun: it would have to be the best one for longer than the bench lasts.
policy: {{persist_s: 3600.0, trend_persist_s: 60.0, goodput_persist_s: 60.0}}
"""


class Child:
    """One process of the bench, asked by a line on its stdin."""

    def __init__(self, script: str, *arguments: str, core: int | None, log: IO[bytes]) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(ROOT / "bench" / script), *arguments],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
        )
        if core is not None:
            os.sched_setaffinity(self.process.pid, {core})

    def say(self, word: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{word}\n".encode())
        self.process.stdin.flush()

    def ask(self) -> dict[str, Any]:
        """What happened since it was asked last. Raises RuntimeError if the process has ended."""
        assert self.process.stdout is not None
        self.say("mark")
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"process {self.process.pid} ended with {self.process.wait()}; see what it said above")
        found: dict[str, Any] = json.loads(line)
        return found

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        try:
            self.process.wait(15)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


@contextlib.contextmanager
def child(script: str, *arguments: str, core: int | None, log: IO[bytes]) -> Iterator[Child]:
    started = Child(script, *arguments, core=core, log=log)
    try:
        yield started
    finally:
        started.close()


def cores() -> tuple[int | None, int | None]:
    """One for the controller, one for the rest; None where there is nothing to choose from."""
    free = sorted(os.sched_getaffinity(0))
    return (free[-1], free[0]) if len(free) > 1 else (None, None)


def cpu_s(pid: int) -> float:
    """CPU seconds of all threads so far, to the nanosecond: /proc/PID/stat counts in hundredths."""
    total = 0
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(OSError):  # a thread that just ended
            total += int((task / "schedstat").read_text().split()[0])
    return total / 1e9


def memory_mb(pid: int, field: str = "VmHWM") -> float:
    found = re.search(rf"{field}:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    return int(found[1]) / 1024 if found else 0.0


def port_in(log: Path) -> int:
    until = time.monotonic() + UP_WITHIN_S
    while time.monotonic() < until:
        if found := re.search(r"on http://127\.0\.0\.1:(\d+)", log.read_text()):
            return int(found[1])
        time.sleep(0.1)
    raise RuntimeError(f"the controller did not start:\n{log.read_text()[-2000:]}")


def told(words: str) -> None:
    print(
        f"\r\033[K{words}" if sys.stderr.isatty() else words, end="" if sys.stderr.isatty() else "\n", file=sys.stderr, flush=True
    )


def window(controller: Child, sidecars: Child, seconds: float, words: str) -> dict[str, Any]:
    """Everything that both sides count, over `seconds`."""
    controller.ask(), sidecars.ask()
    began, spent = time.monotonic(), cpu_s(controller.process.pid)
    while (left := began + seconds - time.monotonic()) > 0:
        told(f"{words}, {left:.0f} s more")
        time.sleep(min(10.0, left))
    span, spent = time.monotonic() - began, cpu_s(controller.process.pid) - spent
    seen, sent = controller.ask(), sidecars.ask()
    messages = seen.get("samples", 0) + seen.get("samples_refused", 0) + sent.get("receipts", 0)
    return {"span_s": span, "cpu_s": spent, "messages": messages, "seen": seen, "sent": sent}


def measured(size: int, load: str, seconds: float, profile_s: float) -> dict[str, Any]:
    mine, theirs = cores()
    name = f"{size} workers, {load}"
    with tempfile.TemporaryDirectory(prefix="fluidpd-fleet-") as folder, contextlib.ExitStack() as opened:
        settings, log_path = Path(folder) / "controller.yaml", Path(folder) / "controller.log"
        settings.write_text(SETTINGS.format(folder=folder))
        log = opened.enter_context(log_path.open("wb"))
        controller = opened.enter_context(child("fleet_controller.py", str(settings), core=mine, log=log))
        port = port_in(log_path)
        began, before = time.monotonic(), cpu_s(controller.process.pid)
        sidecars = opened.enter_context(child("fleet_sidecars.py", str(port), str(size), load, core=theirs, log=log))
        while (there := sidecars.ask())["welcomed"] < size:
            told(f"{name}: {there['welcomed']} are welcomed")
            if time.monotonic() - began > UP_WITHIN_S:
                raise RuntimeError(f"only {there['welcomed']} of {size} were welcomed within {UP_WITHIN_S:.0f} s")
            time.sleep(0.2)
        up_s, up_cpu_s = time.monotonic() - began, cpu_s(controller.process.pid) - before
        told(f"{name}: all are welcomed, warming up")
        time.sleep(CALM_DOWN_S)
        if profile_s:
            told(f"{name}: profile process {controller.process.pid} now ({profile_s:.0f} s)")
            time.sleep(profile_s)
        full = window(controller, sidecars, seconds, f"{name}: measuring")
        sidecars.say("half")
        time.sleep(1.0)
        half = window(controller, sidecars, seconds, f"{name}: measuring at half the rate")
        memory = memory_mb(controller.process.pid)
    told("")
    return row(size, load, full, half, memory) | {"welcome_all_s": up_s, "welcome_all_cpu_s": up_cpu_s}


def row(size: int, load: str, full: dict[str, Any], half: dict[str, Any], memory: float) -> dict[str, Any]:
    """One line of the table. Rates are per second; times seconds, except where a name says otherwise."""

    def rate(w: dict[str, Any], key: str) -> float:
        return float(w[key] / w["span_s"])

    fewer = rate(full, "messages") - rate(half, "messages")
    seen, sent = full["seen"], full["sent"]
    return {
        "workers": size,
        "load": load,
        "sample_hz": sent["hz"],
        "ticks_per_s": seen["ticks"] / seen["span_s"],
        "decision_p50_s": seen["judge_s"]["p50"],
        "decision_p99_s": seen["judge_s"]["p99"],
        "lag_p50_s": seen["lag_s"]["p50"],
        "lag_p99_s": seen["lag_s"]["p99"],
        "lag_max_s": seen["lag_s"]["max"],
        "whole_tick_p99_s": seen["whole_s"]["p99"],
        "cpu_s_per_s": rate(full, "cpu_s"),
        "memory_peak_mb": memory,
        "sql_rows_per_s": seen.get("sql_rows", 0) / seen["span_s"],
        "sql_commits_per_s": seen.get("sql_commits", 0) / seen["span_s"],
        "messages_per_s": rate(full, "messages"),
        "commands_per_s": sent.get("heard", 0) / full["span_s"],
        "command_bytes_per_s": sent.get("heard_bytes", 0) / full["span_s"],
        "us_per_message": (rate(full, "cpu_s") - rate(half, "cpu_s")) / fewer * 1e6 if fewer >= ENOUGH_PER_S else None,
        "us_per_message_all_in": full["cpu_s"] / full["messages"] * 1e6 if full["messages"] else None,
        "dropped": seen.get("samples_refused", 0) + sent.get("held_back", 0),
        "late": seen["late_samples"],
        "sample_delay_p99_s": seen["sample_delay_s"]["p99"],
        "sent_late": sent.get("sent_late", 0),
        "disconnects": sent.get("disconnects", 0),
    }


COLUMNS = (
    "workers, load",
    "Hz each",
    "ticks/s",
    "decision p99, ms",
    "lag p50, p99, ms",
    "CPU, s/s",
    "memory, MB",
    "SQL rows/s",
    "messages/s",
    "us per message",
    "dropped, late",
)


def line(r: dict[str, Any]) -> str:
    def ms(key: str) -> str:
        return "-" if r[key] is None else f"{r[key] * 1e3:.1f}"

    def us(key: str) -> str:
        return "-" if r[key] is None else f"{r[key]:.0f}"

    cells = (
        f"{r['workers']:,}, {r['load']}",
        f"{r['sample_hz']:.0f}",
        f"{r['ticks_per_s']:.0f}",
        ms("decision_p99_s"),
        f"{ms('lag_p50_s')}, {ms('lag_p99_s')}",
        f"{r['cpu_s_per_s']:.2f}",
        f"{r['memory_peak_mb']:.0f}",
        f"{r['sql_rows_per_s']:,.0f}",
        f"{r['messages_per_s']:,.0f}",
        f"{us('us_per_message')} ({us('us_per_message_all_in')})",
        f"{r['dropped']}, {r['late']}",
    )
    return as_row(cells)


def as_row(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def verdict(rows: list[dict[str, Any]]) -> list[str]:
    """The targets, where the largest fleet of the issue was measured, and the growth between neighbours."""
    said = []
    for r in rows:
        if r["workers"] >= 1000:
            lag = r["lag_p99_s"] is not None and r["lag_p99_s"] <= LAG_TARGET_S
            said.append(
                f"{r['workers']:,} workers, {r['load']}: lag p99 <= {LAG_TARGET_S * 1e3:.0f} ms {'met' if lag else 'MISSED'}, "
                f"memory < {MEMORY_TARGET_MB} MB {'met' if r['memory_peak_mb'] < MEMORY_TARGET_MB else 'MISSED'}"
            )
    for before, r in pairwise(rows):
        if before["load"] == r["load"]:
            more, cost = r["messages_per_s"] / before["messages_per_s"], r["cpu_s_per_s"] / before["cpu_s_per_s"]
            said.append(f"{before['workers']:,} to {r['workers']:,}, {r['load']}: x{more:.1f} messages, x{cost:.1f} CPU time")
    return said


def shown(rows: list[dict[str, Any]], load_before: float) -> str:
    load = f"{load_before:.1f} before, {os.getloadavg()[0]:.1f} after"
    return "\n".join(
        (
            "Synthetic sidecars on loopback, the real controller on one core of this machine, SQLite.",
            f"Load average of the machine, {os.cpu_count()} cores: {load}.",
            "",
            as_row(COLUMNS),
            as_row("---" for _ in COLUMNS).replace(" ", ""),
            *(line(r) for r in rows),
            "",
            *(f"- {said}" for said in verdict(rows)),
        )
    )


def write(text: str, page: Path) -> None:
    """Put the table where the page has it. Raises ValueError if the page has no such place."""
    before, found, rest = page.read_text(encoding="utf-8").partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (found and end):
        raise ValueError(f"{page} has no place for the table: {BEGIN} and {END}")
    page.write_text(f"{before}{BEGIN}\n{text}\n{END}{after}", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", default=SIZES, help=f"workers, separated by commas (default {SIZES})")
    parser.add_argument("--seconds", type=float, default=15.0, help="of each of the two measurements of a size (default 15)")
    parser.add_argument("--load", choices=(*LOADS, "both"), default="both")
    parser.add_argument("--profile", type=float, default=0.0, metavar="SECONDS", help="wait so long before measuring")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the numbers too")
    parser.add_argument("--write", type=Path, metavar="PAGE", help="put the table into this page, such as docs/scale.md")
    given = parser.parse_args()
    try:
        sizes = [int(size) for size in given.sizes.split(",")]
    except ValueError:
        parser.error(f"--sizes {given.sizes}: write numbers separated by commas, for example 8,64")
    if min(sizes) < 2 or given.seconds <= 0:
        parser.error("a fleet has at least 2 workers, and a measurement takes time")
    loads = LOADS if given.load == "both" else (given.load,)
    load_before = os.getloadavg()[0]
    rows = [measured(size, load, given.seconds, given.profile) for load in loads for size in sizes]
    result = {"sidecars": "synthetic", "cores": os.cpu_count(), "load_average": [load_before, os.getloadavg()[0]], "rows": rows}
    if given.json:
        given.json.write_text(json.dumps(result, indent=2) + "\n")
    text = shown(rows, load_before)
    print(text)
    if given.write:
        write(text, given.write)


if __name__ == "__main__":
    main()
