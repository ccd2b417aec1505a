"""What a decision was made on: every worker's readings of that second, the limits that stood, and the alternatives weighed.

Never takes today's limits for those of then: without a snapshot of that second it says that there is none.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from dashboard import format as fmt
from dashboard import lookups, tables, urls
from dashboard.reading import Records
from dashboard.tables import Cell, Column, Table
from dashboard.urls import Asked
from fluidpd.names import UnknownWhy
from fluidpd.record import BasisRow, SnapshotRow
from fluidpd.telemetry import ConfirmedIdle, Known, Reading, Unknown, WorkerView

LIMITS = (
    "judge", "prefill_idle", "prefill_stop", "prefill_over", "prefill_high", "decode_idle", "decode_low", "decode_high",
    "persist_s", "trend_horizon_s", "trend_persist_s", "trend_high", "residence_s", "flips_per_minute", "max_concurrent",
    "min_prefill", "min_decode", "goodput_margin", "goodput_persist_s", "quorum_share", "flip_max_age_s",
)  # fmt: skip
TARGETS = ("ttft_s", "tbt_s", "joint_objective")
# What each alternative is called, and what is done if it is chosen.
ALTERNATIVES = {
    "good_if_stay": "stay as it is",
    "good_if_lend": "let more decode workers lend",
    "good_if_withhold": "let none lend",
    "good_if_to_prefill": "move one worker to prefill",
    "good_if_to_decode": "move one worker to decode",
    "good_if_shed": "turn lost causes away (told, never done)",
}
SAMPLE_NUMBERS = (
    ("batch", "Batch"),
    ("context_tokens", "Context"),
    ("waiting", "Waiting"),
    ("kv_used_tokens", "KV used"),
    ("kv_capacity_tokens", "KV there"),
    ("step_s", "Step"),
    ("residual_p995_s", "Residual p99.5"),
    ("tbt_p99_s", "TBT p99"),
    ("prefill_busy_share", "Prefill busy"),
    ("borrow_open_tokens", "Borrowed, open"),
)
_WHY = {why: why.value.replace("_", " ") for why in UnknownWhy}
NO_SNAPSHOT = (
    "No snapshot of that second is kept: the controller keeps one a second while retention.snapshots_days is above 0, "
    "for that many days. The limits and readings of then are unknown."
)


@dataclass(frozen=True, slots=True)
class Evidence:
    """`note` says what is not known."""

    samples: Table
    limits: Table
    note: str
    fresh: str


async def read(records: Records, wall_s: float, asked: Asked) -> Evidence:
    snapshot = await lookups.snapshot_at(records, wall_s)
    basis = await lookups.basis(records, snapshot.basis) if snapshot is not None else None
    note = NO_SNAPSHOT if snapshot is None else ""
    if snapshot is not None and int(wall_s) != snapshot.second:
        note = f"The nearest snapshot is of {fmt.when(snapshot.second)}: what stands here was read then."
    return Evidence(samples(snapshot, asked), limits(basis), note, fresh(snapshot, basis))


def fresh(snapshot: SnapshotRow | None, basis: BasisRow | None) -> str:
    """How many workers had a sample that was fresh enough to act on."""
    if snapshot is None:
        return fmt.UNKNOWN
    limit = basis.policy.get("flip_max_age_s") if basis is not None else None
    workers, now_s = snapshot.snapshot.workers, snapshot.snapshot.now_s
    if not isinstance(limit, int | float):
        return f"{len(workers)} workers; which were fresh is unknown"
    young = sum(1 for w in workers if w.age_s(now_s) <= limit)
    return f"{young} of {len(workers)} workers no older than {fmt.seconds(float(limit))}"


def samples(snapshot: SnapshotRow | None, asked: Asked) -> Table:
    columns = (
        Column("worker", "Worker"),
        Column("role", "Role"),
        Column("state", "State"),
        Column("age_s", "Age", is_number=True),
        *(Column(name, label, is_number=True) for name, label in SAMPLE_NUMBERS),
    )
    found = snapshot.snapshot.workers if snapshot is not None else ()
    now_s = snapshot.snapshot.now_s if snapshot is not None else 0.0
    when = f" at {fmt.when(snapshot.second)}" if snapshot is not None else ""
    rows = tuple(_sample(w, now_s, asked) for w in found)
    return Table("samples", f"Samples{when}: what was known of each worker", columns, rows, empty="No snapshot of that second.")


def _sample(w: WorkerView, now_s: float, asked: Asked) -> tuple[Cell, ...]:
    age_s = None if w.received_s is None else round(w.age_s(now_s), 4)
    return (
        tables.typed(w.name, href=asked.elsewhere(urls.worker(w.name))),
        tables.role(w.role.value),
        tables.words(w.state.value, title=fmt.STATES[w.state]),
        tables.seconds(age_s),
        *(reading_cell(name, getattr(w.readings, name)) for name, _ in SAMPLE_NUMBERS),
    )


def reading_cell(name: str, reading: Reading) -> Cell:
    """A reading as it was judged: a number, idle (which is no number), or unknown and why."""
    match reading:
        case Known(value, _, flagged):
            text = fmt.amount(value) if name.endswith("_total") else fmt.quantity(name, value)
            return Cell(value, f"{text} ?" if flagged else text, title="suspect: clamped to its bound" if flagged else "")
        case ConfirmedIdle():
            return Cell("idle", "idle", tone="mut", title="nothing ran, so there is no such number")
        case Unknown(why, _):
            return Cell(None, fmt.UNKNOWN, tone="mut", title=_WHY[why])


def limits(basis: BasisRow | None) -> Table:
    columns = (Column("setting", "Limit"), Column("value", "Value", is_number=True))
    found: list[tuple[str, object]] = []
    if basis is not None:
        found += [(f"policy.{name}", basis.policy[name]) for name in LIMITS if name in basis.policy]
        found += [(f"slo.{name}", basis.slo[name]) for name in TARGETS if name in basis.slo]
        found += [("cost.key", basis.cost.get("key"))]
    rows = tuple((tables.words(name), _setting(name, value)) for name, value in found)
    return Table("limits", "The limits that stood then", columns, rows, empty="Not recorded.")


def _setting(name: str, value: object) -> Cell:
    return Cell(value, fmt.quantity(name.partition(".")[2], value))


# ---------------------------------------------------------------- the decision's own numbers


def numbers(of: Mapping[str, object], name: str = "numbers") -> Table:
    """All of a decision's numbers, as they were recorded; alternatives have a table of their own."""
    columns = (Column("number", "Number"), Column("value", "Value", is_number=True))
    rows = tuple(
        (tables.words(key, fmt.capitalised(fmt.label_of(key)), title=key), tables.known(key, value))
        for key, value in of.items()
        if key not in ALTERNATIVES
    )
    return Table(name, "The numbers it was made with", columns, rows, empty="It was made without numbers: by hand, or by a pin.")


def alternatives(of: Mapping[str, object], action: str, flips_to: str) -> Table:
    """What each alternative was predicted to be worth: requests that meet both targets in the seconds looked ahead."""
    columns = (
        Column("alternative", "Alternative"),
        Column("good", "Good requests predicted", is_number=True),
        Column("gain", "Against staying", is_number=True),
        Column("margin", "Asked of a move", is_number=True),
        Column("taken", "Taken"),
    )
    stay, margin = _number(of.get("good_if_stay")), _number(of.get("goodput_margin"))
    rows = []
    for key, text in ALTERNATIVES.items():
        if key not in of:
            continue
        good = _number(of[key])
        gain = None if good is None or stay is None else round(good - stay, 2)
        is_move = key in ("good_if_to_prefill", "good_if_to_decode")
        rows.append(
            (
                tables.words(key, fmt.capitalised(text)),
                tables.known("good", good),
                Cell(None, "–")
                if key == "good_if_stay"
                else Cell(gain, fmt.UNKNOWN if gain is None else f"{gain:+.2f}".replace("-", "−")),
                tables.known("margin", margin) if is_move else Cell(None, "–"),
                _taken(key, action, flips_to),
            )
        )
    empty = "No alternatives were weighed: fixed thresholds judged, or a rule that outranks every prediction."
    return Table("alternatives", "The alternatives that were weighed", columns, tuple(rows), empty=empty)


def _taken(key: str, action: str, flips_to: str) -> Cell:
    taken = {"flip": f"good_if_to_{flips_to}", "borrow": "good_if_lend", "hold": "good_if_stay"}.get(action)
    return Cell(key == taken, "taken" if key == taken else "", tone="" if key == taken else "mut")


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def refusals(of: tuple[Mapping[str, object], ...], asked: Asked) -> Table:
    columns = (Column("worker", "Worker"), Column("rule", "Rule"), Column("why", "Why"), Column("numbers", "Numbers"))
    return Table(
        "refusals", "What was refused, and by which rule", columns, tuple(_refusal(r, asked) for r in of), empty="Nothing."
    )


def _refusal(r: Mapping[str, object], asked: Asked) -> tuple[Cell, ...]:
    worker, rule, said = str(r.get("worker") or ""), str(r.get("rule") or ""), r.get("numbers")
    shown = fmt.numbers_line(said) if isinstance(said, Mapping) else ""
    detail = str(r.get("detail") or "")
    return (
        tables.typed(worker, href=asked.elsewhere(urls.worker(worker))) if worker else Cell("", "no worker"),
        Cell(rule, rule, "user"),
        Cell(fmt.rule_words(rule), fmt.capitalised(fmt.rule_words(rule)), "user"),
        Cell(said if isinstance(said, Mapping) else None, "; ".join(x for x in (shown, detail) if x) or "–", "user"),
    )
