"""How long a sidecar's samples were under way, from its own monotonic seconds: a slow link must not make old facts look new.

Never makes a sample younger than its arrival: a sender that is wrong about its clock can only lose trust.
"""

from __future__ import annotations

import math

DRIFT = 2e-4  # two good clocks differ by less; so fast a lasting delay becomes what is normal
LATE_S = 0.25  # more than this is worth telling a person


class Transit:
    """One connection. `greeted_s` is when its hello arrived, in our monotonic seconds; `sent_s` of a sample counts from when the
    sender said that hello, less the time it takes a message to arrive, as the sender measured it."""

    def __init__(self, greeted_s: float) -> None:
        self._base_s = self._at_s = greeted_s

    def late_s(self, sent_s: float | None, now_s: float) -> float:
        """Seconds that a sample which arrives now was under way; 0 from a sender that does not say."""
        if sent_s is None or not math.isfinite(sent_s):
            return 0.0
        offset_s = now_s - sent_s
        drifted_s = self._base_s + DRIFT * (now_s - self._at_s)
        self._base_s, self._at_s = min(drifted_s, offset_s), now_s
        return offset_s - self._base_s
