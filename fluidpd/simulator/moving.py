"""Role moves of a simulated fleet, by the very table of the live ones (`fluidpd.transition`). Never decides on a move."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fluidpd.decision import Flip
from fluidpd.names import Heading, Phase, Role
from fluidpd.simulator.fleet import Handle
from fluidpd.simulator.job import Job
from fluidpd.transition import START, Effect, Event, step

if TYPE_CHECKING:
    from fluidpd.simulator.run import Simulation

# Durations a live fleet shows between its processes; the switch is the middle of what SGLang's CPU build was measured at.
PREFLIGHT_S, LEAVE_S, REMAP_S, VERIFY_S, JOIN_S = 0.010, 0.005, 0.015, 0.020, 0.100
SWITCH_S = {Role.DECODE: 0.305, Role.PREFILL: 0.080}  # by new role
HANDOFF_BYTES_PER_S = 20e9
_ADOPT_AGAIN_S = 0.05


class Moving:
    """Invariant: a worker has at most one move, and it is open while `handle.move` is set."""

    def __init__(self, sim: Simulation) -> None:
        self._sim = sim
        self._link_free_s: dict[str, float] = {}

    def begin(self, h: Handle, flip: Flip) -> None:
        h.flip, h.move, h.view = flip, START, None
        self._sim.after(PREFLIGHT_S, self._event, h, Event.OK)

    def drained(self, h: Handle) -> None:
        """The worker has nothing to do: if that is what its move waits for, it goes on."""
        if h.move is not None and h.move.phase is Phase.DRAIN and h.move.heading is Heading.FORWARD and h.model.idle:
            self._event(h, Event.OK)

    def hand_off(self, h: Handle) -> None:
        """Long generations of a draining decode worker go on at a peer; their KV shares the capped link."""
        sim = self._sim
        if h.model.role is not Role.DECODE or h.move is None:
            return
        for job in list(h.model.batch.jobs):
            h.model.batch.sync(job)
            if job.max_new_tokens - job.produced <= sim.settings.policy.natural_end_tokens:
                continue
            h.model.cut(job)
            job.last_token_s = sim.now
            self._send(h, job)
        while h.model.retracted:
            self._send(h, h.model.retracted.popleft())

    def _send(self, h: Handle, job: Job) -> None:
        sim = self._sim
        start = max(sim.now, self._link_free_s.get(h.name, 0.0))
        done = start + job.context * sim.cost.kv_bytes_per_token / HANDOFF_BYTES_PER_S
        self._link_free_s[h.name] = done
        sim.at(done, self._adopt, h, job)

    def _adopt(self, origin: Handle, job: Job) -> None:
        sim = self._sim
        peers = [x for x in sim.order if x is not origin and x.routed and x.model.role is Role.DECODE]
        for peer in peers:
            if peer.step is not None and peer.model.kv.outgrown_in(peer.step.repeats, job):
                sim.settled(peer)
        peers.sort(key=lambda x: (x.model.kv_committed, x.index))
        for peer in peers:
            if peer.model.adopt(job):
                sim.wake(peer)
                return
        sim.after(_ADOPT_AGAIN_S, self._adopt, origin, job)  # every peer is full: its KV waits where it is

    # ------------------------------------------------------------ the table

    def _event(self, h: Handle, event: Event) -> None:
        assert h.move is not None and h.flip is not None
        h.move, effects = step(h.move, event)
        moved = h.move
        for effect in effects:
            self._effect(h, h.flip, effect)
        if not moved.open:
            h.move, h.flip, h.view = None, None, None

    def _effect(self, h: Handle, flip: Flip, effect: Effect) -> None:
        sim = self._sim
        match effect:
            case Effect.LEAVE_ROUTER:
                h.routed = False
                sim.routing_changed()
                sim.after(LEAVE_S, self._event, h, Event.LEFT_ROUTER)
            case Effect.DRAIN:
                h.model.draining = True
                sim.timeline.roles.append((sim.now, h.name, "draining"))
                sim.wake(h)
            case Effect.REMAP:
                sim.after(REMAP_S, self._event, h, Event.OK)
            case Effect.SWITCH:
                sim.timeline.roles.append((sim.now, h.name, "switching"))
                sim.after(SWITCH_S[flip.to_role], self._switched, h, flip)
            case Effect.VERIFY:
                sim.after(VERIFY_S, self._event, h, Event.OK)
            case Effect.JOIN_ROUTER:
                sim.after(JOIN_S, self._joined, h, flip)
            case _:
                pass

    def _switched(self, h: Handle, flip: Flip) -> None:
        h.model.role, h.model.draining, h.model.grant = flip.to_role, False, None
        if h.model.cache is not None:
            h.model.cache.clear()
        self._event(h, Event.OK)

    def _joined(self, h: Handle, flip: Flip) -> None:
        h.routed, h.role_since_s = True, self._sim.now
        self._sim.routing_changed()
        if flip.to_role is Role.PREFILL:
            self._sim.flips_to_prefill += 1
        else:
            self._sim.flips_to_decode += 1
        self._sim.timeline.roles.append((self._sim.now, h.name, flip.to_role.value))
        self._event(h, Event.JOINED_ROUTER)
