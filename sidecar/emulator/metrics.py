"""GET /metrics of an emulated worker, in SGLang's names, types and labels; what it does not model is 0, as on an idle worker.

Never counts; it reads the model, the meter and the tally when asked.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from fluidpd.names import Role
from sidecar.emulator.metric_families import BUCKETS, COUNTERS, GAUGES, LABELLED, STAGES
from sidecar.emulator.readout import CONTEXT_TOKENS, WEIGHT_GB
from sidecar.emulator.tally import Histogram
from sidecar.emulator.worker import EmulatedWorker

_RANK = ("engine_type", "model_name", "moe_ep_rank", "pp_rank", "tp_rank")
_FRONT = ("engine_type", "model_name")
_BY_STREAM = ("time_to_first_token_seconds", "e2e_request_latency_seconds", "request_time_per_output_token_seconds")
_FRONT_PLAIN = (
    "prompt_tokens_histogram",
    "uncached_prompt_tokens_histogram",
    "generation_tokens_histogram",
    "inter_token_latency_seconds",
)
_TRANSFERS = ("kv_transfer_latency_ms", "kv_transfer_total_mb", "kv_transfer_speed_gb_s")
_FRONT_COUNTERS = ("prompt_tokens_total", "generation_tokens_total", "num_requests_total")


class WorkerCollector(Collector):
    """No label tells the role of now: SGLang's scheduler says engine_type="dynamic" for a worker that may switch, and its HTTP
    process the role at the start.
    """

    def __init__(self, worker: EmulatedWorker, *, moving: bool) -> None:
        self._worker = worker
        self._moving = moving
        self._front = (worker.spec.role.value, worker.settings.model)
        self._rank = ("dynamic", worker.settings.model, "0", "0", "0")

    def collect(self) -> Iterator[Metric]:
        values = self._values()
        moving = {key.partition("/")[0] for key in values}.union(_BY_STREAM, _FRONT_PLAIN, _FRONT_COUNTERS, _TRANSFERS)

        def wanted(name: str) -> bool:
            return (name in moving) is self._moving

        for name in filter(wanted, GAUGES):
            yield self._gauge(name, _RANK, [(self._rank, values.get(name, 0.0))])
        for name in filter(wanted, COUNTERS):
            yield self._counter(name, _RANK, [(self._rank, values.get(name, 0.0))])
        for name, kind, labels, cases in LABELLED:
            if wanted(name):
                rows = [((*self._rank, *case), values.get(f"{name}/{case[0]}", 0.0)) for case in cases]
                make = self._gauge if kind == "gauge" else self._counter
                yield make(name, (*_RANK, *labels), rows)
        for name in filter(wanted, BUCKETS):
            yield self._histogram_family(name)
        for name in filter(wanted, _FRONT_COUNTERS):
            rows = [((*self._front, s), float(self._worker.tally.by_stream[name, s])) for s in ("false", "true")]
            yield self._counter(name, (*_FRONT, "is_streaming"), rows)
        if not self._moving:
            for name in ("num_retracted_reqs", "num_paused_reqs"):
                yield self._gauge(name, (*_RANK, "pid"), [((*self._rank, "0"), 0.0)])
            yield self._counter("failed_session_recoveries_total", (), [((), 0.0)])
            yield self._counter("process_cpu_seconds_total", ("component",), [(("detokenizer",), 0.0)])

    def _histogram_family(self, name: str) -> Metric:
        tally = self._worker.tally
        if name in _BY_STREAM:
            cases = [((*self._front, s), tally.histogram(name, s)) for s in ("false", "true")]
            return self._histogram(name, (*_FRONT, "is_streaming"), cases)
        if name in _FRONT_PLAIN:
            return self._histogram(name, _FRONT, [(self._front, tally.histogram(name))])
        if name == "per_stage_req_latency_seconds":
            return self._histogram(name, (*_RANK, "stage"), [((*self._rank, s), tally.histogram(name, s)) for s in STAGES])
        return self._histogram(name, _RANK, [(self._rank, tally.histogram(name))])

    def _values(self) -> dict[str, float]:
        """What the model knows, under SGLang's names."""
        worker = self._worker
        model, meter = worker.engine.model, worker.engine.meter
        used, capacity = model.kv_used, model.kv_capacity
        counters = model.counters
        prefill = worker.role is Role.PREFILL
        waiting = sum(j.ready for j in model.queue) if prefill else len(model.arrived)
        return {
            "max_total_num_tokens": capacity,
            "weight_memory_usage_gb": WEIGHT_GB,
            "kv_cache_memory_usage_gb": capacity * worker.cost.kv_bytes_per_token / 1e9,
            "page_size": 64,
            "num_pages": capacity // 64,
            "context_len": CONTEXT_TOKENS,
            "num_running_reqs": len(model.running) + len(model.prefilling) + len(model.borrowed),
            "num_queue_reqs": waiting,
            "gen_throughput": worker.tally.throughput(counters.generated_tokens, worker.clock()),
            "decode_sum_seq_lens": sum(j.context for j in model.running),
            "token_usage": used / capacity,
            "full_token_usage": used / capacity,
            "num_used_tokens": used,
            "kv_available_tokens": capacity - used,
            "kv_used_tokens": used,
            "num_prefill_bootstrap_queue_reqs": sum(not j.ready for j in model.queue),
            "num_prefill_inflight_queue_reqs": len(model.sending),
            "num_decode_prealloc_queue_reqs": len(model.wait_kv),
            "num_decode_transfer_queue_reqs": len(model.expecting),
            "pending_prealloc_token_usage": sum(j.prompt_tokens for j in model.wait_kv) / capacity,
            "utilization": -1.0,
            "is_cuda_graph": float(bool(model.running)),
            "scheduler_process_cpu_seconds_total": counters.busy_s,
            "prefill_effective_tokens_total/input": counters.prefilled_tokens,
            "realtime_tokens_total/prefill_compute": counters.prefilled_tokens,
            "realtime_tokens_total/decode": counters.generated_tokens,
            "cuda_graph_passes_total/prefill_none": meter.prefill_steps,
            "cuda_graph_passes_total/decode_none": meter.decode_moments[0],
            "scheduler_stage_seconds_total/run_batch": counters.busy_s,
            "num_bootstrap_failed_reqs_total": worker.tally.failed_total,
        }

    @staticmethod
    def _gauge(name: str, labels: tuple[str, ...], rows: list[tuple[tuple[str, ...], float]]) -> Metric:
        family = GaugeMetricFamily(f"sglang:{name}", _help(name), labels=labels)
        for values, value in rows:
            family.add_metric(values, float(value))
        return family

    @staticmethod
    def _counter(name: str, labels: tuple[str, ...], rows: list[tuple[tuple[str, ...], float]]) -> Metric:
        family = CounterMetricFamily(f"sglang:{name}", _help(name), labels=labels)
        for values, value in rows:
            family.add_metric(values, float(value))
        return family

    @staticmethod
    def _histogram(name: str, labels: tuple[str, ...], rows: Sequence[tuple[tuple[str, ...], Histogram]]) -> Metric:
        family = HistogramMetricFamily(f"sglang:{name}", _help(name), labels=labels)
        for values, histogram in rows:
            family.add_metric(values, histogram.cumulative(), histogram.total)
        return family


def _help(name: str) -> str:
    return f"Emulated: SGLang's {name} as the worker model has it; 0 where the model has no such thing."


class MetricsPage:
    """Two thirds of SGLang's series never move here: they are written once, so that a scrape does not hold up the engines."""

    def __init__(self, worker: EmulatedWorker) -> None:
        still = CollectorRegistry(auto_describe=False)
        still.register(WorkerCollector(worker, moving=False))
        self._still = generate_latest(still)
        self._moving = CollectorRegistry(auto_describe=False)
        self._moving.register(WorkerCollector(worker, moving=True))

    def text(self) -> bytes:
        return generate_latest(self._moving) + self._still
