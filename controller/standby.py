"""A controller that does not lead: it shows what the leader wrote, names the leader, and refuses whatever would act.

Never sends a command and never touches the router: it has neither. All it writes is the audit of what it refused.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any, NoReturn

from fastapi import APIRouter, WebSocket, WebSocketDisconnect

from controller.clock import Clock
from controller.ports import HubPort
from controller.refusals import GuardRefused
from controller.routes.access import scoped
from controller.settings import ControllerSettings
from controller.store.engine import StoreUnavailable
from controller.store.queries import Queries
from controller.store.writes import Store
from controller.version import VERSION
from controller.views import banner, targets, thresholds
from fluidpd.decision import Refusal
from fluidpd.names import Action, Role, Rule
from fluidpd.record import LeaderRow, PauseRow, PinRow, StatusRow, TransitionRow, WorkerRow
from fluidpd.telemetry import Refused

log = logging.getLogger(__name__)

LOOK_EVERY_S = 1.0
HELLO_WITHIN_S = 5.0
STANDBY_CODE = 4410


class Standby:
    """What the API is given while another controller leads. `look` keeps it fresh."""

    def __init__(self, settings: ControllerSettings, store: Store, queries: Queries, hub: HubPort, clock: Clock) -> None:
        self._settings, self._store, self._queries, self._hub, self._clock = settings, store, queries, hub, clock
        self._started_wall_s = clock.wall()
        self.leader: LeaderRow | None = None
        self.trouble = ""
        self._written: StatusRow | None = None
        self._workers: tuple[WorkerRow, ...] = ()

    # ------------------------------------------------------------ looking

    async def look(self) -> None:
        """Read what the leader wrote last. What cannot be read stays as it was, and the banner says why."""
        try:
            self.leader = await self._store.leader()
            self._written, self._workers = await self._queries.status(), await self._queries.workers()
            self.trouble = ""
        except StoreUnavailable as error:
            self.trouble = str(error)
        self._hub.publish("status", asdict(self.status()))
        self._hub.publish("workers", {"wall_s": self._clock.wall(), "workers": list(self.worker_views())})

    @property
    def leads(self) -> str:
        """Who leads, as a sentence."""
        row = self.leader
        if row is None or row.left_s <= 0:
            return "nobody leads at the moment: a standby takes over within seconds"
        return f"{row.address or 'another controller'} leads (epoch {row.epoch}, {row.holder})"

    def status(self) -> StatusRow:
        """The leader's last word, marked as not our own."""
        row, s = self.leader, self._settings
        address = row.address if row is not None and row.left_s > 0 else ""
        base = self._written or StatusRow(
            wall_s=self._clock.wall(),
            started_wall_s=self._started_wall_s,
            version=VERSION,
            epoch=0,
            leading=False,
            mode=s.mode.value,
            action=Action.HOLD.value,
            reason=Rule.NOT_LEADER.value,
            numbers={},
            refusals=(),
            lenders=(),
            ppi=None,
            dpi=None,
            thresholds=thresholds(s.policy),
            targets=targets(s.slo, s.policy),
            engines=(),
            requests_total=None,
            requests_good=None,
            login=s.security.tokens_file is not None,
        )
        said = (self.trouble,) if self.trouble else (base.banner, "" if address else self.leads)
        epoch = row.epoch if row is not None else base.epoch
        return replace(base, version=VERSION, leading=False, leader=address, epoch=epoch, banner=banner(*said))

    def worker_views(self) -> tuple[dict[str, Any], ...]:
        """As the leader wrote them: nothing here is younger than its last write of each."""
        return tuple(_view(w) for w in self._workers)

    # ------------------------------------------------------------ acts, all refused

    def _refuse(self, worker: str = "") -> NoReturn:
        raise GuardRefused(Refusal(worker, Rule.NOT_LEADER, f"this controller stands by; {self.leads}: ask there"))

    async def request_move(self, worker: str, role: Role, reason: str, actor: str, force: bool) -> TransitionRow:
        self._refuse(worker)

    def preview(self, worker: str, role: Role, pin: bool, force: bool) -> dict[str, Any] | None:
        self._refuse(worker)

    async def cancel_move(self, id: str, reason: str, actor: str) -> TransitionRow:
        self._refuse()

    async def request_grant(self, worker: str, ttl_s: float, reason: str, actor: str) -> dict[str, Any]:
        self._refuse(worker)

    async def set_pin(
        self, worker: str, role: Role, ttl_s: float, reason: str, actor: str, expected_version: int | None = None
    ) -> PinRow:
        self._refuse(worker)

    async def drop_pin(self, worker: str, actor: str, reason: str, expected_version: int | None = None) -> PinRow | None:
        self._refuse(worker)

    async def set_pause(
        self,
        reason: str,
        ttl_s: float,
        actor: str,
        roll_back: bool = False,
        expected_version: int | None = None,
        everywhere: bool = False,
    ) -> PauseRow:
        self._refuse()

    async def resume(
        self, actor: str, reason: str, expected_version: int | None = None, everywhere: bool = False
    ) -> PauseRow | None:
        self._refuse()

    async def deregister(self, worker: str) -> bool:
        self._refuse(worker)


def standby_link(standby: Standby) -> APIRouter:
    """The sidecars' door: it says that another leads, and closes. Whoever comes is told no more than that."""
    router = APIRouter()

    @router.websocket("/link")
    @scoped("sidecar")
    async def link(socket: WebSocket) -> None:
        await socket.accept()
        why = f"this controller stands by; {standby.leads}"
        try:
            await socket.send_text(Refused(why=why, standby=True).model_dump_json())
            async with asyncio.timeout(HELLO_WITHIN_S):
                await socket.receive()  # whoever says hello first must have said it before the end, or misses the answer
            await socket.close(STANDBY_CODE, "this controller stands by")
        except (TimeoutError, WebSocketDisconnect, RuntimeError):
            pass  # it went away, or was no sidecar

    return router


def _view(w: WorkerRow) -> dict[str, Any]:
    known: Mapping[str, Any] = asdict(w)
    return {
        **{name: known[name] for name in known if name not in ("registered_wall_s", "seen_wall_s")},
        "role": w.role.value,
        "state": w.state.value,
        "plugin": w.plugin.value if w.plugin else None,
        "capabilities": list(w.capabilities),
        "cannot": dict(w.cannot),
        "seen_wall_s": w.seen_wall_s,
        "age_s": None,  # its sidecar talks to the leader
        "connected": False,
    }
