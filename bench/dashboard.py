"""How quick the dashboard's overview is: 16 workers, 24 hours of seconds in SQLite, a real process, a real Chromium.

    python bench/dashboard.py                        # 1.38 million rows, about two minutes
    python bench/dashboard.py --rows 200000          # a look
    python bench/dashboard.py --keep /tmp/day.db     # make the day once, use it again
    python bench/dashboard.py --json out.json

The rows and the fleet are made up; the store, its roll-ups, the dashboard's process and the browser are the real ones. Every
HTML time is of a window nobody asked for before, so no answer is a kept one; what the lanes were until an hour ago is read by the
first and kept for the others. "processor" is what the dashboard's process used of one, which a busy machine changes less than the
time. Never touches another database.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import shutil
import socket
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "dashboard"))

from dashboard_fleet import busy_fleet, decision, move, status, worker

from controller.store import history
from controller.store.engine import migrate
from controller.store.writes import Store
from fluidpd.names import Role
from fluidpd.record import TransitionRow

ROOT = Path(__file__).resolve().parents[1]
WORKERS, DAY_S, HOUR_S = 16, 86_400, 3600
PREFILL = 5  # of the sixteen
CHROMIUM = os.environ.get("FLUIDPD_CHROMIUM") or shutil.which("chromium") or "/usr/bin/chromium"
FLAGS = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-dev-shm-usage"]
GOALS = {
    "html_first_ms": (None, "ms", "overview of 24 h as HTML, the first of a new process"),
    "html_ms": (150, "ms", "overview of 24 h as HTML, from SQLite"),
    "html_cpu_ms": (None, "ms", "the same, processor"),
    "interactive_ms": (500, "ms", "interactive in Chromium: its scripts have run"),
    "chart_ms": (None, "ms", "pressure chart of 24 h drawn"),
    "wire_kb": (300, "kB", "over the wire on a first visit, until all is drawn"),
    "again_kb": (None, "kB", "over the wire on the next visit"),
    "zoom_ms": (50, "ms", "zoom of 100 000 points in uPlot, until it is drawn"),
    "tabs_ms": (None, "ms", "the eighth of 8 open tabs: until it is live"),
    "tabs_html_ms": (None, "ms", "the overview's HTML while 8 tabs are open"),
    "tabs_connections": (6, "", "connections that 8 tabs hold (a browser has 6 for one server)"),
}
SECONDS = """
with recursive s(t) as (select :since union all select t + 1 from s where t + 1 < :until),
w(i) as (select 1 union all select i + 1 from w where i < :workers)
insert into worker_history (cluster, model, pool, step_s, second, worker, role, state, pressure, slack_s, kv_share, batch,
  waiting, borrow_open_tokens, borrowed_tokens_total, age_s, lending)
select 'default', 'default', 'default', 1, t, 'w' || i,
  case when i <= :prefill or (t / 1800 + i) % 9 = 0 then 'prefill' else 'decode' end,
  case when (t / 7 + i * 97) % 5000 = 0 then 'stale' else 'serving' end,
  0.4 + 0.2 * ((t / 60 + i * 7) % 10) / 10.0, 0.014, 0.42, 31 + (t + i) % 5, (t + i) % 7, 0, t * 2.0, 0.05,
  (t / 600 + i) % 11 = 0 from s, w
"""
INDICES = """
with recursive s(t) as (select :since union all select t + 1 from s where t + 1 < :until),
n(name, base) as (values ('ppi', 0.4), ('dpi', 0.55))
insert into index_history (cluster, model, pool, step_s, name, second, low, mean, high)
select 'default', 'default', 'default', 1, name, t, base, base + 0.3 * ((t / 300) % 7) / 7.0 + 0.05 * (t % 11) / 11.0, base + 0.5
from s, n
"""


@dataclass
class Measured:
    """Single measurements by name."""

    values: dict[str, list[float]] = field(default_factory=dict)
    rows: int = 0

    def add(self, name: str, value: float) -> None:
        self.values.setdefault(name, []).append(value)

    def as_dict(self) -> dict[str, Any]:
        rows = {k: {"median": statistics.median(v), "max": max(v), "all": v, "goal": GOALS[k][0]} for k, v in self.values.items()}
        return {"rows": self.rows, "workers": WORKERS, "figures": rows}


# ---------------------------------------------------------------- the day


def make_day(path: Path, rows: int, now_s: int) -> int:
    """A database with the history of `rows` worker seconds up to now, rolled up as the scheduler does; returns the rows."""
    url = f"sqlite+aiosqlite:///{path}"
    migrate(url)
    seconds = min(DAY_S, max(600, rows // WORKERS))
    # Hour by hour: a roll-up of a whole day at once is not what a controller does.
    for since in range(now_s - seconds, now_s, HOUR_S):
        until = min(since + HOUR_S, now_s)
        with contextlib.closing(sqlite3.connect(path)) as database:
            database.execute(SECONDS, {"since": since, "until": until, "workers": WORKERS, "prefill": PREFILL})
            database.execute(INDICES, {"since": since, "until": until})
            database.commit()
        asyncio.run(_roll_up(url, until))
    asyncio.run(_fleet(url, now_s, seconds))
    with contextlib.closing(sqlite3.connect(path)) as database:
        database.execute("pragma optimize")
        return int(
            database.execute("select (select count(*) from worker_history) + (select count(*) from index_history)").fetchone()[0]
        )


async def _roll_up(url: str, now_s: int) -> None:
    store = Store(url)
    await store.open()
    await history.roll_up(store, now_s + 5)
    await store.close()


async def _fleet(url: str, now_s: int, seconds: int) -> None:
    store = Store(url, wall=lambda: float(now_s))
    await store.open()
    roles = {f"w{i}": Role.PREFILL if i <= PREFILL else Role.DECODE for i in range(1, WORKERS + 1)}
    await store.upsert_workers(
        [worker(n, r, registered_wall_s=now_s - 2.0 * DAY_S, seen_wall_s=float(now_s)) for n, r in roles.items()]
    )
    await store.write_status(status(float(now_s)))
    pin = busy_fleet(lambda: float(now_s)).pin_rows[0]
    await store.set_pin(pin)
    for i in range(300):  # what 24 h of a lively fleet leave
        at = now_s - seconds + seconds * (i + 0.5) / 300
        await store.remember_decision(
            decision(0, at, *(("flip", "prefill_sustained_flip") if i % 3 == 0 else ("hold", "persisting")))
        )
    for i in range(100):
        at = now_s - seconds + seconds * (i + 0.5) / 100
        row = move(f"m-{i:03}", f"w{PREFILL + 1 + i % 11}", at)
        await store.open_transition(_opened(row))
        for phase in row.phases:
            await store.record_phase(phase, row.move, row.ended_wall_s if phase is row.phases[-1] else None)
    await store.close()


def _opened(row: TransitionRow) -> TransitionRow:
    return replace(row, end=None, ended_wall_s=None, phases=())


# ---------------------------------------------------------------- the dashboard


@contextlib.contextmanager
def dashboard(path: Path) -> Iterator[tuple[str, int]]:
    """Its own process on a free port of the loopback: the URL, and the process's number."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    env = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "FLUIDPD_DASHBOARD__DATABASE_URL": f"sqlite+aiosqlite:///{path}",
        "FLUIDPD_DASHBOARD__PORT": str(port),
        "FLUIDPD_DASHBOARD__CONTROLLER_URL": "http://127.0.0.1:9",
    }
    serve = "from dashboard.serve import serve; from dashboard.settings import DashboardSettings"
    code = f"import asyncio; {serve}; asyncio.run(serve(DashboardSettings()))"
    process = subprocess.Popen([sys.executable, "-c", code], env=env, cwd=ROOT)
    url = f"http://127.0.0.1:{port}"
    try:
        for _ in range(300):
            with contextlib.suppress(httpx.HTTPError):
                if httpx.get(f"{url}/healthz", trust_env=False).is_success:
                    break
            time.sleep(0.1)
        yield url, process.pid
    finally:
        process.terminate()
        process.wait(10)


def processor_ms(pid: int) -> float:
    used = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
    return (int(used[11]) + int(used[12])) * 1000 / os.sysconf("SC_CLK_TCK")


def html_times(url: str, rounds: int, measured: Measured, name: str = "html_ms", first: int = 1400) -> None:
    with httpx.Client(base_url=url, trust_env=False, headers={"Accept-Encoding": "gzip"}, timeout=60) as client:
        client.get("/healthz")
        for i in range(rounds):
            began = time.perf_counter()
            answer = client.get(f"/?from=now-{first + i}m&to=now")
            took_ms = (time.perf_counter() - began) * 1000
            measured.add("html_first_ms" if i == 0 and name == "html_ms" else name, took_ms)
            answer.raise_for_status()


# ---------------------------------------------------------------- the browser

DRAWN = """addEventListener('DOMContentLoaded', () => { const box = document.getElementById('pressure'); if (!box) return;
  new MutationObserver((_, o) => { if (box.querySelector('canvas')) { window.drawnAt = performance.now();
    document.documentElement.dataset.drawn = 'yes'; o.disconnect(); } })
    .observe(box, { childList: true, subtree: true }); })"""
ZOOM = """async () => {
  const n = 100000, x = [], y = [];
  for (let i = 0; i < n; i++) { x.push(i); y.push(Math.sin(i / 500) + Math.sin(i / 7) / 4); }
  const box = document.createElement('div'); document.body.append(box);
  let drawn = null;
  const chart = new uPlot({ width: 1200, height: 224, scales: { x: { time: false } }, series: [{}, { stroke: 'red' }],
    hooks: { draw: [() => drawn && drawn()] } }, [x, y], box);
  await new Promise((r) => setTimeout(r, 300));
  const times = [];
  for (let i = 0; i < 9; i++) {
    const began = performance.now(), done = new Promise((r) => { drawn = r; });
    chart.setScale('x', { min: i * 2000, max: n - i * 3000 });
    await done;
    times.push(performance.now() - began);
  }
  box.remove();
  return times;
}"""


def browse(url: str, rounds: int, measured: Measured) -> None:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        for i in range(rounds):
            context = browser.new_context(viewport={"width": 1280, "height": 900})
            context.add_init_script(DRAWN)
            page = context.new_page()
            for name in ("wire_kb", "again_kb"):
                before = Wire(context, page)
                page.goto(f"{url}/?from=now-{1300 + i}m&to=now")
                page.wait_for_selector("html[data-drawn]")
                measured.add(name, before.kilobytes())
                if name == "wire_kb":
                    timing = "performance.getEntriesByType('navigation')[0].domContentLoadedEventEnd"
                    measured.add("interactive_ms", page.evaluate(timing))
                    measured.add("chart_ms", page.evaluate("window.drawnAt"))
            if i == 0:
                for took in page.evaluate(ZOOM):
                    measured.add("zoom_ms", took)
            context.close()
        tabs(browser, url, measured)
        browser.close()


class Wire:
    """Counts what crosses the wire for one page, headers and all."""

    def __init__(self, context: Any, page: Any) -> None:
        self._session = context.new_cdp_session(page)
        self._bytes = 0
        self._session.on("Network.loadingFinished", self._finished)
        self._session.send("Network.enable")

    def _finished(self, event: dict[str, Any]) -> None:
        self._bytes += int(event["encodedDataLength"])

    def kilobytes(self) -> float:
        self._session.detach()
        return self._bytes / 1000


def tabs(browser: Any, url: str, measured: Measured) -> None:
    context = browser.new_context(viewport={"width": 1280, "height": 900})
    pages = []
    for _ in range(8):
        page = context.new_page()
        pages.append(page)
        began = time.perf_counter()
        page.goto(f"{url}/?from=now-1h&to=now")
        page.wait_for_selector("#live:has-text('live')", timeout=60_000)
    measured.add("tabs_ms", (time.perf_counter() - began) * 1000)
    measured.add("tabs_connections", float(connections(int(url.rpartition(":")[2]))))
    html_times(url, 5, measured, "tabs_html_ms", 1200)
    context.close()


def connections(port: int) -> int:
    """Established connections to a port of the loopback, as the kernel counts them at the server's side."""
    lines = Path("/proc/net/tcp").read_text(encoding="ascii").splitlines()[1:]
    wanted = f"0100007F:{port:04X}"
    return sum(1 for line in lines if line.split()[1] == wanted and line.split()[3] == "01")


def table(measured: Measured) -> str:
    lines = [
        f"{measured.rows:,} rows of history in SQLite, {WORKERS} workers",
        "",
        "| figure | median | worst | goal |",
        "|---|---|---|---|",
    ]
    for name, (goal, unit, words) in GOALS.items():
        if values := measured.values.get(name):
            asked = f"<= {goal} {unit}".strip() if goal is not None else ""
            lines.append(f"| {words} | {statistics.median(values):.0f} {unit} | {max(values):.0f} {unit} | {asked} |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--rows", type=int, default=WORKERS * DAY_S, help="worker seconds to make, at most a day's (default %(default)s)"
    )
    parser.add_argument("--rounds", type=int, default=5, help="times each thing is measured (default %(default)s)")
    parser.add_argument("--keep", type=Path, help="a database to make, or to use again if it is there")
    parser.add_argument("--no-browser", action="store_true", help="only the HTML times")
    parser.add_argument("--json", type=Path, help="write every single measurement there")
    asked = parser.parse_args()
    if asked.rows < 1 or asked.rounds < 1:
        parser.error("--rows and --rounds are at least 1")
    measured = Measured()
    with tempfile.TemporaryDirectory() as folder:
        path = asked.keep or Path(folder) / "day.db"
        if path.exists():
            with contextlib.closing(sqlite3.connect(path)) as kept:
                measured.rows = int(
                    kept.execute(
                        "select (select count(*) from worker_history) + (select count(*) from index_history)"
                    ).fetchone()[0]
                )
        else:
            print(f"making {asked.rows:,} worker seconds in {path} ...", file=sys.stderr, flush=True)
            measured.rows = make_day(path, asked.rows, int(time.time()))
        with dashboard(path) as (url, pid):
            before = processor_ms(pid)
            html_times(url, asked.rounds + 1, measured)
            measured.add("html_cpu_ms", (processor_ms(pid) - before) / (asked.rounds + 1))
            if not asked.no_browser:
                browse(url, asked.rounds, measured)
    print(table(measured))
    if asked.json:
        asked.json.write_text(json.dumps(measured.as_dict(), indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
