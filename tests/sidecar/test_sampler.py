"""When a sample is sent, and what is in it."""

from __future__ import annotations

import json
from typing import Any

import pytest
from sidecar_fakes import FakeEngine, FakePlugin

from fluidpd.names import Role
from fluidpd.telemetry import QUEUE_LIMIT, Sample, WaitingPrompt
from sidecar.clock import Clock
from sidecar.protocol import PluginSample
from sidecar.sampler import Sampler, is_jump


class StillClock(Clock):
    """Moves only when told."""

    def __init__(self) -> None:
        self.at_s = 100.0

    def now(self) -> float:
        return self.at_s


class Gpu:
    def __init__(self, **values: float) -> None:
        self.values = values

    def read(self) -> dict[str, float]:
        return self.values


class Sent:
    """A sampler on a clock that stands still, and what it sent."""

    def __init__(self, engine: FakeEngine | None = None, plugin: FakePlugin | None = None, **gpu: float) -> None:
        self.clock = StillClock()
        self.samples: list[Sample] = []
        self.roles: list[Role] = []
        self.why = ""
        self.engine = engine or FakeEngine()
        self.sampler = Sampler(
            "w1",
            self.engine,
            plugin or FakePlugin(),
            Gpu(**gpu),
            self.clock,
            send=self.samples.append,
            role_seen=self.roles.append,
            not_flippable_why=lambda: self.why,
            tbt_slo_s=0.04,
        )

    def say(self, after_s: float = 0.0, role: Role = Role.PREFILL, **given: Any) -> None:
        self.clock.at_s += after_s
        self.sampler.plugin_sample(PluginSample(role=role, **given))


def test_samples_of_a_flooding_plugin_are_thinned_and_numbered_without_gaps() -> None:
    sent = Sent()
    for _ in range(100):
        sent.say(0.005)
    assert 10 <= len(sent.samples) <= 25 and [s.seq for s in sent.samples] == list(range(1, len(sent.samples) + 1))


JUMPS: dict[str, tuple[dict[str, Any], dict[str, Any], bool]] = {
    "four more prompts": ({"waiting": 1}, {"waiting": 5}, True),
    "three more prompts": ({"waiting": 1}, {"waiting": 4}, False),
    "8,192 more tokens": ({"waiting_tokens": 0}, {"waiting_tokens": 8192}, True),
    "fewer prompts": ({"waiting": 50}, {"waiting": 1}, False),
    "TBT over its target": ({"tbt_p99_s": 0.03}, {"tbt_p99_s": 0.05}, True),
    "TBT over it still": ({"tbt_p99_s": 0.05}, {"tbt_p99_s": 0.06}, False),
    "nonsense": ({"waiting": "x"}, {"waiting": float("nan")}, False),
}


@pytest.mark.parametrize("case", JUMPS, ids=str)
def test_a_jump_does_not_wait_for_its_turn(case: str) -> None:
    before, after, jumps = JUMPS[case]
    sent = Sent()
    sent.say(values=before)
    sent.say(0.001, values=after)
    assert (len(sent.samples) == 2) is jumps


def test_a_changed_role_is_a_jump_and_is_told() -> None:
    sent = Sent()
    sent.say(role=Role.PREFILL)
    sent.say(0.001, role=Role.DECODE)
    assert [s.role for s in sent.samples] == [Role.PREFILL, Role.DECODE] and sent.roles == [Role.PREFILL, Role.DECODE]
    assert is_jump(None, sent.samples[0], 0.04)


def test_a_long_queue_is_cut_and_its_true_length_kept() -> None:
    sent = Sent()
    prompts = tuple(WaitingPrompt(room=n, prompt_tokens=1, uncached_tokens=1, waited_s=0) for n in range(QUEUE_LIMIT + 44))
    sent.say(queue=prompts)
    queue = sent.samples[0].queue
    assert (
        queue is not None and len(queue) == QUEUE_LIMIT and queue[0].room == 0 and sent.samples[0].queue_total == QUEUE_LIMIT + 44
    )


def test_every_sample_is_strict_json_whatever_the_plugin_measured() -> None:
    sent = Sent()
    sent.say(values={"step_s": float("nan"), "tbt_p99_s": float("inf"), "batch": 3})
    said = json.loads(sent.samples[0].model_dump_json(), parse_constant=pytest.fail)
    assert said["values"] == {"step_s": "nan", "tbt_p99_s": "inf", "batch": 3}  # rejected by name at the controller, not lost


async def test_without_a_plugin_the_engines_own_surface_is_read() -> None:
    sent = Sent(plugin=FakePlugin(connected=False), gpu_busy_share=0.5)
    await sent.sampler.poll()
    assert sent.samples[0].values == {"running": 1.0, "gpu_busy_share": 0.5} and "no plugin" in sent.samples[0].notes[0]
    assert sent.samples[0].role is Role.DECODE and sent.samples[0].queue is None


async def test_while_the_plugin_speaks_the_engine_is_only_a_cross_check() -> None:
    sent = Sent(engine=FakeEngine(role=Role.DECODE))
    sent.say(role=Role.PREFILL)
    await sent.sampler.poll()
    sent.say(0.06, role=Role.PREFILL)
    assert len(sent.samples) == 2 and "the plugin says prefill, the engine last said decode" in sent.samples[1].notes[0]


async def test_an_engine_whose_http_side_hangs_while_its_plugin_speaks_is_slow_and_not_dead() -> None:
    sent = Sent(engine=FakeEngine(reachable=False))
    sent.say()
    await sent.sampler.poll()
    sent.say(0.06)
    assert "health_slow" in sent.samples[-1].notes and sent.samples[-1].engine_state == "serving"
    sent.engine.reachable = True
    await sent.sampler.poll()
    sent.say(0.06)
    assert "health_slow" not in sent.samples[-1].notes


async def test_a_silent_plugin_is_not_repeated_the_engine_is_asked() -> None:
    sent = Sent()
    sent.say(values={"batch": 9})
    sent.clock.at_s += 1.0
    await sent.sampler.poll()
    assert "batch" not in sent.samples[-1].values and "the plugin is silent" in sent.samples[-1].notes[0]


async def test_a_machine_without_a_gpu_has_no_gpu_readings_rather_than_zeros() -> None:
    from sidecar.gpu.nvml import Nvml

    for index in (None, 0):
        nvml = Nvml(index)
        if not nvml.available:
            assert nvml.read() == {} and nvml.why_absent
        nvml.close()


def test_why_a_worker_cannot_flip_travels_with_each_sample() -> None:
    sent = Sent()
    sent.why = "the backend nixl has no role switch"
    sent.say()
    assert sent.samples[0].flippable is False and "nixl" in sent.samples[0].not_flippable_why


def test_counts_of_the_http_part_join_the_schedulers_samples_and_leave_with_it() -> None:
    sent = Sent()
    sent.say(part="http", values={"requests_total": 7, "requests_good_total": 6, "batch": 99})
    assert sent.samples == []
    sent.say(1.0, part="scheduler", values={"batch": 3})
    values = sent.samples[-1].values
    assert (values["batch"], values["requests_total"], values["requests_good_total"]) == (3, 7, 6)
    sent.sampler.plugin_left("http")
    sent.say(1.0, part="scheduler", values={"batch": 3})
    assert "requests_total" not in sent.samples[-1].values
