"""Who may do what: every route under every scope, and what a browser page of another site may not do."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
from memory_fakes import open_api
from starlette.types import Message, Receive, Scope, Send

from controller.guardrails import Guardrails
from controller.settings import ConfigError, ControllerSettings, load_settings

SCOPES = ("read", "operate", "admin", "metrics")
BODIES = {
    "/api/v1/workers/{name}/pin": {"role": "decode", "ttl_s": 60, "reason": "incident 17"},
    "/api/v1/pause": {"ttl_s": 60, "reason": "incident 17"},
    "/api/v1/resume": {"reason": "incident 17"},
    "/api/v1/workers/{name}/move": {"role": "prefill", "reason": "incident 17"},
    "/api/v1/workers/{name}/grant": {"ttl_s": 60, "reason": "incident 17"},
    "/api/v1/transitions/{id}/cancel": {"reason": "incident 17"},
}
REASON = {"reason": "incident 17"}
OPEN = {"/healthz/live", "/healthz/ready"}


def guarded(folder: Path) -> ControllerSettings:
    tokens = [{"name": s, "sha256": hashlib.sha256(f"fpd_{s}".encode()).hexdigest(), "scopes": [s]} for s in SCOPES]
    (folder / "tokens.json").write_text(json.dumps(tokens))
    return load_settings(None, {}, {"security": {"tokens_file": str(folder / "tokens.json")}})


def bearing(scope: str) -> dict[str, str]:
    return {"Authorization": f"Bearer fpd_{scope}"}


async def test_every_route_needs_its_scope_and_none_is_open_by_accident(tmp_path: Path) -> None:
    async with open_api(tmp_path, guarded(tmp_path)) as (client, _, _hub):
        spec = (await client.get("/api/v1/openapi.json")).json()["paths"]
        for path, methods in spec.items():
            if path == "/api/v1/stream":
                continue  # never ends; its own test below
            url = path.replace("{name}", "w3").replace("{id}", "m1")
            for method in methods:
                needed = "operate" if method != "get" else "metrics" if path == "/metrics" else "read"
                allowed = {"read": {"read", "operate", "admin"}, "operate": {"operate", "admin"}, "metrics": set(SCOPES)}[needed]
                body = BODIES.get(path) if method == "post" else REASON if method == "delete" else None
                answers = {
                    scope: (await client.request(method, url, json=body, headers=bearing(scope))).status_code for scope in SCOPES
                }
                if path in OPEN:
                    assert set(answers.values()) <= {200, 503}
                    continue
                assert {s for s, status in answers.items() if status != 403} == allowed, (method, path, answers)
                for headers in ({}, {"Authorization": "Bearer fpd_guess"}, {"Authorization": "Basic fpd_admin"}):
                    refused = await client.request(method, url, json=body, headers=headers)
                    assert refused.status_code == 401 and "WWW-Authenticate" in refused.headers, (method, path)


async def test_the_stream_needs_a_token_too(tmp_path: Path) -> None:
    async with open_api(tmp_path, guarded(tmp_path)) as (client, _, _hub):
        assert (await client.get("/api/v1/stream")).status_code == 401
        assert (await client.get("/api/v1/stream", headers=bearing("metrics"))).status_code == 403


async def test_force_needs_admin_and_the_refusal_is_audited(tmp_path: Path) -> None:
    body = {"role": "prefill", "reason": "incident 17", "force": True}
    async with open_api(tmp_path, guarded(tmp_path)) as (client, controller, _):
        refused = await client.post("/api/v1/workers/w3/move", json=body, headers=bearing("operate"))
        assert (refused.status_code, controller.asked) == (403, [])
        allowed = await client.post("/api/v1/workers/w3/move", json=body, headers={**bearing("admin"), "X-FluidPD-Source": "cli"})
        assert allowed.status_code == 202
        rows = await controller.store.queries.audit()
    assert [(r.actor, r.source, r.outcome) for r in rows] == [("admin", "cli", "done"), ("operate", "api", "refused")]


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Sec-Fetch-Site": "cross-site"}, 403),
        ({"Sec-Fetch-Site": "same-site"}, 403),
        ({"Sec-Fetch-Site": "same-origin"}, 200),
        ({"Origin": "http://evil.example"}, 403),
        ({"Origin": "http://127.0.0.1:8070"}, 200),
        ({"Content-Type": "application/x-www-form-urlencoded"}, 415),
        ({"Content-Type": "text/plain"}, 415),
        ({"Host": "evil.example"}, 403),
        ({"Host": "localhost:8070"}, 200),
    ],
)
async def test_a_page_of_another_site_cannot_act(tmp_path: Path, headers: dict[str, str], status: int) -> None:
    async with open_api(tmp_path) as (client, controller, _):
        sent = {"Content-Type": "application/json", **headers}
        answer = await client.post("/api/v1/resume", content=b'{"reason": "go on now"}', headers=sent)
        assert answer.status_code == status
        assert len(controller.asked) == (1 if status == 200 else 0)


async def test_a_body_beyond_its_size_is_refused(tmp_path: Path) -> None:
    async with open_api(tmp_path) as (client, controller, _):
        answer = await client.post("/api/v1/resume", json={"reason": "x" * 70_000})
        assert (answer.status_code, controller.asked) == (413, [])


@pytest.mark.parametrize(("origin", "reaches"), [(None, True), ("http://evil.example", False)])
async def test_a_page_cannot_pose_as_a_sidecar(origin: str | None, reaches: bool) -> None:
    reached, sent = [], []

    async def app(scope: Scope, _receive: Receive, _send: Send) -> None:
        reached.append(scope["path"])

    async def send(message: Message) -> None:
        sent.append(message["type"])

    async def receive() -> Message:
        return {"type": "websocket.connect"}

    headers = [(b"host", b"127.0.0.1:8070"), *([(b"origin", origin.encode())] if origin else [])]
    await Guardrails(app, None)({"type": "websocket", "path": "/link", "headers": headers}, receive, send)
    assert (reached == ["/link"], sent == ["websocket.close"]) == (reaches, not reaches)


async def test_every_answer_carries_the_security_headers_and_no_cors(tmp_path: Path) -> None:
    async with open_api(tmp_path) as (client, _, _hub):
        for path in ("/api/v1/status", "/api/v1/nothing", "/metrics", "/healthz/live"):
            headers = (await client.get(path, headers={"Origin": "http://evil.example"})).headers
            assert headers["x-content-type-options"] == "nosniff"
            assert "default-src 'none'" in headers["content-security-policy"]
            assert "access-control-allow-origin" not in headers


@pytest.mark.parametrize("content", ["{}", "[]", '[{"name": "a", "sha256": "secret", "scopes": ["read"]}]', "nonsense"])
async def test_a_tokens_file_that_is_none_stops_the_start(tmp_path: Path, content: str) -> None:
    settings = guarded(tmp_path)
    (tmp_path / "tokens.json").write_text(content)
    with pytest.raises(ConfigError, match="tokens_file"):
        async with open_api(tmp_path, settings):
            pass
