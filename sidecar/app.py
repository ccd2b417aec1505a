"""One sidecar, assembled: which part hears which message, and what is true of it right now.

Never holds logic of its own: each part is tested alone, this file only connects them.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import uuid
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

import httpx

from fluidpd import trace
from fluidpd.addresses import Allowed
from fluidpd.command import HandoffPeer, MoveOrder
from fluidpd.names import End, PluginState, Role
from fluidpd.telemetry import Hello, Welcome
from sidecar.bandwidth import TokenBucket
from sidecar.clock import Clock
from sidecar.driver import Driver
from sidecar.engines.exposition import Series
from sidecar.engines.page_reader import PageReader
from sidecar.engines.plugin_socket import PluginSocket
from sidecar.engines.sglang import SglangEngine
from sidecar.engines.slo_counts import WANTED as SLO_SERIES
from sidecar.engines.slo_counts import slo_counts
from sidecar.gpu.nvml import Nvml
from sidecar.handoff import Adoptions, Handoffs
from sidecar.history import History
from sidecar.journal import Journal
from sidecar.link import Link
from sidecar.link_key import LinkKey
from sidecar.metrics import registry_of
from sidecar.peer_http import PinnedTransport
from sidecar.peers import Claims, PeerClient, StaleBootstraps
from sidecar.phases import Phases, Told
from sidecar.ports import Engine, EngineFacts
from sidecar.protocol import HandoffWanted, PluginHello, PluginWelcome
from sidecar.reports import as_hello
from sidecar.sampler import Sampler
from sidecar.settings import SidecarSettings, is_loopback
from sidecar.tls import client_context

log = logging.getLogger(__name__)

_FACTS_EVERY_S = 5.0
_PLUGIN_GRACE_S = 1.0


class Sidecar:
    """Everything beside one worker. `start` and `stop` may be called once each."""

    def __init__(self, settings: SidecarSettings, clock: Clock | None = None, engine: Engine | None = None) -> None:
        self.settings = settings
        self.clock = clock or Clock()
        self.boot = uuid.uuid4().hex[:16]
        self.url = settings.sidecar_url or f"{settings.scheme}://{settings.host}:{settings.port}"
        self.secret = settings.secret()
        self.refused_peers_total: Counter[str] = Counter()
        settings.admin_key()  # read again for each use; here only so that a wrong path is found at the start
        self.journal = Journal.open(settings.state_dir)
        self.facts: EngineFacts | None = None
        self.not_flippable_why = ""
        self._plugin_boot = ""
        self._ask_facts = asyncio.Event()
        self._restarted: asyncio.Task[None] | None = None
        self._started_s = self.clock.now()
        self._tasks: list[asyncio.Task[None]] = []
        self._hz = settings.sample_hz
        self._slo = settings.slo  # until a controller says what this model's requests are judged by

        self._engine_http = httpx.AsyncClient(base_url=settings.worker_url, trust_env=False)
        tls = client_context(settings)
        self._peer_http = httpx.AsyncClient(
            trust_env=False,
            transport=PinnedTransport(
                Allowed.of(settings.allowed_peers, loopback=is_loopback(urlsplit(self.url).hostname or "")),
                verify=tls if tls is not None else True,
                limits=httpx.Limits(max_connections=None, max_keepalive_connections=32),
            ),
        )
        self.engine: Engine = engine or SglangEngine(
            self._engine_http,
            self.clock,
            name=settings.engine,
            bootstrap=settings.bootstrap,
            admin_key=settings.admin_key,
            timeout_s=settings.engine_timeout_s,
            switch_timeout_s=settings.limits.switch_s,
            graph_memory_gb=settings.decode_cuda_graph_memory_gb,
            judge=self._judge,
            also=SLO_SERIES,
        )
        self.gpu = Nvml(settings.gpu_index)
        self.plugin = PluginSocket(settings.plugin_socket, self._plugin_welcome)
        self.peers = PeerClient(self._peer_http, lambda: self.url, lambda: self.secret, epoch=lambda: self.driver.highest_epoch)
        self.stale = StaleBootstraps(self.plugin, self.peers, settings.bootstrap, settings.limits.drop_stale_s)
        self.phases = Phases(
            self.engine,
            self.plugin,
            self.clock,
            settings.limits,
            drop_stale=self._drop_stale,
            allow_plain_drain=settings.allow_plain_drain,
            mark_not_flippable=self._mark_not_flippable,
        )
        self.history = History(settings.history_file, self.clock)
        self.driver = Driver(
            worker=settings.worker,
            journal=self.journal,
            phases=self.phases,
            plugin=self.plugin,
            clock=self.clock,
            limits=settings.limits,
            report=lambda report: self.link.report(report),
            history=self.history,
        )
        self.link = Link(
            settings.controller_urls,
            self.clock,
            self.driver,
            hello=self.hello,
            welcomed=self._welcomed,
            proof=LinkKey(self.secret, settings.token()),
            tls=tls,
        )
        self.sampler = Sampler(
            settings.worker,
            self.engine,
            self.plugin,
            self.gpu,
            self.clock,
            send=self.link.offer,
            role_seen=self._role_seen,
            not_flippable_why=lambda: self.not_flippable_why,
            tbt_slo_s=settings.slo.tbt_s,
            rate_hz=settings.sample_hz,
            plugin_silent_s=settings.plugin_silent_s,
            cross_check_s=settings.cross_check_s,
        )
        rate = settings.link_bytes_per_s * settings.handoff_share
        self.bucket = TokenBucket(rate, rate * settings.handoff_burst_s)
        self.claims = Claims(settings.worker, self.plugin, self.peers, self.driver.grant, settings.claim_timeout_s)
        self.handoffs = Handoffs(
            self.plugin,
            self.peers,
            self.clock,
            self.bucket,
            self._handoff_peers,
            adopt_timeout_s=settings.adopt_timeout_s,
            relay_silent_s=settings.relay_silent_s,
        )
        self.adoptions = Adoptions(self.plugin, settings.adopt_timeout_s)
        self.registry = registry_of(self)
        self._connect_parts()

    def _connect_parts(self) -> None:
        plugin = self.plugin
        plugin.on("sample", self.sampler.plugin_sample)
        plugin.on("claim_wanted", self.claims.wanted)
        plugin.on("claim_answer", self.claims.answered)
        plugin.on("handoff_wanted", self._handoff_wanted)
        plugin.on("relay_gone", self.handoffs.gone)
        plugin.on("adopt_answer", self.adoptions.answered)
        plugin.on("tokens", self.adoptions.tokens)
        plugin.on_hello(self._plugin_came)
        plugin.on_gone(self._plugin_left)

    # ------------------------------------------------------------ life

    async def start(self) -> None:
        """Serve the plugin, go on with an open move, and stay connected to the controller. Raises SocketTrouble."""
        await self.plugin.start()
        self.driver.recover()
        parts = {"link": self.link.run(), "sampler": self.sampler.run(), "facts": self._keep_facts()}
        self._tasks = [asyncio.create_task(part, name=f"{name}-{self.settings.worker}") for name, part in parts.items()]

    async def stop(self) -> None:
        """Leave the engine as it is: an open move goes on at the next start."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.driver.stop()
        await self.claims.stop()
        await self.handoffs.stop()
        await self.plugin.stop()
        await self._engine_http.aclose()
        await self._peer_http.aclose()
        self.gpu.close()
        self.journal.close()
        self.history.close()

    def crashed(self) -> BaseException | None:
        """Why a part that must never end has ended, if one has."""
        for task in self._tasks:
            if task.done() and not task.cancelled() and task.exception() is not None:
                return task.exception()
        return None

    # ------------------------------------------------------------ what is true now

    @property
    def page(self) -> PageReader | None:
        """The reader of the engine's metrics page, where the engine has one. It is only read while no plugin speaks."""
        return self.engine.page if isinstance(self.engine, SglangEngine) else None

    def hello(self) -> Hello | None:
        """Who this worker is; None until its role is known, because it is never guessed."""
        role = self.driver.role
        if role is None or self.facts is None:
            return None
        plugin, standing = self.plugin.hello, self.plugin.standing
        if plugin is None and self.clock.now() - self._started_s < _PLUGIN_GRACE_S:
            return None  # a plugin that connects in a moment saves a second registration
        s = self.settings
        return Hello(
            worker=s.worker,
            role=role,
            worker_url=s.worker_url,
            bootstrap_port=s.bootstrap_port,
            sidecar_url=self.url,
            model=s.model,
            pool=s.pool,
            node=s.node,
            engine=plugin.engine if plugin else self.facts.engine,
            engine_version=plugin.engine_version if plugin else self.facts.version,
            engine_boot=self._plugin_boot or self.facts.boot,
            engine_start=self.facts.boot,
            started_as=self.facts.started_as,
            sidecar_boot=self.boot,
            capabilities=self.plugin.capabilities,
            plugin=standing.state,
            plugin_why=standing.why,
            cannot=dict(standing.cannot),
            radix_cache=self.facts.radix_cache,
            flippable=not self.not_flippable_why,
            not_flippable_why=self.not_flippable_why,
            highest_epoch=self.driver.highest_epoch,
            open_move=as_hello(self.driver.open_move),
            max_prefill_chunk_tokens=self.facts.max_prefill_chunk_tokens,
            exposed=self.exposed(),
        )

    def degraded(self) -> list[str]:
        """What is wrong, each in a sentence; empty if nothing is."""
        move = self.driver.move
        quarantined = move is not None and move.state.end is End.QUARANTINED and not self._is_another_engine(move.engine_boot)
        standing = self.plugin.standing
        waits = standing.state is PluginState.MISSING and self.clock.now() - self._started_s < _PLUGIN_GRACE_S
        found = [
            "" if self.link.connected else self.link.state,
            "the engine does not answer" if self.sampler.engine_reachable is False else "",
            "" if standing.state is PluginState.ARMED or waits else f"plugin {standing.state}: {standing.why}",
            f"not flippable: {self.not_flippable_why}" if self.not_flippable_why else "",
            self.driver.trouble,
            "the last move quarantined this worker: restart the engine, and look at the move's detail" if quarantined else "",
        ]
        return [reason for reason in found if reason]

    def exposed(self) -> tuple[str, ...]:
        """What anybody could do here, each in a sentence."""
        found = [self.facts.switch_open_why if self.facts is not None else ""]
        if self.settings.is_open:
            found.append(f"the sidecar at {self.url} takes anybody for a peer: set fleet_secret_file")
        return tuple(said for said in found if said)

    def _is_another_engine(self, boot: str) -> bool:
        """Whether the engine of now is known to be another process than the one of this boot."""
        return self.facts is not None and bool(boot) and self.facts.boot != boot

    def state(self) -> dict[str, Any]:
        move, grant, newest, standing = self.driver.move, self.driver.grant(), self.sampler.newest, self.plugin.standing
        return {
            "worker": self.settings.worker,
            "role": self.driver.role,
            "engine": self.settings.engine,
            "engine_reachable": self.sampler.engine_reachable,
            "plugin": {
                "connected": self.plugin.connected,
                "state": standing.state,
                "why": standing.why,
                "capabilities": self.plugin.capabilities,
                "cannot": dict(standing.cannot),
                "refused": self.plugin.refused_why,
            },
            "flippable": not self.not_flippable_why,
            "not_flippable_why": self.not_flippable_why,
            "link": {
                "state": self.link.state,
                "incarnation": self.driver.incarnation,
                "highest_epoch": self.driver.highest_epoch,
            },
            "sample": newest.model_dump(mode="json") if newest else None,
            "grant": grant.model_dump(mode="json") if grant else None,
            "move": None
            if move is None
            else {
                "id": move.order.move_id,
                "from_role": move.order.from_role,
                "to_role": move.order.to_role,
                "phase": move.state.phase,
                "heading": move.state.heading,
                "end": move.state.end,
                "closed": move.closed,
                "phase_age_s": self.driver.phase_age_s,
                "reports": [report.model_dump(mode="json") for report in self.driver.reports()],
            },
            "journal": {
                "path": str(self.journal.path),
                "lines_written": self.journal.lines_written,
                "trouble": self.driver.trouble,
            },
            "handoffs": {
                "relays_open": self.handoffs.open,
                "adoptions_open": self.adoptions.open,
                "ended": self.handoffs.ended_total,
            },
            "bandwidth": {
                "cap_bytes_per_s": self.bucket.rate_bytes_per_s,
                "booked_bytes": self.bucket.taken_bytes,
                "waiting_bytes": self.bucket.debt_bytes(self.clock.now()),
                "paced_s": self.bucket.waited_s,
            },
            "claims": {"asked": self.claims.asked_total, "answered": self.claims.answered_total},
            "gpu": self.gpu.read() or {"absent": self.gpu.why_absent},
            "metrics_page": None
            if self.page is None
            else {
                "sources": self.page.sources,
                "rejected": self.page.rejected_total,
                "notes": self.page.notes,
                "latencies": self.page.latencies(),
            },
            "degraded": self.degraded(),
            "exposed": self.exposed(),
        }

    # ------------------------------------------------------------ how the parts tell each other

    def _plugin_welcome(self) -> PluginWelcome:
        return PluginWelcome(sample_hz=self._hz, ttft_slo_s=self._slo.ttft_s, tbt_slo_s=self._slo.tbt_s)

    def _judge(self, series: Mapping[str, Sequence[Series]]) -> tuple[dict[str, float], tuple[str, ...]]:
        return slo_counts(series, self._slo, snap=self.settings.slo_snap_to_bucket)

    def _plugin_came(self, hello: PluginHello) -> None:
        if hello.boot != self._plugin_boot:
            if self._plugin_boot:
                self._restarted = asyncio.create_task(self.driver.engine_restarted())
            self._plugin_boot = hello.boot
            self.not_flippable_why = ""  # it was true of a process that is gone
            self.facts = None
            self._ask_facts.set()
        self._role_said(hello.role)
        self.link.register_again()

    def _plugin_left(self, part: str) -> None:
        log.warning("the plugin's part %s left", part)
        self.sampler.plugin_left(part)
        self.claims.plugin_gone()
        self.handoffs.plugin_gone()
        self.adoptions.plugin_gone()
        self.link.register_again()

    def _role_seen(self, role: Role) -> None:
        if role is not self.driver.role:
            self.history.role(self.settings.worker, role)
        self.driver.role = role

    def _role_said(self, role: Role | None) -> None:
        """What stands until the first reading of the role."""
        if self.driver.role is None and role is not None:
            self._role_seen(role)

    def _welcomed(self, welcome: Welcome) -> None:
        told = {"ttft_s": welcome.ttft_slo_s, "tbt_s": welcome.tbt_slo_s}
        slo = self._slo.model_copy(update={name: seconds for name, seconds in told.items() if seconds is not None})
        if (welcome.sample_hz, slo) == (self._hz, self._slo):
            return
        if slo != self._slo:
            log.info("requests are judged by the controller's targets: first token %g s, token gap %g s", slo.ttft_s, slo.tbt_s)
        self._hz = self.sampler.rate_hz = welcome.sample_hz
        self._slo, self.sampler.tbt_slo_s = slo, slo.tbt_s
        self.plugin.welcome_again()

    def _mark_not_flippable(self, why: str) -> None:
        self.not_flippable_why = why or "the engine refuses the role switch"

    def _handoff_wanted(self, message: HandoffWanted) -> None:
        """A generation leaves because of a move: what a peer logs of it belongs to the move's trace."""
        move = self.driver.open_move
        with trace.under(trace.parsed(move.order.traceparent) if move is not None else None):
            self.handoffs.wanted(message)

    def _handoff_peers(self) -> tuple[HandoffPeer, ...]:
        move = self.driver.move
        return move.order.handoff_peers if move is not None else ()

    async def _drop_stale(self, order: MoveOrder) -> Told:
        return await self.stale.tell_peers(order)

    async def _keep_facts(self) -> None:
        """What holds for the engine's life is asked until it is known, and then rarely: a restart shows as another boot."""
        while True:
            found = await self.engine.facts()
            if found is not None:
                changed = self.facts is not None and self.facts.boot != found.boot
                if self.facts is None or changed:
                    self.not_flippable_why = found.not_flippable_why
                if changed and not self.plugin.connected:
                    self._plugin_boot = ""
                    await self.driver.engine_restarted()
                    self.link.register_again()
                self.facts = found
                self.driver.engine_boot = found.boot
                self._role_said(found.role)
            await self.driver.write_welcome()  # a disk that was full may have room again
            self._ask_facts.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_FACTS_EVERY_S if self.facts is not None else 0.1):
                    await self._ask_facts.wait()
