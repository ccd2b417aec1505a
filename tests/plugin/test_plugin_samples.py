"""Samples of a scheduler: what they say, when one is made, and what is sent while a long forward runs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from engine_fakes import FakeBatch, FakeEngine

from fluidpd.telemetry import BOUNDS, read
from sidecar.plugin.borrow import Borrow
from sidecar.plugin.claims import Arbiter
from sidecar.plugin.samples import OLDEST_S, Samples
from sidecar.plugin.telemetry import Telemetry
from sidecar.plugin.wants import Wants
from sidecar.protocol import PluginSample, PluginWelcome


class FakePart:
    """What Samples asks of SchedulerPart."""

    def __init__(self, role: str) -> None:
        self.engine = FakeEngine(role)
        self.scheduler = self.engine.scheduler
        self.telemetry = Telemetry()
        self.borrow = Borrow(self.engine)
        self.wants = Wants(self.engine, self.borrow)
        self.arbiter = Arbiter(self.engine)
        self.woken_total = 0
        self.wake = SimpleNamespace(up=self._woken)
        self.sent: list[dict[str, Any]] = []
        self.link = SimpleNamespace(connected=True, send_sample=self.sent.append)

    def _woken(self) -> None:
        self.woken_total += 1

    def started_tokens(self) -> int:
        return 0


def made(role: str) -> tuple[FakePart, Samples]:
    part = FakePart(role)
    samples = Samples(part)  # type: ignore[arg-type]
    samples.welcome(PluginWelcome(sample_hz=20, ttft_slo_s=2, tbt_slo_s=0.04))
    return part, samples


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_sample_is_one_that_the_sidecar_accepts(role: str) -> None:
    part, samples = made(role)
    if role == "prefill":
        part.scheduler.prefill_room(7).fluidpd_at_s = 0.5  # type: ignore[attr-defined]
    else:
        part.scheduler.decode_room(1)
        part.scheduler.running_batch = FakeBatch([part.scheduler.decode_room(2, has_kv=False).req])
    samples.look(1.0)
    samples.send_newest(1.0)
    said = PluginSample.model_validate(part.sent[0])
    readings, rejected = read({k: v for k, v in said.values.items() if k in BOUNDS}, 0.0)
    # Requests are counted by the HTTP part.
    assert rejected == () and set(readings.unknown_names()) == {"requests_total", "requests_good_total"}
    assert said.role == role and (said.queue_total == 1) is (role == "prefill")


def test_samples_are_made_at_their_rate_and_at_once_on_a_jump() -> None:
    part, samples = made("prefill")
    samples.look(1.0)
    samples.look(1.03)
    assert samples._made is not None and samples._made[0] == 1.0
    for room in range(4):
        part.scheduler.prefill_room(room)
    samples.look(1.031)
    assert samples._made[0] == 1.031 and samples._made[1]["queue_total"] == 4
    samples.look(1.05)
    assert samples._made[0] == 1.031
    samples.look(1.09)
    assert samples._made[0] == 1.09


def test_before_a_prefill_forward_what_it_takes_is_no_longer_on_offer() -> None:
    part, samples = made("prefill")
    part.scheduler.prefill_room(1)
    part.scheduler.prefill_room(2)
    samples.look(1.0)
    part.scheduler.waiting_queue.pop(0)
    samples.launching(1.001)
    assert samples._made is not None and [p["room"] for p in samples._made[1]["queue"]] == [2]


def test_while_a_forward_runs_ages_count_on_and_an_engine_that_hangs_falls_silent() -> None:
    part, samples = made("prefill")
    part.scheduler.prefill_room(1).fluidpd_at_s = 9.0  # type: ignore[attr-defined]
    samples.look(10.0)
    samples.send_newest(12.0)
    assert part.sent[0]["queue"][0]["waited_s"] == 3.0
    samples.send_newest(10.0 + OLDEST_S + 0.1)
    assert len(part.sent) == 1


def test_a_queue_is_sent_up_to_its_limit_and_counted_whole() -> None:
    part, samples = made("prefill")
    for room in range(300):
        part.scheduler.prefill_room(room)
    samples.look(1.0)
    samples.send_newest(1.0)
    assert len(part.sent[0]["queue"]) == 256 and part.sent[0]["queue_total"] == 300 and part.sent[0]["values"]["waiting"] == 300


def test_a_scheduler_falls_asleep_only_after_a_sample_has_said_that_all_is_done() -> None:
    part, samples = made("decode")
    part.scheduler.free = 9_000
    samples.look(1.0)
    part.scheduler.free = 10_000  # given back after the boundary that was sampled
    samples.look(1.005)
    assert part.woken_total == 1
    samples.look(1.06)
    assert part.woken_total == 2
    samples.look(1.12)
    assert part.woken_total == 2  # the sample of 1.06 s says that nothing is used
