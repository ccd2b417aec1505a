"""Moves that ended, written to Grafana as annotations by whoever leads, so that its panels show them beside everything else.

Never holds up a decision and never writes a move twice: Grafana is asked first, so a restart or another leader adds nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import httpx

from controller.routes.annotations import of_moves
from controller.settings import GrafanaSettings
from fluidpd.record import TransitionRow

log = logging.getLogger(__name__)
EVERY_S = 10.0
REACH_S = 3600.0  # what ended longer ago is left out: a Grafana that was away for a day is not flooded
MOST = 200
TIMEOUT_S = 5.0


class Ended(Protocol):
    """The part of the store's queries that this needs."""

    async def transitions(
        self, *, limit: int = 50, since_wall_s: float | None = None, until_wall_s: float | None = None
    ) -> tuple[TransitionRow, ...]: ...


class NotWritten(Exception):
    """Grafana did not take it. The message says why, without the token."""


class Grafana:
    """One Grafana. `leads`: whether this controller may write now; `wall`: unix seconds."""

    def __init__(
        self,
        settings: GrafanaSettings,
        moves: Ended,
        leads: Callable[[], bool],
        wall: Callable[[], float],
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        assert settings.url is not None and settings.token_file is not None
        self._settings, self._moves, self._leads, self._wall = settings, moves, leads, wall
        self._token_file = Path(settings.token_file)
        self._written: dict[str, float] = {}  # id of a move: when it ended
        self._trouble = ""
        # Proxies of the environment must never see the token, and a redirect must not carry it elsewhere.
        self._http = httpx.AsyncClient(
            base_url=settings.url.rstrip("/"), timeout=TIMEOUT_S, trust_env=False, follow_redirects=False, transport=transport
        )

    async def close(self) -> None:
        await self._http.aclose()

    async def push(self) -> None:
        """Write what ended since the last time. What Grafana does not take is tried again at the next."""
        if not self._leads():
            return
        now_s = self._wall()
        self._written = {id: at for id, at in self._written.items() if at >= now_s - REACH_S}
        found = await self._moves.transitions(limit=MOST, since_wall_s=now_s - REACH_S, until_wall_s=now_s)
        ended = [m for m in reversed(found) if m.ended_wall_s is not None and m.id not in self._written]
        try:
            for move in ended:
                await self._write(move)
        except NotWritten as error:
            if str(error) != self._trouble:  # once, not every ten seconds
                log.warning("Grafana does not take annotations, which are tried again: %s", error)
            self._trouble = str(error)
        else:
            self._trouble = ""

    async def _write(self, move: TransitionRow) -> None:
        if not await self._ask("GET", "/api/annotations", params={"tags": ["fluidpd", move.id], "limit": 1}):
            (told,) = of_moves([move])
            body = {
                "time": told["time"],
                "timeEnd": told["timeEnd"],
                "tags": [*told["tags"], move.id],
                "text": f"{told['title']}. {told['text']}",
            }
            if self._settings.dashboard_uid is not None:
                body["dashboardUID"] = self._settings.dashboard_uid
            await self._ask("POST", "/api/annotations", json=body)
        self._written[move.id] = move.ended_wall_s or move.started_wall_s

    async def _ask(self, method: str, path: str, **more: Any) -> Any:
        """Raises NotWritten."""
        try:
            token = self._token_file.read_text(encoding="utf-8").strip()  # a rotated one is used at once
            answer = await self._http.request(method, path, headers={"Authorization": f"Bearer {token}"}, **more)
            if answer.is_success:
                return answer.json()
        except (OSError, httpx.HTTPError, ValueError) as error:
            raise NotWritten(f"{type(error).__name__} at {method} {path} of {self._settings.url}") from error
        raise NotWritten(f"{method} {path} of {self._settings.url} answered {answer.status_code}")
