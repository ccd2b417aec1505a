"""What each phase of a role move does at the engine and its plugin, and which event it ends in.

Never decides what comes next: fluidpd.transition does. Never writes the journal and never talks to the controller.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from fluidpd.command import MoveOrder
from fluidpd.names import Role, Rule
from fluidpd.transition import Event
from sidecar.clock import Clock
from sidecar.ports import Engine, Plugin, PluginGone, SwitchAnswer, WorkLeft
from sidecar.protocol import CAN_HANDOFF, CAN_HOLD, CAN_REMAP
from sidecar.settings import PhaseLimits

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Outcome:
    event: Event
    detail: str = ""
    numbers: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Told:
    """What came of telling the peers to forget this worker's old bootstrap entry. `missing`: those that had to, and why not."""

    numbers: Mapping[str, Any] = field(default_factory=dict)
    missing: Mapping[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        rule = Rule.PEERS_HOLD_STALE_BOOTSTRAP.value
        return f"{rule}: " + "; ".join(f"{name}: {why}" for name, why in self.missing.items()) if self.missing else ""


DropStale = Callable[[MoveOrder], Awaitable[Told]]
_LOOK_S = 2.0  # what one look at the engine, with its probe, may take
_GRACE_S = 0.5  # the plugin's own deadline is the drain's; its answer gets this long to arrive


class Phases:
    """Each method is one effect of the table. Deadlines are counted here, on this process's own clock."""

    def __init__(
        self,
        engine: Engine,
        plugin: Plugin,
        clock: Clock,
        limits: PhaseLimits,
        *,
        drop_stale: DropStale,
        allow_plain_drain: bool = True,
        mark_not_flippable: Callable[[str], None] = lambda why: None,
    ) -> None:
        self._engine = engine
        self._plugin = plugin
        self._clock = clock
        self._limits = limits
        self._drop_stale = drop_stale
        self._allow_plain_drain = allow_plain_drain
        self._mark_not_flippable = mark_not_flippable

    async def preflight(self, order: MoveOrder) -> Outcome:
        """Ask what would be refused, before anything drains."""
        try:
            async with asyncio.timeout(self._limits.preflight_s):
                look = await self._engine.look()
                if not look.reachable:
                    return Outcome(Event.NO_ANSWER, f"the engine does not answer: {look.detail}")
                if not look.healthy:
                    return Outcome(Event.FAILED, f"the engine is not healthy: {look.detail}")
                if look.role is not order.from_role:
                    return Outcome(Event.REFUSED, f"the engine serves {look.role or 'an unknown role'}, not {order.from_role}")
                if not self._plugin.connected and not self._allow_plain_drain:
                    return Outcome(Event.REFUSED, "no plugin is connected, and allow_plain_drain is off")
                result = await self._engine.prepare_switch(order.to_role)
                if any(p.must for p in order.stale_peers) and result.answer in (SwitchAnswer.OK, SwitchAnswer.BUSY):
                    # Nobody uses this worker as prefill now: what is cached of it is old, and must be gone before anyone does.
                    told = await self._tell_peers(order)
                    if told.missing:
                        return Outcome(Event.REFUSED, str(told), told.numbers)
        except TimeoutError:
            return Outcome(Event.EXPIRED, f"preflight took longer than {self._limits.preflight_s:g} s")
        match result.answer:
            case SwitchAnswer.OK:
                return Outcome(Event.OK)
            case SwitchAnswer.BUSY:
                return Outcome(Event.OK, "busy now, as a serving worker is; the drain comes next")
            case SwitchAnswer.NOT_FLIPPABLE:
                self._mark_not_flippable(result.message)
                return Outcome(Event.REFUSED, result.message, {"not_flippable": True})
            case SwitchAnswer.BROKE:
                return Outcome(Event.BROKE, result.message)
            case SwitchAnswer.NO_ANSWER:
                return Outcome(Event.NO_ANSWER, result.message)
            case _:
                return Outcome(Event.REFUSED, result.message)

    async def drain(self, order: MoveOrder) -> Outcome:
        """Until the engine is wholly idle; then early requests of the new kind are held, because the router may send them now."""
        started_s = self._clock.now()
        last = WorkLeft(readable=False, detail="not asked yet")
        numbers: dict[str, Any] = {}
        detail = ""
        try:
            async with asyncio.timeout(order.drain_deadline_s + _GRACE_S):
                if self._plugin.connected:
                    reply = await self._plugin.order(
                        "drain",
                        timeout_s=order.drain_deadline_s + _GRACE_S,
                        role=order.from_role,
                        deadline_s=order.drain_deadline_s,
                        natural_end_tokens=order.natural_end_tokens,
                        handoff=self._plugin.can(CAN_HANDOFF) and bool(order.handoff_peers),
                    )
                    numbers.update(reply.numbers)
                    if not reply.ok and self._clock.now() - started_s >= order.drain_deadline_s - _GRACE_S / 10:
                        raise TimeoutError
                    if not reply.ok:
                        return Outcome(Event.FAILED, f"the plugin could not drain: {reply.detail}", numbers)
                idle, polls, waited_for = 0, 0, dict[str, float]()
                needed = 1 if self._plugin.connected else self._limits.idle_polls
                while idle < needed:
                    last = await self._engine.work_left()
                    polls += 1
                    idle = idle + 1 if last.idle else 0
                    for name in last.busy_with():
                        waited_for[name] = round(self._clock.now() - started_s, 3)
                    if idle < needed:
                        if self._clock.now() - started_s > order.drain_deadline_s:
                            raise TimeoutError
                        await self._clock.sleep(self._limits.poll_s)
                numbers |= {"polls": polls, **{f"{name}_s": seconds for name, seconds in waited_for.items()}}
        except TimeoutError:
            last = last if last.readable else await self._engine.work_left()
            counts = {name: count for name, count in last.busy_with().items() if count is not None}
            passed = f"the drain's deadline of {order.drain_deadline_s:g} s passed with {last}"
            if not order.drain_abort:
                return Outcome(Event.EXPIRED, passed, numbers | counts)
            if why := await self._abort_what_is_left():
                return Outcome(Event.EXPIRED, f"{passed}, and it could not be aborted: {why}", numbers | counts)
            detail = f"{passed}: aborted, as policy.drain_abort says"
            log.warning("move %s: %s", order.move_id, detail)
            numbers |= {f"aborted_{name}": count for name, count in counts.items()}
        except PluginGone as error:
            return Outcome(Event.FAILED, str(error), numbers)
        held = await self._hold(order.to_role)
        numbers["held"] = held
        if order.to_role is Role.PREFILL:
            # Before the router may send anybody here: later, what a peer has just learned would be dropped with the stale, and
            # an announcement on its way would be lost with it. Both halves of that pair would wait for ever.
            told = await self._tell_peers(order)
            numbers |= told.numbers
            if told.missing:
                return Outcome(Event.FAILED, str(told), numbers)
        cannot = "" if held else "early requests of the new role cannot be held here"
        return Outcome(Event.OK, "; ".join(filter(None, (detail, cannot))), numbers)

    async def _abort_what_is_left(self) -> str:
        """A person has chosen this over going home. Why the engine is not idle after it; "" if it is."""
        if why := await self._engine.abort_all():
            return why
        until_s, idle, left = self._clock.now() + self._limits.abort_s, 0, WorkLeft(readable=False)
        while idle < self._limits.idle_polls:
            left = await self._engine.work_left()
            idle = idle + 1 if left.idle else 0
            if idle < self._limits.idle_polls:
                if self._clock.now() > until_s:
                    return f"{left} after {self._limits.abort_s:g} s"
                await self._clock.sleep(self._limits.poll_s)
        return ""

    async def _hold(self, role: Role) -> bool:
        if not self._plugin.can(CAN_HOLD):
            return False
        try:
            return (await self._plugin.order("hold", timeout_s=self._limits.hold_s, role=role)).ok
        except (PluginGone, TimeoutError):
            return False

    async def remap(self, order: MoveOrder) -> Outcome:
        if not self._plugin.can(CAN_REMAP):
            return Outcome(Event.OK, "none: one pool serves both roles")
        try:
            reply = await self._plugin.order("remap", timeout_s=self._limits.remap_s, role=order.to_role)
        except TimeoutError:
            return Outcome(Event.EXPIRED, f"remap took longer than {self._limits.remap_s:g} s")
        except PluginGone as error:
            return Outcome(Event.FAILED, str(error))
        return Outcome(Event.OK if reply.ok else Event.FAILED, reply.detail, dict(reply.numbers))

    async def switch(self, order: MoveOrder) -> Outcome:
        try:
            async with asyncio.timeout(self._limits.switch_s):
                result = await self._engine.switch(order.to_role)
        except TimeoutError:
            return Outcome(Event.NO_ANSWER, f"no answer within {self._limits.switch_s:g} s")
        match result.answer:
            case SwitchAnswer.OK:
                return Outcome(Event.OK, result.message)
            case SwitchAnswer.BROKE:
                return Outcome(Event.BROKE, result.message)
            case SwitchAnswer.NO_ANSWER:
                return Outcome(Event.NO_ANSWER, result.message)
            case SwitchAnswer.NOT_FLIPPABLE:
                self._mark_not_flippable(result.message)
                return Outcome(Event.REFUSED, result.message, {"not_flippable": True})
            case _:
                return Outcome(Event.REFUSED, result.message, {"busy": result.answer is SwitchAnswer.BUSY})

    async def verify(self, order: MoveOrder, switch_answered: bool) -> Outcome:
        """Look until the new role is read back and a probe of its kind passes.

        The old role is believed after a few read-backs if the engine had answered the switch; if it had not, the switch may still
        be under way, so it is believed only at the deadline. What an engine noted before the switch says nothing: the first note
        seen here may be such a one, and only those made after it count.
        """
        told = Told()
        deadline_s = self._clock.now() + self._limits.verify_s
        old_reads = 0
        noted: float | None = None  # the stamp of the newest look
        detail = "not asked yet"
        while True:
            role, stamp = None, None
            try:
                # The last look is not cut off by the deadline: a slow answer of a whole engine is no broken engine.
                async with asyncio.timeout(max(_LOOK_S, deadline_s - self._clock.now())):
                    look = await self._engine.look()
                    role, stamp = (look.role if look.reachable and look.healthy else None), look.stamp
                    detail = f"role read back: {look.role or 'none'}; {look.detail}"
                    if role is order.to_role:
                        old_reads = 0
                        probe = await self._engine.probe(order.to_role)
                        detail = f"probe {probe.name}: {probe.detail}"
                        if probe.ok:
                            if order.to_role is Role.DECODE:
                                told = await self._tell_peers(order)
                            return Outcome(Event.OK, detail, told.numbers)
            except TimeoutError:
                detail = f"the engine did not answer in time; before: {detail}"
            if role is order.from_role:
                old_reads += stamp is None or noted not in (None, stamp)
                noted = stamp
                if switch_answered and old_reads >= self._limits.old_role_reads:
                    return Outcome(Event.FAILED, f"the engine answered ok and still serves {role}")
            if self._clock.now() >= deadline_s:
                if role is order.from_role:
                    return Outcome(Event.FAILED, f"the engine still serves {role} after {self._limits.verify_s:g} s")
                return Outcome(Event.EXPIRED, f"not verified within {self._limits.verify_s:g} s: {detail}", told.numbers)
            await self._clock.sleep(self._limits.poll_s)

    async def _tell_peers(self, order: MoveOrder) -> Told:
        """A defect in telling them counts as not told: what it means depends on who had to be."""
        try:
            return await self._drop_stale(order)
        except Exception as error:
            log.exception("move %s: peers could not be told to drop what they cached", order.move_id)
            why = f"{type(error).__name__}: {error}"
            return Told({"drop_stale_failed": why}, {p.worker: why for p in order.stale_peers if p.must})

    async def open_gate(self, order: MoveOrder, with_plugin: bool) -> str:
        """Let held requests in, and end the drain. Returns what went wrong, or nothing."""
        if self._plugin.connected and not self._plugin.can(CAN_HOLD):
            return await self._insist("undrain", "", order.to_role, with_plugin)
        return await self._insist("open_gate", CAN_HOLD, order.to_role, with_plugin)

    async def restore_arena(self, order: MoveOrder, with_plugin: bool) -> str:
        return await self._insist("restore_arena", CAN_REMAP, order.from_role, with_plugin)

    async def undrain(self, order: MoveOrder, with_plugin: bool) -> str:
        dropped = await self._insist("drop_held", CAN_HOLD, order.to_role, with_plugin)
        return dropped or await self._insist("undrain", "", order.from_role, with_plugin)

    async def _insist(self, what: str, capability: str, role: Role, with_plugin: bool) -> str:
        """Order it until it is done or time is up: a worker that may still refuse or hold requests must not go to the router.

        Where a plugin took part it is waited for, because it may be reconnecting; where none did there is nothing to undo.
        """
        until_s = self._clock.now() + self._limits.undo_s
        said = "the plugin did not come back"
        while with_plugin or self._plugin.connected:
            if self._plugin.connected:
                if capability and not self._plugin.can(capability):
                    return ""
                try:
                    reply = await self._plugin.order(what, timeout_s=max(0.05, until_s - self._clock.now()), role=role)
                    if reply.ok:
                        return ""
                    said = reply.detail or "the plugin could not"
                except (PluginGone, TimeoutError) as error:
                    said = str(error) or "no answer"
            if self._clock.now() >= until_s:
                return f"{what}: {said}"
            await self._clock.sleep(self._limits.poll_s)
        return ""
