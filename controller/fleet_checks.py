"""What can only be seen by comparing workers: settings that must be the same everywhere, and ports that must not be.

Never looks at one worker alone: what an engine rules out by itself, its sidecar says.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Stated:
    """What one worker says of itself. None: not known, which differs from nobody."""

    name: str
    host: str
    bootstrap_port: int | None
    radix_cache: bool | None


def why_not_flippable(workers: Iterable[Stated]) -> dict[str, str]:
    """Workers that may not change roles because of what others say, and why. All others are absent."""
    stated = sorted(workers, key=lambda w: w.name)
    return {**_radix_differs(stated), **_port_shared(stated)}


def _radix_differs(stated: list[Stated]) -> dict[str, str]:
    """The larger camp is taken for the fleet's setting. With two of a size nobody can tell, so neither may flip."""
    camps = {on: [w for w in stated if w.radix_cache is on] for on in (True, False)}
    found: dict[str, str] = {}
    for on, camp in camps.items():
        other = camps[not on]
        if other and len(camp) <= len(other):
            words = "on here, off there" if on else "off here, on there"
            text = f"radix cache differs from {other[0].name} ({words}): start every worker with the same setting"
            found |= {w.name: text for w in camp}
    return found


def _port_shared(stated: list[Stated]) -> dict[str, str]:
    """A bootstrap server runs in both roles, so two workers on a machine need two ports."""
    sharing: dict[tuple[str, int], list[str]] = defaultdict(list)
    for w in stated:
        if w.bootstrap_port is not None:
            sharing[w.host, w.bootstrap_port].append(w.name)
    found = {}
    for (host, port), names in sharing.items():
        for name in names if len(names) > 1 else ():
            other = next(n for n in names if n != name)
            found[name] = (
                f"bootstrap port {port} is also that of {other} on {host}: "
                "give each worker its own --disaggregation-bootstrap-port"
            )
    return found
