"""Judged requests, summed over workers: by model and SLO, each counted once, through restarts of engines and of controllers.

Never judges a request, and never takes what a worker had counted before anybody looked for something new.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from controller.registry import Registry
from controller.store.alert_queries import Counts, Mark, SloKey
from fluidpd.names import Role, WorkerState
from fluidpd.telemetry import Known, Readings

# By SLO, the counters it is made of: judged, and good.
COUNTERS = {
    "joint": ("requests_total", "requests_good_total"),
    "ttft": ("ttft_judged_total", "ttft_good_total"),
    "tbt": ("tbt_judged_total", "tbt_good_total"),
}
_LONGEST_LOOK_S = 5.0  # a look after a longer time does not vouch for all of it
_HEARD = (WorkerState.SERVING, WorkerState.SLOW, WorkerState.MOVING, WorkerState.WARMING)


@dataclass(frozen=True, slots=True)
class Reading:
    """One worker's counters at one look. `owns`: clients' streams are expected there. `heard`: its telemetry is fresh."""

    worker: str
    boot: str
    model: str
    owns: bool
    heard: bool
    warming: bool
    counted: Mapping[str, float]


def readings_of(registry: Registry, now_s: float, model_name: Callable[[str], str]) -> list[Reading]:
    """`model_name`: as counts name a model, of what its worker said."""
    found = []
    for w in registry:
        state = registry.state(w, now_s)
        model = w.hello.model if w.hello else (w.row.model if w.row else "default")
        found.append(
            Reading(
                worker=w.name,
                boot=w.engine_start,
                model=model_name(model),
                owns=w.role is Role.DECODE and state not in (WorkerState.LOST, WorkerState.QUARANTINED, WorkerState.GONE),
                heard=state in _HEARD and w.received_s is not None,
                warming=state is WorkerState.WARMING,
                counted=_counted(w.readings),
            )
        )
    return found


def _counted(readings: Readings) -> dict[str, float]:
    names = [name for pair in COUNTERS.values() for name in pair]
    return {name: r.value for name in names if isinstance(r := getattr(readings, name), Known)}


class SloCounts:
    """Running totals. `look` at a steady pace; `totals` and `marks` are what the next leader needs to go on."""

    def __init__(self) -> None:
        self.totals: dict[SloKey, Counts] = {}
        self.marks: dict[str, Mark] = {}
        self._looked_s: float | None = None
        self._by_histogram: dict[str, tuple[int, int]] = {}  # by model: owners read from histograms, and all that tell
        self._warming: set[str] = set()  # engines that started since they were last counted, and still warm up

    def restore(self, totals: Mapping[SloKey, Counts], marks: Mapping[str, Mark]) -> None:
        """Go on from what was on record. What was counted meanwhile is kept; a worker seen already goes on from its record."""
        for key, counts in totals.items():
            self.totals[key] = self.totals.get(key, Counts()).plus(counts)
        self.marks = {**self.marks, **marks}

    def look(self, readings: Iterable[Reading], now_s: float) -> None:
        passed_s = 0.0 if self._looked_s is None else min(max(0.0, now_s - self._looked_s), _LONGEST_LOOK_S)
        self._looked_s = now_s
        owners: dict[str, list[Reading]] = {}
        for reading in readings:
            if reading.owns:
                owners.setdefault(reading.model, []).append(reading)
            if reading.heard:
                self._grow(reading)
        for model, owning in owners.items():
            told = [r for r in owning if r.heard and "ttft_judged_total" in r.counted]
            self._by_histogram[model] = (sum("requests_total" not in r.counted for r in told), len(told))
            for slo, (judged, good) in COUNTERS.items():
                telling = sum(r.heard and judged in r.counted and good in r.counted for r in owning)
                if telling or (model, slo) in self.totals:
                    self._add((model, slo), Counts(known_s=passed_s * telling / len(owning)))

    def _grow(self, reading: Reading) -> None:
        mark = self.marks.get(reading.worker)
        self.marks[reading.worker] = Mark(reading.boot, reading.counted)
        if not reading.warming:
            self._warming.discard(reading.worker)
        elif mark is None or mark.boot != reading.boot:
            self._warming.add(reading.worker)
        if mark is None or reading.worker in self._warming:
            return  # what it counted before is not ours to count, and an engine that warms up is not judged
        if ("requests_total" in mark.counted) != ("requests_total" in reading.counted):
            return  # its plugin came or went: from here on other counters are counted
        for slo, names in COUNTERS.items():
            if any(name not in reading.counted for name in names):
                continue
            before = [mark.counted.get(name) for name in names]
            now = [reading.counted[name] for name in names]
            if mark.boot == reading.boot and any(b is None for b in before):
                continue  # it tells for the first time: what it has is a beginning
            restarted = mark.boot != reading.boot or now[0] < (before[0] or 0.0)
            if not restarted and now[1] < (before[1] or 0.0):
                continue  # the histogram is read at another bound: the target is another one from here on
            total, good = now if restarted else [n - (b or 0.0) for n, b in zip(now, before, strict=True)]
            if total > 0:
                self._add((reading.model, slo), Counts(good=min(good, total), total=total))

    def _add(self, key: SloKey, counts: Counts) -> None:
        self.totals[key] = self.totals.get(key, Counts()).plus(counts)

    def forget(self, worker: str) -> None:
        self.marks.pop(worker, None)
        self._warming.discard(worker)

    def basis(self, model: str, slo: str) -> str:
        """What a person must know of how an SLO is counted; empty where each request is judged at its own stream."""
        plain, all_ = self._by_histogram.get(model, (0, 0))
        if not plain:
            return ""
        if slo == "joint":
            return f"Not known for {plain} of {all_} workers: without the plugin an engine does not say which requests met both."
        per = "first tokens" if slo == "ttft" else "a request's mean token gap, not its p99"
        return f"On {plain} of {all_} workers counted from the engine's own histogram ({per}): they run without the plugin."

    def of(self, slo: str) -> Counts | None:
        """Over all models; None while nothing tells."""
        found = [counts for (_, name), counts in self.totals.items() if name == slo]
        return Counts(sum(c.good for c in found), sum(c.total for c in found)) if found else None
