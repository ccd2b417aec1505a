"""Claims between sidecars: a decode worker's plugin wants a room, the prefill worker's plugin decides, and this is the way.

Never judges a claim. A claim that got no answer is asked once more under the same id, and then said to have had none.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Callable, Coroutine
from typing import Any

import httpx

from fluidpd import trace
from fluidpd.command import GrantTerms, MoveOrder, PrefillPeer
from fluidpd.signing import SIGNATURE_HEADER, Signed, key_of_secret, signature
from sidecar.phases import Told
from sidecar.ports import Plugin, PluginGone
from sidecar.protocol import (
    CAN_DROP_STALE,
    CAN_GIVE,
    Claim,
    ClaimAnswer,
    ClaimResult,
    ClaimWanted,
    PeerClaim,
    PeerClaimAnswer,
    PeerDropStale,
)

log = logging.getLogger(__name__)

SIDECAR_HEADER = "X-FluidPD-Sidecar"
_PEERS_KEPT = 256
_CLAIMS_KEPT = 4096
_ON_THE_WAY_S = 0.5  # the peer gives up first, and says so


class PeerClient:
    """How this sidecar speaks to others: it says who it is, proves it, and remembers who spoke to it."""

    def __init__(
        self,
        http: httpx.AsyncClient,
        own_url: Callable[[], str],
        secret: Callable[[], str | None],
        *,
        epoch: Callable[[], int] = lambda: 0,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self.http = http
        self._own_url = own_url
        self._secret = secret
        self._epoch = epoch
        self._wall = wall
        self._known: dict[str, None] = {}

    def headers(self, path: str, body: bytes) -> dict[str, str]:
        """For a POST of exactly this body. The secret itself never travels."""
        secret, own = self._secret(), self._own_url()
        said = {SIDECAR_HEADER: own, "Content-Type": "application/json"}
        if (now := trace.current()) is not None:
            said[trace.HEADER] = str(now)
        if secret is None:
            return said
        request = Signed("POST", path, body, own, self._epoch())
        nonce = secrets.token_urlsafe(18)
        return {**said, SIGNATURE_HEADER: signature(key_of_secret(secret), request, at_wall_s=self._wall(), nonce=nonce)}

    async def post(self, url: str, path: str, body: bytes, timeout_s: float) -> httpx.Response:
        return await self.http.post(f"{url}{path}", content=body, headers=self.headers(path, body), timeout=timeout_s)

    def met(self, url: str | None) -> None:
        """Another sidecar's address, from its request or from the controller's word. What cannot be called is not kept."""
        if not url or url == self._own_url() or not _is_callable(url):
            return
        self._known.pop(url, None)
        self._known[url] = None
        while len(self._known) > _PEERS_KEPT:
            self._known.pop(next(iter(self._known)))

    @property
    def known(self) -> tuple[str, ...]:
        return tuple(self._known)


def _is_callable(url: str) -> bool:
    """Whether a request to this address could be made at all: it may be any text that a header carried."""
    try:
        parsed = httpx.URL(url)
    except (httpx.InvalidURL, ValueError):
        return False
    return parsed.scheme in ("http", "https") and bool(parsed.host) and (parsed.port is None or 0 < parsed.port < 65536)


class Tasks:
    """Background work of one owner: kept until done, cancelled together."""

    def __init__(self) -> None:
        self._running: dict[str, asyncio.Task[None]] = {}

    def start(self, id_: str, work: Coroutine[Any, Any, None]) -> bool:
        if id_ in self._running:
            work.close()
            return False
        task = asyncio.create_task(work)
        self._running[id_] = task
        task.add_done_callback(lambda done: self._ended(id_, done))
        return True

    def cancel(self, id_: str) -> bool:
        task = self._running.get(id_)
        return task is not None and task.cancel()

    def __len__(self) -> int:
        return len(self._running)

    async def stop(self) -> None:
        running = list(self._running.values())
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)

    def cancel_all(self) -> None:
        for task in list(self._running.values()):
            task.cancel()

    def _ended(self, id_: str, done: asyncio.Task[None]) -> None:
        if self._running.get(id_) is done:
            del self._running[id_]
        if not done.cancelled() and (error := done.exception()) is not None:
            log.error("background work %s failed", id_, exc_info=error)


class Claims:
    """Both ends of a claim: asking a peer for our plugin, and asking our plugin for a peer."""

    def __init__(
        self, worker: str, plugin: Plugin, peers: PeerClient, grant: Callable[[], GrantTerms | None], timeout_s: float
    ) -> None:
        self.asked_total: dict[str, int] = {}
        self.answered_total: dict[str, int] = {}
        self._worker = worker
        self._plugin = plugin
        self._peers = peers
        self._grant = grant
        self._timeout_s = timeout_s
        self._asking = Tasks()
        self._asked_of: dict[str, PrefillPeer] = {}  # claim id -> the peer that was asked
        self._pending: dict[
            str, asyncio.Future[ClaimAnswer]
        ] = {}  # newest last, answered ones included: a repeat finds its answer

    # ------------------------------------------------------------ the decode side

    def wanted(self, claim: ClaimWanted) -> None:
        self._asking.start(claim.id, self._ask(claim))

    async def _ask(self, claim: ClaimWanted) -> None:
        answer = await self._ask_peer(claim)
        why = "given" if answer.given else (answer.why or "refused")
        self.asked_total[why] = self.asked_total.get(why, 0) + 1
        self._plugin.tell(ClaimResult(id=claim.id, room=claim.room, given=answer.given, why=answer.why))

    async def _ask_peer(self, claim: ClaimWanted) -> PeerClaimAnswer:
        grant = self._grant()
        peer = next((p for p in grant.prefill if p.bootstrap == claim.bootstrap), None) if grant is not None else None
        # An answer that was lost is asked for again, and must be found even after the grant has died: the room may be ours.
        peer = peer or self._asked_of.get(claim.id)
        if peer is None:
            return PeerClaimAnswer(given=False, why="no_grant")
        self._asked_of[claim.id] = peer
        while len(self._asked_of) > _CLAIMS_KEPT:
            del self._asked_of[next(iter(self._asked_of))]
        self._peers.met(peer.sidecar_url)
        body = PeerClaim(id=claim.id, room=claim.room, claimer=self._worker).model_dump_json().encode()
        for _ in range(2):
            try:
                answer = await self._peers.post(peer.sidecar_url, "/peer/claim", body, self._timeout_s + _ON_THE_WAY_S)
                if answer.status_code == 200:
                    return PeerClaimAnswer.model_validate_json(answer.content)
                if answer.status_code != 504:
                    log.warning("claim %s: the sidecar of %s answered HTTP %d", claim.id, peer.worker, answer.status_code)
                    return PeerClaimAnswer(given=False, why="not_allowed" if answer.status_code in (401, 403) else "failed")
            except Exception as error:  # a bad address raises more kinds than those of httpx, and the plugin waits for an answer
                log.warning(
                    "claim %s: no answer from the sidecar of %s: %s", claim.id, peer.worker, str(error) or type(error).__name__
                )
        # The room may have been given away all the same: the plugins settle it by the tombstones that the giver lists.
        return PeerClaimAnswer(given=False, why="no_answer")

    # ------------------------------------------------------------ the prefill side

    async def claimed(self, claim: PeerClaim) -> PeerClaimAnswer:
        """Ask our plugin. Raises TimeoutError. The same id asked twice at once waits for the same answer."""
        if not self._plugin.can(CAN_GIVE):
            return PeerClaimAnswer(given=False, why="not_claimable")
        id_ = f"{claim.claimer}/{claim.id}"  # ids are the claimer's own: two of them may count alike
        pending = self._pending.get(id_)
        if pending is None:
            pending = asyncio.get_running_loop().create_future()
            self._pending[id_] = pending
            while len(self._pending) > _CLAIMS_KEPT:
                self._pending.pop(next(iter(self._pending)))
        if not pending.done():
            # Asked again even if it is being asked already: the plugin answers the same, and its first answer may have been lost.
            self._plugin.tell(Claim(id=id_, room=claim.room, claimer=claim.claimer), CAN_GIVE)
        async with asyncio.timeout(self._timeout_s):
            said = await asyncio.shield(pending)
        why = "given" if said.given else (said.why or "refused")
        self.answered_total[why] = self.answered_total.get(why, 0) + 1
        return PeerClaimAnswer(given=said.given, why=said.why)

    def answered(self, answer: ClaimAnswer) -> None:
        pending = self._pending.get(answer.id)
        if pending is not None and not pending.done():
            pending.set_result(answer)

    def plugin_gone(self) -> None:
        for id_, pending in self._pending.items():
            if not pending.done():
                pending.set_result(ClaimAnswer(id=id_, room=0, given=False, why="failed"))
        self._pending.clear()

    async def stop(self) -> None:
        await self._asking.stop()
        for pending in self._pending.values():
            pending.cancel()


class StaleBootstraps:
    """After a worker changed to or from prefill, decode workers that keep what they cached about it would hang on it."""

    def __init__(self, plugin: Plugin, peers: PeerClient, bootstrap: str, timeout_s: float) -> None:
        self._plugin = plugin
        self._peers = peers
        self._bootstrap = bootstrap
        self._timeout_s = timeout_s

    async def tell_peers(self, order: MoveOrder) -> Told:
        """Tell everyone who may have cached us, at once. A peer that could not be told is named: pairing it with us may hang."""
        named = {p.sidecar_url: p.worker for p in order.handoff_peers} | {p.sidecar_url: p.worker for p in order.stale_peers}
        for url in named:
            self._peers.met(url)
        urls = ({url: url for url in self._peers.known} | named) if self._bootstrap else {}
        answers = dict(zip(urls, await asyncio.gather(*(self._tell(url) for url in urls)), strict=True))
        failed = {urls[url]: why for url, why in answers.items() if why}
        unasked = "its sidecar was not asked" if self._bootstrap else "this sidecar's bootstrap_port is not set"
        missing = {p.worker: why for p in order.stale_peers if p.must and (why := answers.get(p.sidecar_url, unasked))}
        if not urls:
            return Told(missing=missing)
        told = {"drop_stale_told": len(urls) - len(failed)}
        listed = "; ".join(f"{name}: {why}" for name, why in sorted(failed.items()))
        return Told(told | ({"drop_stale_failed": listed} if failed else {}), missing)

    async def _tell(self, url: str) -> str:
        """Why the peer behind `url` could not be told, or nothing."""
        body = PeerDropStale(bootstrap=self._bootstrap).model_dump_json().encode()
        try:
            answer = await self._peers.post(url, "/peer/drop_stale", body, self._timeout_s)
        except Exception as error:  # whatever one address raises, the others are told
            why = str(error) or type(error).__name__
            log.warning("%s could not be told to drop what it cached of %s: %s", url, self._bootstrap, why)
            return f"its sidecar does not answer ({why})"
        if answer.status_code == 200:
            return ""
        return "its plugin did not" if answer.status_code == 409 else f"its sidecar answered HTTP {answer.status_code}"

    async def told(self, said: PeerDropStale) -> bool:
        """A peer changed its role: our plugin forgets it. Without such a plugin there is nothing that could, and that is said."""
        if not self._plugin.can(CAN_DROP_STALE):
            return False
        try:
            return (await self._plugin.order("drop_stale", timeout_s=self._timeout_s, bootstrap=said.bootstrap)).ok
        except (PluginGone, TimeoutError):
            return False
