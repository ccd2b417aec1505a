"""One worker's samples: from the plugin where there is one, from the engine's own surface where there is not, at once on a jump.

Never repeats an old value as a new one: what was not measured for this sample is absent from it.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Protocol

from fluidpd.names import Role
from fluidpd.telemetry import QUEUE_LIMIT, Sample, WaitingPrompt
from sidecar.clock import Clock
from sidecar.ports import Engine, Plugin
from sidecar.protocol import PluginSample

log = logging.getLogger(__name__)

JUMP_PROMPTS = 4
JUMP_TOKENS = 8192
SLOW_S = 1.0
SLOW_NOTE = "health_slow"  # the engine's HTTP side answers late or not at all while its plugin speaks: slow, not dead
_FROM_THE_PLUGIN: Mapping[str, str] = MappingProxyType({})
_HTTP_SIDE = (  # counted where the clients' streams are
    "requests_total",
    "requests_good_total",
    "ttft_judged_total",
    "ttft_good_total",
    "tbt_judged_total",
    "tbt_good_total",
)


class Gpu(Protocol):
    def read(self) -> dict[str, float]: ...


def is_jump(before: Sample | None, after: Sample, tbt_slo_s: float) -> bool:
    """Whether a sample says something that should not wait for its turn."""
    if before is None or after.role is not before.role or after.engine_state != before.engine_state:
        return True
    if _of(after, "waiting") - _of(before, "waiting") >= JUMP_PROMPTS:
        return True
    if _of(after, "waiting_tokens") - _of(before, "waiting_tokens") >= JUMP_TOKENS:
        return True
    if (after.queue_total or 0) - (before.queue_total or 0) >= JUMP_PROMPTS:
        return True
    return _of(after, "tbt_p99_s") > tbt_slo_s >= _of(before, "tbt_p99_s")


def _of(sample: Sample, name: str) -> float:
    raw = sample.values.get(name)
    return float(raw) if isinstance(raw, int | float) and not isinstance(raw, bool) and math.isfinite(raw) else 0.0


def speakable(values: Mapping[str, Any]) -> dict[str, Any]:
    """Values as strict JSON can carry them. A float that is no number travels as its name: rejected alone, and shown."""
    return {k: v if not isinstance(v, float) or math.isfinite(v) else str(v) for k, v in values.items()}


class Sampler:
    def __init__(
        self,
        worker: str,
        engine: Engine,
        plugin: Plugin,
        gpu: Gpu,
        clock: Clock,
        *,
        send: Callable[[Sample], None],
        role_seen: Callable[[Role], None],
        not_flippable_why: Callable[[], str],
        tbt_slo_s: float,
        rate_hz: float = 20.0,
        plugin_silent_s: float = 0.25,
        cross_check_s: float = 1.0,
    ) -> None:
        self.rate_hz = rate_hz
        self.seq = 0
        self.newest: Sample | None = None
        self.engine_reachable: bool | None = None
        self.chunks_total: dict[int, int] = {}
        self._worker = worker
        self._engine = engine
        self._plugin = plugin
        self._gpu = gpu
        self._clock = clock
        self._send = send
        self._role_seen = role_seen
        self._not_flippable_why = not_flippable_why
        self.tbt_slo_s = tbt_slo_s
        self._plugin_silent_s = plugin_silent_s
        self._cross_check_s = cross_check_s
        self._sent: Sample | None = None
        self._sent_at_s = -math.inf
        self._plugin_at_s = -math.inf
        self._engine_role: Role | None = None
        self._disagreement = ""
        self._is_slow = False
        self._gpu_values: dict[str, float] = {}
        self._http_values: dict[str, Any] = {}

    @property
    def plugin_speaks(self) -> bool:
        silent_s = max(self._plugin_silent_s, 3.0 / self.rate_hz)
        return self._plugin.connected and self._clock.now() - self._plugin_at_s <= silent_s

    def plugin_sample(self, said: PluginSample) -> None:
        """A plugin's sample goes out when its turn has come, or at once if it is a jump."""
        if said.part == "http":
            self._http_values = {name: said.values[name] for name in _HTTP_SIDE if name in said.values}
            return
        self._plugin_at_s = self._clock.now()
        for size, count in said.chunks.items():
            if size.isdigit() and count > 0:
                self.chunks_total[int(size)] = self.chunks_total.get(int(size), 0) + count
        if self._engine_role is not None and said.role is not self._engine_role:
            self._disagreement = f"the plugin says {said.role}, the engine last said {self._engine_role}"
        else:
            self._disagreement = ""
        queue = said.queue[:QUEUE_LIMIT] if said.queue is not None else None
        total = said.queue_total if said.queue_total is not None else (len(said.queue) if said.queue is not None else None)
        notes = (*((self._disagreement,) if self._disagreement else ()), *((SLOW_NOTE,) if self._is_slow else ()))
        self._emit(said.role, said.engine_state, said.values, queue, total, notes)

    def plugin_left(self, part: str) -> None:
        """What a part has said is not true of the next one: its counters begin anew."""
        if part == "http":
            self._http_values = {}

    async def run(self) -> None:
        """Poll the engine: slowly, as a cross-check, while the plugin speaks, and at the sample rate while it does not."""
        while True:
            began_s = self._clock.now()
            await self.poll()
            period_s = self._cross_check_s if self.plugin_speaks else 1.0 / self.rate_hz
            await self._clock.sleep(period_s - (self._clock.now() - began_s))

    async def poll(self) -> None:
        spoke, began_s = self.plugin_speaks, self._clock.now()
        measured = await self._engine.measure(with_page=not spoke)
        self._is_slow = measured is None or self._clock.now() - began_s >= SLOW_S
        self._gpu_values = self._gpu.read()
        self.engine_reachable = measured is not None
        if measured is None:
            self._engine_role = None
            if not self.plugin_speaks:
                self._emit(None, "unreachable", {}, None, None, ("the engine does not answer",))
            return
        self._engine_role = measured.role
        if not self.plugin_speaks and not spoke:
            why = "the plugin is silent" if self._plugin.connected else "no plugin"
            notes = (f"{why}: read from the engine's own surface", *measured.notes)
            self._emit(measured.role, "serving", measured.values, None, None, notes, measured.sources)

    def _emit(
        self,
        role: Role | None,
        state: Any,
        values: Mapping[str, Any],
        queue: tuple[WaitingPrompt, ...] | None,
        queue_total: int | None,
        notes: tuple[str, ...],
        sources: Mapping[str, str] = _FROM_THE_PLUGIN,
    ) -> None:
        why = self._not_flippable_why()
        sample = Sample(
            worker=self._worker,
            incarnation=0,  # the link puts in the one in force when it is sent
            seq=self.seq + 1,
            wall_s=self._clock.wall(),
            role=role,
            engine_state=state,
            flippable=not why,
            not_flippable_why=why,
            values=speakable({**self._gpu_values, **values, **self._http_values}),  # the streams' own side outranks a histogram
            queue=queue,
            queue_total=queue_total,
            notes=notes,
            sources=dict(sources),
        )
        self.newest = sample
        if role is not None:
            self._role_seen(role)
        # The sender keeps the rate; this only keeps a plugin that does not from flooding the controller.
        due = self._clock.now() - self._sent_at_s >= 0.5 / self.rate_hz
        if due or is_jump(self._sent, sample, self.tbt_slo_s):
            self.seq += 1
            self._sent, self._sent_at_s = sample, self._clock.now()
            self._send(sample)
