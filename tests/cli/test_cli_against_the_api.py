"""The command line against the controller's real API and a real database; only the control side behind it is a fake."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest
from fastapi import APIRouter
from typer.testing import CliRunner

from cli.main import app as cli
from controller.app import create_app
from controller.refusals import Conflict, GuardRefused, NotFound
from controller.settings import ControllerSettings, load_settings
from controller.store.engine import make_engine, migrate
from controller.store.queries import Queries
from controller.store.writes import Store
from controller.stream import Hub
from fluidpd.decision import Refusal
from fluidpd.names import Heading, Phase, Role, Rule, Trigger
from fluidpd.record import PauseRow, PinRow, StatusRow, TransitionRow

WHY = ("--reason", "a good reason")
THRESHOLDS = {"prefill_high": 1.2, "decode_high": 0.95}


def status_row() -> StatusRow:
    return StatusRow(
        wall_s=time.time(),
        started_wall_s=0.0,
        version="0.1.0",
        epoch=3,
        leading=True,
        mode="active",
        action="hold",
        reason="balanced",
        numbers={},
        refusals=(),
        lenders=(),
        ppi=0.4,
        dpi=None,
        thresholds=THRESHOLDS,
        targets={"joint_objective": 0.95},
        engines=("emulated",),
        requests_total=None,
        requests_good=None,
    )


@dataclass
class ControlSide:
    """Knows one decode worker, w3, and refuses with `refusal` when there is one."""

    refusal: Exception | None = None
    asked: list[tuple[Any, ...]] = field(default_factory=list)

    def status(self) -> StatusRow:
        return status_row()

    def worker_views(self) -> tuple[dict[str, Any], ...]:
        return ({"name": "w3", "role": "decode", "state": "serving"},)

    def take(self, *asked: Any) -> None:
        if self.refusal is not None:
            raise self.refusal
        self.asked.append(asked)

    async def set_pin(self, worker, role, ttl_s, reason, actor, expected_version=None) -> PinRow:
        self.take("pin", worker, role, ttl_s, reason, actor, expected_version)
        return PinRow(worker, role, reason, actor, 0.0, ttl_s)

    async def drop_pin(self, worker, actor, reason, expected_version=None) -> PinRow:
        self.take("unpin", worker, actor, reason, expected_version)
        return PinRow(worker, Role.DECODE, reason, actor, 0.0, 1_700_000_000.0)

    async def set_pause(self, reason, ttl_s, actor, roll_back=False, expected_version=None, everywhere=False) -> PauseRow:
        self.take("pause", reason, ttl_s, actor, expected_version)
        return PauseRow(reason, actor, 0.0, 1_700_000_000.0)

    async def resume(self, actor, reason, expected_version=None, everywhere=False) -> PauseRow:
        self.take("resume", actor, reason, expected_version)
        return PauseRow(reason, actor, 0.0, 1_700_000_000.0)

    async def request_move(self, worker, role, reason, actor, force) -> TransitionRow:
        self.take("move", worker, role, reason, actor, force)
        return TransitionRow(
            "m1", worker, 1, role.other, role, Trigger.MANUAL, reason, {}, 3, 0.0, Phase.PREFLIGHT, Heading.FORWARD
        )

    async def request_grant(self, worker, ttl_s, reason, actor) -> dict[str, Any]:
        self.take("grant", worker, ttl_s, reason, actor)
        return {"worker": worker}

    async def cancel_move(self, id, reason, actor) -> TransitionRow:
        self.take("cancel", id, reason, actor)
        return TransitionRow(
            id, "w3", 1, Role.DECODE, Role.PREFILL, Trigger.MANUAL, reason, {}, 3, 0.0, Phase.ADMIT, Heading.BACK
        )


class InProcess(httpx.BaseTransport):
    """Hands each request to an ASGI app on a loop of ours: the whole HTTP side without a port."""

    def __init__(self, app: Any, runner: asyncio.Runner) -> None:
        self._asgi, self._runner = httpx.ASGITransport(app), runner

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        async def ask() -> httpx.Response:
            sent = httpx.Request(request.method, request.url, headers=request.headers, content=request.content)
            answer = await self._asgi.handle_async_request(sent)
            return httpx.Response(answer.status_code, headers=answer.headers, content=await answer.aread())

        return self._runner.run(ask())


@pytest.fixture
def control() -> ControlSide:
    return ControlSide()


@pytest.fixture
def fluidpd(control: ControlSide, tmp_path) -> Iterator[Any]:
    settings: ControllerSettings = load_settings(None, {"FLUIDPD_DATABASE__URL": f"sqlite+aiosqlite:///{tmp_path}/f.db"})
    migrate(settings.database.url)
    with asyncio.Runner() as runner:
        store, reader = Store(settings.database.url, settings.identity.scope), make_engine(settings.database.url, read_only=True)
        runner.run(store.open())
        queries = Queries(reader, settings.identity.scope)
        app = create_app(settings, control, store, queries, Hub(), link=APIRouter())

        def run(*arguments: str) -> Any:
            result = CliRunner().invoke(cli, list(arguments), obj=InProcess(app, runner))
            assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
            return result

        yield run
        runner.run(store.close())
        runner.run(reader.dispose())


def test_looking_commands_read_what_the_api_answers(fluidpd):
    assert "hold" in fluidpd("status").stdout
    assert fluidpd("status", "--exit-code").exit_code == 0
    assert fluidpd("workers").stdout.splitlines()[1].split()[:3] == ["w3", "decode", "serving"]
    for command in ("transitions", "decisions"):
        assert fluidpd(command).exit_code == 0


def test_every_write_arrives_as_it_was_said(control, fluidpd):
    for command in (
        ("pin", "w3", *WHY),
        ("pin", "w3", "prefill", "--expected-version", "2", "--ttl", "5m", *WHY),
        ("unpin", "w3", *WHY),
        ("unpin", "w3", "--expected-version", "3"),
        ("pause", "--ttl", "2h", *WHY),
        ("resume", "--expected-version", "4", *WHY),
        ("remap", "w3", "prefill", "--force", *WHY),
        ("chunk", "w3", "--ttl", "90s", *WHY),
        ("cancel", "m1", *WHY),
    ):
        done = fluidpd(*command)
        assert done.exit_code == 0, (command, done.stderr)
    assert control.asked == [
        ("pin", "w3", Role.DECODE, 3600.0, WHY[1], "local", None),
        ("pin", "w3", Role.PREFILL, 300.0, WHY[1], "local", 2),
        ("unpin", "w3", "local", WHY[1], None),
        ("unpin", "w3", "local", "", 3),
        ("pause", WHY[1], 7200.0, "local", None),
        ("resume", "local", WHY[1], 4),
        ("move", "w3", Role.PREFILL, WHY[1], "local", True),
        ("grant", "w3", 90.0, WHY[1], "local"),
        ("cancel", "m1", WHY[1], "local"),
    ]


REFUSALS = [
    (GuardRefused(Refusal("w3", Rule.FLOOR, "decode would have 0 workers")), 3, "floor"),
    (GuardRefused(Refusal("w3", Rule.NOT_LEADER, "another controller leads")), 69, "not_leader"),
    (NotFound("there is no worker 'w3'"), 4, "there is no worker"),
    (Conflict("the pin changed", {"version": 3}), 5, "the pin changed"),
]


@pytest.mark.parametrize(("refusal", "code", "words"), REFUSALS, ids=lambda value: str(value)[:20])
def test_a_refusal_becomes_one_line_and_its_exit_code(control, fluidpd, refusal, code, words):
    control.refusal = refusal
    done = fluidpd("remap", "w3", "prefill", *WHY)
    assert done.exit_code == code
    assert words in done.stderr and done.stderr.count("\n") == 1


def test_what_the_api_cannot_use_is_a_usage_error_that_names_the_field(fluidpd):
    done = fluidpd("pause", "--ttl", "2d", *WHY)
    assert done.exit_code == 2
    assert "ttl_s" in done.stderr
    assert fluidpd("workers", "--server", "http://evil.example:8070").exit_code == 1
