"""Who is there: each worker's life as its sidecar's messages and their silence tell it.

Never decides, and never believes a sender's clock: every age is counted from when a message was received.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from urllib.parse import urlsplit

from controller.clock import Clock
from controller.fleet_checks import Beside, Stated
from controller.ports import Connection
from controller.transit import LATE_S, Transit
from fluidpd.names import PluginState, Role, UnknownWhy, WorkerState
from fluidpd.policy.settings import PolicySettings
from fluidpd.record import WorkerRow
from fluidpd.telemetry import Hello, Known, Readings, Sample, WaitingPrompt, WorkerView, read

EXTERNAL_HOLD_S = 60.0  # a role changed from outside is not changed back within this
ADOPT_AFTER_S = 0.25  # a differing role must be read back for this long: one sample may be from before a switch
SKEW_WARN_S = 5.0
STUCK_AFTER_S = 3.0
SUSPECT_AFTER_S = 10.0  # tokens flow for this long while no KV is used: one of the two is wrong
FORGET_AFTER_S = 3600.0  # a worker silent for this long has left
PRUNE_AFTER_S = 3600.0  # one that left is kept in memory for this long after its row says so
ANSWERING = ("serving", "warming", "switching")
SLOW_NOTE = "health_slow"  # what a sidecar notes when the engine's health probe is slow but answers


@dataclass(slots=True)
class Worker:
    """One registered worker. Its state is derived from these facts and the time, never set."""

    name: str
    role: Role
    incarnation: int
    hello: Hello | None  # None: known from the database only, not heard of since this process started
    row: WorkerRow | None  # as it was restored
    registered_wall_s: float
    seen_wall_s: float
    known_since_s: float
    role_since_s: float
    connection: Connection | None = None
    asked_hz: float | None = None  # the sample rate it was last welcomed with
    transit: Transit | None = None
    late_s: float = 0.0  # how long the newest sample was under way
    received_s: float | None = None  # newest sample in which the engine answered, less its time under way
    heard_s: float | None = None  # newest sample of any kind
    seq: int = -1
    engine_state: str = "serving"
    seen_role: Role | None = None
    differs_since_s: float | None = None
    warm_at_s: float | None = None
    readings: Readings = field(default_factory=Readings)
    queue: tuple[WaitingPrompt, ...] | None = None
    queue_total: int | None = None
    own_flippable: bool = False  # by its sidecar's word
    own_why: str = ""
    fleet_why: str = ""  # why it may not flip beside the others
    prefill_start: str = ""  # the start of its engine in which it was seen as a prefill worker
    notes: tuple[str, ...] = ()
    sources: Mapping[str, str] = field(default_factory=dict)  # where readings were found; empty: at the plugin
    skew_s: float | None = None
    rejected: Counter[tuple[str, UnknownWhy]] = field(default_factory=Counter)
    pinned_role: Role | None = None
    retry_after_s: float | None = None
    failures: int = 0
    move_id: str | None = None
    quarantined: bool = False
    quarantined_boot: str = ""
    gone: bool = False
    gone_written_s: float | None = None
    transfers: float = 0.0  # in its transfer queue when last heard, and since when they have not moved
    transfers_since_s: float = 0.0
    is_suspect: bool = False
    suspect_since_s: float | None = None
    suspect_tokens: float = 0.0
    dirty: bool = True
    view: WorkerView | None = None
    recheck_s: float = 0.0

    @property
    def url(self) -> str:
        return self.hello.worker_url if self.hello else (self.row.worker_url if self.row else "")

    @property
    def sidecar_url(self) -> str:
        return self.hello.sidecar_url if self.hello else (self.row.sidecar_url if self.row else "")

    @property
    def bootstrap_port(self) -> int | None:
        return self.hello.bootstrap_port if self.hello else (self.row.bootstrap_port if self.row else None)

    @property
    def capabilities(self) -> tuple[str, ...]:
        return self.hello.capabilities if self.hello else (self.row.capabilities if self.row else ())

    @property
    def engine_boot(self) -> str:
        return self.hello.engine_boot if self.hello else ""

    @property
    def engine_start(self) -> str:
        return (self.hello.engine_start or self.hello.engine_boot) if self.hello else ""

    @property
    def flippable(self) -> bool:
        return self.own_flippable and not self.fleet_why

    @property
    def not_flippable_why(self) -> str:
        return self.own_why or self.fleet_why

    @property
    def plugin(self) -> PluginState | None:
        return self.hello.plugin if self.hello else (self.row.plugin if self.row else None)

    @property
    def plugin_why(self) -> str:
        return self.hello.plugin_why if self.hello else (self.row.plugin_why if self.row else "")

    @property
    def cannot(self) -> Mapping[str, str]:
        return self.hello.cannot if self.hello else (self.row.cannot if self.row else {})

    @property
    def known_as_prefill(self) -> bool:
        """Whether decode workers may have cached where this engine process listened as a prefill worker."""
        if self.hello is not None and self.hello.started_as is Role.PREFILL:
            return True
        return bool(self.prefill_start) and self.prefill_start == self.engine_start

    def age_s(self, now_s: float) -> float:
        return math.inf if self.received_s is None else max(0.0, now_s - self.received_s)

    @property
    def answers(self) -> bool:
        return self.engine_state in ANSWERING

    def warnings(self) -> tuple[str, ...]:
        """What a person should know about this worker's telemetry."""
        found = list(self.notes)
        if self.skew_s is not None and abs(self.skew_s) > SKEW_WARN_S:
            found.append(f"its clock is {self.skew_s:+.0f} s off; times are counted here, but its logs will mislead")
        if self.late_s > LATE_S:
            found.append(f"its samples arrive {self.late_s:.1f} s late and count as that old: its link is slow")
        if self.is_suspect:
            found.append("suspect metric: no KV in use while tokens are generated")
        return tuple(found)


@dataclass(frozen=True, slots=True)
class Change:
    """Something that happened to a worker, for the audit and for whoever must react."""

    worker: str
    what: str  # registered, restarted, external_role, quarantine_cleared, forgotten
    detail: str


class Registry:
    """All workers of one pool. `changes` collects what happened until somebody takes it."""

    def __init__(self, clock: Clock, policy: PolicySettings) -> None:
        self._clock = clock
        self._policy = policy
        self._workers: dict[str, Worker] = {}
        self._beside = Beside()
        self.counts: Counter[str] = Counter()
        self.changes: list[Change] = []
        self.former_urls: set[str] = set()  # addresses that workers moved away from or left: to be taken out of the router

    # ------------------------------------------------------------ looking

    def now(self) -> float:
        """Monotonic seconds, as every age here is counted."""
        return self._clock.now()

    def get(self, name: str) -> Worker | None:
        worker = self._workers.get(name)
        return None if worker is None or worker.gone else worker

    def __iter__(self) -> Iterator[Worker]:
        return (w for w in self._workers.values() if not w.gone)

    def everyone(self) -> tuple[Worker, ...]:
        """Those that left included."""
        return tuple(self._workers.values())

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def incarnations(self) -> dict[str, int]:
        return {w.name: w.incarnation for w in self if w.hello is not None}

    def state(self, w: Worker, now_s: float) -> WorkerState:
        if w.gone:
            return WorkerState.GONE
        if w.quarantined:
            return WorkerState.QUARANTINED
        if w.move_id is not None:
            return WorkerState.MOVING
        since_s = w.received_s if w.received_s is not None else w.known_since_s
        if now_s - since_s > self._policy.lost_after_s:
            return WorkerState.LOST
        if w.hello is not None and (w.warm_at_s is None or now_s < w.warm_at_s or w.engine_state == "warming"):
            return WorkerState.WARMING
        if w.received_s is None or now_s - w.received_s > self._policy.flip_max_age_s:
            return WorkerState.STALE
        return WorkerState.SLOW if SLOW_NOTE in w.notes else WorkerState.SERVING

    def silent(self, w: Worker, now_s: float) -> bool:
        """Lost by age, whatever its move or quarantine says."""
        return now_s - (w.received_s if w.received_s is not None else w.known_since_s) > self._policy.lost_after_s

    def stuck_transfers(self, w: Worker, now_s: float) -> int:
        """KV transfers to it that neither came nor went for longer than any one takes."""
        return int(w.transfers) if w.transfers and now_s - w.transfers_since_s > STUCK_AFTER_S else 0

    def views(self, now_s: float) -> tuple[WorkerView, ...]:
        """One view a worker. Rebuilt only when something changed or a state may have changed with time."""
        return tuple(w.view if w.view is not None and not w.dirty and now_s < w.recheck_s else self._look(w, now_s) for w in self)

    def _look(self, w: Worker, now_s: float) -> WorkerView:
        view = WorkerView(
            name=w.name,
            role=w.role,
            state=self.state(w, now_s),
            incarnation=w.incarnation,
            received_s=w.received_s,
            role_since_s=w.role_since_s,
            readings=w.readings,
            queue=w.queue,
            queue_total=w.queue_total,
            pinned_role=w.pinned_role,
            flippable=w.flippable,
            not_flippable_why=w.not_flippable_why,
            can_borrow="borrow" in w.capabilities,
            can_triage="triage" in w.capabilities,
            known_as_prefill=w.known_as_prefill,
            can_drop_stale="drop_stale" in w.capabilities,
            retry_after_s=w.retry_after_s,
            stuck_transfers=self.stuck_transfers(w, now_s),
            model=w.hello.model if w.hello else (w.row.model if w.row else "default"),
            pool=w.hello.pool if w.hello else (w.row.pool if w.row else "default"),
        )
        w.view, w.dirty, w.recheck_s = view, False, self._next_change(w, now_s)
        return view

    def _next_change(self, w: Worker, now_s: float) -> float:
        since_s = w.received_s if w.received_s is not None else w.known_since_s
        moments = [since_s + self._policy.flip_max_age_s, since_s + self._policy.lost_after_s]
        if w.warm_at_s is not None:
            moments.append(w.warm_at_s)
        # A limit is passed strictly after its moment, so the moment itself is looked at again too.
        return min((m + 1e-6 for m in moments if m + 1e-6 > now_s), default=math.inf)

    # ------------------------------------------------------------ arriving

    def restore(self, row: WorkerRow, quarantined_boot: str = "") -> None:
        """A worker the database knows. It counts as silent until its sidecar says hello."""
        now_s = self._clock.now()
        self._workers[row.name] = Worker(
            name=row.name,
            role=row.role,
            incarnation=row.incarnation,
            hello=None,
            row=row,
            registered_wall_s=row.registered_wall_s,
            seen_wall_s=row.seen_wall_s,
            known_since_s=now_s,
            role_since_s=now_s,
            own_flippable=row.flippable,
            own_why=row.not_flippable_why,
            prefill_start=row.prefill_start,
            quarantined=row.state is WorkerState.QUARANTINED,
            quarantined_boot=quarantined_boot,
        )

    def taken(self, hello: Hello, connection: Connection) -> str | None:
        """Why this worker may not be who it says: its address or its name is another's who is heard right now."""
        now_s, address = self._clock.now(), _address(hello.worker_url)
        known = self.get(hello.worker)
        if known is not None and known.connection is not None and known.connection is not connection:
            fresh = known.heard_s is not None and now_s - known.heard_s <= self._policy.flip_max_age_s
            if fresh and _address(known.url) != address:
                return f"the name {hello.worker!r} is taken by a worker at {known.url}; give each sidecar a name of its own"
        for w in self:
            if w.name != hello.worker and w.url and not self.silent(w, now_s) and _address(w.url) == address:
                return (
                    f"the address {hello.worker_url} is already that of worker {w.name!r}; "
                    f"one worker has one name: stop the other sidecar, or wait {self._policy.lost_after_s:g} s after it ended"
                )
        return None

    def greet(self, hello: Hello, connection: Connection) -> Worker:
        """Register, or recognise. A restart or a new address is a new incarnation: what the old one still sends is ignored."""
        now_s, wall_s = self._clock.now(), self._clock.wall()
        known = self._workers.get(hello.worker)
        if known is not None and known.connection is not None and known.connection is not connection:
            known.connection.close("the same worker connected again")
        w = known if known is not None and not known.gone else None
        if w is not None and w.hello is not None and _same_life(w.hello, hello):
            # A new connection starts its own numbering: nothing of the old one is listened to any more.
            w.hello, w.connection, w.seq, w.dirty = hello, connection, -1, True
            w.transit, w.late_s = Transit(now_s), 0.0
            self._flippable(w, hello.flippable, hello.not_flippable_why)
            self._note_prefill(w, hello.role)
            self._compare(w)
            return w
        fresh = Worker(
            name=hello.worker,
            role=w.role if w is not None and w.move_id is not None else hello.role,
            incarnation=(known.incarnation if known is not None else 0) + 1,
            hello=hello,
            row=None,
            registered_wall_s=w.registered_wall_s if w is not None else wall_s,
            seen_wall_s=wall_s,
            known_since_s=now_s,
            role_since_s=now_s,
            connection=connection,
            transit=Transit(now_s),
            seen_role=hello.role,
            own_flippable=hello.flippable,
            own_why="" if hello.flippable else hello.not_flippable_why,
            prefill_start=known.prefill_start if known is not None else "",
        )
        self._note_prefill(fresh, hello.role)
        if w is not None:
            fresh.pinned_role, fresh.move_id, fresh.failures, fresh.retry_after_s = (
                w.pinned_role,
                w.move_id,
                w.failures,
                w.retry_after_s,
            )
            if w.quarantined:
                fresh.quarantined = bool(w.quarantined_boot) and w.quarantined_boot == hello.engine_boot
                fresh.quarantined_boot = w.quarantined_boot if fresh.quarantined else ""
                if not fresh.quarantined:
                    self._tell(fresh, "quarantine_cleared", "its engine was restarted")
            what = "restarted" if w.hello is not None else "returned"  # to a controller that was itself restarted
            self._tell(fresh, what, f"incarnation {fresh.incarnation} as {hello.role}")
        else:
            self._tell(fresh, "registered", f"incarnation {fresh.incarnation} as {hello.role}")
        self._workers[hello.worker] = fresh
        self._replaces(fresh)
        self._compare(fresh)
        if known is not None and known.url != hello.worker_url:
            self.former_urls.add(known.url)
        return fresh

    def _replaces(self, fresh: Worker) -> None:
        """Whoever had this address before and is silent is gone: acting for both would undo the one's work with the other's.

        A quarantine is of the engine behind the address: a new name does not heal it.
        """
        now_s = self._clock.now()
        for w in list(self):
            if w is fresh or not w.url or _address(w.url) != _address(fresh.url) or not self.silent(w, now_s):
                continue
            if w.quarantined and w.quarantined_boot and w.quarantined_boot == fresh.engine_boot:
                fresh.quarantined, fresh.quarantined_boot = True, fresh.engine_boot
                self._tell(fresh, "quarantined", f"its engine was put in quarantine as {w.name}: restart it")
            if w.move_id is None:
                self.deregister(w.name)
                self._tell(w, "replaced", f"{fresh.name} is at its address now")

    def left(self, name: str, connection: Connection) -> None:
        """A connection ended. The worker stays: only silence makes it stale, then lost."""
        w = self._workers.get(name)
        if w is not None and w.connection is connection:
            w.connection = None

    def deregister(self, name: str) -> bool:
        """The worker leaves for good; whatever still arrives from it is counted and dropped."""
        w = self.get(name)
        if w is None:
            return False
        w.gone = w.dirty = True
        self.former_urls.add(w.url)
        if w.connection is not None:
            w.connection.close("deregistered")
            w.connection = None
        self._compare(w)
        return True

    def _compare(self, w: Worker) -> None:
        """`w` came, left or says something else: look again at what workers say of themselves beside each other."""
        stated = None
        if w.hello is not None and not w.gone:
            stated = Stated(w.name, _address(w.url)[0], w.hello.bootstrap_port, w.hello.radix_cache)
        if not self._beside.changes(w.name, stated):
            return
        found = self._beside.why_not_flippable()
        for other in self:
            why = found.get(other.name, "")
            if other.fleet_why != why:
                other.fleet_why, other.dirty = why, True

    def _note_prefill(self, w: Worker, role: Role | None) -> None:
        if role is Role.PREFILL and w.prefill_start != w.engine_start:
            w.prefill_start, w.dirty = w.engine_start, True

    def forget_silent(self, now_s: float) -> None:
        for w in list(self):
            last_s = w.heard_s if w.heard_s is not None else w.known_since_s
            if w.move_id is None and now_s - last_s > FORGET_AFTER_S:
                self.deregister(w.name)
                self._tell(w, "forgotten", f"silent for {FORGET_AFTER_S:.0f} s")

    def prune(self, now_s: float) -> tuple[str, ...]:
        """Drop from memory who left long ago, and return their names; the database keeps their rows."""
        old = [
            w.name for w in self._workers.values() if w.gone_written_s is not None and now_s - w.gone_written_s > PRUNE_AFTER_S
        ]
        for name in old:
            del self._workers[name]
        return tuple(old)

    # ------------------------------------------------------------ listening

    def hear(self, sample: Sample, connection: Connection | None = None) -> bool:
        """Take one sample in. False: it was ignored, and counted under why."""
        w = self.get(sample.worker)
        if w is None or w.hello is None or (connection is not None and w.connection is not connection):
            self.counts["unattributed"] += 1
            return False
        if sample.incarnation != w.incarnation:
            self.counts["old_incarnation"] += 1
            return False
        if sample.seq <= w.seq:
            self.counts["reordered"] += 1
            return False
        now_s, wall_s = self._clock.now(), self._clock.wall()
        w.seq, w.heard_s, w.seen_wall_s, w.skew_s = sample.seq, now_s, wall_s, sample.wall_s - wall_s
        w.engine_state, w.notes, w.sources, w.dirty = sample.engine_state, sample.notes, sample.sources, True
        if sample.flippable is not None:
            self._flippable(w, sample.flippable, sample.not_flippable_why)
        if not w.answers:
            return True  # the sidecar is alive, the engine is not: its numbers age as in silence
        w.late_s = w.transit.late_s(sample.sent_s, now_s) if w.transit is not None else 0.0
        w.received_s = now_s - w.late_s
        if w.warm_at_s is None:
            w.warm_at_s = now_s + self._policy.warmup_s
        w.readings, rejected = read(sample.values, w.received_s, w.readings)
        for name, why in rejected:
            w.rejected[name, why] += 1
            self.counts["rejected_values"] += 1
        w.queue, w.queue_total = sample.queue, sample.queue_total
        self._read_back(w, sample.role, now_s)
        self._suspect(w, now_s)
        queue = w.readings.transfer_queue
        transfers = queue.value if isinstance(queue, Known) and w.role is Role.DECODE else 0.0
        if transfers != w.transfers:
            w.transfers, w.transfers_since_s = transfers, now_s
        return True

    def _flippable(self, w: Worker, flippable: bool, why: str) -> None:
        w.own_flippable, w.own_why = flippable, "" if flippable else why

    def _read_back(self, w: Worker, role: Role | None, now_s: float) -> None:
        """The engine's own word on its role. A lasting difference without a move of ours: somebody else switched it."""
        if role is None:
            return
        w.seen_role = role
        self._note_prefill(w, role)
        if role is w.role or w.move_id is not None or w.engine_state == "switching":
            w.differs_since_s = None
            return
        if w.differs_since_s is None:
            w.differs_since_s = now_s
        if now_s - w.differs_since_s >= ADOPT_AFTER_S:
            before, w.role, w.role_since_s, w.differs_since_s = w.role, role, now_s, None
            w.retry_after_s = now_s + EXTERNAL_HOLD_S
            self._tell(w, "external_role", f"{before} -> {role}, not by a move of ours; left alone for {EXTERNAL_HOLD_S:.0f} s")

    def _suspect(self, w: Worker, now_s: float) -> None:
        """KV at zero while tokens are generated: flagged once it lasted, as one of the two metrics must be wrong."""
        used, generated = w.readings.kv_used_tokens, w.readings.generated_tokens_total
        if w.role is not Role.DECODE or not (isinstance(used, Known) and isinstance(generated, Known)) or used.value > 0:
            w.suspect_since_s, w.is_suspect = None, False
        elif w.suspect_since_s is None:
            w.suspect_since_s, w.suspect_tokens = now_s, generated.value
        elif now_s - w.suspect_since_s > SUSPECT_AFTER_S:
            w.is_suspect = generated.value > w.suspect_tokens
            w.suspect_since_s, w.suspect_tokens = now_s, generated.value

    # ------------------------------------------------------------ moves and pins

    def pin(self, name: str, role: Role | None) -> None:
        w = self._workers.get(name)
        if w is not None and w.pinned_role is not role:
            w.pinned_role, w.dirty = role, True

    def departs(self, name: str, move_id: str) -> None:
        w = self._workers.get(name)
        if w is not None:
            w.move_id, w.dirty = move_id, True

    def stays(self, name: str) -> None:
        """A move that was not even begun."""
        w = self._workers.get(name)
        if w is not None:
            w.move_id, w.dirty = None, True

    def arrives(self, name: str, role: Role, *, moved: bool, quarantined: bool) -> None:
        """A move ended: done (`moved`), or back in `role` after a failure, or broken."""
        w = self._workers.get(name)
        if w is None:
            return
        now_s = self._clock.now()
        w.move_id, w.dirty, w.differs_since_s = None, True, None
        if quarantined:
            w.quarantined, w.quarantined_boot = True, w.engine_boot
            self._tell(w, "quarantined", "its engine may be broken: restart it")
        if moved:
            w.role, w.role_since_s, w.failures, w.retry_after_s = role, now_s, 0, None
            self._note_prefill(w, role)
        else:
            w.role = role
            w.failures += 1
            w.retry_after_s = now_s + self._policy.backoff_s * min(8, 2 ** (w.failures - 1))

    def _tell(self, w: Worker, what: str, detail: str) -> None:
        w.dirty = True
        self.changes.append(Change(w.name, what, detail))

    def row(self, w: Worker, now_s: float) -> WorkerRow:
        """Its durable side."""
        return WorkerRow(
            name=w.name,
            role=w.role,
            state=self.state(w, now_s),
            worker_url=w.url,
            sidecar_url=w.sidecar_url,
            bootstrap_port=w.bootstrap_port,
            engine=w.hello.engine if w.hello else (w.row.engine if w.row else ""),
            engine_version=w.hello.engine_version if w.hello else (w.row.engine_version if w.row else ""),
            incarnation=w.incarnation,
            flippable=w.flippable,
            not_flippable_why=w.not_flippable_why,
            capabilities=w.capabilities,
            model=w.hello.model if w.hello else (w.row.model if w.row else "default"),
            pool=w.hello.pool if w.hello else (w.row.pool if w.row else "default"),
            node=w.hello.node if w.hello else (w.row.node if w.row else ""),
            registered_wall_s=w.registered_wall_s,
            seen_wall_s=w.seen_wall_s,
            plugin=w.plugin,
            plugin_why=w.plugin_why,
            cannot=dict(w.cannot),
            prefill_start=w.prefill_start,
        )


@lru_cache(maxsize=8192)
def _address(url: str) -> tuple[str, int]:
    """Who is called at `url`: its host and port, whatever way they are written."""
    parts = urlsplit(url)
    host = (parts.hostname or "").rstrip(".")
    port = parts.port or (443 if parts.scheme == "https" else 80)
    return "127.0.0.1" if host in ("localhost", "::1") else host, port


def _same_life(before: Hello, after: Hello) -> bool:
    return (before.engine_boot, before.sidecar_boot, before.worker_url, before.sidecar_url) == (
        after.engine_boot,
        after.sidecar_boot,
        after.worker_url,
        after.sidecar_url,
    )
