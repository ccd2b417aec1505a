"""How a sidecar calls another: at an address that was looked at before, without redirects, and with a limit on the answer.

Never lets a name lead into the infrastructure: what a lookup finds is judged, and exactly that is called.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from ipaddress import ip_address

import httpx

from fluidpd.addresses import Address, Allowed, Refused, judge, literal

MOST_BYTES = 1024 * 1024
MOST_BYTES_OF = "fluidpd_most_bytes"  # request extension: another limit for this answer
_KEPT_S = 30.0
_KEPT = 1024
Resolve = Callable[[str], Awaitable[tuple[Address, ...]]]


async def resolved(host: str) -> tuple[Address, ...]:
    """Every address of a name. Raises OSError."""
    found = await asyncio.get_running_loop().getaddrinfo(host, None)
    return tuple(dict.fromkeys(ip_address(str(entry[4][0])) for entry in found))


class PinnedTransport(httpx.AsyncBaseTransport):
    """Connects to the address that was judged, whatever the name means a moment later."""

    def __init__(
        self,
        allowed: Allowed,
        *,
        verify: ssl.SSLContext | bool = True,
        limits: httpx.Limits | None = None,
        resolve: Resolve = resolved,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._allowed = allowed
        self._verify = verify
        self._limits = limits or httpx.Limits(max_connections=None)
        self._resolve = resolve
        self._clock = clock
        self._known: dict[str, tuple[float, Address]] = {}
        self._transports: dict[str, httpx.AsyncHTTPTransport] = {}

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        host = request.url.host
        address = await self._address(host)
        # The Host header was made with the name, and the certificate is checked against it.
        request.extensions = {**request.extensions, "sni_hostname": host}
        request.url = request.url.copy_with(host=str(address))
        answer = await self._transport(host if request.url.scheme == "https" else "").handle_async_request(request)
        answer.stream = _Bounded(answer.stream, int(request.extensions.get(MOST_BYTES_OF, MOST_BYTES)))
        return answer

    def _transport(self, name: str) -> httpx.AsyncHTTPTransport:
        """Connections are kept by address; those whose certificate was checked, by the name it was checked for."""
        found = self._transports.get(name)
        if found is None:
            found = httpx.AsyncHTTPTransport(verify=self._verify, trust_env=False, limits=self._limits)
            self._transports[name] = found
        return found

    async def aclose(self) -> None:
        for transport in self._transports.values():
            await transport.aclose()

    async def _address(self, host: str) -> Address:
        now_s = self._clock()
        known = self._known.get(host)
        if known is not None and now_s - known[0] < _KEPT_S:
            return known[1]
        try:
            found = literal(host)
            address = judge(host, (found,) if found is not None else await self._resolve(host), self._allowed)
        except Refused as error:
            raise httpx.ConnectError(f"refused: {error}") from error
        except (OSError, UnicodeError) as error:
            raise httpx.ConnectError(f"{host} is not known here: {error}") from error
        if len(self._known) >= _KEPT:
            self._known.clear()
        self._known[host] = (now_s, address)
        return address


class _Bounded(httpx.AsyncByteStream):
    def __init__(self, stream: httpx.AsyncByteStream | httpx.SyncByteStream, most: int) -> None:
        assert isinstance(stream, httpx.AsyncByteStream)
        self._stream = stream
        self._most = most

    async def __aiter__(self) -> AsyncIterator[bytes]:
        seen = 0
        async for part in self._stream:
            seen += len(part)
            if seen > self._most:
                raise httpx.ReadError(f"the answer is larger than {self._most} bytes")
            yield part

    async def aclose(self) -> None:
        await self._stream.aclose()
