"""The whole controller on a real port, asked what schemathesis makes of its description: no 5xx, and only declared answers."""

from __future__ import annotations

import hashlib
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from memory_fakes import new_database

schemathesis = pytest.importorskip("schemathesis", reason="no schemathesis: run `make setup`")

TOKEN = "fpd_admin"  # known to the file below by its hash, like any other
EXAMPLES = 8
ENDLESS = "/api/v1/stream"


@pytest.fixture
def address(tmp_path: Path, root: Path) -> Iterator[str]:
    """The controller itself, in a process of its own: schemathesis is not asynchronous."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    tokens = [{"name": "ana", "sha256": hashlib.sha256(TOKEN.encode()).hexdigest(), "scopes": ["admin"]}]
    (tmp_path / "tokens.json").write_text(json.dumps(tokens))
    settings = {
        "SERVER__PORT": str(port),
        "DATABASE__URL": new_database(tmp_path),
        "POLICY__TICK_S": "0.2",
        "SECURITY__TOKENS_FILE": str(tmp_path / "tokens.json"),
        "SECURITY__WRITES_PER_MINUTE": "100000",
    }
    environ = {**os.environ, **{f"FLUIDPD_{name}": value for name, value in settings.items()}}
    with open(tmp_path / "log", "w") as log:
        process = subprocess.Popen([sys.executable, "-m", "cli", "controller"], cwd=root, env=environ, stdout=log, stderr=log)
    url = f"http://127.0.0.1:{port}"
    until_s = time.monotonic() + 60
    try:
        while not is_ready(url):
            assert process.poll() is None and time.monotonic() < until_s, (tmp_path / "log").read_text()
            time.sleep(0.05)
        yield url
    finally:
        process.terminate()
        process.wait(30)


def is_ready(url: str) -> bool:
    try:
        return httpx.get(f"{url}/healthz/ready", trust_env=False, timeout=5).status_code == 200
    except httpx.HTTPError:
        return False


def cases(operation: Any) -> Any:
    """What fits the description, and where there is something to get wrong, what does not."""
    right = operation.as_strategy()
    if not list(operation.iter_parameters()) and not list(operation.body):
        return right
    return right | operation.as_strategy(schemathesis.GenerationMode.NEGATIVE)


def explored(operation: Any, seen: set[int]) -> str:
    """Ask some times, the same each run; what was wrong with an answer, or nothing."""
    import hypothesis
    from schemathesis.checks import not_a_server_error
    from schemathesis.specs.openapi import checks as declared

    checks = [
        not_a_server_error,
        declared.status_code_conformance,
        declared.content_type_conformance,
        declared.response_schema_conformance,
    ]

    @hypothesis.settings(
        max_examples=EXAMPLES, deadline=None, derandomize=True, database=None, suppress_health_check=list(hypothesis.HealthCheck)
    )
    @hypothesis.given(case=cases(operation))
    def ask(case: Any) -> None:
        answer = case.call_and_validate(headers={"Authorization": f"Bearer {TOKEN}"}, checks=checks, timeout=30)
        seen.add(answer.status_code)

    try:
        ask()
    except Exception as problem:
        return f"{operation.method.upper()} {operation.path}: {problem}"
    return ""


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_every_operation_answers_only_as_it_declares_and_never_with_a_failure_of_its_own(address: str) -> None:
    schema = schemathesis.openapi.from_url(f"{address}/api/v1/openapi.json", headers={"Authorization": f"Bearer {TOKEN}"})
    operations = [found.ok() for found in schema.get_all_operations()]
    asked = [operation for operation in operations if operation.path != ENDLESS]
    assert len(asked) > 20 and len(operations) - len(asked) == 1
    seen: set[int] = set()
    assert [said for operation in asked if (said := explored(operation, seen))] == []
    assert {200, 404, 422} <= seen  # right and wrong requests did arrive
