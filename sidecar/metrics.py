"""The sidecar's own metrics, read off its parts when they are asked for.

Never counts by itself: each number has its home in the part that makes it. What may be exported is declared in metric_set.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry
from prometheus_client.core import HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from fluidpd.metric import Sheet
from fluidpd.names import PluginState
from sidecar.metric_set import CHUNK_BUCKETS, GPU, METRICS

if TYPE_CHECKING:
    from sidecar.app import Sidecar

_US = "fluidpd_sidecar_"


class _OfSidecar(Collector):
    def __init__(self, sidecar: Sidecar) -> None:
        self._sidecar = sidecar

    def collect(self) -> Iterable[Metric]:
        s, sheet = self._sidecar, Sheet(METRICS)
        now: dict[str, float | None] = {
            "link_connected": s.link.connected,
            "link_connects_total": s.link.connects_total,
            "controller_last_contact_timestamp_seconds": s.link.last_contact_wall_s,
            "samples_sent_total": s.link.samples_sent_total,
            "samples_replaced_total": s.link.samples_dropped_total,
            "controller_messages_malformed_total": s.link.malformed_total,
            "plugin_connected": s.plugin.connected,
            "plugin_armed": s.plugin.standing.state is PluginState.ARMED,
            "plugin_messages_total": sum(s.plugin.messages_total.values()),
            "plugin_messages_malformed_total": s.plugin.malformed_total,
            "engine_reachable": s.sampler.engine_reachable,
            "flippable": not s.not_flippable_why,
            "exposed": len(s.exposed()),
            "move_open": s.driver.open_move is not None,
            "epoch_highest": s.driver.highest_epoch,
            "grant_in_force": s.driver.grant() is not None,
            "relays_open": s.handoffs.open,
            "relayed_tokens_total": s.handoffs.relayed_tokens_total,
            "adoptions_open": s.adoptions.open,
            "handoff_bytes_total": s.bucket.taken_bytes,
            "handoff_paced_seconds_total": s.bucket.waited_s,
            "handoff_cap_bytes_per_second": s.bucket.rate_bytes_per_s,
        }
        for name, value in now.items():
            sheet.set(f"{_US}{name}", value)
        for (command, outcome), count in s.driver.answers_total.items():
            sheet.set(f"{_US}commands_total", count, command=command, outcome=outcome)
        sheet.count(f"{_US}moves_ended_total", "end", s.driver.ends_total)
        sheet.count(f"{_US}claims_asked_total", "answer", s.claims.asked_total)
        sheet.count(f"{_US}claims_answered_total", "answer", s.claims.answered_total)
        sheet.count(f"{_US}peers_refused_total", "rule", s.refused_peers_total)
        sheet.count(f"{_US}handoffs_ended_total", "end", s.handoffs.ended_total)
        sheet.count(f"{_US}adoptions_ended_total", "end", s.adoptions.ended_total)
        if s.page is not None:
            sheet.count(f"{_US}page_rejected_total", "reason", s.page.rejected_total)
        sheet.put(f"{_US}borrowed_chunk_tokens", _chunks(s.sampler.chunks_total))
        for reading, value in s.gpu.read().items():
            sheet.set(f"{_US}{GPU[reading]}", value)
        yield from sheet.families()


def _chunks(counts: dict[int, int]) -> Metric:
    """Sizes of the borrowed chunks that the plugin chose."""
    buckets = [(str(edge), float(sum(n for size, n in counts.items() if size <= edge))) for edge in CHUNK_BUCKETS]
    buckets.append(("+Inf", float(sum(counts.values()))))
    spec = next(s for s in METRICS if s.name == f"{_US}borrowed_chunk_tokens")
    family = HistogramMetricFamily(spec.name, spec.text)
    family.add_metric([], buckets, sum_value=float(sum(size * n for size, n in counts.items())))
    return family


def registry_of(sidecar: Sidecar, make: Callable[[], CollectorRegistry] = CollectorRegistry) -> CollectorRegistry:
    """A registry of its own: several sidecars may share a process."""
    registry = make()
    registry.register(_OfSidecar(sidecar))
    return registry
