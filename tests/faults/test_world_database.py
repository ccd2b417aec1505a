"""PostgreSQL goes wrong under two controllers, and controllers stop and hang: one leads, and nothing begins without a record.

One fleet for all of it. The database is reached through a proxy, by a role of its own whose rights can be taken away.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx
import pytest
from harness import Api, FaultFleet, process_state, until
from harness_book import Book
from harness_start import fault_fleet
from postgres_server import PASSWORD, PostgresServer, postgres_server
from tools_proxy import FaultProxy, Mode
from world import CALM, metric, watched

pytestmark = [pytest.mark.faults, pytest.mark.router, pytest.mark.postgres, pytest.mark.timeout(900)]
ROLE = "app"
KEPT_ROWS = 100  # of history, while the database is away: so few that some must be dropped


@dataclass
class Pair:
    fleet: FaultFleet
    server: PostgresServer
    database: str
    link: FaultProxy

    @property
    def urls(self) -> dict[str, str]:
        return {name: f"http://127.0.0.1:{port}" for name, port in self.fleet.fleet.controller_ports.items()}

    def status(self, name: str) -> dict[str, Any]:
        return dict(httpx.get(f"{self.urls[name]}/api/v1/status", timeout=10).raise_for_status().json())

    def leaders(self) -> list[str]:
        found = []
        for name in self.urls:
            try:
                # The probe asks no database: a status waits for one that is frozen, too long for a watcher.
                if httpx.get(f"{self.urls[name]}/healthz/live", timeout=2).json()["leading"]:
                    found.append(name)
            except httpx.HTTPError:
                pass  # stopped, or it has no database to answer from
        return found

    def leader(self, within_s: float = 90) -> str:
        """Wait until one leads and the fleet is at its side; the harness talks to that one from here on."""
        name = str(until(lambda: (self.leaders() or [""])[0], within_s, "a leader"))
        if not str(self.fleet.api.http.base_url).startswith(self.urls[name]):
            self.fleet.api.http.close()
            self.fleet.api = Api(self.urls[name])
        return name

    def is_refused(self, name: str, worker: str = "w2") -> bool:
        """Whether this controller refuses to begin a move, and says by which rule."""
        body = {"role": "prefill", "reason": "while it must not begin", "force": True}
        answer = httpx.post(f"{self.urls[name]}/api/v1/workers/{worker}/move", json=body, timeout=20)
        assert answer.status_code in (202, 409, 503), answer.text
        if answer.status_code == 202:
            row = answer.json()
            raise AssertionError(f"{name} began {row['id']} without a database")
        return answer.status_code == 503 or answer.json().get("rule") in ("not_leader", "database_down", "stale", "lost")

    def moves(self) -> int:
        return int(self.server.sql("select count(*) from transition", self.database)[0][0])

    def lease(self) -> tuple[str, int, float]:
        """Holder, epoch, and the seconds that its time still runs, as the database itself says."""
        sql = "select holder, epoch, expires_wall_s - extract(epoch from clock_timestamp()) from leadership"
        holder, epoch, left = self.server.sql(sql, self.database)[0]
        return holder, int(epoch), float(left)

    def backends(self) -> list[int]:
        """None while the server recovers, too: it answers nobody then."""
        try:
            rows = self.server.sql("select pid from pg_stat_activity where usename = 'app' order by pid")
        except RuntimeError:
            return []
        return [int(r[0]) for r in rows]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    with postgres_server() as server:
        database = server.create()
        server.sql(f"create role {ROLE} login password '{PASSWORD}'")
        server.sql(f"alter database {database} owner to {ROLE}")
        with FaultProxy(("127.0.0.1", server.port)) as link:
            url = f"postgresql+asyncpg://{ROLE}:{PASSWORD}@127.0.0.1:{link.port}/{database}"
            with fault_fleet(
                tmp_path_factory.mktemp("pair"),
                prefill=1,
                decode=2,
                workers_per_process=3,
                standbys=1,
                controller={"database": {"url": url, "buffer_rows": KEPT_ROWS}},
                policy={**CALM, "lost_after_s": 8.0},
            ) as fleet:
                yield Pair(fleet, server, database, link)
                server.thaw()
                link.heal()
                fleet.api.http.close()


@contextmanager
def whole(pair: Pair) -> Iterator[str]:
    """Yields the leader. Streams run throughout and none is lost; then one leads again, a move works, the history is clean."""
    name = pair.leader()
    pair.fleet.home()
    load = pair.fleet.load(rate=1.5, output=30)
    try:
        yield name
    finally:
        pair.server.thaw()
        pair.link.heal()
        heard = load.stop()
    assert heard.wrong == [] and heard.lost() == [], str(heard)
    pair.leader()
    pair.fleet.settled()
    worker, role = pair.fleet.spare(0)
    pair.fleet.ended(pair.fleet.move(worker, role))
    until(lambda: len(pair.leaders()) == 1, 90, "one leader", pair.leaders)
    assert pair.fleet.violations() == []


def steps_down(pair: Pair, name: str) -> None:
    """By its own clock, as the database says nothing; and it says so, and begins nothing."""
    until(lambda: not pair.status(name)["leading"], 60, "the leader stepping down", lambda: pair.status(name))
    assert pair.status(name)["banner"] != ""
    assert all(pair.is_refused(n) for n in pair.urls)


def test_a_frozen_database_makes_the_leader_step_down_and_holds_up_no_tick(pair: Pair, book: Book) -> None:
    with whole(pair) as name, book.fault("P11 P6", "PostgreSQL frozen (SIGSTOP), connections open") as fault:
        before, ticks = pair.moves(), metric(pair.urls[name], "fluidpd_ticks_total", outcome="ok")
        pids = pair.server.processes()
        pair.server.freeze()
        fault.proof = f"states of {len(pids)} processes: {''.join(process_state(p) for p in pids)}"
        steps_down(pair, name)
        fault.found += watched(lambda: "somebody leads" if pair.leaders() else "", 3.0)
        assert metric(pair.urls[name], "fluidpd_ticks_total", outcome="ok") > ticks
        until(lambda: metric(pair.urls[name], "fluidpd_db_dropped_samples_total") > 0, 90, "history rows dropped, and counted")
        assert metric(pair.urls[name], "fluidpd_db_buffered_samples") <= KEPT_ROWS
        pair.server.thaw()
        pair.leader()
        assert pair.moves() == before
        until(lambda: pair.status(pair.leader())["banner"] == "", 60, "the end of the banner")


def test_a_network_that_swallows_what_goes_to_the_database_is_no_different(pair: Pair, book: Book) -> None:
    with whole(pair) as name, book.fault("P16 P11 P17", "everything between controllers and database swallowed") as fault:
        before = pair.moves()
        pair.link.mode = Mode.BLACKHOLE
        steps_down(pair, name)
        fault.proof = f"{pair.link.counts['held_chunks']} times held back"
        fault.found += watched(lambda: "somebody leads" if pair.leaders() else "", 3.0)
        pair.link.heal()
        pair.leader()
        assert pair.moves() == before


def test_a_slow_database_holds_up_no_tick(pair: Pair, book: Book) -> None:
    """Two seconds each way: every transaction takes longer than it may. Whether it leads meanwhile is its own affair."""
    with whole(pair) as name, book.fault("P17 P11", "2 s latency between controllers and database") as fault:
        pair.link.latency_s = 2.0
        ticks = metric(pair.urls[name], "fluidpd_ticks_total", outcome="ok")
        until(lambda: pair.link.counts["delayed_chunks"] > 10, 60, "delayed bytes")
        fault.proof = f"{pair.link.counts['delayed_chunks']} chunks delayed"
        fault.found += watched(lambda: "two lead" if len(pair.leaders()) > 1 else "", 6.0)
        assert metric(pair.urls[name], "fluidpd_ticks_total", outcome="ok") > ticks
        assert metric(pair.urls[name], "fluidpd_ticks_total", outcome="failed") == 0


def test_an_immediate_restart_and_a_killed_backend_are_survived(pair: Pair, book: Book) -> None:
    with whole(pair):
        with book.fault("P11", "PostgreSQL stopped at once (-m immediate) and started again") as fault:
            old = pair.server.processes()[0]
            pair.server.restart()
            fault.proof = f"postmaster {old}: {process_state(old)}; now {pair.server.processes()[0]}"
            pair.leader()
        with book.fault("P11", "kill -9 of a backend: PostgreSQL recovers, all connections are cut") as fault:
            victim = until(pair.backends, 90, "a connection again")[0]
            os.kill(victim, signal.SIGKILL)
            until(lambda: process_state(victim) in ("gone", "Z"), 90, "the backend gone")
            fault.proof = f"backend {victim}: {process_state(victim)}"
            until(lambda: victim not in pair.backends() and pair.backends(), 60, "new connections")
            pair.leader()
        until(lambda: pair.status(pair.leader())["banner"] == "", 60, "the end of the banner")


def test_rights_that_are_taken_away_stop_what_is_new_and_come_back(pair: Pair, book: Book) -> None:
    with whole(pair) as name, book.fault("P11", "rights to write revoked") as fault:
        before = pair.moves()
        pair.server.sql(f"revoke insert, update, delete on all tables in schema public from {ROLE}", pair.database)
        may = pair.server.sql(f"select has_table_privilege('{ROLE}', 'transition', 'insert')", pair.database)
        fault.proof = f"has_table_privilege({ROLE}, transition, insert): {may[0][0]}"
        assert may == [["f"]]
        until(lambda: "permission" in pair.status(name)["banner"] or not pair.status(name)["leading"], 60, "it is said")
        assert all(pair.is_refused(n) for n in pair.urls)
        pair.server.sql(f"grant insert, update, delete on all tables in schema public to {ROLE}", pair.database)
        pair.leader()
        assert pair.moves() == before


def test_a_leader_that_was_paused_for_longer_than_its_time_acts_never_again_on_the_old_epoch(pair: Pair, book: Book) -> None:
    what = "SIGSTOP of the leader, a move under way, until another leads; then SIGCONT"
    with whole(pair) as name, book.fault("P6 P2", what) as fault:
        epoch = pair.lease()[1]
        moving = pair.fleet.move("w2", "prefill", 60)
        fault.proof = pair.fleet.freeze(name)
        other = next(n for n in pair.urls if n != name)
        until(lambda: pair.leaders() == [other] if _answers(pair, other) else False, 90, "the standby leading")
        assert pair.lease()[1] > epoch
        since_s = time.monotonic()
        pair.leader()
        pair.fleet.ended(moving, 90)
        pair.fleet.thaw(name)
        until(lambda: not pair.status(name)["leading"], 60, "the old leader standing by")
        fault.found += watched(lambda: "both lead" if len(pair.leaders()) > 1 else "", 4.0)
        commands = [e for e in pair.fleet.history().entries if e.kind == "command" and e.at_s > since_s]
        acted = [e.facts for e in commands if e.facts["acted"] and e.facts["epoch"] <= epoch]
        fault.found += [f"the old leader acted: {c}" for c in acted]


def test_kill_9_of_the_leader_under_load_loses_no_request_and_the_standby_leads_within_15_s(pair: Pair, book: Book) -> None:
    """9 s until the leadership runs out by the database's clock, and the standby asks for it every second."""
    with whole(pair) as name, book.fault("P6 P13", "SIGKILL of the leader under load") as fault:
        other, epoch = next(n for n in pair.urls if n != name), pair.lease()[1]
        since = pair.fleet.mark()
        fault.proof = pair.fleet.kill(name)
        until(lambda: pair.leaders() == [other], 90, "the standby's lead")
        leads_s = since.passed_s
        assert pair.fleet.in_time(since, 15.0), f"it took {leads_s:.1f} s"
        pair.leader()
        pair.fleet.settled()
        acts_s = since.passed_s
        heard = [pair.fleet.sidecar(w)["link"]["highest_epoch"] for w in pair.fleet.workers]
        assert set(heard) == {pair.lease()[1]} and heard[0] > epoch
        pair.fleet.restart(name)
        until(lambda: _answers(pair, name), 60, "the old one as a standby")
        answer = httpx.post(f"{pair.urls[name]}/api/v1/pause", json={"reason": "asked of a standby", "ttl_s": 5}, timeout=20)
        assert (answer.status_code, answer.json()["rule"]) == (503, "not_leader")
        said = f"leads after {leads_s:.1f} s, has all workers after {acts_s:.1f} s"
        fault.proof += f"; the standby {said}"
        book.notes["failover"] = said


def test_sigterm_hands_the_leadership_over_at_once_and_parks_the_open_move(pair: Pair, book: Book) -> None:
    with whole(pair) as name:
        other = next(n for n in pair.urls if n != name)
        with book.fault("P19", "SIGTERM to the leader, a move under way, a standby there") as fault:
            epoch, moving = pair.lease()[1], pair.fleet.move("w2", "prefill", 60)
            fault.proof = pair.fleet.terminated(name)
            holder, now, left_s = pair.lease()
            fault.proof += f"; row: epoch {now}, {left_s:.1f} s left"
            assert now > epoch or left_s <= 0, f"{holder} still holds the row for {left_s:.1f} s"
            until(lambda: pair.leaders() == [other], 60, "the standby leading")
            pair.leader()
            row = pair.fleet.ended(moving, 90)
            assert row["end"] in ("done", "rolled_back", "cancelled")
            pair.fleet.restart(name)
            until(lambda: _answers(pair, name), 60, "the restarted controller, standing by")


def test_sigterm_is_clean_although_the_database_is_frozen(pair: Pair, book: Book) -> None:
    with whole(pair) as name, book.fault("P19 P11", "SIGTERM to the leader while PostgreSQL is frozen") as fault:
        pair.server.freeze()
        fault.proof = f"frozen: {pair.server.frozen}; {pair.fleet.terminated(name)}"
        pair.server.thaw()
        pair.fleet.restart(name)
        until(lambda: _answers(pair, name), 60, "the restarted controller")


def _answers(pair: Pair, name: str) -> bool:
    try:
        return bool(pair.status(name))
    except httpx.HTTPError:
        return False
