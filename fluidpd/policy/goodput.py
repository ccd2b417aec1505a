"""Judgement by predicted goodput: roll what could be done forward, do what lets most requests meet both targets.

Replaces the thresholds' judgement and nothing else: pauses, pins, quorum, emergencies, floors, residence, survivors and the
budget of moves come first, as they do with thresholds. Lending keeps its reflex. Where the model cannot be trusted the thresholds
judge, and the decision says so.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from fluidpd.decision import Decision, Flip, Refusal
from fluidpd.indices import Indices, Targets
from fluidpd.names import Action, Reason, Role, Trigger
from fluidpd.policy.balance import BETTER, ENOUGH, Need, need_of
from fluidpd.policy.decide import LAWS, THRESHOLDS, Facts, after, calm, decide, facts_of, first_allowed, first_of, home, revoke
from fluidpd.policy.decide import with_slack as able_to_lend
from fluidpd.policy.forecast import Demand, observed_demand
from fluidpd.policy.memory import Memory, observed
from fluidpd.policy.rollout import Plan, Predicted, roll
from fluidpd.policy.scene import Future, Scene, drain_s, scene_of
from fluidpd.policy.settings import PolicySettings
from fluidpd.telemetry import Known, Snapshot

_KNOWN_AFTER_S = 2.0  # of watching, before a forecast is worth anything
_SUSTAINED_AFTER_S = 20.0  # of watching, before a load counts as sustained
_HOME_COST = 0.5  # requests that going home may cost by prediction
_EARLY_BELOW = 0.7  # decode pressure of workers that lend before prefill is over its limit
_RETURN = 2.0  # a move is paid for there and back


def decide_by_goodput(
    snapshot: Snapshot,
    indices: Indices,
    memory: Memory,
    settings: PolicySettings,
    now_s: float,
    targets: Targets | None = None,
    future: Future | None = None,
) -> tuple[Decision, Memory]:
    """Judge one snapshot. The same shape as `fluidpd.policy.decide.decide`; `future` stands in for the forecast."""
    if targets is None:
        return decide(snapshot, indices, memory, settings, now_s, targets)
    demand = observed_demand(memory.demand, snapshot)
    memory = replace(observed(memory, snapshot, indices, settings), demand=demand)
    facts = facts_of(snapshot, indices, memory, settings, targets)
    law = next((d for rule in LAWS if (d := rule(facts)) is not None), None)
    if law is not None:
        return law, after(law, replace(facts.memory, favoured=None))
    unsure, off = _unsure(facts, demand)
    if unsure:
        decision = _with_numbers(first_of(THRESHOLDS, facts), {"model_residual_share": off})
        return decision, after(decision, replace(facts.memory, favoured=None, lends_early=False, weighed={}))
    decision, memory = _judged(facts, targets, future)
    return decision, after(decision, memory)


def _unsure(f: Facts, demand: Demand) -> tuple[bool, float | None]:
    """Whether the model cannot be trusted, and how far measured steps are off it; None = not known."""
    if f.missing or demand.prompt_rate.seen_s < _KNOWN_AFTER_S:
        return True, None
    factors = []
    for w in f.snapshot.of(Role.DECODE):
        measured, p = w.readings.step_s, f.indices.workers.get(w.name)
        if isinstance(measured, Known) and measured.value > 0 and p is not None and p.step_s:
            factor = measured.value / p.step_s
            factors.append(factor if factor >= 1 else 1 / factor)
    if not factors:
        return False, None
    off = sorted(factors)[len(factors) // 2] - 1  # of the worker in the middle: one odd one is its own trouble
    return off > f.settings.goodput_residual_share, off


# ---------------------------------------------------------------- weighing


@dataclass(frozen=True, slots=True)
class _Option:
    name: str
    plan: Plan
    predicted: Predicted
    flips: tuple[Flip, ...] = ()


def _judged(f: Facts, targets: Targets, future: Future | None) -> tuple[Decision, Memory]:
    m = f.memory
    waits = isinstance(f.indices.ppi, Known)  # lending early still means that something waits
    able = (f.lenders or _at_ease(f, able_to_lend(f.snapshot, f.indices, m, f.settings))) if waits else ()
    if m.weighed_s is not None and f.now_s - m.weighed_s < f.settings.goodput_every_s - 1e-6:
        return _stay(f, able, ()), m
    demand = m.demand
    assert demand is not None
    scene = scene_of(f.snapshot, f.indices, demand, targets, future)
    coming = sum(many for _, many in scene.arrivals)
    margin = max(f.settings.goodput_margin, f.settings.goodput_margin_share * coming)
    lending = able if m.lends_early else f.lenders
    stay = _Option("stay", Plan(len(lending)), roll(scene, Plan(len(lending))))
    m = replace(m, weighed_s=f.now_s)
    need, split = need_of(scene, f.settings.borrow), (sum(line.workers for line in scene.lines if line.takes), scene.decoders)
    # While prompts wait a worker that drains would be missed: it can neither take new ones nor lend.
    at_ease = not isinstance(f.indices.ppi, Known) or f.indices.ppi.value < f.settings.prefill_idle
    better = need.better(*split) if at_ease and demand.prompt_rate.seen_s >= _SUSTAINED_AFTER_S else None
    shown = {"headroom": round(need.headroom(*split), 2)}
    if stay.predicted.late < margin:  # nothing can save what is not lost
        moves, refusals = _moves(f, scene, stay.plan.lenders, better) if better is not None else ([], ())
        m = replace(m, weighed={**_shown([stay, *moves], margin), **shown}, lends_early=m.lends_early and bool(f.lenders))
        if better is None:
            m = replace(m, favoured=None)
            f = replace(f, memory=m)
            return _homeward(f, scene, stay, need, split) or _stay(f, able, ()), m
        best = next((o for o in moves if stay.predicted.good - o.predicted.good < margin), None)
        return _made(f, m, best, lending, able, refusals)
    options = [stay, *_lending(f, scene, lending, able)]
    calmest = max(options, key=lambda o: (o.predicted.good, o.name == "stay"))
    if calmest.predicted.good - stay.predicted.good <= margin / 2:
        calmest = stay
    early = calmest.name == "lend" or (m.lends_early and calmest.name == "stay")
    moves, refusals = _moves(f, scene, calmest.plan.lenders)
    shed = replace(calmest.plan, shed=True)
    rejecting = _Option("shed", shed, roll(scene, shed))  # told, never done: turning requests away is a person's choice
    m = replace(m, lends_early=early, weighed={**_shown([*options, *moves, rejecting], margin), **shown})
    # Where the sustained load is more than a split carries, a roll of seconds is no reason to make that worse.
    sound = [o for o in moves if o.plan.to is not None and not need.spoils(*split, o.plan.to)]
    best = max(sound, key=lambda o: o.predicted.good, default=None)
    if best is None or best.predicted.good - calmest.predicted.good <= margin:
        best = next((o for o in moves if o.plan.to is better and o.predicted.good >= calmest.predicted.good), None)
    return _made(f, m, best, able if early else f.lenders, able, refusals)


def _at_ease(f: Facts, able: tuple[str, ...]) -> tuple[str, ...]:
    """Of decode workers that could lend, those far from their limit. Before prefill is over its own, nothing is worth longer
    steps to one that is near it: longer steps mean more generations at a time."""

    def pressure(name: str) -> float:
        reading = f.indices.workers[name].pressure
        return reading.value if isinstance(reading, Known) else 0.0

    return tuple(name for name in able if pressure(name) < _EARLY_BELOW)


def _made(
    f: Facts, m: Memory, best: _Option | None, lenders: tuple[str, ...], able: tuple[str, ...], refusals: tuple[Refusal, ...]
) -> tuple[Decision, Memory]:
    """A move that has been the best one for a while; until then, and without one, stay."""
    if best is None:
        m = replace(m, favoured=None)
        return _stay(replace(f, memory=m), able, refusals), m
    since = m.favoured[1] if m.favoured is not None and m.favoured[0] == best.name else f.now_s
    m = replace(m, favoured=(best.name, since))
    f = replace(f, memory=m)
    if f.now_s - since < f.settings.goodput_persist_s - 1e-6:
        return _stay(f, able, refusals), m
    return _with_numbers(f.say(Action.FLIP, Reason.GOODPUT_FLIP, flips=best.flips, lenders=lenders), m.weighed), m


def _lending(f: Facts, scene: Scene, lending: tuple[str, ...], able: tuple[str, ...]) -> list[_Option]:
    """More lenders, and none."""
    found = []
    for name, many in (("lend", len(able)), ("withhold", 0)):
        if many != len(lending) and (many or f.lenders):
            plan = Plan(many)
            found.append(_Option(name, plan, roll(scene, plan)))
    return found


def _moves(f: Facts, scene: Scene, lenders: float, only: Role | None = None) -> tuple[list[_Option], tuple[Refusal, ...]]:
    """One worker to either role, or to `only` one: the cheapest that every guard lets go."""
    if not f.settings.flip:
        return [], ()
    options: list[_Option] = []
    refused: tuple[Refusal, ...] = ()
    for name, from_role in (("to_prefill", Role.DECODE), ("to_decode", Role.PREFILL)):
        if only is from_role:
            continue
        flips, refusals = first_allowed(f, from_role, Trigger.AUTO)
        refused += refusals
        if flips:
            plan = _plan(f, scene, flips[0], lenders)
            options.append(_Option(name, plan, _there_and_back(roll(scene, plan), scene, plan), flips))
    return options, refused[:8]


def _plan(f: Facts, scene: Scene, flip: Flip, lenders: float) -> Plan:
    w = next(w for w in f.snapshot.workers if w.name == flip.worker)
    batch = w.readings.batch
    moved = batch.value if isinstance(batch, Known) and w.role is Role.DECODE else 0.0
    if w.role is Role.PREFILL:
        return Plan(lenders, flip.to_role, drain_s(w, f.indices, 0.0, 0.0), moved, w.name)
    # Its own rooms wait at prefill workers: they are served there in order, or lent here.
    longest = max((line.total / line.workers for line in scene.lines), default=0.0)
    own = sum(line.total for line in scene.lines) / max(1.0, scene.decoders)
    waits = min(longest, own / 0.7 + 0.3) if lenders else longest
    step = f.indices.workers[w.name].step_s or 0.02
    return Plan(lenders, flip.to_role, drain_s(w, f.indices, waits, step), moved, w.name)


def _there_and_back(p: Predicted, scene: Scene, plan: Plan) -> Predicted:
    """What is handed off on the way there is handed off on the way back as well, one day."""
    lost = (_RETURN - 1) * min(plan.moved, 4.0) * (1 - math.exp(-100.0 / scene.output)) * 0.5
    return Predicted(p.good - lost, p.late + lost)


def _shown(options: list[_Option], margin: float) -> dict[str, float | None]:
    shown: dict[str, float | None] = {f"good_if_{o.name}": round(o.predicted.good, 2) for o in options}
    return {**shown, "late_if_stay": round(options[0].predicted.late, 2), "goodput_margin": round(margin, 2)}


# ---------------------------------------------------------------- saying


def _stay(f: Facts, able: tuple[str, ...], refusals: tuple[Refusal, ...]) -> Decision:
    """No move: lend by reflex, or early because it was predicted to pay; or nothing."""
    lenders = able if f.memory.lends_early else f.lenders
    g = replace(f, lenders=lenders)
    shown = f.memory.weighed
    if (stopped := revoke(g)) is not None:
        return _with_numbers(stopped, shown)
    if lenders:
        reason = Reason.PREFILL_OVER_BORROW if lenders == f.lenders else Reason.GOODPUT_BORROW
        return _with_numbers(g.say(Action.BORROW, reason, lenders=lenders, refusals=refusals), shown)
    if "good_if_shed" in shown:  # something is being lost, and nothing that may be done saves enough of it
        return _with_numbers(g.say(Action.HOLD, Reason.GOODPUT_STAY, refusals=refusals), shown)
    quiet = calm(g)
    assert quiet is not None
    return _with_numbers(quiet, shown)


def _with_numbers(decision: Decision, more: Mapping[str, float | None]) -> Decision:
    return replace(decision, numbers={**decision.numbers, **more})


def _homeward(f: Facts, scene: Scene, stay: _Option, need: Need, split: tuple[float, float]) -> Decision | None:
    """Back to the usual split, if the thresholds would, it has room for the load, and nobody is predicted to pay for it."""
    decision = home(f)
    if decision is None or not decision.flips or need.headroom(split[0] - 1, split[1] + 1) < ENOUGH * BETTER:
        return None
    plan = _plan(f, scene, decision.flips[0], stay.plan.lenders)
    cost = stay.predicted.good - roll(scene, plan).good
    return _with_numbers(decision, f.memory.weighed) if cost < _HOME_COST else None
