"""What a larger fleet gets less of, so that one controller on one core keeps up with it: by its number of workers alone.

Never looks at a clock or a load: the same fleet always gets the same, so that what is seen of it can be compared.
"""

from __future__ import annotations

SMALL, MIDDLE = 64, 256  # workers


def sample_hz(workers: int) -> float:
    """Samples a second that each worker is asked for."""
    return 20.0 if workers <= SMALL else 10.0 if workers <= MIDDLE else 5.0


def tick_s(workers: int, shortest_s: float) -> float:
    """The period of the decision loop: a decision costs by the worker, and a larger fleet's samples come less often too."""
    return max(shortest_s, 0.0 if workers <= SMALL else 0.025 if workers <= MIDDLE else 0.1)


def grant_renew_s(workers: int, usual_s: float, ttl_s: float) -> float:
    """How long a grant runs before it is renewed. A large fleet's are renewed once in a life, not twice."""
    return usual_s if workers <= MIDDLE else max(usual_s, ttl_s * 0.6)


def each_s(workers: int, usual_s: float) -> float:
    """The period of what shows or keeps every worker at once: as often as usual to 256, then so that its cost does not grow."""
    return usual_s * max(1.0, workers / MIDDLE)
