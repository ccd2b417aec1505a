"""Speaks to the controller's API: actions, and the names of what happens on its event stream.

Never retries an action: a person sees the answer and decides.
"""

from __future__ import annotations

import ssl
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any, Protocol
from urllib.parse import quote

import httpx

STREAM_SILENCE_S = 30.0  # twice the heartbeat: a stream quiet for longer is dead
# Only what a page does not see at its next beat anyway: the others hold the whole fleet, a megabyte of a large one.
STREAM = "/api/v1/stream?events=transition,decision,audit"
_NEVER_SENT = (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout, httpx.UnsupportedProtocol)


@dataclass(frozen=True, slots=True)
class Problem:
    """Why an action was not done: RFC 9457's fields, with the rule that refused where one did."""

    status: int
    title: str
    detail: str = ""
    rule: str = ""


class ControllerGone(ConnectionError):
    """The controller cannot be reached, or its stream ended."""


class Controller(Protocol):
    """What pages need of the controller. None means done."""

    async def pin(self, worker: str, role: str, ttl_s: float, reason: str, expected_version: int | None) -> Problem | None: ...
    async def unpin(self, worker: str, reason: str) -> Problem | None: ...
    async def pause(self, reason: str, ttl_s: float) -> Problem | None: ...
    async def resume(self, reason: str) -> Problem | None: ...
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
        if token:
            headers["Authorization"] = f"Bearer {token}"
        # Proxies of the environment must never see a fleet's commands.
        self._http = httpx.AsyncClient(
            base_url=base_url, headers=headers, transport=transport, timeout=5.0, trust_env=False, verify=tls or True
        )

    async def pin(self, worker: str, role: str, ttl_s: float, reason: str, expected_version: int | None) -> Problem | None:
        body: dict[str, Any] = {"role": role, "ttl_s": ttl_s, "reason": reason}
        if expected_version is not None:
            body["expected_version"] = expected_version
        return await self._act("POST", f"/api/v1/workers/{quote(worker, safe='')}/pin", body)

    async def unpin(self, worker: str, reason: str) -> Problem | None:
        why = f"?reason={quote(reason, safe='')}" if reason else ""
        return await self._act("DELETE", f"/api/v1/workers/{quote(worker, safe='')}/pin{why}")

    async def pause(self, reason: str, ttl_s: float) -> Problem | None:
        return await self._act("POST", "/api/v1/pause", {"reason": reason, "ttl_s": ttl_s})

    async def resume(self, reason: str) -> Problem | None:
        return await self._act("POST", "/api/v1/resume", {"reason": reason})

    async def events(self) -> AsyncIterator[str]:
        """Yields the name of each event, and "" for a heartbeat. Raises ControllerGone when the stream ends, however it ends."""
        timeout = httpx.Timeout(5.0, read=STREAM_SILENCE_S)
        accept = {"Accept": "text/event-stream"}
        try:
            async with self._http.stream("GET", STREAM, headers=accept, timeout=timeout) as answer:
                if answer.status_code != httpx.codes.OK:
                    raise ControllerGone(f"the controller's stream answered {answer.status_code}")
                yield ""
                name = "message"
                async for line in answer.aiter_lines():
                    if line.startswith("event:"):
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
        try:
            answer = await self._http.request(method, path, json=body)
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
        return None if answer.is_success else _problem(answer)

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
    )


def _sentence(detail: Any) -> str:
    """A detail in words; a list of field errors becomes one sentence."""
    if isinstance(detail, list):
        return "; ".join(f"{'.'.join(map(str, e.get('loc', ())))}: {e.get('msg', e)}" for e in detail if isinstance(e, dict))
    return "" if detail is None else str(detail)
