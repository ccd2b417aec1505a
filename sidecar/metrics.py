"""The sidecar's own metrics, read off its parts when they are asked for.

Never counts by itself: each number has its home in the part that makes it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from fluidpd.names import PluginState

if TYPE_CHECKING:
    from sidecar.app import Sidecar

_CHUNK_EDGES = (32, 64, 96, 128, 192, 224, 256, 384, 512, 768, 1024, 2048)


class _OfSidecar(Collector):
    def __init__(self, sidecar: Sidecar) -> None:
        self._sidecar = sidecar

    def collect(self) -> Iterable[Metric]:
        s = self._sidecar
        yield _gauge("link_connected", "1 while registered with a controller", float(s.link.connected))
        yield _counter("link_connects", "connections to a controller that were welcomed", s.link.connects_total)
        yield _counter("samples_sent", "samples sent to the controller", s.link.samples_sent_total)
        yield _counter(
            "samples_replaced", "samples that a newer one replaced before they could be sent", s.link.samples_dropped_total
        )
        yield _counter("controller_messages_malformed", "messages of the controller not understood", s.link.malformed_total)
        yield _gauge("plugin_connected", "1 while the engine's plugin is connected", float(s.plugin.connected))
        yield _gauge("plugin_armed", "1 while it is connected and armed", float(s.plugin.standing.state is PluginState.ARMED))
        yield _gauge("flippable", "1 if the engine may change roles", float(not s.not_flippable_why))
        yield _by("plugin_messages", "messages of the plugin", "type", s.plugin.messages_total)
        yield _counter("plugin_messages_malformed", "messages of the plugin not understood", s.plugin.malformed_total)
        if s.sampler.engine_reachable is not None:
            yield _gauge("engine_reachable", "1 if the engine answered the last poll", float(s.sampler.engine_reachable))
        yield _by("commands", "commands, by answer", "answer", s.driver.answers_total)
        yield _by("moves_ended", "role moves that ended, by end", "end", s.driver.ends_total)
        yield _gauge("move_open", "1 while a role move is open", float(s.driver.open_move is not None))
        yield _gauge("epoch_highest", "highest leadership epoch seen", s.driver.highest_epoch)
        yield _gauge("grant_in_force", "1 while prompts may be borrowed", float(s.driver.grant() is not None))
        yield _by("claims_asked", "claims asked of peers, by answer", "answer", s.claims.asked_total)
        yield _by("claims_answered", "claims of peers, by answer", "answer", s.claims.answered_total)
        yield _by("peers_refused", "requests of peers that were refused at the door, by rule", "rule", s.refused_peers_total)
        yield _gauge("exposed", "ways in which this worker stands open to anybody", len(s.exposed()))
        yield _by("handoffs_ended", "generations handed to peers, by end", "end", s.handoffs.ended_total)
        yield _gauge("relays_open", "generations that a peer continues for this worker's clients", s.handoffs.open)
        yield _counter("relayed_tokens", "tokens passed on from peers", s.handoffs.relayed_tokens_total)
        yield _by("adoptions_ended", "generations continued here for peers, by end", "end", s.adoptions.ended_total)
        yield _gauge("adoptions_open", "generations now continued here for peers", s.adoptions.open)
        yield _counter("handoff_bytes", "bytes of KV booked for handoffs", s.bucket.taken_bytes)
        yield _counter("handoff_paced_seconds", "seconds that handoffs waited for the bandwidth cap", s.bucket.waited_s)
        yield _gauge("handoff_cap_bytes_per_second", "the bandwidth cap", s.bucket.rate_bytes_per_s)
        yield _chunks(s.sampler.chunks_total)
        for name, value in s.gpu.read().items():
            yield _gauge(name, "NVML reading", value)


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(f"fluidpd_sidecar_{name}", text, value=value)


def _counter(name: str, text: str, value: float) -> Metric:
    return CounterMetricFamily(f"fluidpd_sidecar_{name}", text, value=value)


def _by(name: str, text: str, label: str, counts: dict[str, int]) -> Metric:
    family = CounterMetricFamily(f"fluidpd_sidecar_{name}", text, labels=[label])
    for value, count in sorted(counts.items()):
        family.add_metric([value], count)
    return family


def _chunks(counts: dict[int, int]) -> Metric:
    """Sizes of the borrowed chunks that the plugin chose."""
    buckets = [(str(float(edge)), float(sum(n for size, n in counts.items() if size <= edge))) for edge in _CHUNK_EDGES]
    buckets.append(("+Inf", float(sum(counts.values()))))
    family = HistogramMetricFamily("fluidpd_sidecar_borrowed_chunk_tokens", "sizes of borrowed chunks in tokens")
    family.add_metric([], buckets, sum_value=float(sum(size * n for size, n in counts.items())))
    return family


def registry_of(sidecar: Sidecar, make: Callable[[], CollectorRegistry] = CollectorRegistry) -> CollectorRegistry:
    """A registry of its own: several sidecars may share a process."""
    registry = make()
    registry.register(_OfSidecar(sidecar))
    return registry
