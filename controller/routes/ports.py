"""What the API needs of the controller. The real one is controller.loop.Controller; tests bring a fake.

Refusals are raised: controller.refusals.GuardRefused, NotFound, Conflict.
"""

from __future__ import annotations

from typing import Any, Protocol

from fluidpd.names import Role
from fluidpd.record import PauseRow, PinRow, StatusRow, TransitionRow


class ControllerPort(Protocol):
    def status(self) -> StatusRow: ...

    def worker_views(self) -> tuple[dict[str, Any], ...]:
        """Each worker as it is known this moment, ready for JSON; `name` is the key."""
        ...

    async def request_move(self, worker: str, role: Role, reason: str, actor: str, force: bool) -> TransitionRow: ...
    async def cancel_move(self, id: str, reason: str, actor: str) -> TransitionRow: ...
    async def request_grant(self, worker: str, ttl_s: float, reason: str, actor: str) -> dict[str, Any]: ...
    async def set_pin(
        self, worker: str, role: Role, ttl_s: float, reason: str, actor: str, expected_version: int | None = None
    ) -> PinRow: ...
    async def drop_pin(self, worker: str, actor: str, reason: str, expected_version: int | None = None) -> Any: ...
    async def set_pause(
        self,
        reason: str,
        ttl_s: float,
        actor: str,
        roll_back: bool = False,
        expected_version: int | None = None,
        everywhere: bool = False,
    ) -> PauseRow: ...
    async def resume(self, actor: str, reason: str, expected_version: int | None = None, everywhere: bool = False) -> Any: ...
    def preview(self, worker: str, role: Role, pin: bool, force: bool) -> dict[str, Any] | None:
        """What a pin, or a move, would do at this moment, ready for JSON. None: there is no such worker."""
        ...

    async def deregister(self, worker: str) -> bool: ...
