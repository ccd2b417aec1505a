"""A coarse, fast model of the fleet, rolled forward a few seconds: how many requests would meet both targets if we did this?

Prefill serves in order of arrival, lost causes included unless it can triage; lenders take what waits too long elsewhere and can
still be saved. A decode worker's generations stay with it. Requests are expected counts, so half a request is an answer. Never
decides.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from fluidpd.names import Role
from fluidpd.policy.scene import LEAST_LENT, LENT_SHARE, MOST_LENT, NATURAL_END_TOKENS, STEPS_S, SWITCH_S, Batch, Line, Scene

HORIZON_S = sum(STEPS_S)
BEYOND_S = 20.0  # decode fills slower than a roll lasts: its load is projected so much further
_PACKED_S = 0.6  # the longest forward of packed prompts: all of them are done when the last one is
_COARSE = 1024  # tokens of context that make no difference
_SOFT_S = 0.15  # a predicted wait this far off the target is as good as sure


@dataclass(frozen=True, slots=True)
class Plan:
    """What is done at 0 s. `lenders`: decode workers that lend, from now on. `to`: one worker starts to change its role."""

    lenders: float
    to: Role | None = None
    drain_s: float = 0.0  # until it is empty
    moved: float = 0.0  # generations that are handed off
    worker: str = ""  # who
    shed: bool = False  # lost causes are turned away


@dataclass(frozen=True, slots=True)
class Predicted:
    good: float  # requests within both targets: finished, running or waiting at the end
    late: float  # those that will miss one


def roll(scene: Scene, plan: Plan) -> Predicted:
    """One alternative, `HORIZON_S` seconds long."""
    lines = [line.copy() for line in scene.lines]
    batches = [b.copy() for b in scene.batches]
    joins = list(scene.joins)
    stops_s = math.inf  # when the one that leaves stops lending
    if plan.to is Role.PREFILL:
        stops_s = plan.drain_s
        _hand_over(batches, scene, plan)
        joins.append((plan.drain_s + SWITCH_S[Role.PREFILL], Role.PREFILL))
    elif plan.to is Role.DECODE:
        _split(lines, plan)
        joins.append((plan.drain_s + SWITCH_S[Role.DECODE], Role.DECODE))
    for at, role in joins:
        if role is Role.PREFILL:
            lines.append(Line(1.0, from_s=at, takes=False))
        else:
            batches.append(Batch(1.0, from_s=at))
    _appoint(batches, plan.lenders)

    ttft, tbt, work_s, output, per_token = scene.ttft_s, scene.tbt_s, scene.work_s, scene.output, scene.work_per_token
    done_good = late = now = 0.0
    paces = scene.paces
    fatal_s = max(1.0, 0.01 * output)  # steps over the target that make a request a miss
    lent_wait = work_s / 0.7  # a lender's own time with one prompt
    for dt, (tokens, coming) in zip(STEPS_S, scene.arrivals, strict=True):
        mid = now + 0.5 * dt
        # ---- arrivals, shared out in turn
        open_ = 0.0
        for line in lines:
            if not line.takes and 0.0 < line.from_s <= now:
                line.takes = True
            if line.takes:
                open_ += line.workers
        if coming > 0:
            if open_ > 0:
                for line in lines:
                    if line.takes:
                        part = line.workers / open_
                        line.add(mid, tokens * per_token * part, coming * part)
            else:
                late += coming
        # ---- decode: how long a step takes, and what can be lent beside it
        lent = context = serving = 0.0
        pace: list[tuple[float, float]] = []
        for b in batches:
            if b.from_s > now:
                pace.append((0.0, 0.0))
                continue
            key = (math.ceil(b.many / b.workers), int(b.context / b.workers / _COARSE))
            found = paces.get(key)
            if found is None:
                found = paces[key] = _pace(scene, key[0], key[1] * _COARSE)
            base_s, lent_step_s, speed = found
            pace.append((base_s, lent_step_s))
            lent += b.lends * speed
            context += b.context
            serving += b.workers
        if plan.to is Role.PREFILL and plan.lenders and now < stops_s:
            lent += 0.7  # it goes on with its own rooms
        queued = sum([line.total for line in lines])
        # KV: whoever waits for prefill has its space already, or waits for that: then prefill cannot start it.
        room = serving * scene.capacity - context - queued / per_token
        ready = 1.0 if room >= 0 or queued <= 0 else max(0.0, 1.0 + room * per_token / queued)
        # ---- lenders first: they take what can still be saved
        first_good = first_late = lent_share = 0.0
        budget = lent * LENT_SHARE * dt * ready
        if budget > 0 and queued > 0:
            given = budget
            for line in sorted(lines, key=_wait, reverse=True):
                if budget <= 0:
                    break
                good, bad, budget = _lend(line, budget, mid, ttft, lent_wait)
                first_good += good
                first_late += bad
            lent_share = 1 - budget / given
        for line in lines:
            if line.total > 0 and line.from_s <= now:
                good, bad = _serve(line, line.workers * dt * ready, mid, scene, plan.shed or scene.triage)
                first_good += good
                first_late += bad
        # ---- decode goes on
        for b, (base_s, lent_step_s) in zip(batches, pace, strict=True):
            if b.from_s > now:
                continue
            if b.many > 0:
                if base_s > 0.96 * tbt:
                    lost = b.good * min(1.0, (base_s / tbt - 0.96) / 0.08) * min(1.0, dt / (fatal_s * base_s))
                    b.good -= lost
                    late += lost
                spent = base_s + (lent_step_s - base_s) * lent_share * b.lends / b.workers
                made = b.many * dt / spent
                ends = min(b.many, made / output)
                done = b.good * ends / b.many
                done_good += done
                b.good -= done
                b.context += made - ends * b.context / b.many
                b.many -= ends
            part = b.workers / serving
            b.many += (first_good + first_late) * part
            b.context += (first_good + first_late) * scene.prompt * part
            b.good += first_good * part
        late += first_late
        now += dt
    for line in lines:
        good, bad = _owed(line, now, scene, (line.workers if line.from_s <= now else 0.0), plan.lenders, len(lines))
        done_good += good
        late += bad
    good, bad = _beyond(batches, scene)
    lost = _handed_off(scene, plan)
    return Predicted(done_good + good - lost, late + bad + lost)


def _beyond(batches: list[Batch], scene: Scene) -> tuple[float, float]:
    """What becomes of those still running: if their worker is on its way over the target, or out of space, they go with it."""
    coming = scene.requests_per_s  # not those of a burst: how long its generations last is not known
    serving = sum(b.workers for b in batches)
    good = bad = 0.0
    for b in batches:
        if b.good <= 0:
            continue
        many, context = b.many / b.workers, b.context / b.workers
        lasts = max(1e-3, scene.output * scene.step.decode_s(max(1, round(many)), round(context)))  # one generation, seconds
        fade = math.exp(-BEYOND_S / lasts)
        later = coming / serving * lasts * (1 - fade) + many * fade  # Little's law on one worker
        each = context / max(many, 1e-9) + 0.5 * scene.output * min(1.0, BEYOND_S / lasts)
        step = scene.step.decode_s(max(1, round(later)), round(later * each))
        over = max((step / scene.tbt_s - 0.92) / 0.12, (later * each / scene.capacity - 0.9) / 0.1)
        lost = b.good * min(1.0, max(0.0, over)) * fade
        good += b.good - lost
        bad += lost
    return good, bad


def _appoint(batches: list[Batch], lenders: float) -> None:
    """The lightest lend first."""
    for b in batches:
        b.lends = min(b.workers, lenders)
        lenders -= b.lends


def _hand_over(batches: list[Batch], scene: Scene, plan: Plan) -> None:
    """One decode worker leaves: its generations go on at the lightest of the others."""
    for i, (b, origin) in enumerate(zip(batches, scene.batches, strict=True)):
        if plan.worker not in origin.names:
            continue
        part = 1 / b.workers
        many, context, good = b.many * part, b.context * part, b.good * part
        b.workers -= 1
        b.many, b.context, b.good = b.many - many, b.context - context, b.good - good
        if b.workers <= 0:
            del batches[i]
        if batches:
            batches[0].many += many
            batches[0].context += context
            batches[0].good += good
        return


def _wait(line: Line) -> float:
    return line.total / line.workers


def _split(lines: list[Line], plan: Plan) -> None:
    """One worker leaves its line with its share of the queue: nothing new comes to it."""
    line = next((x for x in lines if plan.worker in x.names), None)
    if line is None:
        return
    if line.workers <= 1:
        line.takes = False
        return
    part = 1.0 / line.workers
    out = Line(1.0, line.came[:], [x * part for x in line.work], [x * part for x in line.many], line.total * part, False)
    line.work = [x * (1 - part) for x in line.work]
    line.many = [x * (1 - part) for x in line.many]
    line.total *= 1 - part
    line.workers -= 1
    lines.append(out)


def _pace(scene: Scene, batch: int, context: int) -> tuple[float, float, float]:
    """A decode step, one with lent work, and prefill seconds lent per second."""
    step = scene.step
    if batch == 0:  # nobody to keep a deadline for: whole prompts
        return 0.0, scene.work_s, 1.0
    base = step.decode_s(batch, context)
    chunk = step.largest_chunk(scene.limit_s, MOST_LENT, 1024, batch, context)
    if chunk < LEAST_LENT:
        return base, base, 0.0
    lent = step.step_s(chunk, 1024, batch, context)
    return base, lent, chunk * scene.work_per_token / lent


def _chance(wait_s: float, ttft_s: float) -> float:
    """That a predicted wait keeps the target: sure well below it, a toss at it."""
    x = (ttft_s - wait_s) / _SOFT_S
    return 1.0 if x > 2 else 0.0 if x < -2 else 0.5 + 0.25 * x


def _serve(line: Line, budget: float, at_s: float, scene: Scene, shed: bool) -> tuple[float, float]:
    """In order of arrival. A request is done when its forward is, and a forward packs what waits."""
    came, work, many = line.came, line.work, line.many
    extra = scene.work_s * (1 - 1 / line.workers) + scene.transfer_s + 0.5 * min(_PACKED_S, line.total / line.workers)
    ttft = scene.ttft_s
    good = bad = 0.0
    i, n = 0, len(work)
    while budget > 0 and i < n:
        left, count = work[i], many[i]
        wait = at_s - came[i] + extra
        if shed and count and wait > ttft + _SOFT_S:
            bad += count
            line.total -= left
            i += 1
            continue
        if left <= budget:
            budget -= left
            taken = count
            i += 1
            line.total -= left
        else:
            taken = count * budget / left
            work[i], many[i] = left - budget, count - taken
            line.total -= budget
            budget = 0.0
        if taken:
            p = _chance(wait, ttft)
            good += taken * p
            bad += taken * (1 - p)
    if i:
        del came[:i], work[:i], many[:i]
    if not work:
        line.total = 0.0
    return good, bad


def _lend(line: Line, budget: float, at_s: float, ttft_s: float, own_s: float) -> tuple[float, float, float]:
    """The oldest that can still be saved, of those that would wait too long here."""
    came, work, many = line.came, line.work, line.many
    good = bad = 0.0
    ahead = 0.0
    for i in range(len(work)):
        left = work[i]
        if budget <= 0:
            break
        age = at_s - came[i]
        if many[i] and age + own_s <= ttft_s and ahead / line.workers > own_s:
            taken = min(left, budget)
            part = many[i] * taken / left if left > 0 else many[i]
            budget -= taken
            work[i] = left - taken
            many[i] -= part
            line.total -= taken
            p = _chance(age + own_s, ttft_s)
            good += part * p
            bad += part * (1 - p)
        ahead += work[i]
    return good, bad, budget


def _owed(line: Line, now_s: float, scene: Scene, workers: float, lenders: float, lines: int) -> tuple[float, float]:
    """What still waits at the end: counted by the wait it is heading for."""
    speed = max(0.25, workers) + 0.6 * lenders / max(1, lines)
    ahead = good = bad = 0.0
    for came, work, many in zip(line.came, line.work, line.many, strict=True):
        ahead += work
        p = _chance(now_s - came + ahead / speed + scene.transfer_s, scene.ttft_s)
        good += many * p
        bad += many * (1 - p)
    return good, bad


def _handed_off(scene: Scene, plan: Plan) -> float:
    """Generations that a move costs: one long gap is a miss for an output below a hundred tokens, and for no other."""
    if not plan.moved:
        return 0.0
    mean = scene.output
    return plan.moved * (1 - math.exp(-100.0 / mean)) * math.exp(-NATURAL_END_TOKENS / mean)
