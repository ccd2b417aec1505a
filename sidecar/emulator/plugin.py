"""The emulator's side of the plugin protocol: one connection to the sidecar's socket, kept for ever.

Never decides and never talks to another worker; claims and handoffs travel sidecar to sidecar.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import orjson
from pydantic import ValidationError

from fluidpd.names import Role
from fluidpd.simulator.worker import ClaimAnswered
from fluidpd.slo import SloTargets
from fluidpd.telemetry import IDLE, QUEUE_LIMIT
from sidecar.emulator.bootstrap import normal_address
from sidecar.emulator.claims import Claims
from sidecar.emulator.generation import Generation
from sidecar.emulator.handoff import Handoffs
from sidecar.emulator.pages import PagesInUse
from sidecar.emulator.readout import ENGINE_VERSION
from sidecar.emulator.worker import EmulatedWorker
from sidecar.protocol import (
    CAN_ADOPT,
    CAN_BORROW,
    CAN_DROP_STALE,
    CAN_GIVE,
    CAN_HANDOFF,
    CAN_HOLD,
    CAN_REMAP,
    CAN_SAMPLE,
    CAN_TRIAGE,
    MAX_LINE_BYTES,
    TO_PLUGIN,
    Adopt,
    Claim,
    ClaimResult,
    Grant,
    HandoffFailed,
    HandoffTaken,
    Message,
    Order,
    PluginHello,
    PluginWelcome,
    RelayGone,
    Reply,
    Revoke,
    Tokens,
    line,
)

log = logging.getLogger(__name__)

CAPABILITIES = (CAN_SAMPLE, CAN_BORROW, CAN_GIVE, CAN_HANDOFF, CAN_ADOPT, CAN_HOLD, CAN_REMAP, CAN_DROP_STALE, CAN_TRIAGE)
RETRY_S = 0.2
ORPHAN_S = 10.0  # a drain or a closed gate outlives its sidecar by this much, then the worker serves again
_SHORTEST_GAP_S = 0.010
_MAX_UNSENT_BYTES = 8 * 1024 * 1024


class PluginConnection:
    """Implements worker.PluginPort."""

    def __init__(self, worker: EmulatedWorker, path: str) -> None:
        self._worker = worker
        self._path = path
        self._writer: asyncio.StreamWriter | None = None
        self._is_welcome = False
        self._sample_hz = 20.0
        self._jump = asyncio.Event()
        self._seen: tuple[object, ...] = ()
        self._seen_waiting = 0
        self._seen_chunks: dict[int, int] = {}
        self._orphaned: asyncio.TimerHandle | None = None
        self.claims = Claims(worker, self.send)
        self.handoffs = Handoffs(worker, self.send)

    @property
    def connected(self) -> bool:
        return self._is_welcome

    # ------------------------------------------------------------ connection

    async def run(self) -> None:
        while True:
            try:
                reader, writer = await asyncio.open_unix_connection(self._path, limit=MAX_LINE_BYTES)
            except OSError:
                await asyncio.sleep(RETRY_S)
                continue
            sampling: asyncio.Task[None] | None = None
            try:
                self._writer = writer
                writer.write(line(self._hello()))
                sampling = asyncio.create_task(self._sample_for_ever())
                while raw := await reader.readline():
                    self._hear(raw)
            except (OSError, ValueError):
                pass  # the sidecar died, or a line was over the limit: connect again
            finally:
                if sampling is not None:
                    sampling.cancel()
                self._writer, self._is_welcome = None, False
                writer.close()
                self._lost()
            await asyncio.sleep(RETRY_S)

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()

    def send(self, message: Message | dict[str, Any]) -> bool:
        """False if there is no sidecar, or one that does not read."""
        writer = self._writer
        if writer is None or writer.is_closing() or writer.transport.get_write_buffer_size() > _MAX_UNSENT_BYTES:
            return False
        writer.write(line(message) if isinstance(message, Message) else orjson.dumps(message) + b"\n")
        return True

    def _hello(self) -> PluginHello:
        model = self._worker.engine.model
        return PluginHello(
            engine="emulated",
            engine_version=ENGINE_VERSION,
            boot=self._worker.boot,
            role=model.role,
            capabilities=CAPABILITIES,
            kv_capacity_tokens=model.kv_capacity,
            kv_bytes_per_token=self._worker.cost.kv_bytes_per_token,
        )

    def _lost(self) -> None:
        self.claims.sidecar_lost()
        self.handoffs.sidecar_lost()
        if self._orphaned is None:
            self._orphaned = asyncio.get_running_loop().call_later(ORPHAN_S, self._orphan)

    def _orphan(self) -> None:
        self.handoffs.give_up_drain()
        gate = self._worker.gate
        if gate.awaited is self._worker.role:
            gate.open()
        else:
            gate.drop()

    # ------------------------------------------------------------ messages in

    def _hear(self, raw: bytes) -> None:
        try:
            message = TO_PLUGIN.validate_json(raw)
        except ValidationError:
            return  # a kind of message that a newer sidecar knows
        try:
            self._act_on(message)
        except Exception:  # it came from another process: it must cost neither the connection nor this one
            log.exception("a message of type %s could not be handled", message.type)

    def _act_on(self, message: Message) -> None:
        if isinstance(message, PluginWelcome):
            self._welcome(message)
        elif isinstance(message, Grant):
            self.claims.grant(message)
        elif isinstance(message, Revoke):
            self.claims.revoke()
        elif isinstance(message, Claim):
            self.claims.asked(message)
        elif isinstance(message, ClaimResult):
            self.claims.result(message)
        elif isinstance(message, Tokens):
            self.handoffs.tokens(message)
        elif isinstance(message, Adopt):
            self.handoffs.adopt(message.state)
        elif isinstance(message, HandoffTaken):
            self.handoffs.taken(message.id)
        elif isinstance(message, HandoffFailed):
            self.handoffs.failed(message.id, message.why)
        elif isinstance(message, RelayGone):
            self.handoffs.relay_gone(message.id)
        elif isinstance(message, Order):
            self._order(message)

    def _welcome(self, message: PluginWelcome) -> None:
        if self._orphaned is not None:
            self._orphaned.cancel()
            self._orphaned = None
        self._sample_hz = min(100.0, max(0.1, message.sample_hz))
        self._worker.slo = SloTargets(ttft_s=message.ttft_slo_s, tbt_s=message.tbt_slo_s)
        self._is_welcome = True
        self._jump.set()

    def _order(self, order: Order) -> None:
        worker = self._worker
        if order.what == "drain":
            self.handoffs.drain(order)  # replies when the worker is idle
            return
        ok, detail, numbers = True, "", {}
        if order.what == "undrain":
            self.handoffs.undrain()
        elif order.what == "hold":
            if order.role is None:
                ok, detail = False, "hold needs a role"
            else:
                worker.gate.hold(order.role)
        elif order.what == "open_gate":
            worker.engine.model.draining = False  # the new role is there: new requests of it are welcome
            numbers = {"admitted": float(worker.gate.open())}
        elif order.what == "drop_held":
            numbers = {"dropped": float(worker.gate.drop())}
        elif order.what in ("remap", "restore_arena"):
            ok, detail, numbers = self._remap(order.role or worker.role)
        elif order.what == "drop_stale":
            numbers = {"dropped": float(worker.links.drop(normal_address(order.bootstrap)))}
        self.send(Reply(id=order.id, ok=ok, detail=detail, numbers=numbers))
        self.changed()

    def _remap(self, role: Role) -> tuple[bool, str, dict[str, float]]:
        try:
            return True, "", self._worker.remap(role)
        except (PagesInUse, OSError) as problem:
            return False, str(problem), {}

    # ------------------------------------------------------------ samples

    async def _sample_for_ever(self) -> None:
        while True:
            try:
                async with asyncio.timeout(1 / self._sample_hz):
                    await self._jump.wait()
                await asyncio.sleep(_SHORTEST_GAP_S)
            except TimeoutError:
                pass  # nothing jumped: the regular sample is due
            self._jump.clear()
            if self._is_welcome:
                self.send(self.sample())

    def sample(self) -> dict[str, Any]:
        """A PluginSample as a plain object: twenty times a second for each worker, no model is built for it."""
        worker, now = self._worker, self._worker.clock()
        model = worker.engine.model
        residual = worker.engine.meter.residual_p995_s()
        values = model.values(now) | {
            "residual_p995_s": IDLE if residual is None else residual,
            **worker.tally.values(),
        }
        is_prefill = worker.role is Role.PREFILL
        waiting = [*model.queue] if is_prefill else []
        queue = [
            {"room": j.room, "prompt_tokens": j.prompt_tokens, "uncached_tokens": j.rest, "waited_s": max(0.0, now - j.arrived_s)}
            for j in waiting[:QUEUE_LIMIT]
        ]
        chunks = {str(size): n - self._seen_chunks.get(size, 0) for size, n in model.chunk_sizes.items()}
        self._seen_chunks = dict(model.chunk_sizes)
        self._seen, self._seen_waiting = self._shape(), len(model.queue)
        return {
            "type": "sample",
            "role": worker.role.value,
            "engine_state": worker.switch.state,
            "values": values,
            "queue": queue,
            "queue_total": len(waiting),
            "chunks": {size: n for size, n in chunks.items() if n > 0},
        }

    def _shape(self) -> tuple[object, ...]:
        worker = self._worker
        return worker.role, worker.switch.state, worker.engine.model.draining, bool(worker.engine.model.wait_kv)

    def changed(self) -> None:
        """Something may have jumped: a sample goes at once if it did."""
        waiting = len(self._worker.engine.model.queue)
        if self._shape() != self._seen or waiting >= 2 * self._seen_waiting + 1:
            self._jump.set()

    # ------------------------------------------------------------ what the engine says

    def claim_wanted(self, gen: Generation) -> None:
        self.claims.wanted(gen)

    def claim_answered(self, event: ClaimAnswered) -> None:
        self.claims.answered(event)

    def produced(self, gen: Generation, fresh: int) -> None:
        self.handoffs.produced(gen, fresh)

    def left(self, gen: Generation) -> None:
        self.handoffs.left(gen)

    def boundary(self, now_s: float) -> None:
        self.handoffs.boundary()

    def reports(self) -> dict[str, int]:
        h = self.handoffs
        return {
            "handoffs_out": h.out_total,
            "handoffs_in": h.in_total,
            "handoffs_taken_home": h.taken_home_total,
            "relaying": h.relaying,
        }
