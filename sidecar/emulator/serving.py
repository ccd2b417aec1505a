"""Serves one text request of an emulated worker from its first byte to its last: admission, holding, streaming, the end.

Never decides what a token is or when it comes; the engine does.
"""

from __future__ import annotations

import asyncio
from functools import partial

from fluidpd.names import Role
from fluidpd.simulator.worker import Job
from sidecar.emulator.asgi import ClientGone, Receive, Scope, Send, TooLarge, Watch, answer_json, header, read_body, start_stream
from sidecar.emulator.ask import Api, Ask, BadAsk, Noticed, Pair, parse_ask
from sidecar.emulator.bootstrap import address_of
from sidecar.emulator.chunks import DONE, Chunks, body_error, error_body, error_event, refused_event
from sidecar.emulator.generation import Generation, abort_finish
from sidecar.emulator.worker import EmulatedWorker

PROBE_HEADER = b"x-fluidpd-probe"


async def serve_text(worker: EmulatedWorker, api: Api, scope: Scope, receive: Receive, send: Send) -> None:
    """One request to /generate, /v1/completions or /v1/chat/completions."""
    ask: Ask | None = None
    try:
        ask = parse_ask(api, await read_body(receive), worker.settings.model)
        gen = _generation(worker, ask, is_probe=header(scope, PROBE_HEADER) == "1")
        watch = Watch(receive, lambda: None)
        try:
            await _admit(worker, ask, gen, watch)
            await _answer(worker, ask, gen, watch, send)
        finally:
            watch.close()
            worker.done(gen, client_left=watch.gone)
    except BadAsk as problem:
        await _refuse(worker, api, ask, problem, send)
    except TooLarge as problem:
        await answer_json(send, 413, error_body(api, str(problem), 413))
    except ClientGone:
        pass  # there is nobody to answer


async def _refuse(worker: EmulatedWorker, api: Api, ask: Ask | None, problem: BadAsk, send: Send) -> None:
    """SGLang's answer to a request that is not served: its shape depends on where the fault was noticed, and on streaming."""
    message, status = str(problem), problem.status
    streamed = ask.stream if ask is not None else problem.streamed
    if problem.noticed is Noticed.BODY:
        await answer_json(send, status, body_error(message))
    elif streamed and problem.noticed is Noticed.VALUE and api is Api.GENERATE:
        await _whole_stream(send, refused_event(message, status))
    elif streamed and problem.noticed is Noticed.SCHEDULER and ask is not None:
        if api is Api.GENERATE:
            gen = Generation(ask.rid, ask.digest, Job(ask.rid, 0, ask.prompt_tokens, 1, worker.clock()), worker.clock())
            told = Chunks(ask, gen, incremental=True).end(abort_finish(message, status))
        else:
            told = error_event(message, status) + DONE
        await _whole_stream(send, told)
    else:
        await answer_json(send, status, error_body(api, message, status))


async def _whole_stream(send: Send, body: bytes) -> None:
    await start_stream(send)
    await send({"type": "http.response.body", "body": body, "more_body": False})


def _generation(worker: EmulatedWorker, ask: Ask, is_probe: bool) -> Generation:
    now = worker.clock()
    if ask.pair is not None:
        half = worker.half_for(ask.pair.host, ask.pair.port)
        why = _too_large(worker, ask, half)
        if why:
            worker.refuse(half, ask.pair.room, address_of(ask.pair.host, ask.pair.port), why)
            raise BadAsk(why)
        return _half(ask, ask.pair, half, now)
    if not is_probe:
        message = f"Invalid request: Disaggregated request received without bootstrap room id. req.rid={ask.rid!r}"
        raise BadAsk(message, noticed=Noticed.SCHEDULER)
    room, is_prefill = worker.engine.local_room(), worker.role is Role.PREFILL
    # A decode probe runs one decode step: its prompt counts as here, and its first token as made.
    produced, wanted_tokens = (0, 1) if is_prefill else (1, 2)
    job = Job(ask.rid, room, ask.prompt_tokens, wanted_tokens, now, produced=produced, claimable=False)
    return Generation(ask.rid, ask.digest, job, now, is_prefill_half=is_prefill, is_streaming=ask.stream, is_probe=True)


def _too_large(worker: EmulatedWorker, ask: Ask, half: Role) -> str:
    whole, pool = ask.prompt_tokens + ask.max_new_tokens, worker.engine.configured_capacity
    if whole > pool:
        return f"{whole} tokens in and out are more than the KV pool holds ({pool}): shorten the prompt or ask for fewer tokens"
    now = worker.engine.model.kv_capacity
    if half is Role.PREFILL and ask.prompt_tokens > now:
        return (
            f"{ask.prompt_tokens} prompt tokens are more than the KV pool of a prefill worker holds ({now}): shorten the prompt"
        )
    return ""


def _half(ask: Ask, pair: Pair, half: Role, now: float) -> Generation:
    is_prefill = half is Role.PREFILL
    peer = "" if is_prefill else address_of(pair.host, pair.port)
    job = Job(
        ask.rid, pair.room, ask.prompt_tokens, 1 if is_prefill else ask.max_new_tokens, now, peer=peer, ready=not is_prefill
    )
    return Generation(
        ask.rid,
        ask.digest,
        job,
        now,
        is_prefill_half=is_prefill,
        is_streaming=ask.stream,
        is_counted=not is_prefill,
        stop=ask.stop,
    )


async def _admit(worker: EmulatedWorker, ask: Ask, gen: Generation, watch: Watch) -> None:
    """Submit the request to the engine, after the gate if its role is awaited. Raises BadAsk (503) or ClientGone."""
    half = Role.PREFILL if gen.is_prefill_half else Role.DECODE
    if gen.is_probe:
        if worker.switch.state != "serving":
            raise BadAsk(f"worker is {worker.switch.state}", 503, Noticed.STATE)
    else:
        if worker.gate.holds(half):
            turn = asyncio.ensure_future(worker.gate.wait())
            watch.on_gone = partial(_cancel, turn)
            try:
                await turn
            except asyncio.CancelledError:
                if watch.gone:
                    raise ClientGone from None
                raise
        why = worker.why_not(half)
        if why:
            worker.refuse(half, gen.job.room, gen.job.peer, why)
            raise BadAsk(f"{why}: try another worker", 503, Noticed.STATE)
        if gen.job.room in worker.halves:
            raise BadAsk(f"bootstrap_room {gen.job.room} is already open here")
        if any(other.rid == gen.rid for other in worker.open):
            raise BadAsk(f"Duplicate request ID detected: {gen.rid}")
    watch.on_gone = lambda: worker.abort(gen, "client disconnected")
    if watch.gone:
        raise ClientGone
    worker.submit(gen)


def _cancel(turn: asyncio.Future[bool]) -> None:
    turn.cancel()


async def _answer(worker: EmulatedWorker, ask: Ask, gen: Generation, watch: Watch, send: Send) -> None:
    chunks = Chunks(ask, gen, worker.settings.incremental_streaming_output)
    if ask.stream:
        await _stream(gen, chunks, watch, send)
        return
    await gen.ended()
    finish = gen.finish or {}
    if watch.gone:
        return
    watch.close()
    if finish["type"] == "abort" and finish["status_code"] is not None:
        status = finish["status_code"]
        await answer_json(send, status, error_body(ask.api, finish["message"], status))
    else:
        await answer_json(send, 200, chunks.whole(finish))


async def _stream(gen: Generation, chunks: Chunks, watch: Watch, send: Send) -> None:
    await start_stream(send)
    before = chunks.first()
    if before:
        await send({"type": "http.response.body", "body": before, "more_body": True})
    sent = 0
    while not watch.gone:
        ready = len(gen.texts)
        finish = gen.finish
        if ready > sent:
            body = chunks.token(sent) if ready == sent + 1 else b"".join(chunks.token(k) for k in range(sent, ready))
            sent = ready
        else:
            body = b""
        if finish is not None:
            watch.close()  # once the answer is complete the server reports every client as gone
            await send({"type": "http.response.body", "body": body + chunks.end(finish), "more_body": False})
            return
        if body:
            await send({"type": "http.response.body", "body": body, "more_body": True})
        if len(gen.texts) == sent and gen.finish is None and not watch.gone:
            await gen.more()
