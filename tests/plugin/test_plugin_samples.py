"""Samples of a scheduler: what they say, when one is made, and what is sent while a long forward runs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from engine_fakes import FakeBatch, FakeEngine

from fluidpd.slo import SloTargets
from fluidpd.telemetry import BOUNDS, read
from sidecar.plugin import entry
from sidecar.plugin.arming import Guard
from sidecar.plugin.borrow import Borrow
from sidecar.plugin.claims import Arbiter
from sidecar.plugin.rooms import Contexts
from sidecar.plugin.samples import OLDEST_S, Samples
from sidecar.plugin.tally import Tally
from sidecar.plugin.telemetry import Plain, Telemetry
from sidecar.plugin.triage import Triage
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
        self.triage = Triage(self.engine, self.telemetry)
        self.contexts = Contexts()
        self.may_sleep = True
        self.wake = SimpleNamespace(stay=self._stay)
        self.asked: list[int] = []  # samples wanted at once
        self.link: Any = SimpleNamespace(sample_soon=lambda: self.asked.append(1), cpu_s=0.0)

    def _stay(self, awake: bool) -> None:
        self.may_sleep = not awake

    def started_tokens(self) -> int:
        return 0


def made(role: str) -> tuple[FakePart, Samples]:
    part = FakePart(role)
    samples = Samples(part)  # type: ignore[arg-type]
    samples.welcome(PluginWelcome(sample_hz=20, ttft_slo_s=2, tbt_slo_s=0.04))
    return part, samples


def said(samples: Samples, now_s: float) -> dict[str, Any]:
    sample = samples.newest(now_s)
    assert sample is not None
    return sample


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_sample_is_one_that_the_sidecar_accepts(role: str) -> None:
    part, samples = made(role)
    if role == "prefill":
        part.scheduler.prefill_room(7).fluidpd_at_s = 0.5  # type: ignore[attr-defined]
    else:
        part.scheduler.decode_room(1)
        part.scheduler.running_batch = FakeBatch([part.scheduler.decode_room(2, has_kv=False).req])
    samples.look(1.0)
    sample = PluginSample.model_validate(samples.newest(1.0))
    readings, rejected = read({k: v for k, v in sample.values.items() if k in BOUNDS}, 0.0)
    # Requests are counted by the HTTP part.
    assert rejected == () and set(readings.unknown_names()) == set(Tally(SloTargets()).values())
    assert sample.role == role and (sample.queue_total == 1) is (role == "prefill")


def test_samples_are_made_at_their_rate_and_at_once_on_a_jump() -> None:
    part, samples = made("prefill")
    samples.look(1.0)
    samples.look(1.03)
    assert samples._made is not None and samples._made.at_s == 1.0
    for room in range(4):
        part.scheduler.prefill_room(room)
    samples.look(1.031)
    assert samples._made.at_s == 1.031 and len(samples._made.queue) == 4 and part.asked
    samples.look(1.05)
    assert samples._made.at_s == 1.031
    samples.look(1.09)
    assert samples._made.at_s == 1.09


def test_before_a_prefill_forward_what_it_takes_is_no_longer_on_offer() -> None:
    part, samples = made("prefill")
    part.scheduler.prefill_room(1)
    part.scheduler.prefill_room(2)
    samples.look(1.0)
    part.scheduler.waiting_queue.pop(0)
    samples.launching(1.001)
    assert samples._made is not None and [room for room, *_ in samples._made.queue] == [2]


def test_while_a_forward_runs_ages_count_on_and_an_engine_that_hangs_falls_silent() -> None:
    part, samples = made("prefill")
    part.scheduler.prefill_room(1).fluidpd_at_s = 9.0  # type: ignore[attr-defined]
    samples.look(10.0)
    assert said(samples, 12.0)["queue"][0]["waited_s"] == 3.0
    assert samples.newest(10.0 + OLDEST_S + 0.1) is None


def test_a_queue_that_triage_has_reordered_is_sent_oldest_first() -> None:
    part, samples = made("prefill")
    for room in range(4):
        part.scheduler.prefill_room(room).fluidpd_at_s = 0.1 * room  # type: ignore[attr-defined]
    part.triage.reorder(["r3", "r1"], 2)
    assert [r.bootstrap_room for r in part.scheduler.waiting_queue] == [3, 1, 0, 2]
    samples.look(1.0)
    assert [prompt["room"] for prompt in said(samples, 1.0)["queue"]] == [0, 1, 2, 3] and part.triage.is_reordered
    part.scheduler.waiting_queue.pop(0)
    part.scheduler.waiting_queue.pop(0)
    samples.look(1.06)
    assert [prompt["room"] for prompt in said(samples, 1.06)["queue"]] == [0, 2] and not part.triage.is_reordered


def test_a_queue_is_sent_up_to_its_limit_and_counted_whole() -> None:
    part, samples = made("prefill")
    for room in range(300):
        part.scheduler.prefill_room(room)
    samples.look(1.0)
    sample = said(samples, 1.0)
    assert len(sample["queue"]) == 256 and sample["queue_total"] == 300 and sample["values"]["waiting"] == 300


def test_a_scheduler_falls_asleep_only_after_a_sample_has_said_that_all_is_done() -> None:
    part, samples = made("decode")
    part.scheduler.free = 9_000
    samples.look(1.0)
    part.scheduler.free = 10_000  # given back after the boundary that was sampled
    samples.look(1.005)
    assert not part.may_sleep
    samples.look(1.06)
    assert part.may_sleep
    assert said(samples, 1.06)["values"]["kv_used_tokens"] == 0


def test_a_sample_sent_late_tells_of_the_steps_since_its_boundary() -> None:
    part, samples = made("decode")
    part.scheduler.running_batch = FakeBatch([part.scheduler.decode_room(2, has_kv=False).req])
    samples.look(1.0)
    part.telemetry.ended.append(Plain(1, 100, 1.0, None, 1.02, 0.0))
    assert said(samples, 1.03)["values"]["generated_tokens_total"] == 1


def test_the_first_lent_step_that_is_late_is_told_at_once_and_the_next_ones_in_their_turn() -> None:
    part, samples = made("decode")
    part.scheduler.running_batch = FakeBatch([part.scheduler.decode_room(2, has_kv=False).req])
    samples.look(1.0)
    said(samples, 1.0)
    samples.late()
    assert len(part.asked) == 1
    for at_s in (1.0, 1.1):
        part.telemetry.ended.append(Plain(1, 100, at_s, None, at_s, 0.0))
    said(samples, 1.1)
    samples.late()
    assert len(part.asked) == 1


@pytest.mark.parametrize("has_link", [True, False])
def test_steps_that_nobody_asks_about_are_counted_all_the_same(has_link: bool) -> None:
    part, samples = made("decode")
    part.link = part.link if has_link else None  # on every rank but the first there is none
    for n in range(200):
        part.telemetry.ended.append(Plain(1, 100, 1.0 + n, None, 1.02 + n, 0.0))
    samples.look(2000.0)
    assert not part.telemetry.ended and part.telemetry.steps_total == 200 and (samples._made is not None) is has_link


def test_an_error_while_a_sample_is_made_is_counted_and_costs_only_that_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    part, samples = made("decode")
    monkeypatch.setattr(entry, "GUARD", Guard())
    samples.look(1.0)
    monkeypatch.setattr(part.telemetry, "numbers", lambda *_: 1 / 0)
    assert samples.newest(1.0) is None and entry.GUARD.errors_by_hook == {"sampling": 1}
    monkeypatch.undo()
    assert samples.newest(1.0) is not None
