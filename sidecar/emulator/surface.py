"""SGLang 0.5.23's HTTP surface in front of an emulated worker, and GET /emulator. One plain ASGI application for each worker.

Never hides what it is: every answer carries x-fluidpd-engine: emulated.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Literal, TypeVar
from urllib.parse import parse_qs

from prometheus_client import CONTENT_TYPE_LATEST
from pydantic import BaseModel, ConfigDict, ValidationError

from sidecar.emulator import readout
from sidecar.emulator.asgi import ClientGone, Receive, Scope, Send, TooLarge, answer, answer_json, read_body
from sidecar.emulator.ask import Api, BadAsk, Noticed, parse_json
from sidecar.emulator.chunks import body_error
from sidecar.emulator.lateness import Meter
from sidecar.emulator.metrics import MetricsPage
from sidecar.emulator.serving import serve_text
from sidecar.emulator.switch import FAULTS, SwitchBody
from sidecar.emulator.worker import EmulatedWorker

Handler = Callable[[Scope, Receive, Send], Awaitable[None]]
_FLUSHED = (
    b"Cache flushed.\nPlease check backend logs for more details. "
    b"(When there are running or waiting requests, the operation will not be performed.)\n"
)
_TEXT = {"/generate": Api.GENERATE, "/v1/completions": Api.COMPLETIONS, "/v1/chat/completions": Api.CHAT}


class AbortBody(BaseModel):
    rid: str = ""
    abort_all: bool = False


class PauseBody(BaseModel):
    mode: Literal["abort", "retract", "in_place"] = "abort"


class SlowBody(BaseModel):
    model_config = ConfigDict(allow_inf_nan=False)

    forward_sleep_time: float | None = None


class UnknownSection(Exception):
    """/v1/loads was asked for a section that there is not, which SGLang does not survive politely."""


class Surface:
    def __init__(self, worker: EmulatedWorker) -> None:
        self._worker = worker
        self._metrics = MetricsPage(worker)
        reads: dict[str, Callable[[Scope], Any]] = {
            "/server_info": lambda _: readout.server_info(worker),
            "/get_server_info": lambda _: readout.server_info(worker),
            "/model_info": lambda _: readout.model_info(worker),
            "/get_model_info": lambda _: readout.model_info(worker),
            "/v1/models": lambda _: readout.models(worker),
            "/v1/loads": lambda scope: readout.loads(worker, _include(scope)),
            "/emulator": lambda _: readout.emulator(worker),
        }
        self._reads = reads
        self._handlers: dict[tuple[str, str], Handler] = {
            ("GET", "/health"): self._health,
            ("GET", "/health_generate"): self._health_generate,
            ("GET", "/ready"): self._ready,
            ("GET", "/ping"): self._health,
            ("GET", "/metrics"): self._page,
            ("POST", "/pd_role_switch"): self._switch,
            ("POST", "/abort_request"): self._abort,
            ("POST", "/pause_generation"): self._pause,
            ("POST", "/continue_generation"): self._go_on,
            ("GET", "/flush_cache"): self._flush,
            ("POST", "/flush_cache"): self._flush,
            ("POST", "/slow_down"): self._slow_down,
            ("POST", "/emulator/reset"): self._reset,
            ("POST", "/emulator/fault"): self._fault,
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        method, path = scope["method"], scope["path"]
        if method == "POST" and path in _TEXT:
            await serve_text(self._worker, _TEXT[path], scope, receive, send)
            return
        try:
            if method == "GET" and path in self._reads:
                await answer_json(send, 200, self._reads[path](scope))
            elif (method, path) in self._handlers:
                await self._handlers[method, path](scope, receive, send)
            else:
                known = path in self._reads or path in _TEXT or any(p == path for _, p in self._handlers)
                status, detail = (405, "Method Not Allowed") if known else (404, "Not Found")
                await answer_json(send, status, {"detail": detail})
        except UnknownSection:
            await answer(send, 500, b"Internal Server Error", b"text/plain; charset=utf-8")
        except BadAsk as problem:
            said = body_error(str(problem)) if problem.noticed is Noticed.BODY else {"error": {"message": str(problem)}}
            await answer_json(send, problem.status, said)
        except TooLarge as problem:
            await answer_json(send, 413, {"error": {"message": str(problem)}})
        except ClientGone:
            pass  # there is nobody to answer

    # ------------------------------------------------------------ health

    async def _health(self, scope: Scope, receive: Receive, send: Send) -> None:
        # A switch under way is not ill health: the router must be able to register the worker meanwhile.
        await answer(send, 503 if self._worker.switch.is_unhealthy else 200, b"")

    async def _health_generate(self, scope: Scope, receive: Receive, send: Send) -> None:
        await answer(send, 200 if self._worker.switch.state == "serving" else 503, b"")

    async def _ready(self, scope: Scope, receive: Receive, send: Send) -> None:
        await answer(send, 503 if self._worker.switch.is_unhealthy or self._worker.engine.is_paused else 200, b"")

    async def _page(self, scope: Scope, receive: Receive, send: Send) -> None:
        await answer(send, 200, self._metrics.text(), CONTENT_TYPE_LATEST.encode())

    # ------------------------------------------------------------ orders

    async def _switch(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = _read(SwitchBody, await read_body(receive)).model_dump()
        status, said = await self._worker.switch.ask(body)
        await answer_json(send, status, said)

    async def _abort(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = _read(AbortBody, await read_body(receive))
        for gen in [g for g in self._worker.open if body.abort_all or (body.rid and g.rid == body.rid)]:
            self._worker.abort_asked(gen)
        await answer(send, 200, b"")

    async def _pause(self, scope: Scope, receive: Receive, send: Send) -> None:
        # What runs stands still where it is, in each mode that keeps it; the real one's "retract" also gives its KV back.
        if _read(PauseBody, await read_body(receive)).mode == "abort":
            for gen in list(self._worker.open):
                self._worker.abort_asked(gen)
        self._worker.engine.is_paused = True
        await answer_json(send, 200, {"message": "Generation paused successfully.", "status": "ok"})

    async def _go_on(self, scope: Scope, receive: Receive, send: Send) -> None:
        parse_json(await read_body(receive))
        self._worker.engine.is_paused = False
        self._worker.engine.wake()
        await answer_json(send, 200, {"message": "Generation continued successfully.", "status": "ok"})

    async def _flush(self, scope: Scope, receive: Receive, send: Send) -> None:
        # There is no prefix cache here; as on the real one only an idle worker says that it was flushed.
        if self._worker.engine.model.idle:
            await answer(send, 200, _FLUSHED)
        else:
            await answer(send, 400, b"Flush cache failed.\n")

    async def _slow_down(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = _read(SlowBody, await read_body(receive))
        self._worker.engine.extra_step_s = max(0.0, body.forward_sleep_time or 0.0)
        await answer_json(send, 200, None)

    # ------------------------------------------------------------ the emulator's own

    async def _reset(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._worker.engine.meter = Meter(
            decode_moments=self._worker.engine.meter.decode_moments,
            prefill_busy_us=self._worker.engine.meter.prefill_busy_us,
            prefill_uncached_tokens=self._worker.engine.meter.prefill_uncached_tokens,
            prefill_steps=self._worker.engine.meter.prefill_steps,
        )
        self._worker.engine.model.chunk_sizes.clear()
        await answer_json(send, 200, {"reset": True})

    async def _fault(self, scope: Scope, receive: Receive, send: Send) -> None:
        if not self._worker.settings.faults_allowed:
            raise BadAsk("faults are off: start the emulator with faults_allowed", 403)
        body = parse_json(await read_body(receive))
        what, times, spares = body.get("what"), body.get("times", 1), body.get("spares_preparation", False)
        if what not in FAULTS or not isinstance(times, int) or times < 0:
            raise BadAsk(f"what must be one of {', '.join(FAULTS)} and times a whole number")
        self._worker.switch.inject(what, times, spares is True)
        await answer_json(send, 200, {"what": what, "times": times})


_Body = TypeVar("_Body", bound=BaseModel)


def _read(kind: type[_Body], raw: bytes) -> _Body:
    """Raises BadAsk."""
    try:
        return kind.model_validate(parse_json(raw))
    except ValidationError as problem:
        first = problem.errors()[0]
        raise BadAsk(f"{'.'.join(map(str, first['loc']))}: {first['msg']}", noticed=Noticed.BODY) from None


def _include(scope: Scope) -> set[str]:
    asked = parse_qs(scope["query_string"].decode("latin-1")).get("include", [])
    sections = {part.strip() for value in asked for part in value.split(",") if part}
    if sections - readout.SECTIONS_ASKED:
        raise UnknownSection
    return sections
