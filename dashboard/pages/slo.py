"""SLO & alerts: what fires and what to do about it, the budget of each SLO, how fast it burns, silences, and who was told.

Never shows unknown as good: a minute that was not counted is hatched, a number that is not known is a dash.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from controller.store.alert_queries import Bucket, Notice
from controller.store.slo_reading import PairView, SloView
from dashboard import alerting, downloads, urls
from dashboard import format as fmt
from dashboard.pages.frame import Frame
from dashboard.reading import Records
from dashboard.tables import Cell, Column, Link, Table
from dashboard.urls import Asked
from fluidpd.alerts import Alert, AlertState, Silence
from fluidpd.burn import MINUTE_S, WINDOWS_S

WORDS = {"ttft": "First token", "tbt": "Token gaps", "joint": "Both"}
STATES = {"firing": "fires", "nodata": "fires, and nothing is known now", "pending": "about to fire", "resolved": "ended"}
_ORDER = {AlertState.FIRING: 0, AlertState.NODATA: 1, AlertState.PENDING: 2, AlertState.RESOLVED: 3}
_TONES = {"page": "bad", "ticket": "warn"}
_OWN = ("alertname", "severity", "cluster")
ENDED_SHOWN_S = 86_400.0
# The longest bar of the minute chart stands for this share of bad requests at least, so that little stays little.
_FULL_SCALE = 0.10


@dataclass(frozen=True, slots=True)
class AlertView:
    name: str
    severity: str
    tone: str
    state: str
    is_firing: bool
    since_s: float | None
    ended_s: float | None
    summary: str
    description: str
    about: str
    window: str
    budget_left: str
    cause: str
    doing: str
    first_command: str
    runbook: str
    around: str  # the overview at the time it began
    silenced_by: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Rate:
    window: str
    text: str
    tone: str


@dataclass(frozen=True, slots=True)
class Bar:
    """One minute: where it lies (percent), how high, and what it says. `known` False: hatched."""

    x: float
    width: float
    height: float
    known: bool
    wall_s: float
    judged: str
    missed: str
    share: str


@dataclass(frozen=True, slots=True)
class SloCard:
    model: str
    slo: str
    title: str
    promise: str
    attainment: str
    objective: str
    missed: bool
    budget: str
    budget_bar: float  # 0 to 100
    is_spent: bool
    is_known: bool
    lasts: str
    judged: str
    known: str
    basis: str
    rates: tuple[Rate, ...]
    pairs: tuple[PairView, ...]
    bars: tuple[Bar, ...]
    full: str  # the share that the highest possible bar stands for
    scale: int


@dataclass(frozen=True, slots=True)
class Told:
    wall_s: float
    receiver: str
    event: str
    what: str
    outcome: str
    attempts: int
    error: str


@dataclass(frozen=True, slots=True)
class SloPage:
    template: ClassVar[str] = "slo.html"
    frame: Frame
    sentence: str
    scale: int
    firing: tuple[AlertView, ...]
    ended: tuple[AlertView, ...]
    cards: tuple[SloCard, ...]
    windows: tuple[str, ...]
    silences: tuple[Silence, ...]
    told: tuple[Told, ...]
    has_watchdog: bool
    exports: tuple[Link, ...]


@dataclass(frozen=True, slots=True)
class SloPart:
    """The overview's panel."""

    template: ClassVar[str] = "part_slo.html"
    href: str
    sentence: str
    tone: str
    cards: tuple[SloCard, ...]
    scale: int


async def page(records: Records, asked: Asked, around: Frame) -> SloPage:
    now_s = records.wall()
    silences = await alerting.silences(records)
    found = await alerting.alerts(records)
    shown = tuple(_alert(a, silences, asked, now_s) for a in sorted(found, key=_place) if a.severity != "none")
    cards = await _cards(records, now_s, asked.model)
    ended = tuple(v for v in shown if v.state == STATES["resolved"] and v.ended_s and now_s - v.ended_s < ENDED_SHOWN_S)
    firing = tuple(v for v in shown if v.state != STATES["resolved"])
    return SloPage(
        frame=around,
        sentence=_sentence(firing, cards),
        scale=_scale(cards),
        firing=firing,
        ended=ended,
        cards=cards,
        windows=tuple(WINDOWS_S),
        silences=silences,
        told=tuple(_told(n) for n in await alerting.notices(records)),
        exports=downloads.links(asked, urls.SLO, "slos") if cards else (),
        has_watchdog=any(a.severity == "none" and a.state.is_firing for a in found),
    )


async def files(records: Records, asked: Asked) -> tuple[Table, ...]:
    """Every SLO with its numbers, whole; what is not known is empty."""
    views = [v for v in await alerting.slos(records) if not asked.model or v.model == asked.model]
    names = ("model", "slo", "objective", "target_s", "attainment", "budget_left", "exhausted_in_s", "judged", "known_share")
    columns = (*names, *(f"burn_rate_{window}" for window in WINDOWS_S))
    rows = tuple(
        tuple(Cell(value, "") for value in (*(getattr(v, n) for n in names), *(v.burn_rates.get(w) for w in WINDOWS_S)))
        for v in views
    )
    return (Table("slos", "SLOs", tuple(Column(c, c) for c in columns), rows),)


async def read_part(records: Records, asked: Asked) -> SloPart:
    now_s = records.wall()
    found = [a for a in await alerting.alerts(records) if a.severity != "none" and a.state is not AlertState.RESOLVED]
    shown = tuple(_alert(a, (), asked, now_s) for a in sorted(found, key=_place) if a.severity != "none")
    cards = await _cards(records, now_s)
    tone = next((v.tone for v in shown if v.is_firing), "")
    return SloPart(asked.elsewhere(urls.SLO), _sentence(shown, cards), tone, cards, _scale(cards))


async def _cards(records: Records, now_s: float, model: str = "") -> tuple[SloCard, ...]:
    """Model by model, in the order in which a request meets them."""
    views = [view for view in await alerting.slos(records) if not model or view.model == model]
    order = {slo: at for at, slo in enumerate(WORDS)}
    return tuple(_card(view, now_s) for view in sorted(views, key=lambda v: (v.model, order.get(v.slo, len(order)))))


def _scale(cards: Sequence[SloCard]) -> int:
    return max((c.scale for c in cards), default=1)


def _sentence(firing: Sequence[AlertView], cards: Sequence[SloCard]) -> str:
    fires = [v for v in firing if v.is_firing]
    if fires:
        rest = f", and {len(fires) - 1} more" if len(fires) > 1 else ""
        return f"{fires[0].summary}{rest}."
    if not cards:
        return "Nothing fires. No request was judged yet."
    spent = [f"{c.title.lower()} of {c.model}" for c in cards if c.is_spent]
    if spent:
        return f"Nothing fires. The budget of {fmt.listed(spent)} is spent."
    left = sum(c.is_known for c in cards)
    return f"Nothing fires. {left} of {len(cards)} SLOs have budget left." if left else "Nothing fires. No budget is known."


def _place(alert: Alert) -> tuple[int, int, float]:
    return _ORDER.get(alert.state, 9), 0 if alert.severity == "page" else 1, -(alert.started_s or alert.resolved_s or 0.0)


def _alert(alert: Alert, silences: Sequence[Silence], asked: Asked, now_s: float) -> AlertView:
    texts, since_s = alert.annotations, alert.started_s or alert.pending_s
    worker = alert.labels.get("worker", "")
    around = ""
    if since_s is not None:
        fixed = {"from_": f"{(since_s - 3600) * 1000:.0f}", "to": f"{(since_s + 900) * 1000:.0f}"}
        around = asked.href(urls.OVERVIEW, worker=worker, **fixed)
    return AlertView(
        name=alert.rule,
        severity=alert.severity,
        tone=_TONES.get(alert.severity, ""),
        state=STATES.get(alert.state.value, alert.state.value),
        is_firing=alert.state.is_firing,
        since_s=since_s,
        ended_s=alert.resolved_s,
        summary=texts.get("summary", alert.rule),
        description=texts.get("description", ""),
        about=", ".join(f"{k} {v}" for k, v in sorted(alert.labels.items()) if k not in _OWN),
        window=texts.get("window", ""),
        budget_left=texts.get("budget_left", ""),
        cause=texts.get("likely_cause", ""),
        doing=texts.get("what_fluidpd_does", ""),
        first_command=texts.get("first_command", ""),
        runbook=_web(texts.get("runbook_url", "")),
        around=around,
        silenced_by=tuple(s.id for s in silences if s.mutes(alert, now_s)),
    )


def _web(address: str) -> str:
    """An address that may be a link: what stands in the database is not trusted to be one."""
    return address if address.startswith(("http://", "https://")) else ""


def _card(view: SloView, now_s: float) -> SloCard:
    left = view.budget_left
    verb = {"ttft": "within", "tbt": "at most"}.get(view.slo, "")
    target = "both targets" if view.target_s is None else f"{verb} {fmt.seconds(view.target_s)}"
    return SloCard(
        model=view.model,
        slo=view.slo,
        title=WORDS.get(view.slo, view.slo),
        promise=target,
        attainment=fmt.share(view.attainment),
        objective=fmt.share(view.objective),
        missed=view.attainment is not None and view.attainment < view.objective,
        budget=fmt.share(left),
        budget_bar=0.0 if left is None else max(0.0, min(100.0, left * 100)),
        is_spent=left is not None and left <= 0,
        is_known=left is not None,
        lasts="" if not view.exhausted_in_s else f"gone in {fmt.seconds(view.exhausted_in_s)} at this rate",
        judged=fmt.amount(view.judged),
        known=fmt.share(view.known_share),
        basis=view.basis,
        rates=tuple(_rate(name, view) for name in WINDOWS_S),
        pairs=view.pairs,
        bars=_bars(view.minutes, now_s, MINUTE_S // view.window_scale),
        full=fmt.share(_full(view.minutes)),
        scale=view.window_scale,
    )


def _rate(window: str, view: SloView) -> Rate:
    rate = view.burn_rates.get(window)
    if rate is None:
        return Rate(window, "–", "unknown")
    tone = next((p.severity for p in view.pairs if p.burning and window in p.windows.split("/")), "")
    return Rate(window, f"{rate:.1f}x", _TONES.get(tone, ""))


def _bars(minutes: Sequence[Bucket], now_s: float, bucket_s: int) -> tuple[Bar, ...]:
    """The last hour of minutes, oldest first. What has no row, or no known second, is hatched."""
    end = int(now_s // bucket_s) * bucket_s
    at = {b.second: b for b in minutes}
    full = _full(minutes)
    found = []
    for i in range(60):
        second = end - (60 - i) * bucket_s
        bucket = at.get(second)
        known = bucket is not None and bucket.counts.known_s > 0
        counts = bucket.counts if bucket is not None else None
        share = counts.bad / counts.total if counts is not None and counts.total else None
        found.append(
            Bar(
                x=i * 100 / 60,
                width=0.9 * 100 / 60,
                height=0.0 if share is None else share / full * 100,
                known=known,
                wall_s=float(second),
                judged=fmt.UNKNOWN if counts is None else f"{counts.total:g}",
                missed=fmt.UNKNOWN if counts is None else f"{counts.bad:g}",
                share=fmt.share(share),
            )
        )
    return tuple(found)


def _full(minutes: Sequence[Bucket]) -> float:
    return max([_FULL_SCALE, *(b.counts.bad / b.counts.total for b in minutes if b.counts.total)])


def _told(notice: Notice) -> Told:
    labels = notice.body.get("labels", {})
    about = ", ".join(str(v) for k, v in sorted(labels.items()) if k not in _OWN)
    name = str(labels.get("alertname", ""))
    return Told(
        wall_s=notice.sent_s or notice.created_s,
        receiver=notice.receiver,
        event="fires" if notice.event.value == "firing" else "ended",
        what=f"{name} ({about})" if about else name,
        outcome=notice.outcome,
        attempts=notice.attempts,
        error=notice.last_error,
    )
