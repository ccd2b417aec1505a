"""A controller that answers from memory, and a way to run commands against it without a network."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner

from cli.main import app

WORKER = {
    "name": "w3",
    "role": "decode",
    "state": "serving",
    "engine": "emulated",
    "flippable": True,
    "pressure": None,
    "age_s": 0.04,
}


@dataclass
class FakeController:
    """Answers what `answers` holds for (method, path); everything else is a 404 problem, like the real one."""

    answers: dict[tuple[str, str], tuple[int, Any]] = field(default_factory=dict)
    requests: list[httpx.Request] = field(default_factory=list)
    failure: Exception | None = None

    def say(self, method: str, path: str, body: Any, status: int = 200) -> None:
        self.answers[method, f"/api/v1{path}"] = (status, body)

    def refuse(self, method: str, path: str, status: int, detail: str, **members: Any) -> None:
        self.say(method, path, {"type": "about:blank", "title": "no", "status": status, "detail": detail, **members}, status)

    def handle(self, request: httpx.Request) -> httpx.Response:
        self.requests.append(request)
        if self.failure is not None:
            raise self.failure
        status, body = self.answers.get(
            (request.method, request.url.path),
            (404, {"status": 404, "detail": f"there is no {request.url.path.rsplit('/', 1)[-1]}"}),
        )
        return httpx.Response(status, json=body) if not isinstance(body, str) else httpx.Response(status, text=body)

    @property
    def written(self) -> list[tuple[str, str, Any]]:
        return [
            (request.method, request.url.path.removeprefix("/api/v1"), json.loads(request.content) if request.content else None)
            for request in self.requests
            if request.method != "GET"
        ]


@dataclass(frozen=True)
class Outcome:
    code: int
    out: str
    err: str


@pytest.fixture
def controller() -> FakeController:
    fake = FakeController()
    fake.say("GET", "/workers", [WORKER])
    fake.say("GET", "/workers/w3", WORKER)
    return fake


@pytest.fixture
def fluidpd(controller: FakeController) -> Callable[..., Outcome]:
    """Run `fluidpd ...` against the fake controller."""

    def run(*arguments: str) -> Outcome:
        result = CliRunner().invoke(app, list(arguments), obj=httpx.MockTransport(controller.handle))
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        return Outcome(result.exit_code, result.stdout, result.stderr)

    return run
