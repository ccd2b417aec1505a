"""What can only be seen by comparing workers: settings that must be the same everywhere, and ports that must not be.

Never looks at one worker alone: what an engine rules out by itself, its sidecar says.
"""

from __future__ import annotations

from collections import Counter, defaultdict
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


class Beside:
    """What all workers state. In a fleet without differences one more worker is looked at alone: a thousand hellos at once
    must not compare everybody a thousand times."""

    def __init__(self) -> None:
        self._stated: dict[str, Stated] = {}
        self._radix: Counter[bool | None] = Counter()
        self._at: Counter[tuple[str, int | None]] = Counter()
        self._is_odd = False

    def changes(self, name: str, stated: Stated | None) -> bool:
        """Take the worker's word (None: it left). True: somebody differs or did, so all must be looked at again."""
        before = self._stated.pop(name, None)
        if before is not None:
            self._radix[before.radix_cache] -= 1
            self._at[before.host, before.bootstrap_port] -= 1
            if not self._at[before.host, before.bootstrap_port]:
                del self._at[before.host, before.bootstrap_port]
        if stated is None:
            return self._is_odd
        self._stated[name] = stated
        self._radix[stated.radix_cache] += 1
        self._at[stated.host, stated.bootstrap_port] += 1
        shares = stated.bootstrap_port is not None and self._at[stated.host, stated.bootstrap_port] > 1
        return self._is_odd or shares or (self._radix[True] > 0 and self._radix[False] > 0)

    def why_not_flippable(self) -> dict[str, str]:
        found = why_not_flippable(self._stated.values())
        self._is_odd = bool(found)
        return found


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
