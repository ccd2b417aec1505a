"""Moves that ended are written to Grafana as annotations, each once, by whoever leads."""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from memory_fakes import NOW, a_move

from controller import grafana
from controller.grafana import Grafana
from controller.settings import ConfigError, GrafanaSettings, load_settings
from fluidpd.names import End
from fluidpd.record import TransitionRow


@dataclass
class FakeGrafana:
    """Keeps annotations as Grafana's API does: found by all of their tags."""

    kept: list[dict[str, Any]] = field(default_factory=list)
    asked: list[httpx.Request] = field(default_factory=list)
    status: int = 200

    def answer(self, request: httpx.Request) -> httpx.Response:
        self.asked.append(request)
        if self.status != 200:
            return httpx.Response(self.status, text="no s3cret here")
        if request.method == "POST":
            self.kept.append(json.loads(request.content))
            return httpx.Response(200, json={"message": "Annotation added", "id": len(self.kept)})
        wanted = set(request.url.params.get_list("tags"))
        return httpx.Response(200, json=[a for a in self.kept if wanted <= set(a["tags"])])


@dataclass
class Moves:
    rows: tuple[TransitionRow, ...] = ()

    async def transitions(self, *, limit: int = 50, since_wall_s: float | None = None, until_wall_s: float | None = None) -> Any:
        assert since_wall_s is not None
        found = [m for m in self.rows if m.ended_wall_s is None or m.ended_wall_s >= since_wall_s]
        return tuple(sorted(found, key=lambda m: -m.started_wall_s)[:limit])


def ended(id: str, at: float, end: End = End.DONE) -> TransitionRow:
    return replace(a_move(), id=id, started_wall_s=at - 4, ended_wall_s=at, end=end)


@pytest.fixture
def there() -> FakeGrafana:
    return FakeGrafana()


@pytest.fixture
def settings(tmp_path: Path) -> GrafanaSettings:
    (tmp_path / "token").write_text("s3cret\n")
    return GrafanaSettings(url="http://grafana.example/g/", token_file=str(tmp_path / "token"), dashboard_uid="fluidpd")


def writer(settings: GrafanaSettings, there: FakeGrafana, moves: Moves, leads: bool = True) -> Grafana:
    return Grafana(settings, moves, lambda: leads, lambda: NOW, httpx.MockTransport(there.answer))


async def test_a_move_is_written_once_when_it_has_ended_with_its_times_its_end_and_its_tags(
    settings: GrafanaSettings, there: FakeGrafana
) -> None:
    open_move = replace(a_move(), id="m-2", started_wall_s=NOW - 2, ended_wall_s=None, end=None)
    moves = Moves((ended("m-1", NOW - 60), open_move, ended("m-0", NOW - 90, End.ROLLED_BACK)))
    mine = writer(settings, there, moves)
    await mine.push()
    await mine.push()
    first, second = there.kept
    assert (second["time"], second["timeEnd"]) == (round((NOW - 64) * 1000), round((NOW - 60) * 1000))
    assert first["tags"][-1] == "m-0" and {"fluidpd", "transition", "rolled_back"} <= set(first["tags"])
    assert second["dashboardUID"] == "fluidpd" and " to " in second["text"] and "done" in second["text"]
    moves.rows = (replace(open_move, ended_wall_s=NOW, end=End.DONE), *moves.rows)
    await mine.push()
    assert [a["tags"][-1] for a in there.kept] == ["m-0", "m-1", "m-2"]
    assert all(r.headers["authorization"] == "Bearer s3cret" and r.url.path == "/g/api/annotations" for r in there.asked)
    await mine.close()


async def test_a_restart_and_another_leader_write_nothing_again(settings: GrafanaSettings, there: FakeGrafana) -> None:
    moves = Moves((ended("m-1", NOW - 60),))
    for _ in range(2):
        mine = writer(settings, there, moves)
        await mine.push()
        await mine.close()
    assert len(there.kept) == 1


async def test_who_does_not_lead_writes_nothing_and_what_is_old_stays_out(settings: GrafanaSettings, there: FakeGrafana) -> None:
    follower = writer(settings, there, Moves((ended("m-1", NOW - 60),)), leads=False)
    leader = writer(settings, there, Moves((ended("m-1", NOW - grafana.REACH_S - 1),)))
    for one in (follower, leader):
        await one.push()
        await one.close()
    assert there.kept == [] and there.asked == []


@pytest.mark.parametrize("status", [401, 500, 302])
async def test_a_grafana_in_trouble_is_said_once_without_the_token_and_asked_again(
    settings: GrafanaSettings, there: FakeGrafana, caplog: pytest.LogCaptureFixture, status: int
) -> None:
    mine = writer(settings, there, Moves((ended("m-1", NOW - 60),)))
    there.status = status
    with caplog.at_level(logging.WARNING):
        await mine.push()
        await mine.push()
    assert len(caplog.records) == 1 and str(status) in caplog.text and "s3cret" not in caplog.text
    there.status = 200
    await mine.push()
    assert len(there.kept) == 1
    await mine.close()


async def test_a_grafana_that_is_away_costs_a_line_in_the_log(
    settings: GrafanaSettings, caplog: pytest.LogCaptureFixture
) -> None:
    def away(_request: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("refused")

    mine = Grafana(settings, Moves((ended("m-1", NOW - 60),)), lambda: True, lambda: NOW, httpx.MockTransport(away))
    await mine.push()
    await mine.close()
    assert "ConnectError at GET /api/annotations of http://grafana.example/g/" in caplog.text


def test_an_address_needs_a_token_that_can_be_read() -> None:
    with pytest.raises(ConfigError, match="go together"):
        load_settings(None, {"FLUIDPD_GRAFANA__URL": "http://grafana.example"})
    both = {"FLUIDPD_GRAFANA__URL": "http://grafana.example", "FLUIDPD_GRAFANA__TOKEN_FILE": "/nowhere/token"}
    with pytest.raises(ConfigError, match=r"grafana\.token_file: /nowhere/token cannot be read"):
        load_settings(None, both)
