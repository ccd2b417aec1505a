"""How times are judged on a machine that others use too: less the time for which it had none for us."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from fleet_tools import until
from harness_tools import waited_s
from harness_watch import Watch

from cli.fleet import Fleet

STARVED_S, STARVED_SHARE = 1.0, 0.25


@dataclass(frozen=True, slots=True)
class Mark:
    """A moment, and how long each process had waited for the machine by then."""

    at_s: float
    waited: Mapping[int, float]

    @property
    def passed_s(self) -> float:
        return time.monotonic() - self.at_s


@dataclass
class Timed:
    """A fleet that is watched, and whose processes' waiting is known."""

    fleet: Fleet
    watch: Watch

    def mark(self) -> Mark:
        """Now, as what follows is timed from."""
        return Mark(time.monotonic(), self._waited())

    def _waited(self) -> dict[int, float]:
        return {child.pid: waited_s(child.pid) for child in self.fleet.children.values() if not child.dead()}

    def waited_s(self, since: Mark) -> float:
        """How long one of the fleet's processes was ready to run since then, and the machine had others to run."""
        return max((all_s - since.waited.get(pid, 0.0) for pid, all_s in self._waited().items()), default=0.0)

    def in_time(self, since: Mark, limit_s: float) -> bool:
        """Whether at most so long has passed, without the time for which the machine had no time for us."""
        return since.passed_s - self.waited_s(since) <= limit_s or self.watch.longest_gap_s(since.at_s) > STARVED_S

    def starved(self, since: Mark) -> bool:
        """Whether the machine has kept one of us, or even an idle looker, waiting since then for longer than limits allow for."""
        return self.waited_s(since) > since.passed_s * STARVED_SHARE or self.watch.longest_gap_s(since.at_s) > STARVED_S

    def calmly(self, look: Callable[[], list[str]], tries: int = 5) -> list[str]:
        """What `look` found wrong. Looked at again if the machine starved us meanwhile."""
        found: list[str] = []
        for _ in range(tries):
            since = self.mark()
            found = look()
            if not found or not self.starved(since):
                break
        return found

    def watched_for(self, seconds: float) -> None:
        """Let it be looked at from outside for so long, however busy the machine is."""
        looks, since_s = len(self.watch.moments), time.monotonic()
        until(
            lambda: len(self.watch.moments) - looks >= seconds * 10 and time.monotonic() - since_s >= seconds,
            seconds * 10 + 30,
            "enough looks at the fleet",
        )
