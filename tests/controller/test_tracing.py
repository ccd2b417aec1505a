"""Role moves as traces: one a move, a span for each event, the same ids whoever tells of it; and what logs say of them."""

from __future__ import annotations

import builtins
import json
import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest
from control_fakes import Fleet
from memory_fakes import NOW, a_move, a_phase
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from controller.routes.bodies import to_json
from controller.settings import ConfigError, load_settings
from controller.stream import Hub
from controller.tracing import Tracing, provider_of, tracing_of
from fluidpd import trace
from fluidpd.logs import JsonLines, LogSettings
from fluidpd.names import End, Phase, Role

MOVE = "0123456789abcdef0123456789abcdef"


@pytest.fixture
def told() -> Iterator[tuple[Hub, InMemorySpanExporter]]:
    """A hub whose moves are traced, and what was traced."""
    exporter, provider = InMemorySpanExporter(), provider_of(load_settings())
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    hub, tracing = Hub(wall=lambda: NOW), Tracing(provider)
    hub.tap(tracing.observe)
    yield hub, exporter
    tracing.close()


def an_ended_move(end: End = End.DONE) -> Any:
    rows = [a_phase(MOVE, seq, phase=phase, took_s=0.25) for seq, phase in enumerate(Phase, 1)]
    return replace(a_move(MOVE), end=end, phase=Phase.ADMIT, ended_wall_s=NOW + 7, phases=tuple(rows), detail="as it should")


def publish_step_by_step(hub: Hub, row: Any) -> None:
    for count in range(len(row.phases) + 1):
        hub.publish("transition", to_json(replace(row, end=None, ended_wall_s=None, phases=row.phases[:count])))
    hub.publish("transition", to_json(row))


def test_a_move_is_one_trace_with_a_span_for_each_phase_within_its_own(told: tuple[Hub, InMemorySpanExporter]) -> None:
    hub, exporter = told
    publish_step_by_step(hub, an_ended_move())
    spans = exporter.get_finished_spans()
    assert [s.name for s in spans] == [*Phase, "role move"]
    assert {f"{s.context.trace_id:032x}" for s in spans} == {MOVE}
    *phases, whole = spans
    assert whole.parent is None and all(s.parent.span_id == whole.context.span_id for s in phases)
    assert (whole.start_time, whole.end_time) == (int(NOW * 1e9), int((NOW + 7) * 1e9))
    assert phases[0].end_time - phases[0].start_time == 250_000_000
    assert whole.attributes["fluidpd.worker"] == "w3" and whole.attributes["fluidpd.end"] == "done" and whole.status.is_unset
    assert whole.resource.attributes["service.name"] == "fluidpd-controller"


def test_the_next_leader_tells_the_rest_under_the_same_ids_so_that_nothing_is_there_twice() -> None:
    row = an_ended_move()
    seen: list[set[int]] = []
    for _ in range(2):
        exporter, provider = InMemorySpanExporter(), provider_of(load_settings())
        provider.add_span_processor(SimpleSpanProcessor(exporter))
        tracing = Tracing(provider)
        tracing.observe("transition", to_json(row))
        tracing.observe("transition", to_json(row))
        seen.append({s.context.span_id for s in exporter.get_finished_spans()})
        assert len(exporter.get_finished_spans()) == 7
        tracing.close()
    assert seen[0] == seen[1]


@pytest.mark.parametrize("end", [End.ROLLED_BACK, End.QUARANTINED])
def test_a_move_that_failed_is_an_error_and_says_why(told: tuple[Hub, InMemorySpanExporter], end: End) -> None:
    hub, exporter = told
    publish_step_by_step(hub, an_ended_move(end))
    whole = exporter.get_finished_spans()[-1]
    assert not whole.status.is_ok and whole.status.description == "as it should"


def test_what_cannot_be_traced_costs_the_hub_nothing(told: tuple[Hub, InMemorySpanExporter]) -> None:
    hub, exporter = told
    hub.publish("transition", {"id": MOVE, "phases": [{"seq": "x"}]})
    hub.publish("decision", {"action": "hold"})
    assert not exporter.get_finished_spans()


# ------------------------------------------------------------------ ids and orders


def test_a_moves_id_is_its_trace_and_any_other_text_is_made_into_one() -> None:
    assert trace.of_move(MOVE).trace_id == MOVE
    for odd in ("m1", "0" * 32, "", "ü" * 40):
        made = trace.of_move(odd)
        assert trace.parsed(str(made)) == made == trace.of_move(odd)
    assert len({trace.of_phase(MOVE, seq).span_id for seq in range(50)} | {trace.of_move(MOVE).span_id}) == 51


@pytest.mark.parametrize(
    "text", ["", "00-" + "0" * 32 + "-" + "1" * 16 + "-01", "01-x", f"00-{MOVE}-{'0' * 16}-01", f"00-{MOVE}"]
)
def test_what_is_no_traceparent_is_none(text: str) -> None:
    assert trace.parsed(text) is None


async def test_an_order_carries_the_traceparent_of_its_move_to_the_sidecar() -> None:
    f = await Fleet({"p1": "prefill", "d1": "decode", "d2": "decode"}).up()
    row = await f.controller.request_move("d1", Role.PREFILL, "a test", "ana", True)
    (order,) = f.sidecars["d1"].connection.bodies("move")
    assert order["traceparent"] == str(trace.of_move(row.id))


# ------------------------------------------------------------------ without the package


def test_no_endpoint_needs_no_package_and_an_endpoint_without_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.startswith("opentelemetry"):
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    assert tracing_of(load_settings()) is None
    with pytest.raises(ConfigError, match=r"pip install 'fluidpd\[otel\]'"):
        tracing_of(load_settings(overrides={"tracing": {"endpoint": "http://127.0.0.1:4318/v1/traces"}}))


@contextmanager
def a_collector() -> Iterator[tuple[str, list[tuple[str, bytes]]]]:
    got: list[tuple[str, bytes]] = []

    class Taker(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            got.append((self.path, self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Taker)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1/traces", got
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def test_spans_arrive_at_a_collector_over_http() -> None:
    with a_collector() as (url, got):
        tracing = tracing_of(load_settings(overrides={"tracing": {"endpoint": url}}))
        assert tracing is not None
        tracing.observe("transition", to_json(an_ended_move()))
        tracing.close()
    assert {path for path, _ in got} == {"/v1/traces"}
    assert any(bytes.fromhex(MOVE) in body and b"role move" in body and b"fluidpd-controller" in body for _, body in got)


# ------------------------------------------------------------------ logs


def a_line(message: str = "move %s", *args: Any, error: BaseException | None = None) -> dict[str, Any]:
    exc = (type(error), error, None) if error is not None else None
    record = logging.LogRecord("controller.moves", logging.INFO, __file__, 1, message, args, exc)
    text = JsonLines().format(record)
    assert "\n" not in text
    found: dict[str, Any] = json.loads(text)
    return found


def test_a_log_line_is_a_json_object_with_the_trace_it_belongs_to() -> None:
    outside = a_line("a %s", 'quote " and\nline')
    assert outside["message"] == 'a quote " and\nline' and "trace_id" not in outside and outside["time"].endswith("Z")
    with trace.under(trace.of_move(MOVE)):
        inside = a_line("move %s", MOVE)
    assert (inside["trace_id"], inside["span_id"]) == (MOVE, trace.of_move(MOVE).span_id)
    assert inside["level"] == "info" and "ValueError: bad" in a_line("x", error=ValueError("bad"))["exception"]


async def test_what_a_controller_logs_of_a_move_carries_its_trace() -> None:
    lines: list[dict[str, Any]] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(json.loads(JsonLines().format(record)))

    handler = Keep()
    logger = logging.getLogger("controller")
    logger.addHandler(handler)
    before = logger.level
    logger.setLevel(logging.INFO)
    try:
        f = await Fleet({"p1": "prefill", "d1": "decode", "d2": "decode"}).up()
        row = await f.controller.request_move("d1", Role.PREFILL, "a test", "ana", True)
        await f.tell("d1", "refused", "preflight")
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before)
    of_move = [one for one in lines if row.id in one["message"]]
    assert len(of_move) >= 2 and {one.get("trace_id") for one in of_move} == {row.id}


def test_settings_of_logs_are_closed() -> None:
    assert LogSettings().format == "text"
    with pytest.raises(ConfigError, match=r"log\.format"):
        load_settings(overrides={"log": {"format": "yaml"}})
