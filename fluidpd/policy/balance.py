"""Which split the sustained load asks for: what a roll of a few seconds cannot see, since generations last a minute.

Prompts and generations are counted in workers: how many would be busy with them. A split is worth the share of the load that it
would keep, so in overload the best one is that of the highest sustained throughput; where several keep all of it, the one that
could carry most times as much. Never decides.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from fluidpd.names import Role
from fluidpd.policy.scene import LEAST_LENT, LENT_SHARE, MOST_LENT, Scene

AHEAD_S = 20.0
# Prompts come in bursts and wait in one queue each: from this share of the time busy on, some are late; at the other all are.
PREFILL_EASE, PREFILL_LOST = 0.5, 1.4
# Generations share their worker's fate: near its limit all are in time still, and soon after it none. No estimate is so good
# that a worker should leave a pool that is close to it: who asks whether a move spoils something sees trouble sooner.
DECODE_EASE, DECODE_LOST = 0.95, 1.1
CAUTIOUS_EASE, CAUTIOUS_LOST = 0.87, 1.13
ENOUGH = 1.5  # a split that could carry so many times the load is left alone
BETTER = 1.15  # and a neighbour must carry so many times more than it
MOST_TIMES = 8.0  # a headroom above this is no different from it
WORTH = 0.05  # or keep so much more of the load
_KV_SHARE = 0.95
_MOST = 256


def _nothing(_: float) -> float:
    return 0.0


@dataclass(frozen=True, slots=True)
class Need:
    """In workers: `prefill` busy all the time, `decode` at the limit of their steps or of their KV space.

    `lent`: for how much of a prefill worker a decode worker stands in, by its own share of that limit.
    """

    prefill: float
    decode: float
    lent: Callable[[float], float] = _nothing

    def headroom(self, prefill: float, decode: float) -> float:
        """How many times this load so many workers of each role could carry at ease; `MOST_TIMES` stands for more."""
        most = min(MOST_TIMES, DECODE_EASE * decode / self.decode) if self.decode > 0 else MOST_TIMES

        def carries(times: float) -> bool:
            return times * self.prefill <= PREFILL_EASE * self._prefilling(prefill, decode, times)

        low, high = 0.0, most
        if carries(most):
            return most
        for _ in range(12):  # what is lent falls as decode gets fuller, so it is searched
            middle = 0.5 * (low + high)
            low, high = (middle, high) if carries(middle) else (low, middle)
        return low

    def _prefilling(self, prefill: float, decode: float, times: float = 1.0) -> float:
        """Prefill workers, and what decode workers stand in for at so many times this load."""
        return prefill + (decode * self.lent(times * self.decode / decode) if decode > 0 else 0.0)

    def kept(self, prefill: float, decode: float, cautious: bool = False) -> float:
        """The share of the load that so many workers of each role would serve in time."""
        ease, lost = (CAUTIOUS_EASE, CAUTIOUS_LOST) if cautious else (DECODE_EASE, DECODE_LOST)
        if prefill <= 0 or decode <= 0:
            return 0.0
        late = (self.prefill / self._prefilling(prefill, decode) - PREFILL_EASE) / (PREFILL_LOST - PREFILL_EASE)
        over = (self.decode / decode - ease) / (lost - ease)
        return (1 - min(1.0, max(0.0, late))) * (1 - min(1.0, max(0.0, over)))

    def better(self, prefill: float, decode: float) -> Role | None:
        """The role that a worker should turn to, if the split has too little headroom and its neighbour is clearly better."""
        now, kept = self.headroom(prefill, decode), self.kept(prefill, decode)
        if now >= ENOUGH:
            return None
        many = _step(prefill + decode)
        splits = {Role.PREFILL: (prefill + many, decode - many), Role.DECODE: (prefill - many, decode + many)}
        best = max(splits, key=lambda role: (self.kept(*splits[role]), self.headroom(*splits[role])))
        gain = self.kept(*splits[best]) - kept
        return best if gain >= WORTH or (gain >= 0 and self.headroom(*splits[best]) >= BETTER * now) else None

    def spoils(self, prefill: float, decode: float, to: Role) -> bool:
        """Whether turning workers to a role leaves a split that keeps clearly less of the load than now."""
        step = _step(prefill + decode) * (1 if to is Role.PREFILL else -1)
        return self.kept(prefill + step, decode - step, True) <= self.kept(prefill, decode, True) - WORTH


def _step(workers: float) -> int:
    """How far apart two splits are that are compared: in a large fleet one worker makes no difference."""
    return max(1, round(workers / 8))


def need_of(scene: Scene, lends: bool = True) -> Need:
    """Of the sustained load, generations as they will be `AHEAD_S` from now. `lends`: whether decode workers may lend."""
    many = sum(b.many for b in scene.batches)
    context = sum(b.context for b in scene.batches)
    each = context / many if many >= 1 else scene.prompt + 0.5 * scene.output
    lasts = max(1e-3, scene.output * scene.tbt_s)
    fade = math.exp(-AHEAD_S / lasts)
    later = scene.requests_per_s * lasts * (1 - fade) + many * fade
    largest = _largest_batch(scene, each)
    known: dict[int, float] = {}

    def lent(share: float) -> float:
        batch = 4 * math.ceil(share * largest / 4)  # four more or less make no difference
        if batch not in known:
            known[batch] = LENT_SHARE * _speed(scene, batch, round(batch * each))
        return known[batch]

    return Need(scene.prompt_per_s * scene.packed_per_token, later / largest, lent if lends else _nothing)


def _speed(scene: Scene, batch: int, context: int) -> float:
    """Of a prefill worker, what one decode worker with so many generations does beside them, in chunks half a prompt deep."""
    depth = round(0.5 * scene.prompt)
    chunk = scene.step.largest_chunk(scene.limit_s, MOST_LENT, depth, batch, context) if batch else MOST_LENT
    if chunk < LEAST_LENT:
        return 0.0
    alone_s, fused_s = chunk * scene.packed_per_token, scene.step.step_s(chunk, depth, batch, context)
    takes_s = scene.prompt / chunk * fused_s  # where a mean prompt takes as long as it may, long ones are late
    return min(1.0, alone_s / fused_s) * max(0.0, 1 - takes_s / scene.ttft_s)


def _largest_batch(scene: Scene, each: float) -> int:
    """Decodes of `each` tokens of context that one worker can run within the target."""
    low, high = 1, _MOST
    while low < high:
        middle = (low + high + 1) // 2
        fits = middle * each <= _KV_SHARE * scene.capacity and scene.step.decode_s(middle, round(middle * each)) <= scene.tbt_s
        low, high = (middle, high) if fits else (low, middle - 1)
    return low
