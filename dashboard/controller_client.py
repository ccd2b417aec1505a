"""Speaks to the controller's API: logins, actions, previews, and the names of what happens on its event stream.

Never retries an action: a person sees the answer and decides.
"""

from __future__ import annotations

import copy
import ssl
import uuid
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, Self
from urllib.parse import quote

import httpx
from starlette.requests import Request

from dashboard import visitor

STREAM_SILENCE_S = 30.0  # twice the heartbeat: a stream quiet for longer is dead
# Only what a page does not see at its next beat anyway: the others hold the whole fleet, a megabyte of a large one.
STREAM = "/api/v1/stream?events=transition,decision,audit"
_NEVER_SENT = (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout, httpx.UnsupportedProtocol)


@dataclass(frozen=True, slots=True)
class Problem:
    """Why an action was not done: RFC 9457's fields, with the rule that refused where one did, and what stands instead."""

    status: int
    title: str
    detail: str = ""
    rule: str = ""
    changed: bool = False  # somebody changed it since it was read
    current: Mapping[str, Any] | None = field(default=None, compare=False)
    retry_after_s: int = 0


class ControllerGone(ConnectionError):
    """The controller cannot be reached, or its stream ended."""


@dataclass(frozen=True, slots=True)
class Caller:
    """For whom a request is made. `secret`: the session; None where nobody logs in and the dashboard's own token acts."""

    secret: str | None = None
    address: str = ""
    request_id: str = ""


def caller_of(request: Request) -> Caller:
    """Whoever sent this request to the dashboard."""
    address = request.client.host if request.client is not None else ""
    return Caller(visitor.current().secret, address, uuid.uuid4().hex)


@dataclass(frozen=True, slots=True)
class Opened:
    """A session of the controller's making."""

    secret: str
    actor: str
    expires_wall_s: float


class Controller(Protocol):
    """What pages need of the controller. None means done."""

    def acting(self, caller: Caller) -> Controller:
        """The same, with every request made for that person."""
        ...

    async def login(self, token: str) -> Opened | Problem: ...
    async def logout(self) -> Problem | None: ...
    async def preview(self, worker: str, role: str, act: str, force: bool) -> Mapping[str, Any] | Problem: ...
    async def config(self) -> list[dict[str, Any]] | Problem: ...
    async def pin(self, worker: str, role: str, ttl_s: float, reason: str, expected_version: int | None) -> Problem | None: ...
    async def unpin(self, worker: str, reason: str, expected_version: int | None = None) -> Problem | None: ...
    async def pause(
        self,
        reason: str,
        ttl_s: float,
        roll_back: bool = False,
        expected_version: int | None = None,
        everywhere: bool = False,
    ) -> Problem | None: ...
    async def resume(self, reason: str, expected_version: int | None = None, everywhere: bool = False) -> Problem | None: ...
    async def move(self, worker: str, role: str, reason: str, force: bool) -> Problem | None: ...
    async def cancel(self, move_id: str, reason: str) -> Problem | None: ...
    def events(self) -> AsyncIterator[str]: ...


class ControllerClient:
    """The real one, over HTTP."""

    def __init__(
        self,
        base_url: str,
        token: str | None = None,
        transport: httpx.AsyncBaseTransport | None = None,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        headers = {"User-Agent": "fluidpd-dashboard", "X-Fluidpd-Source": "dashboard"}
        self._bearer = {"Authorization": f"Bearer {token}"} if token else {}
        self._for: dict[str, str] = dict(self._bearer)
        # Proxies of the environment must never see a fleet's commands.
        self._last_id = ""
        self._http = httpx.AsyncClient(
            base_url=base_url, headers=headers, transport=transport, timeout=5.0, trust_env=False, verify=tls or True
        )

    def acting(self, caller: Caller) -> Self:
        """The same connections; a session's requests never carry the dashboard's own token."""
        other = copy.copy(self)
        own = self._bearer if caller.secret is None else {"Authorization": f"Bearer {caller.secret or 'nobody'}"}
        other._for = {**own, "X-Fluidpd-Client": caller.address, "X-Request-Id": caller.request_id}
        return other

    async def login(self, token: str) -> Opened | Problem:
        told = await self._ask("POST", "/api/v1/login", {"token": token})
        return told if isinstance(told, Problem) else Opened(told["session"], told["actor"], told["expires_wall_s"])

    async def logout(self) -> Problem | None:
        return await self._act("POST", "/api/v1/logout")

    async def preview(self, worker: str, role: str, act: str, force: bool) -> Mapping[str, Any] | Problem:
        asked = f"role={quote(role, safe='')}&act={quote(act, safe='')}&force={str(force).lower()}"
        found: Mapping[str, Any] | Problem = await self._ask("GET", f"{_worker(worker)}/preview?{asked}")
        return found

    async def config(self) -> list[dict[str, Any]] | Problem:
        found: list[dict[str, Any]] | Problem = await self._ask("GET", "/api/v1/config/sources")
        return found

    async def pin(self, worker: str, role: str, ttl_s: float, reason: str, expected_version: int | None) -> Problem | None:
        body = {"role": role, "ttl_s": ttl_s, "reason": reason, "expected_version": expected_version}
        return await self._act("POST", f"{_worker(worker)}/pin", body)

    async def unpin(self, worker: str, reason: str, expected_version: int | None = None) -> Problem | None:
        return await self._act("DELETE", f"{_worker(worker)}/pin", {"reason": reason, "expected_version": expected_version})

    async def pause(
        self,
        reason: str,
        ttl_s: float,
        roll_back: bool = False,
        expected_version: int | None = None,
        everywhere: bool = False,
    ) -> Problem | None:
        body = {"reason": reason, "ttl_s": ttl_s, "roll_back": roll_back, "expected_version": expected_version}
        return await self._act("POST", "/api/v1/pause", {**body, "everywhere": everywhere})

    async def resume(self, reason: str, expected_version: int | None = None, everywhere: bool = False) -> Problem | None:
        body = {"reason": reason, "expected_version": expected_version, "everywhere": everywhere}
        return await self._act("POST", "/api/v1/resume", body)

    async def move(self, worker: str, role: str, reason: str, force: bool) -> Problem | None:
        return await self._act("POST", f"{_worker(worker)}/move", {"role": role, "reason": reason, "force": force})

    async def cancel(self, move_id: str, reason: str) -> Problem | None:
        return await self._act("POST", f"/api/v1/transitions/{quote(move_id, safe='')}/cancel", {"reason": reason})

    async def events(self) -> AsyncIterator[str]:
        """Yields the name of each event, and "" for a heartbeat; after a break, first of those that were missed.

        Raises ControllerGone when the stream ends, however it ends.
        """
        timeout = httpx.Timeout(5.0, read=STREAM_SILENCE_S)
        resume = {"Last-Event-ID": self._last_id} if self._last_id else {}
        accept = {"Accept": "text/event-stream", **self._bearer, **resume}
        try:
            async with self._http.stream("GET", STREAM, headers=accept, timeout=timeout) as answer:
                if answer.status_code != httpx.codes.OK:
                    raise ControllerGone(f"the controller's stream answered {answer.status_code}")
                yield ""
                name = "message"
                async for line in answer.aiter_lines():
                    if line.startswith("id:"):
                        self._last_id = line.removeprefix("id:").strip()
                    elif line.startswith("event:"):
                        name = line.removeprefix("event:").strip()
                    elif line.startswith(":"):
                        yield ""
                    elif not line:
                        yield name
                        name = "message"
        except httpx.HTTPError as error:
            raise ControllerGone(f"the controller's stream broke: {type(error).__name__}") from error
        raise ControllerGone("the controller's stream ended")

    async def _act(self, method: str, path: str, body: dict[str, Any] | None = None) -> Problem | None:
        told = await self._ask(method, path, body)
        return told if isinstance(told, Problem) else None

    async def _ask(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        """The answer's JSON, or why there is none."""
        sent = None if body is None else {k: v for k, v in body.items() if v is not None}
        try:
            answer = await self._http.request(method, path, json=sent, headers=self._for)
        except _NEVER_SENT as error:
            return Problem(
                503,
                "The controller does not answer",
                f"Nothing was changed ({type(error).__name__}). Start it with `fluidpd controller`, or check controller_url.",
            )
        except httpx.HTTPError as error:  # the request may have arrived, and only its answer was lost
            return Problem(
                503,
                "The controller did not answer in time" if isinstance(error, httpx.TimeoutException) else "The answer was lost",
                f"It is not known whether it was done ({type(error).__name__}): look at the fleet before trying again.",
            )
        if not answer.is_success:
            return _problem(answer)
        try:
            return answer.json()
        except ValueError:
            return {}

    async def aclose(self) -> None:
        await self._http.aclose()


def _problem(answer: httpx.Response) -> Problem:
    try:
        told = answer.json()
    except ValueError:
        told = None
    if not isinstance(told, dict):
        return Problem(answer.status_code, f"The controller refused ({answer.status_code})", answer.text[:300])
    return Problem(
        answer.status_code,
        str(told.get("title") or f"The controller refused ({answer.status_code})"),
        _sentence(told.get("detail")),
        str(told.get("rule") or ""),
        # The controller sends what stands with each refusal of a version, also when nothing does.
        changed=answer.status_code == httpx.codes.CONFLICT and "current" in told,
        current=told.get("current"),
        retry_after_s=int(wait) if (wait := answer.headers.get("retry-after", "")).isdecimal() else 0,
    )


def _worker(name: str) -> str:
    return f"/api/v1/workers/{quote(name, safe='')}"


def _sentence(detail: Any) -> str:
    """A detail in words; a list of field errors becomes one sentence."""
    if isinstance(detail, list):
        return "; ".join(f"{'.'.join(map(str, e.get('loc', ())))}: {e.get('msg', e)}" for e in detail if isinstance(e, dict))
    return "" if detail is None else str(detail)
