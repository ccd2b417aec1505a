"""Two controllers on PostgreSQL: the one that leads is killed while it pages. Nobody misses the page, nobody gets it twice.

Windows are scaled 1:60. The targets of the model are in the controllers' settings alone: its engine must have them from there.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

import pytest
from alertmanager_server import Alertmanager, alertmanager
from fleet_hooks import Hook, a_hook
from fleet_tools import Api, Load, kill, steady, until
from postgres_server import PostgresServer, postgres_server

from cli.fleet import Fleet, FleetSpec, running

pytestmark = [pytest.mark.faults, pytest.mark.prometheus, pytest.mark.postgres]

BURN = "FluidPDErrorBudgetBurn"
SLOS = {"ttft", "joint"}


@dataclass
class Scene:
    """`early` takes the first page, and the leader dies before it hears so. `late` takes nothing until then. `am` has a hook."""

    server: PostgresServer
    database: str
    fleet: Fleet | None = None
    early: Hook = field(default_factory=Hook)
    late: Hook = field(default_factory=Hook)
    am: Alertmanager | None = None
    of_am: Hook = field(default_factory=Hook)
    starts: dict[str, float] = field(default_factory=dict)  # by SLO, as it was on record when the leader died

    def on_early(self, body: dict[str, Any]) -> int:
        if body["commonLabels"]["alertname"] == BURN and not self.starts:
            assert self.fleet is not None
            kill(self.fleet, "controller")
            self.starts = self.recorded("started_s")
        return 200

    def on_late(self, body: dict[str, Any]) -> int:
        return 200 if self.starts else 503

    def recorded(self, column: str) -> dict[str, Any]:
        asked = f"select labels->>'slo', {column} from alert where rule = '{BURN}' and labels->>'severity' = 'page'"
        return {slo: float(value) for slo, value in self.server.sql(asked, self.database) if value}


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    with postgres_server() as server:
        made = Scene(server, server.create())
        folder = tmp_path_factory.mktemp("failover")
        with (
            a_hook(made.on_early) as made.early,
            a_hook(made.on_late) as made.late,
            a_hook() as made.of_am,
            alertmanager(folder / "am", made.of_am.url) as made.am,
            running(_spec(made), folder, print, keep=True) as made.fleet,
        ):
            yield made


def _spec(scene: Scene) -> FleetSpec:
    assert scene.am is not None
    receivers = [
        {"name": "am", "kind": "alertmanager", "url": scene.am.url},
        {"name": "early", "kind": "webhook", "url": scene.early.url, "timeout_s": 20.0},
        {"name": "late", "kind": "webhook", "url": scene.late.url},
    ]
    return FleetSpec(
        prefill=1,
        decode=1,
        workers_per_process=2,
        standbys=1,
        dashboard=False,
        database_url=scene.server.url(scene.database),
        policy={"backoff_s": 1.0},
        controller={
            # No first token comes within a millisecond; the sidecars' own settings say 2 s.
            "slo_models": [{"name": "default", "ttft_s": 0.001}],
            "alerting": {"window_scale": 60, "receivers": receivers},
        },
    )


@pytest.mark.timeout(400)
def test_a_leader_killed_while_it_pages_loses_no_page_and_doubles_none(scene: Scene) -> None:
    assert scene.fleet is not None and scene.am is not None
    fleet, am, early, late, of_am = scene.fleet, scene.am, scene.early, scene.late, scene.of_am
    load = Load(fleet, steady(110, rate=10, prompt=60, output=4), "failover")
    until(lambda: scene.starts, 120, "the page at which the leader is killed", lambda: fleet.log("controller")[-2000:])
    assert set(scene.starts) == SLOS and fleet.children["controller"].dead()
    next_one = Api(f"http://127.0.0.1:{fleet.controller_ports['controller-2']}")
    until(lambda: next_one.get("status")["leading"], 60, "the standby leading")

    # Lost: nothing. What was on record and not told is told by who leads now, and what was told, but not noted, once more.
    for slo in SLOS:
        until(lambda slo=slo: late.of("firing", slo) and early.of("firing", slo), 60, f"the page of {slo} at both webhooks")
    until(lambda: len(am.alerts(alertname=BURN, severity="page")) == 2, 90, "both at the Alertmanager")
    until(lambda: of_am.of("firing", "ttft") and of_am.of("firing", "joint"), 30, "its own webhook called")

    def fires_on() -> bool:
        found = [a for a in next_one.get("alerts")["alerts"] if a["rule"] == BURN and a["severity"] == "page"]
        return len(found) == 2 and {a["state"] for a in found} == {"firing"}

    until(fires_on, 60, "it fires on")
    assert scene.recorded("started_s") == scene.starts, "the beginning is the dead leader's"
    there = am.alerts(alertname=BURN, severity="page")
    shown = {a["labels"]["slo"]: datetime.fromisoformat(a["startsAt"]).timestamp() for a in there}
    assert shown == pytest.approx(scene.starts, abs=0.001)

    load.finish(250)
    for hook in (early, late, of_am):
        until(lambda hook=hook: all(hook.of("resolved", slo) for slo in SLOS), 90, "the end, at each")
    # Doubled: nothing, but the one page whose taking nobody lived to hear of; and that one under its own key.
    for slo in SLOS:
        assert len({t.key for t in early.of("firing", slo)}) == len({t.key for t in late.of("firing", slo)}) == 1
        assert len(late.of("firing", slo)) == len(late.of("resolved", slo)) == len(early.of("resolved", slo)) == 1
        assert len(of_am.of("firing", slo)) == len(of_am.of("resolved", slo)) == 1
    again = sorted(len(early.of("firing", slo)) for slo in SLOS)
    assert again == [1, 2], "the one at which it was killed, twice; the other, once"
    ours = f"receiver <> 'am' and fingerprint in (select fingerprint from alert where rule = '{BURN}')"
    kept = f"select event, outcome, count(*) from notification_outbox where {ours} group by 1, 2 order by 1"
    rows = scene.server.sql(kept, scene.database)
    assert rows == [["firing", "sent", "4"], ["resolved", "sent", "4"]]
    next_one.http.close()


@pytest.mark.timeout(120)
def test_the_one_that_comes_back_stands_by_and_tells_nobody(scene: Scene) -> None:
    assert scene.fleet is not None
    told = len(scene.late.told) + len(scene.early.told)
    scene.fleet.restart("controller")
    api = Api(scene.fleet.controller_url)
    until(lambda: not api.get("status")["leading"] and api.get("alerts")["alerts"], 60, "it stands by, and shows the alerts")
    assert api.post("alerts/test/late", reason="a test").status_code == 503
    assert len(scene.late.told) + len(scene.early.told) == told
    api.http.close()
