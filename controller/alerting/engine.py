"""The alert engine: closes each SLO minute, judges every rule, and writes state and what has to be told of it in one transaction.

Never evaluates or sends while another controller leads, and never forgets what fires: a restart or a failover goes on with it.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from controller.alerting import messages
from controller.alerting.counting import SloCounts
from controller.alerting.facts import Facts, Gathering, Watched
from controller.alerting.rules import BURN_PAGE, BURN_TICKET, RULES, Finding
from controller.clock import Clock
from controller.receivers.news import News
from controller.receivers.receiver import Receiver
from controller.receivers.sending import Sending
from controller.settings import ControllerSettings
from controller.settings_alerting import SLOS, objectives
from controller.store.alert_queries import Counts, Notice, SloKey, Terms
from controller.store.alerting import AlertStore
from controller.store.engine import StoreUnavailable
from controller.store.queries import Queries
from controller.store.writes import Deposed, Store
from fluidpd.addresses import Allowed
from fluidpd.alerts import Alert, AlertState, Rule, Silence, Told, fingerprint, new, step
from fluidpd.burn import MINUTE_S, PERIOD_S, WINDOWS_S, Budget, Burn, Track, budget, burn_rates, judge

log = logging.getLogger(__name__)

EVALUATE_S = 15.0
WRITE_EVERY_S = 5  # of minutes that are shorter than this; and MOST_UNWRITTEN wait for a database
MOST_UNWRITTEN = 1440
RESOLVED_TOLD_S = 900.0  # an Alertmanager that was away hears of an end for this long
FORGET_S = 30 * 86_400.0
_REPAIR_S = 5.0  # the wall clock was set by more than this: times follow it from there on


@dataclass(frozen=True, slots=True)
class SloState:
    """One SLO at the last evaluation, as pages and metrics show it."""

    model: str
    slo: str
    objective: float
    basis: str
    counts: Counts
    burns: tuple[Burn, ...]
    rates: dict[str, float | None]
    budget: Budget


class Alerting:
    """Made by who leads, ended with it. `look` every LOOK_S or so; sending runs by itself once started."""

    def __init__(
        self,
        settings: ControllerSettings,
        watched: Watched,
        counts: SloCounts,
        store: Store,
        queries: Queries,
        clock: Clock,
        *,
        may_act: Callable[[], bool],
        receivers: Sequence[Receiver] | None = None,
        chance: Callable[[], float] | None = None,
    ) -> None:
        a = settings.alerting
        self.settings, self._counts, self._clock = settings, counts, clock
        self._may_act = may_act
        self.store = AlertStore(store)
        self.scale = a.window_scale
        self.bucket_s = MINUTE_S // self.scale
        allowed = Allowed.of(a.allowed_receivers, loopback=True)
        made = [Receiver(r, allowed, clock.wall) for r in a.sends_to] if receivers is None else receivers
        options = {} if chance is None else {"chance": chance}
        self.sending = Sending(made, self.store, clock, current=self._current, may_send=may_act, queue=a.queue, **options)
        self._gathering = Gathering(watched, store, queries, self.wall, self.sending.failing)
        self._anchor = (clock.wall(), clock.now())
        self._tracks: dict[SloKey, Track] = {}
        self._closed: dict[SloKey, Counts] = {}  # totals at the end of the last minute
        self._unwritten: dict[int, dict[SloKey, Counts]] = {}
        self._sums: tuple[float, dict[SloKey, Counts]] = (-math.inf, {})
        self._saved: dict[str, tuple[Alert, float]] = {}
        self._open: int | None = None
        self._due_s = 0.0
        self.alerts: dict[str, Alert] = {}
        self._told: set[str] = set()  # keys of firing notices that are in the outbox, or left from here
        self.silences: tuple[Silence, ...] = ()
        self.slos: tuple[SloState, ...] = ()
        self._tasks: list[asyncio.Task[None]] = []

    # ------------------------------------------------------------ its life

    async def begin(self) -> None:
        """Take over what the last leader left. Raises StoreUnavailable."""
        for said in self.settings.unreachable_objectives:
            log.warning("%s", said)
        left = await self.store.remembered()
        self._counts.restore(left.totals, left.marks)
        self.alerts = {a.fingerprint: a for a in left.alerts if a.state is not AlertState.INACTIVE}
        self._saved = {a.fingerprint: (a, 0.0) for a in left.alerts}
        self._told = {n.key for n in await self.store.notices(1000) if n.event is Told.FIRING}
        self._closed = dict(left.totals)
        now_s = self.wall()
        for key, total in left.totals.items():
            track = self._tracks[key] = Track()
            buckets = await self.store.buckets(key, now_s - WINDOWS_S["3d"] / self.scale - self.bucket_s, now_s)
            grown = total
            for bucket in buckets:
                grown = grown.minus(bucket.counts)
            for bucket in buckets:
                grown = grown.plus(bucket.counts)
                track.add(bucket.second + self.bucket_s, grown.total, grown.bad, grown.known_s)

    def start(self) -> None:
        self._tasks.append(asyncio.create_task(self._look_for_ever(), name="alerting"))
        self.sending.start()

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks.clear()
        await self.sending.stop()

    @property
    def totals(self) -> Mapping[SloKey, Counts]:
        return self._counts.totals

    @property
    def look_s(self) -> float:
        return min(1.0, self.bucket_s / 4)

    async def _look_for_ever(self) -> None:
        while True:
            try:
                await self.look()
            except Exception:
                log.exception("an evaluation of alerts failed; the next one tries again")
            await self._clock.sleep(self.look_s)

    def wall(self) -> float:
        """Wall time that does not jump: as it was at the start plus what has passed, until the clock was set on purpose."""
        wall_s, now_s = self._anchor
        steady_s = wall_s + self._clock.now() - now_s
        if abs(self._clock.wall() - steady_s) > _REPAIR_S:
            log.warning("the wall clock was set by %+.0f s: alert times follow it", self._clock.wall() - steady_s)
            self._anchor = (self._clock.wall(), self._clock.now())
            return self._clock.wall()
        return steady_s

    # ------------------------------------------------------------ one look

    async def look(self) -> None:
        """Close the minute if it is over, judge the rules if it is time. Does nothing while another leads."""
        if not self._may_act():
            return
        now_s = self.wall()
        bucket = math.floor(now_s / self.bucket_s) * self.bucket_s
        if self._open is None:
            self._open = bucket
        elif bucket != self._open:
            self._open = bucket
            await self._close(bucket - self.bucket_s)
            self._due_s = min(self._due_s, now_s)  # what is judged is whole minutes: judge them as soon as they are whole
        if now_s >= self._due_s or self._due_s - now_s > EVALUATE_S:
            self._due_s = now_s + max(1.0, EVALUATE_S / self.scale)
            await self.evaluate()

    async def _close(self, second: int) -> None:
        totals = dict(self._counts.totals)
        for key, counts in totals.items():
            track = self._tracks.setdefault(key, Track())
            track.add(second + self.bucket_s, counts.total, counts.bad, counts.known_s)
        self._unwritten[second] = {key: counts.minus(self._closed.get(key, Counts())) for key, counts in totals.items()}
        self._closed = totals
        if self.bucket_s < WRITE_EVERY_S and second - min(self._unwritten) < WRITE_EVERY_S:
            return  # short ones are written together: each transaction waits for the disk
        try:
            terms = {key: self._terms(key) for key in totals}
            await self.store.count(self._unwritten, totals, dict(self._counts.marks), terms)
        except StoreUnavailable as error:
            log.warning("the SLO counts of %d minutes wait: %s", len(self._unwritten), error)
            while len(self._unwritten) > MOST_UNWRITTEN:
                oldest, other = sorted(self._unwritten)[:2]  # what they counted is kept, when it was is not
                grown, more = self._unwritten.pop(oldest), self._unwritten[other]
                self._unwritten[other] = {k: grown.get(k, Counts()).plus(more.get(k, Counts())) for k in {*grown, *more}}
            return
        self._unwritten = {}

    def _terms(self, key: SloKey) -> Terms:
        model, slo = key
        targets = self.settings.slo_of(model)
        target_s = {"ttft": targets.ttft_s, "tbt": targets.tbt_s}.get(slo)
        return Terms(objectives(targets)[slo], target_s, self.scale, self._counts.basis(model, slo))

    async def evaluate(self) -> None:
        """Judge every rule once. What changed is on disk, with what has to be told of it, before anybody is told."""
        facts = await self._gathering.facts()
        try:
            self.silences = await self.store.silences(facts.now_s)
            if abs(facts.now_s - self._sums[0]) >= EVALUATE_S:  # a month of minutes: not summed every second
                self._sums = facts.now_s, await self.store.sums(facts.now_s - PERIOD_S / self.scale)
        except StoreUnavailable:
            pass  # the last ones stand
        judged: list[tuple[Rule, list[Finding] | None]] = []
        self.slos = tuple(self._slo_states(self._sums[1]))
        judged.extend(self._burning(facts))
        for rule, check in RULES:
            found = check(facts, self.settings)
            judged.append((rule, None if found is None else list(found)))
        await self._apply(judged, facts.now_s)

    def _slo_states(self, sums: dict[SloKey, Counts]) -> Iterable[SloState]:
        for (model, slo), track in sorted(self._tracks.items()):
            if slo not in SLOS or track.newest_s is None:
                continue
            targets = self.settings.slo_of(model)
            objective = objectives(targets)[slo]
            end_s = math.floor(self.wall() / self.bucket_s) * self.bucket_s
            counts = sums.get((model, slo), Counts())
            yield SloState(
                model=model,
                slo=slo,
                objective=objective,
                basis=self._counts.basis(model, slo),
                counts=self._counts.totals.get((model, slo), Counts()),
                burns=judge(track, end_s, objective, self.scale),
                rates=burn_rates(track, end_s, objective, self.scale),
                budget=budget(counts.total, counts.bad, counts.known_s, objective, PERIOD_S / self.scale),
            )

    def _burning(self, facts: Facts) -> Iterable[tuple[Rule, list[Finding] | None]]:
        for rule in (BURN_PAGE, BURN_TICKET):
            rule = replace(rule, keep_s=rule.keep_s / self.scale)
            found: list[Finding] = []
            for state in self.slos:
                mine = [b for b in state.burns if b.pair.severity == rule.severity.value]
                burning = tuple(b for b in mine if b.burning)
                targets = self.settings.slo_of(state.model)
                if burning:
                    found.append(
                        messages.burn_finding(
                            state.model,
                            state.slo,
                            burning,
                            state.budget,
                            facts,
                            targets,
                            state.objective,
                            self.scale,
                            state.basis,
                        )
                    )
            yield rule, found

    def _is_blind(self, labels: dict[str, str]) -> bool:
        """Whether too little is known of an SLO to say that it stopped burning."""
        key = (labels.get("model"), labels.get("slo"))
        mine = next((s for s in self.slos if (s.model, s.slo) == key), None)
        return mine is None or all(b.burning is None for b in mine.burns)

    async def _apply(self, judged: Sequence[tuple[Rule, list[Finding] | None]], now_s: float) -> None:
        after: dict[str, Alert] = {}
        notices: list[Notice] = []
        for rule, findings in judged:
            known = {f: a for f, a in self.alerts.items() if a.rule == rule.name and a.severity == rule.severity.value}
            for finding in findings or ():
                fresh = new(rule, finding.labels, self.settings.identity.cluster)
                alert = known.pop(fresh.fingerprint, fresh)
                since_s = alert.started_s if alert.state.is_firing and alert.started_s is not None else now_s
                texts = messages.annotated(rule.name, finding, since_s, self.settings.alerting)
                changed, told = step(alert, rule, True, now_s, value=finding.value, annotations=texts)
                after[changed.fingerprint] = changed
                notices.extend(self._notices(changed, told, now_s))
            for alert in known.values():
                blind = findings is None or (rule.name == BURN_PAGE.name and self._is_blind(dict(alert.labels)))
                changed, told = step(alert, rule, None if blind else False, now_s)
                after[changed.fingerprint] = changed
                notices.extend(self._notices(changed, told, now_s))
        rest = {f: a for f, a in self.alerts.items() if f not in after}  # of rules that this version does not know
        gone = [f for f, a in after.items() if _is_over(a, now_s)]
        await self._keep({f: a for f, a in after.items() if f not in gone}, rest, notices, gone, now_s)

    async def _keep(
        self, after: dict[str, Alert], rest: dict[str, Alert], notices: list[Notice], gone: list[str], now_s: float
    ) -> None:
        unwritten = self.sending.take_unwritten()
        changed = [a for a in after.values() if self._must_write(a, now_s)]
        forgotten = [f for f in gone if f in self._saved]
        try:
            if changed or unwritten or notices or forgotten:
                await self.store.save(changed, [*unwritten, *notices], forgotten)
        except Deposed:
            return  # nobody is told: who leads now has the same facts
        except StoreUnavailable as error:
            log.warning("alerts are not on record while the database is away, and are told all the same: %s", error)
            self.sending.hold([*unwritten, *notices])
        else:
            self._saved |= {a.fingerprint: (a, now_s) for a in changed}
            self._saved = {f: saved for f, saved in self._saved.items() if f not in forgotten}
        self._told.update(n.key for n in notices if n.event is Told.FIRING)
        self.alerts = {**rest, **after}

    def _must_write(self, alert: Alert, now_s: float) -> bool:
        """A change of state at once, other texts now and then, the mere time of an evaluation never."""
        saved, at_s = self._saved.get(alert.fingerprint, (None, 0.0))
        if saved is None:
            return True
        same_state = replace(saved, seen_s=alert.seen_s, value=alert.value, annotations=alert.annotations) == alert
        same_texts = (saved.value, saved.annotations) == (alert.value, alert.annotations)
        return not same_state or (not same_texts and abs(now_s - at_s) >= EVALUATE_S)

    def _notices(self, alert: Alert, told: Told | None, now_s: float) -> Iterable[Notice]:
        """What each receiver has to be told: of a beginning, of what goes on, and of the end whoever was told of either."""
        if alert.started_s is None:
            return
        firing = alert.state.is_firing
        if not firing and told is not Told.RESOLVED:
            return
        muted = any(s.mutes(alert, now_s) for s in self.silences)
        failing = self.sending.failing()
        for receiver in self.sending.receivers:
            if not receiver.wants(alert.severity):
                continue
            begun = f"{alert.fingerprint}:{alert.started_s:.3f}:firing:{receiver.name}"
            if firing:
                turn = receiver.turn(now_s - alert.started_s)
                event, key = Told.FIRING, f"{begun}:{turn}" if turn else begun
                if muted or key in self._told or (turn and receiver.name in failing):  # it is told once it takes something
                    continue
            else:
                event, key = Told.RESOLVED, begun.replace(":firing:", ":resolved:")
                if not any(told_of == begun or told_of.startswith(f"{begun}:") for told_of in self._told):
                    continue
            news = _news(alert, key)
            yield Notice(alert.fingerprint, receiver.name, event, key, news.as_body(), created_s=now_s, next_s=now_s)

    # ------------------------------------------------------------ what senders and pages ask

    async def send_test(self, receiver: str, actor: str, reason: str) -> str:
        """One message that says it is a test. Returns why it was not taken; empty: it was. Raises KeyError."""
        now_s = self.wall()
        labels = {"alertname": "FluidPDTest", "severity": "none", "cluster": self.settings.identity.cluster}
        texts = {
            "summary": f"Test message of FluidPD, asked for by {actor}",
            "description": reason,
            "what_fluidpd_does": "Nothing.",
        }
        mark = fingerprint({**labels, "at": str(now_s)})
        return await self.sending.test(receiver, News(mark, f"{mark}:test", labels, texts, now_s, now_s + 60))

    def _current(self) -> list[News]:
        """What fires, and what ended a short while ago: for Alertmanagers, which forget."""
        now_s = self.wall()
        found = []
        for alert in self.alerts.values():
            if alert.started_s is None or any(s.mutes(alert, now_s) for s in self.silences):
                continue
            ended_s = alert.resolved_s if alert.state is AlertState.RESOLVED else None
            if alert.state.is_firing or (ended_s is not None and now_s - ended_s <= RESOLVED_TOLD_S):
                found.append(_news(alert, f"{alert.fingerprint}:{alert.started_s:.3f}"))
        return found


def _news(alert: Alert, key: str) -> News:
    assert alert.started_s is not None
    ends_s = alert.resolved_s if alert.state is AlertState.RESOLVED else None
    return News(alert.fingerprint, key, alert.labels, alert.annotations, alert.started_s, ends_s)


def _is_over(alert: Alert, now_s: float) -> bool:
    if alert.state is AlertState.INACTIVE:
        return True
    return alert.state is AlertState.RESOLVED and alert.resolved_s is not None and now_s - alert.resolved_s > FORGET_S
