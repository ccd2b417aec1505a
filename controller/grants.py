"""FluidToken's grants: who may lend now, and who serves by triage. Renewed while the decision names it, taken back when not.

Never stores a renewal, and never sends anything once acting is not permitted: a grant dies by itself.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from controller.clock import Clock
from controller.outbox import NotRecorded, Outbox
from controller.rates import grant_renew_s
from controller.registry import Registry, Worker
from fluidpd.command import GrantTerms, Orders, PrefillPeer, Receipt, RevokeTerms
from fluidpd.indices import Indices, WorkerPressure
from fluidpd.names import Answer, Role, WorkerState
from fluidpd.policy.settings import PolicySettings
from fluidpd.slo import SloTargets
from fluidpd.telemetry import Snapshot, WorkerView

log = logging.getLogger(__name__)

ROOMS_PER_PEER = 64
MOST_LENDERS = 256  # at once: each is one more command and its receipt, several times a second
PEERS_PER_GRANT = 64  # the longest queues; a fleet with more prefill workers than these borrows from the others later
REFUSED_WAIT_S = 1.0
REVOKE_TTL_S = 2.0


@dataclass(slots=True)
class _Held:
    """One worker's running grant."""

    renewed_s: float
    incarnation: int
    role: Role  # decode: it lends; prefill: it serves by triage
    ids: list[str] = field(default_factory=list)  # newest few, so that a refusal can be told apart from an old one

    def renewed(self, now_s: float, id_: str | None) -> None:
        self.renewed_s = now_s
        if id_ is not None:
            self.ids = [*self.ids[-3:], id_]


class Grants:
    """The lenders, and who serves by triage. `manual` holds what a person granted to lend, until its monotonic end."""

    def __init__(self, registry: Registry, outbox: Outbox, clock: Clock, policy: PolicySettings, slo: SloTargets) -> None:
        self._registry = registry
        self._outbox = outbox
        self._clock = clock
        self._policy = policy
        self._slo = slo
        self._held: dict[str, _Held] = {}
        self._wait_until_s: dict[str, float] = {}
        self.manual: dict[str, float] = {}
        self.refused: dict[str, str] = {}
        self._peers: dict[str, tuple[WorkerPressure, PrefillPeer]] = {}

    def lends(self, worker: str) -> bool:
        held = self._held.get(worker)
        return held is not None and held.role is Role.DECODE

    @property
    def lenders(self) -> tuple[str, ...]:
        return self._of(Role.DECODE)

    @property
    def triaging(self) -> tuple[str, ...]:
        return self._of(Role.PREFILL)

    def _of(self, role: Role) -> tuple[str, ...]:
        return tuple(sorted(name for name, held in self._held.items() if held.role is role))

    def lapse(self) -> None:
        """Acting is not permitted: stop renewing and say nothing; every grant dies within its TTL."""
        self._held.clear()
        self.manual.clear()

    def forget(self, worker: str) -> None:
        """The worker left long ago."""
        self._held.pop(worker, None)
        self._wait_until_s.pop(worker, None)
        self.manual.pop(worker, None)
        self.refused.pop(worker, None)
        self._peers.pop(worker, None)

    async def renew(self, orders: Orders, snapshot: Snapshot, indices: Indices, durable: bool) -> None:
        """Bring the grants in line with who shall lend or triage. New ones need a record: none while the store is down."""
        now_s = snapshot.now_s
        self.manual = {w: until_s for w, until_s in self.manual.items() if now_s < until_s}
        for worker in [w for w, held in self._held.items() if now_s - held.renewed_s > self._policy.grant_ttl_s]:
            del self._held[worker]  # it could not be renewed and is dead by now
        if not orders.lenders and not orders.triage and not self.manual and not self._held:
            return
        views = {w.name: w for w in snapshot.workers if w.state is WorkerState.SERVING}
        lenders = {n for n in (*orders.lenders, *self.manual) if n in views and views[n].role is Role.DECODE}
        if len(lenders) > MOST_LENDERS:
            lenders = set(sorted(lenders, key=lambda n: self._rank(n, indices))[:MOST_LENDERS])
        triage = {n for n in orders.triage if n in views and views[n].role is Role.PREFILL}
        if len(triage) > MOST_LENDERS:
            triage = set(sorted(triage, key=lambda n: self._queue(n, indices), reverse=True)[:MOST_LENDERS])
        if stopped := [w for w, held in self._held.items() if w not in (lenders if held.role is Role.DECODE else triage)]:
            await self._revoke(stopped, durable, "no longer asked to")
        renew_s = grant_renew_s(len(snapshot.workers), self._policy.grant_renew_s, self._policy.grant_ttl_s)
        due = [views[n] for n in sorted(lenders) if self._due(views[n], now_s, durable, renew_s)]
        if due and (terms := self._terms(indices, now_s)) is not None:
            await self._grant(due, terms, now_s)
        due = [views[n] for n in sorted(triage) if self._due(views[n], now_s, durable, renew_s)]
        if due:
            await self._grant(due, self._triage_terms(), now_s)

    async def _grant(self, due: list[WorkerView], terms: GrantTerms, now_s: float) -> None:
        """Renewals are not recorded one by one; a first grant is."""
        fresh = []
        for w in due:
            held = self._held.get(w.name)
            if held is not None and held.incarnation == w.incarnation and held.role is w.role:
                held.renewed(now_s, self._outbox.post(w.name, terms, self._policy.grant_ttl_s))
            else:
                fresh.append(w)
        if fresh:
            await self._begin(fresh, terms, now_s)

    def _rank(self, worker: str, indices: Indices) -> tuple[bool, bool, float, str]:
        """A person's first, then those that lend, then those with the largest chunks: who lends does not change at every look."""
        p = indices.workers.get(worker)
        return worker not in self.manual, worker not in self._held, -(p.chunk_tokens if p is not None else 0), worker

    def _queue(self, worker: str, indices: Indices) -> tuple[float, str]:
        """Those with the longest queues have most to gain."""
        p = indices.workers.get(worker)
        return (p.backlog_s if p is not None else 0.0), worker

    def _due(self, w: WorkerView, now_s: float, durable: bool, renew_s: float) -> bool:
        if w.age_s(now_s) > self._policy.grant_max_age_s or now_s < self._wait_until_s.get(w.name, 0.0):
            return False
        held = self._held.get(w.name)
        if held is None or held.incarnation != w.incarnation or held.role is not w.role:
            return durable
        return now_s - held.renewed_s >= renew_s

    async def _begin(self, fresh: list[WorkerView], terms: GrantTerms, now_s: float) -> None:
        try:
            ids = await self._outbox.post_all([w.name for w in fresh], terms, self._policy.grant_ttl_s)
        except NotRecorded as error:
            log.warning("%s", error)
            self._wait_until_s |= dict.fromkeys((w.name for w in fresh), now_s + REFUSED_WAIT_S)
            return
        for w in fresh:
            self._held[w.name] = _Held(now_s, w.incarnation, w.role, [ids[w.name]])

    async def _revoke(self, workers: list[str], durable: bool, why: str) -> None:
        for worker in workers:
            del self._held[worker]
        terms = RevokeTerms(why=why)
        if durable:
            try:
                await self._outbox.post_all(workers, terms, REVOKE_TTL_S)
                return
            except NotRecorded as error:
                log.warning("%s", error)
        for worker in workers:
            self._outbox.post(worker, terms, REVOKE_TTL_S)  # taking a permission back is safe without a record

    def answered(self, receipt: Receipt) -> None:
        """A sidecar that refuses a grant is left alone for a moment."""
        held = self._held.get(receipt.worker)
        if held is None or receipt.command_id not in held.ids:
            return
        if receipt.answer in (Answer.ACCEPTED, Answer.REPLAY):
            self.refused.pop(receipt.worker, None)
        else:
            self.refused[receipt.worker] = f"{receipt.answer}: {receipt.detail}" if receipt.detail else receipt.answer.value
            self._wait_until_s[receipt.worker] = self._clock.now() + REFUSED_WAIT_S
            del self._held[receipt.worker]

    def _terms(self, indices: Indices, now_s: float) -> GrantTerms | None:
        peers = [p for w in self._registry if w.role is Role.PREFILL and (p := self._peer(w, indices, now_s)) is not None]
        if not peers:
            return None
        if len(peers) > PEERS_PER_GRANT:
            peers.sort(key=lambda p: -p.backlog_s)
        return GrantTerms(
            prefill=tuple(peers[:PEERS_PER_GRANT]),
            max_outstanding_tokens=self._policy.max_outstanding_tokens,
            tbt_slo_s=self._slo.tbt_s,
            ttft_slo_s=self._slo.ttft_s,
            guard_s=self._policy.guard_s,
            ttl_s=self._policy.grant_ttl_s,
            claim_margin=self._policy.claim_margin,
            progress_floor_s=self._policy.progress_floor_s,
        )

    def _triage_terms(self) -> GrantTerms:
        return GrantTerms(
            prefill=(),
            max_outstanding_tokens=self._policy.max_outstanding_tokens,
            tbt_slo_s=self._slo.tbt_s,
            ttft_slo_s=self._slo.ttft_s,
            guard_s=self._policy.guard_s,
            ttl_s=self._policy.grant_ttl_s,
            triage_margin_s=self._policy.triage_margin_s,
        )

    def _peer(self, w: Worker, indices: Indices, now_s: float) -> PrefillPeer | None:
        state = w.view.state if w.view is not None else None
        if state not in (WorkerState.SERVING, WorkerState.SLOW) or w.age_s(now_s) > self._policy.flip_max_age_s:
            return None
        pressure = indices.workers.get(w.name)
        if pressure is None or w.queue is None or w.bootstrap_port is None:
            return None
        known = self._peers.get(w.name)
        if known is not None and known[0] is pressure:
            return known[1]  # nothing was heard of it since
        host = urlsplit(w.url).hostname
        if host is None:
            return None
        peer = PrefillPeer(
            worker=w.name,
            sidecar_url=w.sidecar_url,
            bootstrap=f"[{host}]:{w.bootstrap_port}" if ":" in host else f"{host}:{w.bootstrap_port}",
            backlog_s=pressure.backlog_s,
            etas_s={room: round(eta_s, 3) for room, eta_s in pressure.etas_s[:ROOMS_PER_PEER]},
        )
        self._peers[w.name] = pressure, peer
        return peer
