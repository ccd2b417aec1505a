"""What the plugin's hooks cost a decode iteration, without an engine: hook by hook, and what its own threads take beside them.

    python bench/plugin_hooks.py [--batch 8 64] [--step-ms 13] [--steps 400]

The engine is a stand-in (tests/plugin/engine_fakes.py) whose step takes `--step-ms`, lets go of the interpreter, and reads more
memory than a core's caches hold, as a forward does: a hook's code is then as cold as in an engine, and costs several times what
it does in a loop. Samples go over a real socket to a process that only reads them. Figures are medians over the steps, of those
that made a sample and of those that did not, weighted by how often a sample is due: a busy machine's pauses are not the plugin's.
What it cannot show: a real engine's other threads, and its own use of the caches; bench/plugin_overhead.py measures those.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import sys
import tempfile
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "plugin")]

_SCHEDULER = "managers.scheduler.Scheduler."
_WARM_UP_STEPS = 50
_SAMPLE_S = 0.05


class Mode:
    """SGLang's ForwardMode of a decode step."""

    def is_decode(self) -> bool:
        return True

    def is_extend(self) -> bool:
        return False

    is_prebuilt = is_idle = is_extend


class Loop:
    """A decode worker's event loop, with or without the hooks around the functions that SGLang's registry would wrap."""

    def __init__(self, scheduler: Any, step_s: float) -> None:
        self.scheduler = scheduler
        self.step_s = step_s
        self.inside_cpu_s = 0.0  # of the step, this thread's
        self._memory = memoryview(bytearray(os.urandom(1 << 20) * 64))
        self.calls: dict[str, Callable[..., Any]] = {
            "_poll_timeout_aborts": lambda s: [],
            "ingest_requests": lambda s: [],
            "process_decode_queue": lambda s: None,
            "get_next_disagg_decode_batch_to_run": lambda s, running_batch: running_batch,
            "run_batch": self._run_batch,
            "process_batch_result": self._process,
        }

    def hook(self, guards: dict[str, Callable[..., Any]]) -> None:
        for name, original in self.calls.items():
            self.calls[name] = self._wrapped(original, guards[_SCHEDULER + name])

    @staticmethod
    def _wrapped(original: Callable[..., Any], hook: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args, **kwargs: hook(original, *args, **kwargs)  # as SGLang's registry does

    def _run_batch(self, scheduler: Any, batch: Any) -> Any:
        cpu_s, until_s, at = time.thread_time(), time.monotonic() + self.step_s, 0
        while time.monotonic() < until_s:
            zlib.crc32(self._memory[at : at + (1 << 20)])
            at = (at + (1 << 20)) % len(self._memory)
        self.inside_cpu_s += time.thread_time() - cpu_s
        return object()

    def _process(self, scheduler: Any, batch: Any, result: Any) -> None:
        for req in batch.reqs:
            req.output_ids.append(1)

    def iterate(self) -> None:
        s, calls = self.scheduler, self.calls
        calls["ingest_requests"](s)
        calls["_poll_timeout_aborts"](s)
        calls["process_decode_queue"](s)
        batch = calls["get_next_disagg_decode_batch_to_run"](s, running_batch=s.running_batch)
        result = calls["run_batch"](s, batch)
        calls["process_batch_result"](s, batch, result)
        s.last_batch = batch

    def cpu_us(self) -> float:
        """One iteration: this thread's CPU time outside the step."""
        cpu_s, inside_s = time.thread_time(), self.inside_cpu_s
        self.iterate()
        return 1e6 * (time.thread_time() - cpu_s - (self.inside_cpu_s - inside_s))


def scheduler_of(batch: int) -> tuple[Any, Any]:
    from engine_fakes import FakeBatch, FakeEngine, FakeReq

    engine = FakeEngine("decode")
    s = engine.scheduler
    s.running_batch = FakeBatch([FakeReq(room, tokens=900, output_ids=[1] * 100) for room in range(batch)])
    s.running_batch.forward_mode = Mode()
    s.device, s._engine_paused, s.free = "cpu", False, 2_000
    s.server_args, s._request_dispatcher = SimpleNamespace(tp_size=1), SimpleNamespace(_mapping={})
    engine.why_no_claims = lambda: ""
    return engine, s


def reader(path: str) -> int:
    """A process that welcomes one plugin and reads what it says; its id."""
    from sidecar.protocol import PluginWelcome, line

    listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listening.bind(path)
    listening.listen(1)
    child = os.fork()
    if child:
        listening.close()
        return child
    try:
        connection, _ = listening.accept()
        connection.recv(65536)
        connection.sendall(line(PluginWelcome(sample_hz=20, ttft_slo_s=2, tbt_slo_s=0.04)))
        while connection.recv(65536):
            pass
    finally:
        os._exit(0)


def measure(batch: int, step_s: float, steps: int) -> dict[str, Any]:
    from sidecar.plugin import entry, scheduler, scheduler_hooks
    from sidecar.plugin.arming import Guard
    from sidecar.plugin.settings import PluginSettings

    engine, s = scheduler_of(batch)
    bare = Loop(s, step_s)
    for _ in range(_WARM_UP_STEPS):
        bare.iterate()
    without_us = statistics.median(bare.cpu_us() for _ in range(steps))

    path = str(Path(tempfile.mkdtemp(prefix="fluidpd-hooks-")) / "plugin.sock")
    child = reader(path)
    guard = entry.GUARD = Guard()
    entry.SETTINGS = PluginSettings(socket_path=path)
    entry.version = lambda: "none"
    vars(scheduler)["Engine"] = lambda _: engine
    part = scheduler_hooks.PART = scheduler.SchedulerPart(s)
    part.start()
    loop = Loop(s, step_s)
    loop.hook(guards_of(guard, scheduler_hooks.HOOKS))
    for _ in range(_WARM_UP_STEPS):
        loop.iterate()
    assert part.link is not None and part.link.connected
    plain: list[dict[str, float]] = []
    sampling: list[dict[str, float]] = []
    others_s, began_s = time.process_time() - time.thread_time(), time.monotonic()
    for _ in range(steps):
        before, was = guard.hook_s | {"by_the_hooks_clock": guard.spent_s}, part.samples._made
        cpu_us = loop.cpu_us()
        after = guard.hook_s | {"by_the_hooks_clock": guard.spent_s}
        spent = {name: 1e6 * (now_s - before[name]) for name, now_s in after.items()}
        (plain if part.samples._made is was else sampling).append(spent | {"cpu_of_the_loop": cpu_us - without_us})
    others_s, took_s = time.process_time() - time.thread_time() - others_s, time.monotonic() - began_s
    assert not guard.errors_total
    part.link.close()
    os.waitpid(child, 0)
    share = min(1.0, step_s / _SAMPLE_S)
    return {
        "batch": batch,
        "step_ms": 1e3 * step_s,
        "us_per_step": weighed(plain, sampling, share),
        "of_a_step_without_a_sample": weighed(plain, plain, 1.0),
        "of_one_with": weighed(sampling, sampling, 1.0),
        "cpu_of_own_threads_us_per_sample": round(1e6 * others_s / took_s * _SAMPLE_S, 1),
    }


def weighed(plain: list[dict[str, float]], sampling: list[dict[str, float]], share: float) -> dict[str, float]:
    found = {}
    for name in plain[0]:
        without, with_ = (statistics.median(step[name] for step in steps) for steps in (plain, sampling))
        if without + with_ > 0:
            found[name.rpartition(".")[2]] = round((1 - share) * without + share * with_, 1)
    return found


def guards_of(guard: Any, hooks: Any) -> dict[str, Callable[..., Any]]:
    found = {hook.target.removeprefix("sglang.srt."): hook for hook in hooks}
    return {name: guard.guarded(name, hook) for name, hook in found.items()}


def main() -> int:
    ask = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ask.add_argument("--batch", type=int, nargs="+", default=[8, 64])
    ask.add_argument("--step-ms", type=float, default=13.0)
    ask.add_argument("--steps", type=int, default=400)
    options = ask.parse_args()
    for batch in options.batch:
        print(json.dumps(measure(batch, options.step_ms / 1e3, options.steps)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
