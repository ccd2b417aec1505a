"""Keeps requests of a role that a worker does not have yet, until the role is there or will not come: in the plugin, and in the
emulated worker. Imports nothing that SGLang's process does not have anyway. Never answers a request itself.
"""

from __future__ import annotations

import asyncio

from fluidpd.names import Role

_MAX_HELD = 1024


class Gate:
    """Invariant: a request is held only while its role is the one that is awaited."""

    def __init__(self) -> None:
        self.awaited: Role | None = None
        self.held_total = 0
        self._held: set[asyncio.Future[bool]] = set()

    @property
    def held(self) -> int:
        return len(self._held)

    def hold(self, role: Role) -> None:
        if self.awaited is not None and self.awaited is not role:
            self.drop()
        self.awaited = role

    def open(self) -> int:
        return self._settle(True)

    def drop(self) -> int:
        return self._settle(False)

    def holds(self, role: Role) -> bool:
        return self.awaited is role

    async def wait(self) -> bool:
        """True once the role is there, False if it will not come (or too many wait already)."""
        if len(self._held) >= _MAX_HELD:
            return False
        turn: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._held.add(turn)
        self.held_total += 1
        try:
            return await turn
        finally:
            self._held.discard(turn)

    def _settle(self, admitted: bool) -> int:
        self.awaited = None
        settled = 0
        for turn in self._held:
            if not turn.done():
                turn.set_result(admitted)
                settled += 1
        return settled
