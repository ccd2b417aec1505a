"""An idle scheduler that sleeps hears its sidecar at once, and misses nothing that was said while it fell asleep."""

from __future__ import annotations

import select
from types import SimpleNamespace

from engine_fakes import FakeScheduler

from sidecar.plugin.wake import Wake


class Sleeper:
    """SGLang's IdleSleeper, as far as we use it; `slept` says whether it would have waited for its whole second."""

    def __init__(self) -> None:
        self.poller = SimpleNamespace(register=self._register)
        self._poll = select.poll()

    def _register(self, fd: int, events: int) -> None:
        self._poll.register(fd, events)

    def slept(self) -> bool:
        return not self._poll.poll(0)


def test_what_is_said_ends_the_sleep_once() -> None:
    sleeper = Sleeper()
    wake = Wake(SimpleNamespace(idle_sleeper=sleeper))
    assert sleeper.slept()
    wake.up()
    wake.up()
    assert not sleeper.slept()
    wake.seen()
    assert sleeper.slept()
    wake.seen()
    wake.up()
    assert not sleeper.slept()


def test_a_scheduler_that_is_to_stay_awake_never_sleeps_and_sleeps_again_after_one_more_look() -> None:
    sleeper = Sleeper()
    wake = Wake(SimpleNamespace(idle_sleeper=sleeper))
    for _ in range(3):
        wake.seen()
        wake.stay(True)
        assert not sleeper.slept()
    wake.seen()
    wake.stay(False)
    wake.up()  # said while it would fall asleep
    assert not sleeper.slept()
    wake.seen()
    assert sleeper.slept()


def test_a_scheduler_that_never_sleeps_is_left_alone() -> None:
    for scheduler in (FakeScheduler("decode"), SimpleNamespace(idle_sleeper=None), SimpleNamespace(idle_sleeper=object())):
        wake = Wake(scheduler)
        wake.up()
        wake.stay(True)
        wake.seen()
