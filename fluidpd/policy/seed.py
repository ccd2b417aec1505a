"""The seed's four rules, as it prints them, on its own two indices: a baseline for comparison. Nothing live uses this.

    1. PPI <= 1 and DPI <= 1                                      balanced
    2. PPI > 1 and DPI < theta_D_low                              FluidToken
    3. PPI > theta_P_high for tau_persist and DPI < theta_D_idle  FluidRole, decode to prefill
    4. DPI > theta_D_high for tau_persist and PPI < theta_P_idle  FluidRole, prefill to decode

What the seed leaves open is filled in as sparingly as can be: the victim is the cheapest one to drain, one worker of each role
always stays, one move at a time, and a worker keeps a new role for the seed's residence time. The seed gives no thresholds;
ours stand in for them. Its rules overlap (3 implies 2 where DPI is low): the later one is taken, since it is the stronger.
"""

from __future__ import annotations

from dataclasses import replace

from fluidpd.decision import Decision, Flip
from fluidpd.indices import Indices, Targets
from fluidpd.names import Action, Reason, Role, Trigger
from fluidpd.policy.memory import Memory
from fluidpd.policy.score import victims
from fluidpd.policy.settings import PolicySettings
from fluidpd.telemetry import Snapshot, value_of


def decide_as_the_seed(
    snapshot: Snapshot,
    indices: Indices,
    memory: Memory,
    settings: PolicySettings,
    now_s: float,
    targets: Targets | None = None,
) -> tuple[Decision, Memory]:
    """Judge one snapshot by the seed's rules. The same shape as `fluidpd.policy.decide.decide`."""
    ppi, dpi = value_of(indices.ppi_seed), value_of(indices.dpi_seed)
    high = ppi is not None and ppi > settings.prefill_high
    over = dpi is not None and dpi > settings.decode_high
    memory = replace(
        memory,
        prefill_high_since_s=(memory.prefill_high_since_s if memory.prefill_high_since_s is not None else now_s)
        if high
        else None,
        decode_high_since_s=(memory.decode_high_since_s if memory.decode_high_since_s is not None else now_s) if over else None,
    )

    def say(
        action: Action, reason: Reason, *, lenders: tuple[str, ...] = (), flips: tuple[Flip, ...] = ()
    ) -> tuple[Decision, Memory]:
        told = Decision(now_s, action, reason, flips=flips, lenders=lenders, numbers={"ppi_seed": ppi, "dpi_seed": dpi})
        after = memory.lent(lenders)
        return told, after.spent() if flips else after

    if ppi is None or dpi is None:
        return say(Action.HOLD, Reason.PRESSURE_UNKNOWN)
    to_prefill, to_decode = (
        _held(memory.prefill_high_since_s, now_s, settings),
        _held(memory.decode_high_since_s, now_s, settings),
    )
    lenders = tuple(w.name for w in snapshot.of(Role.DECODE) if w.serves) if ppi > 1.0 and dpi < settings.decode_low else ()
    if to_prefill and dpi < settings.decode_idle and (flip := _move(snapshot, indices, Role.DECODE, settings)) is not None:
        return say(Action.FLIP, Reason.PREFILL_SUSTAINED_FLIP, lenders=lenders, flips=(flip,))
    if to_decode and ppi < settings.prefill_idle and (flip := _move(snapshot, indices, Role.PREFILL, settings)) is not None:
        return say(Action.FLIP, Reason.DECODE_SUSTAINED_FLIP, flips=(flip,))
    if lenders:
        return say(Action.BORROW, Reason.PREFILL_OVER_BORROW, lenders=lenders)
    return say(Action.HOLD, Reason.BALANCED if ppi <= 1.0 and dpi <= 1.0 else Reason.PERSISTING)


def _held(since_s: float | None, now_s: float, settings: PolicySettings) -> bool:
    return since_s is not None and now_s - since_s >= settings.persist_s


def _move(snapshot: Snapshot, indices: Indices, from_role: Role, settings: PolicySettings) -> Flip | None:
    serving = [w for w in victims(snapshot, indices, from_role) if w.serves]
    if snapshot.open_moves or len(serving) < 2:
        return None
    free = [w for w in serving if snapshot.now_s - w.role_since_s >= settings.residence_s]
    return Flip(free[0].name, from_role, from_role.other, Trigger.AUTO) if free else None
