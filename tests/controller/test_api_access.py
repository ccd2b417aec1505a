"""Who may do what: every route under every scope, and what a browser page of another site may not do."""

from __future__ import annotations

import asyncio
import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
from fastapi import APIRouter, FastAPI
from memory_fakes import open_api
from starlette.types import Message, Receive, Scope, Send

from controller.guardrails import Guardrails
from controller.routes.access import PUBLIC, Door, ScopeMissing, declare_scopes, leaves, needs, scopes_of
from controller.security.audit import Refusals
from controller.security.tokens import book_of
from controller.settings import ConfigError, ControllerSettings, load_settings
from fluidpd.record import AuditRow

SCOPES = ("read", "operate", "admin", "metrics", "sidecar")
REACH = {
    "read": {"read", "operate", "admin"},
    "operate": {"operate", "admin"},
    "admin": {"admin"},
    "metrics": {"read", "operate", "admin", "metrics"},
}
WHY = {"reason": "incident 17"}
BODIES: dict[tuple[str, str], dict[str, Any]] = {
    ("post", "/api/v1/workers/{name}/pin"): {"role": "decode", "ttl_s": 60, **WHY},
    ("post", "/api/v1/pause"): {"ttl_s": 60, **WHY},
    ("post", "/api/v1/workers/{name}/move"): {"role": "prefill", **WHY},
    ("post", "/api/v1/workers/{name}/grant"): {"ttl_s": 60, **WHY},
    ("post", "/api/v1/alerts/silences"): {"ttl_s": 60, "matchers": {"slo": "ttft"}, **WHY},
}
ENDLESS = "/api/v1/stream"  # its own test below
NEEDED = {  # a route that is not here is new: say here, too, who may use it
    "/metrics": "metrics",
    "/sd": "metrics",
    "/healthz/live": PUBLIC,
    "/healthz/ready": PUBLIC,
    "/api/v1/login": PUBLIC,
    "/api/v1/logout": "read",
}


def guarded(folder: Path, **security: Any) -> ControllerSettings:
    tokens = [{"name": s, "sha256": hashlib.sha256(f"fpd_{s}".encode()).hexdigest(), "scopes": [s]} for s in SCOPES]
    old = hashlib.sha256(b"fpd_expired").hexdigest()
    tokens.append({"name": "old", "sha256": old, "scopes": ["admin"], "expires_wall_s": 1_600_000_000.0})
    (folder / "tokens.json").write_text(json.dumps(tokens))
    many = {"writes_per_minute": 10_000, "failed_tokens_per_minute": 10_000}
    return load_settings(None, {}, {"security": {"tokens_file": str(folder / "tokens.json"), **many, **security}})


def bearing(scope: str) -> dict[str, str]:
    return {"Authorization": f"Bearer fpd_{scope}"}


@pytest.mark.timeout(180)  # some 250 requests, of which many wait for the disk
async def test_every_route_under_every_token_answers_as_its_scope_says(tmp_path: Path) -> None:
    async with open_api(tmp_path, guarded(tmp_path)) as (client, _, _hub):
        spec = (await client.get("/api/v1/openapi.json", headers=bearing("read"))).json()["paths"]
        assert len(spec) > 15
        for path, methods in spec.items():
            for method, said in methods.items():
                needed = NEEDED.get(path, "read" if method == "get" else "operate")
                assert said["x-fluidpd-scope"] == needed, (method, path)
                assert ("security" in said) == (needed != PUBLIC), (method, path)
                if path in (ENDLESS, "/api/v1/login"):  # tests of their own
                    continue
                url = path.replace("{name}", "w3").replace("silences/{id}", "silences/1").replace("{id}", "m1")
                url += "?role=prefill" if path.endswith("/preview") else ""
                body = None if method == "get" else BODIES.get((method, path), WHY)
                allowed = REACH.get(needed, set(SCOPES))
                for scope in SCOPES:
                    answer = await client.request(method, url, json=body, headers=bearing(scope))
                    expected = 403 if scope not in allowed else None
                    assert (answer.status_code == 403) == (expected == 403), (method, path, scope, answer.text)
                    assert answer.status_code in (200, 202, 403, 404, 503), (method, path, scope, answer.text)
                for headers, rule in (
                    ({}, "token_required"),
                    ({"Authorization": "Basic fpd_admin"}, "token_required"),
                    ({"Authorization": "Bearer "}, "token_required"),
                    ({"Authorization": "Bearer fpd_guess"}, "token_unknown"),
                    (bearing("expired"), "token_expired"),
                ):
                    refused = await client.request(method, url, json=body, headers=headers)
                    if needed == PUBLIC:
                        assert refused.status_code in (200, 503)
                        continue
                    assert (refused.status_code, refused.json()["rule"]) == (401, rule), (method, path)
                    assert "WWW-Authenticate" in refused.headers


async def test_every_route_of_the_app_declares_exactly_one_scope_the_link_and_the_schema_too(tmp_path: Path) -> None:
    async with open_api(tmp_path, guarded(tmp_path)) as (client, _, _hub):
        app = _app_of(client)
        found = {getattr(route, "path", str(route)): scopes_of(route) for route in leaves(app.routes)}
    assert all(len(scopes) == 1 for scopes in found.values()), found
    assert found["/api/v1/openapi.json"] == {"read"}


def _stop_the_clock_of_limits(client: Any, settings: ControllerSettings) -> None:
    book = book_of(settings.security.tokens_file)
    _app_of(client).state.door = Door(settings.security, book, clock=lambda: 0.0)


def _app_of(client: Any) -> FastAPI:
    app: FastAPI = client._transport.app
    return app


def test_a_route_without_a_scope_or_with_two_stops_the_start() -> None:
    router = APIRouter()

    async def shows() -> None: ...

    router.add_api_route("/secret", shows)
    with pytest.raises(ScopeMissing, match="/secret declares no scope"):
        declare_scopes(router.routes)
    both = APIRouter()
    both.add_api_route("/secret", shows, dependencies=[needs_of("read"), needs_of("operate")])
    with pytest.raises(ScopeMissing, match="operate"):
        declare_scopes(both.routes)


def needs_of(scope: Any) -> Any:
    from fastapi import Depends

    return Depends(needs(scope))


async def test_the_stream_needs_a_token_too(tmp_path: Path) -> None:
    async with open_api(tmp_path, guarded(tmp_path)) as (client, _, _hub):
        assert (await client.get("/api/v1/stream")).status_code == 401
        for scope in ("metrics", "sidecar"):
            assert (await client.get("/api/v1/stream", headers=bearing(scope))).status_code == 403


async def test_a_token_listens_only_so_many_times(tmp_path: Path) -> None:
    async with open_api(tmp_path, guarded(tmp_path, streams_per_token=1)) as (client, _, hub):
        first = asyncio.ensure_future(client.get("/api/v1/stream", headers=bearing("read")))
        while hub.listeners == 0:
            await asyncio.sleep(0.001)
        refused = await client.get("/api/v1/stream", headers=bearing("read"))
        assert (refused.status_code, refused.json()["rule"]) == (429, "streams_per_token")
        assert int(refused.headers["Retry-After"]) >= 1
        hub.close()
        await first
        assert (await client.get("/api/v1/stream", headers=bearing("read"))).status_code == 200


async def test_a_token_that_writes_too_often_waits_and_the_others_do_not(tmp_path: Path) -> None:
    async with open_api(tmp_path, guarded(tmp_path, writes_per_minute=2)) as (client, controller, _):
        _stop_the_clock_of_limits(client, guarded(tmp_path, writes_per_minute=2))
        codes = [(await client.post("/api/v1/resume", json=WHY, headers=bearing("operate"))).status_code for _ in range(2)]
        refused = await client.post("/api/v1/resume", json=WHY, headers=bearing("operate"))
        other = await client.post("/api/v1/resume", json=WHY, headers=bearing("admin"))
        rows = await controller.store.queries.audit()
    assert codes == [200, 200] and other.status_code == 200
    assert (refused.status_code, refused.json()["rule"]) == (429, "writes_per_token")
    assert 1 <= int(refused.headers["Retry-After"]) <= 31
    assert [(r.actor, r.outcome) for r in rows] == [
        ("admin", "done"),
        ("operate", "refused"),
        ("operate", "done"),
        ("operate", "done"),
    ]


async def test_who_only_guesses_tokens_is_told_to_wait_and_a_good_token_still_works(tmp_path: Path) -> None:
    async with open_api(tmp_path, guarded(tmp_path, failed_tokens_per_minute=3)) as (client, _, _hub):
        _stop_the_clock_of_limits(client, guarded(tmp_path, failed_tokens_per_minute=3))
        answers = [await client.get("/api/v1/status", headers=bearing("guess")) for _ in range(4)]
        good = await client.get("/api/v1/status", headers=bearing("read"))
    assert [a.status_code for a in answers] == [401, 401, 401, 429] and good.status_code == 200
    assert answers[3].json()["rule"] == "failed_tokens" and "Retry-After" in answers[3].headers


REFUSED = [
    ("no token", {}, {}, 401, "token_required"),
    ("the wrong scope", bearing("read"), {}, 403, "scope"),
    ("a bad field", bearing("operate"), {"json": {"reason": "hm"}}, 422, "reason"),
    ("no JSON", bearing("operate"), {"content": b"{", "headers": {"Content-Type": "application/json"}}, 400, "JSON"),
    ("a page of another site", {**bearing("operate"), "Sec-Fetch-Site": "cross-site"}, {}, 403, "cross_site"),
    ("a form", bearing("operate"), {"content": b"a=b", "headers": {"Content-Type": "text/plain"}}, 415, "content_type"),
    ("too large", bearing("operate"), {"json": {"reason": "x" * 70_000}}, 413, "body_size"),
]


@pytest.mark.parametrize(("why", "headers", "request_", "status", "said"), REFUSED, ids=[r[0] for r in REFUSED])
async def test_each_refusal_of_an_act_leaves_one_row(
    tmp_path: Path, why: str, headers: dict[str, str], request_: dict[str, Any], status: int, said: str
) -> None:
    sent = {"json": WHY, **request_} if "content" not in request_ else dict(request_)
    sent["headers"] = {**headers, **sent.get("headers", {})}
    async with open_api(tmp_path, guarded(tmp_path)) as (client, controller, _):
        answer = await client.post("/api/v1/workers/w3/pin", **sent)
        rows = await controller.store.queries.audit()
    assert answer.status_code == status
    assert [(r.verb, r.subject, r.outcome) for r in rows] == [("pin", "w3", "refused")]
    assert rows[0].detail.startswith(str(status)) and said in rows[0].detail
    assert controller.asked == []


async def test_what_a_stranger_writes_into_a_refusal_is_one_line_without_secrets(tmp_path: Path) -> None:
    async with open_api(tmp_path) as (client, controller, _):
        await client.post("/api/v1/workers/a%0Afaked%20row/pin", json={"role": "decode", "ttl_s": 60, "reason": "hm"})
        said = {"role": "decode", "ttl_s": 60, "reason": "my token is fpd_abcdefghijklmnop, use it"}
        await client.post("/api/v1/workers/w3/pin", json=said)
        rows = await controller.store.queries.audit()
    assert rows[0].reason == "my token is ***, use it"
    assert rows[1].subject == "a\\nfaked row"
    assert "\n" not in "".join((r.subject + r.detail + r.reason + r.actor) for r in rows)


async def test_strangers_cannot_fill_the_audit() -> None:
    rows: list[AuditRow] = []
    now_s = 0.0

    async def refusing(scope: Scope, _receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 401, "headers": []})
        await send({"type": "http.response.body", "body": b'{"rule": "token_required", "detail": "no"}'})

    async def note(row: AuditRow) -> None:
        rows.append(row)

    async def nowhere(*_: object) -> Any: ...

    refusals = Refusals(refusing, note, "/api/v1", clock=lambda: now_s)
    for _ in range(40):
        await refusals({"type": "http", "method": "POST", "path": "/api/v1/resume", "client": ("10.0.0.9", 1)}, nowhere, nowhere)
    assert len(rows) == 30 and refusals.left_out == 10
    assert (rows[0].actor, rows[0].verb, rows[0].detail) == ("unknown at 10.0.0.9", "resume", "401 token_required: no")
    now_s = 60.0
    await refusals({"type": "http", "method": "POST", "path": "/api/v1/resume", "client": ("10.0.0.9", 1)}, nowhere, nowhere)
    assert len(rows) == 31


async def test_a_body_that_dribbles_is_given_up() -> None:
    sent: list[Message] = []

    async def app(_scope: Scope, _receive: Receive, _send: Send) -> None:
        raise AssertionError("the route must not be asked")

    async def send(message: Message) -> None:
        sent.append(message)

    async def dribble() -> Message:
        await asyncio.sleep(0.005)
        return {"type": "http.request", "body": b" ", "more_body": True}

    headers = [(b"host", b"x"), (b"content-type", b"application/json"), (b"transfer-encoding", b"chunked")]
    scope = {"type": "http", "method": "POST", "path": "/api/v1/resume", "headers": headers}
    await Guardrails(app, None, body_within_s=0.03)(scope, dribble, send)
    assert sent[0]["status"] == 408 and json.loads(sent[1]["body"])["rule"] == "slow_body"


async def test_a_chunked_body_beyond_its_size_is_refused_as_one_that_says_so(tmp_path: Path) -> None:
    async def chunks() -> Any:
        for _ in range(20):
            yield b" " * 8_000

    async with open_api(tmp_path) as (client, controller, _):
        answer = await client.post("/api/v1/resume", content=chunks(), headers={"Content-Type": "application/json"})
    assert (answer.status_code, answer.json()["rule"], controller.asked) == (413, "body_size", [])


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
        ({"Origin": "null"}, 403),
        ({"Origin": "http://["}, 403),
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


@pytest.mark.parametrize(
    "content",
    [
        "{}",
        "[]",
        '[{"name": "a", "sha256": "secret", "scopes": ["read"]}]',
        '[{"name": "a", "sha256": "' + "0" * 64 + '", "scopes": ["sidecar", "read"]}]',
        '[{"name": "a", "sha256": "' + "0" * 64 + '", "scopes": ["read"], "worker": "w1"}]',
        "nonsense",
    ],
)
async def test_a_tokens_file_that_is_none_stops_the_start(tmp_path: Path, content: str) -> None:
    settings = guarded(tmp_path)
    (tmp_path / "tokens.json").write_text(content)
    with pytest.raises(ConfigError, match="tokens_file"):
        async with open_api(tmp_path, settings):
            pass
