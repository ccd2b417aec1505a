"""One emulated worker: its engine, its two ends of the pairing, its gate and its switch, wired together.

Never parses HTTP and never speaks to a sidecar: surface.py and plugin.py do.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable
from typing import Protocol

from fluidpd.cost import CostModel
from fluidpd.names import Role
from fluidpd.simulator.worker import ClaimAnswered, Stage
from fluidpd.slo import SloTargets
from sidecar.emulator.bootstrap import BootstrapLinks, BootstrapServer, address_of
from sidecar.emulator.engine import Engine
from sidecar.emulator.generation import Generation, abort_finish, length_finish
from sidecar.emulator.settings import EmulatorSettings, WorkerSpec
from sidecar.emulator.switch import RoleSwitch
from sidecar.emulator.tally import Tally
from sidecar.gate import Gate

PREFILL_LOST = "Lost connection with prefill"


class PluginPort(Protocol):
    """What a worker tells its plugin; NoPlugin is plain SGLang."""

    def claim_wanted(self, gen: Generation) -> None: ...

    def claim_answered(self, event: ClaimAnswered) -> None: ...

    def produced(self, gen: Generation, fresh: int) -> None: ...

    def left(self, gen: Generation) -> None: ...

    def boundary(self, now_s: float) -> None: ...

    def changed(self) -> None: ...

    def reports(self) -> dict[str, int]: ...


class NoPlugin:
    def claim_wanted(self, gen: Generation) -> None:
        pass

    def claim_answered(self, event: ClaimAnswered) -> None:
        pass

    def produced(self, gen: Generation, fresh: int) -> None:
        pass

    def left(self, gen: Generation) -> None:
        pass

    def boundary(self, now_s: float) -> None:
        pass

    def changed(self) -> None:
        pass

    def reports(self) -> dict[str, int]:
        return {"handoffs_out": 0, "handoffs_in": 0}


class EmulatedWorker:
    """Invariant: `halves` holds exactly the paired requests that are open here, by room."""

    def __init__(self, spec: WorkerSpec, settings: EmulatorSettings, cost: CostModel, clock: Callable[[], float]) -> None:
        self.spec = spec
        self.settings = settings
        self.cost = cost
        self.boot = uuid.uuid4().hex[:12]
        self.engine = Engine(
            spec.name,
            spec.role,
            cost,
            kv_capacity_tokens=settings.kv_capacity_tokens,
            prefill_chunk_tokens=settings.prefill_chunk_tokens,
            max_running=settings.max_running,
            noise_share=settings.noise_share,
            seed=settings.seed,
            clock=clock,
        )
        self.engine.outside = self
        self.clock = clock
        self.gate = Gate()
        self.slo = SloTargets()
        self.tally = Tally()
        self.plugin: PluginPort = NoPlugin()
        self.switch = RoleSwitch(self.engine, settings.switch_s, f"{settings.seed}/{spec.name}/switch", self._changed)
        self.bootstrap = BootstrapServer(self, spec.port)
        self.bootstrap.is_registered = spec.role is Role.PREFILL
        self.links = BootstrapLinks(spec.name, self, settings.peer_patience_s)
        self.halves: dict[int, Generation] = {}
        self.open: dict[Generation, None] = {}
        self._own_hosts = {address_of(h, spec.bootstrap_port) for h in (spec.host, *spec.advertise)}
        self._lost_while_claiming: set[int] = set()

    @property
    def role(self) -> Role:
        return self.engine.model.role

    def half_for(self, bootstrap_host: str, bootstrap_port: int) -> Role:
        """Both halves carry the same body: the prefill half is the one at the worker whose bootstrap address it names."""
        own = address_of(bootstrap_host, bootstrap_port) in self._own_hosts
        return Role.PREFILL if own else Role.DECODE

    # ------------------------------------------------------------ requests

    def why_not(self, half: Role) -> str:
        """Why a new request of this kind is refused, or an empty text."""
        if self.switch.state != "serving":
            return f"worker is {self.switch.state}"
        if half is not self.role:
            return f"worker serves {self.role}, not {half}"
        return "worker is draining" if self.engine.model.draining else ""

    def refuse(self, half: Role, room: int, peer: str, why: str) -> None:
        """Let the other half know, so that it does not wait for ever."""
        if half is Role.PREFILL:
            self.bootstrap.fail(room, why)
        else:
            self.links.fail(peer, room, why)

    def submit(self, gen: Generation) -> None:
        self.open[gen] = None
        if gen.job.room > 0:
            self.halves[gen.job.room] = gen
        if gen.is_prefill_half and gen.job.room > 0:
            dead = self.bootstrap.why_dead(gen.job.room)
            if dead is not None:
                gen.end(abort_finish(dead, 503))
                self.retire(gen)
                return
            gen.job.ready = self.bootstrap.is_ready(gen.job.room)
        if gen.is_probe and not gen.is_prefill_half:
            if not self.engine.adopt(gen, gen.digest, stays=True):
                gen.end(abort_finish("no KV space for a probe", 503))
            return
        self.engine.add(gen)
        self.plugin.changed()

    def abort_asked(self, gen: Generation) -> None:
        """POST /abort_request: what has tokens ends with them, as SGLang's does; what waits for its other half fails."""
        if gen.produced:
            self.abort(gen, "Aborted", None)
        else:
            stage = "Prefill bootstrap" if gen.is_prefill_half else "Decode transfer"
            self.abort(gen, f"{stage} failed for request {gen.rid}: Aborted by AbortReq.")

    def abort(self, gen: Generation, message: str, status: int | None = 500) -> None:
        self.engine.abort(gen, abort_finish(message, status))
        self.retire(gen)

    def retire(self, gen: Generation) -> None:
        """Nothing waits for this request any more. Safe to call twice."""
        if self.halves.get(gen.job.room) is gen:
            del self.halves[gen.job.room]
            self._lost_while_claiming.discard(gen.job.room)  # however its claim ended: room numbers may come again
        self.open.pop(gen, None)

    def done(self, gen: Generation, *, client_left: bool) -> None:
        """The HTTP side is through with a request; an open one is aborted, a client's is judged once."""
        if gen.is_open:
            self.abort(gen, "client disconnected")
        elif gen.is_counted and not client_left:
            self.tally.count(gen, self.slo, self.clock())
        elif gen.is_prefill_half and not gen.is_probe and not client_left:
            self.tally.count_finished(gen, self.clock())
        self.retire(gen)

    # ------------------------------------------------------------ engine.Outside

    def space_ready(self, gen: Generation) -> None:
        if gen.job.peer:
            self.links.ready(gen.job.peer, gen.job.room)

    def prefilled(self, gen: Generation, at_s: float) -> None:
        took = 0.0 if gen.is_probe else self.cost.transfer_s(gen.job.prompt_tokens)
        self.tally.count_transfer(took, gen.job.prompt_tokens * self.cost.kv_bytes_per_token)
        asyncio.get_running_loop().call_later(max(0.0, at_s + took - self.clock()), self._transferred, gen, at_s + took)

    def _transferred(self, gen: Generation, at_s: float) -> None:
        if not gen.is_open or not gen.pages:
            return  # aborted on the way
        digest = self.engine.pages.read(gen.pages)
        if not gen.is_probe:
            self.bootstrap.send_kv(gen.job.room, digest, gen.job.prompt_tokens)
        self.engine.sent(gen)
        gen.append(digest, at_s)
        gen.end(length_finish(0))
        self.retire(gen)
        self.engine.wake()

    def claim_wanted(self, gen: Generation) -> None:
        self.plugin.claim_wanted(gen)

    def claim_answered(self, event: ClaimAnswered) -> None:
        if event.given:
            self.bootstrap.give(event.room)
            self.halves.pop(event.room, None)
        self.plugin.claim_answered(event)

    def claim_settled(self, room: int, given: bool) -> None:
        """The verdict on this decode worker's own claim."""
        gen = self.halves.get(room)
        if gen is None or gen.job.stage is not Stage.CLAIMING:
            return
        self.engine.model.claim_settled(room, given, self.clock())
        lost = room in self._lost_while_claiming
        self._lost_while_claiming.discard(room)
        if given:
            self.links.forget(gen.job.peer, room)
        elif lost:
            self._prefill_gone(gen)
        self.engine.wake()

    def produced(self, gen: Generation, fresh: int) -> None:
        self.plugin.produced(gen, fresh)

    def left(self, gen: Generation) -> None:
        if gen.job.room > 0:
            why = str((gen.finish or {}).get("message", "aborted"))
            if gen.is_prefill_half:
                self.bootstrap.fail(gen.job.room, why)
            elif gen.job.peer and not gen.texts:
                self.links.fail(gen.job.peer, gen.job.room, why)
        self.plugin.left(gen)
        self.retire(gen)

    def boundary(self, now_s: float) -> None:
        self.plugin.boundary(now_s)

    # ------------------------------------------------------------ pairing

    def room_ready(self, room: int) -> None:
        gen = self.halves.get(room)
        if gen is not None and gen.is_prefill_half:
            self.engine.model.make_ready(gen.job)
            self.engine.wake()

    def kv_arrived(self, room: int, digest: bytes) -> None:
        self._lost_while_claiming.discard(room)
        self.engine.kv_came(room, digest)

    def room_given(self, room: int) -> None:
        """The prefill worker gave a room away although the claim was taken for refused: its answer was lost."""
        gen = self.halves.get(room)
        if gen is not None and not gen.is_prefill_half and gen.job.stage is Stage.WAIT_PREFILL:
            gen.job.stage = Stage.CLAIMING
            self.claim_settled(room, True)

    def room_failed(self, room: int, why: str) -> None:
        gen = self.halves.get(room)
        if gen is None:
            return
        if gen.job.stage in (Stage.BORROWED, Stage.ARRIVED, Stage.RUNNING):
            return  # a prompt with its home here no longer depends on its pair
        gen.job.peer = ""
        self.abort(gen, why, 503)

    def prefill_lost(self, address: str, rooms: frozenset[int]) -> None:
        for room in rooms:
            gen = self.halves.get(room)
            if gen is None or gen.is_prefill_half:
                continue
            if gen.job.stage is Stage.CLAIMING:
                self._lost_while_claiming.add(room)  # it may have been given away just before
            elif gen.job.stage is Stage.WAIT_PREFILL:
                self._prefill_gone(gen)

    def _prefill_gone(self, gen: Generation) -> None:
        gen.job.peer = ""
        self.abort(gen, PREFILL_LOST)

    # ------------------------------------------------------------ changes of shape

    def remap(self, role: Role) -> dict[str, float]:
        """Move pages between KV and scratch for `role`. Raises PagesInUse."""
        done = self.engine.pages.remap(role)
        self.engine.model.kv_capacity = self.engine.pages.capacity_tokens
        return {"moves": float(done.moves), "bytes": float(done.bytes), "took_s": done.took_s}

    def _changed(self) -> None:
        self.bootstrap.is_registered |= self.role is Role.PREFILL
        self.plugin.changed()

    def close(self) -> None:
        self.links.close()
        self.engine.pages.close()
