"""One POST to a receiver: to an address that was looked at, without redirects, within a time, and with a limit on the answer.

Never retries: how it went is the answer, and the sender decides.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from email.utils import parsedate_to_datetime

import httpx

from controller.security.link_gate import resolved
from fluidpd.addresses import Address, Allowed, Refused, judge, literal

MOST_ANSWER_BYTES = 64 * 1024
LONGEST_WAIT_S = 300.0
_POISON = (400, 413, 415, 422)  # the same message would be refused again
Resolve = Callable[[str], Awaitable[tuple[Address, ...]]]


class NotTaken(Exception):
    """The receiver did not take a message. `wait_s`: it asked for that long; `final`: it never will."""

    def __init__(self, why: str, *, wait_s: float | None = None, final: bool = False) -> None:
        super().__init__(why)
        self.wait_s = wait_s
        self.final = final


@dataclass(frozen=True, slots=True)
class Call:
    url: str
    body: bytes
    headers: dict[str, str]


class Caller:
    """Connects to the address that was judged, whatever the name means a moment later."""

    def __init__(
        self,
        allowed: Allowed,
        timeout_s: float,
        *,
        resolve: Resolve = resolved,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self._allowed, self._timeout_s, self._resolve = allowed, timeout_s, resolve
        self._client = httpx.AsyncClient(
            transport=transport,
            trust_env=False,
            follow_redirects=False,
            timeout=timeout_s,
            limits=httpx.Limits(max_connections=2),
        )

    async def close(self) -> None:
        await self._client.aclose()

    async def post(self, call: Call) -> None:
        """Return when it was taken. Raises NotTaken."""
        try:
            async with asyncio.timeout(self._timeout_s):  # whatever the parts of a call take: it hangs no longer
                await self._post(call)
        except TimeoutError:
            raise NotTaken(f"no answer within {self._timeout_s:g} s") from None
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise NotTaken(f"{type(error).__name__}: {error}"[:300]) from error

    async def _post(self, call: Call) -> None:
        url = httpx.URL(call.url)
        address = await self._address(url.host)
        request = self._client.build_request(
            "POST",
            url.copy_with(host=str(address)),
            content=call.body,
            headers={"User-Agent": "fluidpd", "Content-Type": "application/json", **call.headers, "Host": url.netloc.decode()},
            extensions={"sni_hostname": url.host},
        )
        answer = await self._client.send(request, stream=True)
        try:
            said = b""
            async for part in answer.aiter_bytes():
                said += part
                if len(said) > MOST_ANSWER_BYTES:
                    break
        finally:
            await answer.aclose()
        if answer.is_success:
            return
        text = said[:200].decode("utf-8", "replace").strip()
        raise NotTaken(f"HTTP {answer.status_code} {text}".strip(), wait_s=wait_of(answer), final=answer.status_code in _POISON)

    async def _address(self, host: str) -> Address:
        try:
            found = literal(host)
            return judge(host, (found,) if found is not None else await self._resolve(host), self._allowed)
        except Refused as error:
            raise NotTaken(f"{error} (alerting.allowed_receivers)") from error


def wait_of(answer: httpx.Response) -> float | None:
    """What Retry-After asks for, at most LONGEST_WAIT_S."""
    said = answer.headers.get("retry-after", "").strip()
    if not said:
        return None
    if said.isdigit():
        return min(float(said), LONGEST_WAIT_S)
    try:
        sent = answer.headers.get("date")
        asked = parsedate_to_datetime(said)
        return min(max(0.0, (asked - parsedate_to_datetime(sent)).total_seconds()), LONGEST_WAIT_S) if sent else None
    except (TypeError, ValueError):
        return None
