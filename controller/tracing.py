"""Role moves as OpenTelemetry traces: one trace a move, a span for each of its events, sent over OTLP where an endpoint is set.

Never imports OpenTelemetry before it is asked for, and never makes a move wait: spans are made of what was recorded.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Mapping
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from controller.settings import ConfigError, ControllerSettings
from controller.version import VERSION
from fluidpd import trace

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider

log = logging.getLogger(__name__)

REMEDY = "tracing.endpoint is set and OpenTelemetry is not installed: pip install 'fluidpd[otel]', or leave it out"
_REMEMBERED = 4_096
_ids: ContextVar[trace.Trace | None] = ContextVar("fluidpd_span_ids", default=None)


class Tracing:
    """A tap of the hub. What a leader before this one told already is told again under the same ids: one span, not two."""

    def __init__(self, provider: TracerProvider) -> None:
        self._provider = provider
        self._tracer = provider.get_tracer("fluidpd", VERSION)
        self._told: OrderedDict[tuple[str, int], None] = OrderedDict()

    def observe(self, event: str, data: Mapping[str, Any]) -> None:
        if event != "transition":
            return
        try:
            self._transition(data)
        except Exception:  # a trace that cannot be told must not cost the move that it tells of
            log.exception("a move could not be traced")

    def _transition(self, data: Mapping[str, Any]) -> None:
        move = str(data["id"])
        for row in data.get("phases") or ():
            if self._is_new(move, int(row["seq"])):
                end_s = float(row["wall_s"])
                facts = {"heading": row["heading"], "event": row["event"], "detail": row["detail"], "worker": data["worker"]}
                name = str(row["phase"])
                self._span(name, trace.of_phase(move, int(row["seq"])), trace.of_move(move), end_s - row["took_s"], end_s, facts)
        if data.get("end") and self._is_new(move, -1):
            keys = ("id", "worker", "from_role", "to_role", "trigger", "reason", "actor", "end", "detail", "epoch")
            ended_s = float(data["ended_wall_s"] or data["started_wall_s"])
            facts = {key: data.get(key) for key in keys}
            self._span("role move", trace.of_move(move), None, float(data["started_wall_s"]), ended_s, facts)

    def _is_new(self, move: str, seq: int) -> bool:
        if (move, seq) in self._told:
            return False
        self._told[move, seq] = None
        while len(self._told) > _REMEMBERED:
            self._told.popitem(last=False)
        return True

    def _span(
        self, name: str, ids: trace.Trace, parent: trace.Trace | None, start_s: float, end_s: float, facts: Mapping[str, Any]
    ) -> None:
        from opentelemetry.context import Context
        from opentelemetry.trace import NonRecordingSpan, SpanContext, Status, StatusCode, TraceFlags, set_span_in_context

        context = Context()
        if parent is not None:
            known = SpanContext(int(parent.trace_id, 16), int(parent.span_id, 16), True, TraceFlags(TraceFlags.SAMPLED))
            context = set_span_in_context(NonRecordingSpan(known), context)
        told = {f"fluidpd.{key}": str(getattr(value, "value", value)) for key, value in facts.items() if value not in (None, "")}
        token = _ids.set(ids)
        try:
            span = self._tracer.start_span(name, context, attributes=told, start_time=_ns(min(start_s, end_s)))
        finally:
            _ids.reset(token)
        if told.get("fluidpd.end") in ("rolled_back", "quarantined"):
            span.set_status(Status(StatusCode.ERROR, told.get("fluidpd.detail", "")))
        span.end(_ns(end_s))

    def close(self) -> None:
        """Send what waits; may take seconds where nobody answers."""
        self._provider.shutdown()


def tracing_of(settings: ControllerSettings) -> Tracing | None:
    """None without an endpoint. Raises ConfigError where OpenTelemetry is missing."""
    endpoint = settings.tracing.endpoint
    if endpoint is None:
        return None
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        raise ConfigError(REMEDY) from error
    provider = provider_of(settings)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint, timeout=settings.tracing.timeout_s)))
    return Tracing(provider)


def provider_of(settings: ControllerSettings) -> TracerProvider:
    """Spans under ids that are given, of a service that says whose fleet it is. Nothing of it is global."""
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.id_generator import RandomIdGenerator

    class _Given(RandomIdGenerator):
        def generate_trace_id(self) -> int:
            ids = _ids.get()
            return int(ids.trace_id, 16) if ids is not None else super().generate_trace_id()

        def generate_span_id(self) -> int:
            ids = _ids.get()
            return int(ids.span_id, 16) if ids is not None else super().generate_span_id()

    who = settings.identity
    facts = {
        "service.name": "fluidpd-controller",
        "service.version": VERSION,
        "fluidpd.cluster": who.cluster,
        "fluidpd.model": who.model,
        "fluidpd.pool": who.pool,
    }
    return TracerProvider(resource=Resource(facts), id_generator=_Given(), shutdown_on_exit=False)


def _ns(wall_s: float) -> int:
    return round(wall_s * 1e6) * 1000  # a float of seconds carries no more
