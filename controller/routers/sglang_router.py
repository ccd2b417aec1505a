"""sglang-router's membership through its /workers interface: who is in, put one in, take one out.

Never trusts an answer: the router queues every change and answers 202 at once, so the list is read until it shows the change.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import httpx

from controller.clock import Clock
from controller.ports import Member, RouterTrouble
from fluidpd.names import Role

log = logging.getLogger(__name__)

POLL_S = 0.02
CALL_TIMEOUT_S = 2.0
MOST_BYTES = 8 * 1024 * 1024
REPOST_S = 1.0  # an entry that a late, competing job removed or refused is asked for again after this


@dataclass(frozen=True, slots=True)
class _Entry:
    id: str
    url: str
    role: Role | None
    healthy: bool
    bootstrap_port: int | None


class SglangRouter:
    """One router. `api_key` is sent as a bearer token where the router's control plane wants one."""

    def __init__(
        self,
        url: str,
        *,
        clock: Clock | None = None,
        client: httpx.AsyncClient | None = None,
        health_wait_s: float = 10.0,
        api_key: str | None = None,
    ) -> None:
        self._clock = clock or Clock()
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._client = client or httpx.AsyncClient(base_url=url, timeout=CALL_TIMEOUT_S, headers=headers)
        self._url = url
        self._health_wait_s = health_wait_s
        self._queued: dict[str, str] = {}  # worker URL -> id of an addition that was asked for here

    async def close(self) -> None:
        await self._client.aclose()

    async def members(self) -> Mapping[str, Member]:
        return {e.url: Member(e.url, e.role, e.healthy) for e in await self._entries()}

    async def ensure(self, worker_url: str, role: Role | None, bootstrap_port: int | None = None) -> None:
        """See `controller.ports.Router`. An entry in another role is deleted first: the router cannot change one."""
        deadline_s = self._clock.now() + self._health_wait_s
        posted_s: float | None = None
        url = _plain(worker_url)
        seen = "nothing"
        while True:
            mine = [e for e in await self._entries() if _plain(e.url) == url]
            wrong = [e for e in mine if not _fits(e, role, bootstrap_port)]
            for entry in wrong:
                await self._call("DELETE", f"/workers/{entry.id}", missing_is_fine=True)
            if role is None:
                if not mine and not await self._addition_pending(url):
                    return
                seen = "it is still listed" if mine else "an earlier addition is still queued"
            elif not wrong and mine:
                self._queued.pop(url, None)
                if any(e.healthy for e in mine):
                    return
                seen = "it is listed, but not healthy"
            elif not mine:
                now_s = self._clock.now()
                if posted_s is None or (now_s - posted_s > REPOST_S and not await self._addition_pending(url)):
                    await self._add(url, role, bootstrap_port)
                    posted_s = now_s
                seen = "it was asked for and is not listed; the router adds a worker only once its /health answers"
            if self._clock.now() >= deadline_s:
                wanted = "leave" if role is None else f"serve {role}"
                raise RouterTrouble(f"router {self._url}: {worker_url} should {wanted}; after {self._health_wait_s:g} s {seen}")
            await self._clock.sleep(POLL_S)

    async def _add(self, url: str, role: Role, bootstrap_port: int | None) -> None:
        body: dict[str, Any] = {"url": url, "worker_type": role.value}
        if role is Role.PREFILL and bootstrap_port is not None:
            body["bootstrap_port"] = bootstrap_port
        answer = await self._call("POST", "/workers", json=body)
        if isinstance(answer, dict) and isinstance(answer.get("worker_id"), str):
            self._queued[url] = answer["worker_id"]

    async def _addition_pending(self, url: str) -> bool:
        """Whether an addition asked for here still waits in the router's job queue (it would surface after a removal)."""
        queued = self._queued.get(url)
        if queued is None:
            return False
        answer = await self._call("GET", f"/workers/{queued}", missing_is_fine=True)
        job = answer.get("job_status") if isinstance(answer, dict) else None
        pending = isinstance(job, dict) and job.get("status") in ("pending", "processing")
        if not pending:
            self._queued.pop(url, None)
        return pending

    async def _entries(self) -> list[_Entry]:
        answer = await self._call("GET", "/workers")
        if not isinstance(answer, dict) or not isinstance(answer.get("workers"), list):
            raise RouterTrouble(f"router {self._url}: GET /workers answered something that is no list of workers")
        return [
            _Entry(str(w["id"]), str(w["url"]), _role(w.get("worker_type")), w.get("is_healthy") is True, w.get("bootstrap_port"))
            for w in answer["workers"]
            if isinstance(w, dict) and "id" in w and "url" in w
        ]

    async def _call(self, method: str, path: str, *, json: Any = None, missing_is_fine: bool = False) -> Any:
        try:
            answer = await self._bounded(method, path, json)
        except httpx.HTTPError as error:
            raise RouterTrouble(f"router {self._url} does not answer ({type(error).__name__}): is it running?") from error
        if answer.status_code == 404 and missing_is_fine:
            return None
        if answer.status_code >= 400:
            raise RouterTrouble(f"router {self._url}: {method} {path} answered {answer.status_code}: {answer.text[:200]}")
        try:
            return answer.json()
        except ValueError as error:
            raise RouterTrouble(f"router {self._url}: {method} {path} answered no JSON: is this sglang-router?") from error

    async def _bounded(self, method: str, path: str, json: Any) -> httpx.Response:
        """The whole answer, if it is not endless: the list of a few thousand workers is a megabyte or two."""
        async with self._client.stream(method, path, json=json) as answer:
            read = bytearray()
            async for part in answer.aiter_bytes():
                read += part
                if len(read) > MOST_BYTES:
                    raise RouterTrouble(f"router {self._url}: {method} {path} answered more than {MOST_BYTES} bytes")
            headers = {"content-type": answer.headers.get("content-type", "")}
            return httpx.Response(answer.status_code, headers=headers, content=bytes(read))


def _plain(url: str) -> str:
    return url.rstrip("/")


def _role(worker_type: object) -> Role | None:
    return next((role for role in Role if role == worker_type), None)


def _fits(entry: _Entry, role: Role | None, bootstrap_port: int | None) -> bool:
    if entry.role is not role or role is None:
        return False
    return role is Role.DECODE or bootstrap_port is None or entry.bootstrap_port == bootstrap_port
