"""The pages, in one list. An entry is shown once its page has a route.

Never lists a page that is not there.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from dashboard import urls


@dataclass(frozen=True, slots=True)
class Entry:
    """Each of the `letters` follows g on the keyboard: `g o` goes to the overview."""

    key: str
    label: str
    path: str
    letters: str


ENTRIES = (
    Entry("overview", "Overview", urls.OVERVIEW, "o"),
    Entry("fleet", "Fleet", urls.FLEET, "fw"),
    Entry("transitions", "Transitions", urls.TRANSITIONS, "t"),
    Entry("decisions", "Decisions", urls.DECISIONS, "d"),
    Entry("overrides", "Overrides", urls.OVERRIDES, "p"),
    Entry("slo", "SLO & alerts", urls.SLO, "s"),
    Entry("replay", "Replay", urls.REPLAY, "r"),
    Entry("audit", "Audit", urls.AUDIT, "a"),
    Entry("settings", "Settings", urls.SETTINGS, "c"),
)


def shown(paths: Collection[str]) -> tuple[Entry, ...]:
    """The entries whose page is among the app's routes."""
    return tuple(entry for entry in ENTRIES if entry.path in paths)
