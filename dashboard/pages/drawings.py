"""A result document of `fluidpd simulate`, `replay` or `advise --json` as a drawing: bars, stretches and tables.

Never drops the word that says where a number comes from: simulated, or judged again from a record.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from dashboard import format as fmt
from dashboard import tables
from dashboard.pages.transition import Fact
from dashboard.tables import Cell, Column, Table

MOST_DIFFERENCES = 200
RUNS = (
    ("requests", "Requests"),
    ("joint_attainment", "Inside both targets"),
    ("ttft_p50_s", "TTFT p50"),
    ("ttft_p99_s", "TTFT p99"),
    ("tbt_p50_s", "TBT p50"),
    ("tbt_p99_s", "TBT p99"),
    ("flips_to_prefill", "To prefill"),
    ("flips_to_decode", "To decode"),
    ("borrowed_tokens", "Borrowed tokens"),
    ("lost", "Lost"),
    ("corrupted", "Corrupted"),
)
FROM = {
    "simulated": "SIMULATED: requests were played on a simulated clock, on step times of the cost table.",
    "recorded": "JUDGED AGAIN: decisions on the controller's record. What users would have got cannot be told from it.",
    "emulated": "EMULATED: engines were emulated, step times come from tables.",
    "sglang": "MEASURED on the real SGLang.",
}


@dataclass(frozen=True, slots=True)
class Bar:
    """`share` of the width; None: not known, drawn hatched."""

    label: str
    text: str
    share: float | None


@dataclass(frozen=True, slots=True)
class Stretch:
    """Where two sides differ: start and length are shares of the record."""

    start: float
    length: float
    title: str
    is_act: bool


@dataclass(frozen=True, slots=True)
class Drawing:
    """One result. Parts that its kind does not have are empty."""

    kind: str
    source: str
    says: tuple[str, ...]
    facts: tuple[Fact, ...]
    bars_name: str
    bars: tuple[Bar, ...]
    stretches: tuple[Stretch, ...]
    tables: tuple[Table, ...]


def draw(document: Mapping[str, Any]) -> Drawing | None:
    """A result document as a drawing; None where it is none, or lacks what its kind has."""
    try:
        if "splits" in document:
            return _advice(document)
        if document.get("engine") == "recorded":
            return _judged_again(document)
        if "runs" in document:
            return _comparison(document)
    except (KeyError, TypeError, ValueError, AttributeError, IndexError):
        return None  # written by another version, or by hand
    return None


def _source(document: Mapping[str, Any]) -> str:
    engine = str(document.get("engine", ""))
    return FROM.get(engine, f"From: {engine or 'unknown'}.")


def _workload(document: Mapping[str, Any]) -> tuple[Fact, ...]:
    told = document.get("workload") or {}
    return tuple(Fact(fmt.label_of(str(k)), _any(str(k), v)) for k, v in told.items() if not isinstance(v, dict | list))


def _any(key: str, value: object) -> Cell:
    if isinstance(value, str):
        return tables.typed(value)
    return tables.known(key, value)


# ---------------------------------------------------------------- several policies on a workload


def _comparison(document: Mapping[str, Any]) -> Drawing:
    runs = [_flat(r) for r in document["runs"]]
    columns = (Column("policy", "Policy"), *(Column(k, label, is_number=True) for k, label in RUNS))
    rows = tuple((tables.typed(str(r.get("policy"))), *(_run_cell(k, r.get(k)) for k, _ in RUNS)) for r in runs)
    return Drawing(
        kind="Comparison of policies",
        source=_source(document),
        says=(),
        facts=_workload(document),
        bars_name="Requests inside both targets",
        bars=_attainments((str(r.get("policy")), r.get("joint_attainment")) for r in runs),
        stretches=(),
        tables=(Table("runs", "Every policy, as it was run", columns, rows),),
    )


def _flat(run: Mapping[str, Any]) -> dict[str, Any]:
    """{"ttft_s": {"p50": 1}} as {"ttft_p50_s": 1}."""
    out = dict(run)
    for key in ("ttft_s", "tbt_s"):
        if isinstance(told := run.get(key), Mapping):
            out |= {f"{key.removesuffix('_s')}_{quantile}_s": value for quantile, value in told.items()}
    return out


def _run_cell(key: str, value: object) -> Cell:
    if key == "joint_attainment":
        return Cell(value, fmt.share(value if isinstance(value, int | float) else None))
    if key in ("borrowed_tokens", "requests", "lost", "corrupted", "flips_to_prefill", "flips_to_decode"):
        return Cell(value, fmt.amount(value if isinstance(value, int | float) else None))
    return tables.known(key, value)


def _attainments(found: Iterable[tuple[str, Any]]) -> tuple[Bar, ...]:
    return tuple(Bar(name, fmt.share(v if isinstance(v, int | float) else None), _clipped(v)) for name, v in found)


def _clipped(value: Any) -> float | None:
    is_known = isinstance(value, int | float) and math.isfinite(value)
    return min(1.0, max(0.0, float(value))) if is_known else None


# ---------------------------------------------------------------- advice on a split


def _advice(document: Mapping[str, Any]) -> Drawing:
    names = ("first_half", "second_half", "elastic")
    shares = (Column(n, n.replace("_", " ").capitalize(), is_number=True) for n in names)
    columns = (Column("split", "Static split"), *shares, Column("ttft_p99_s", "TTFT p99", is_number=True))
    rows, bars = [], []
    for s in document["splits"]:
        name = f"{s['prefill']}P:{s['decode']}D"
        kept = [s[n]["joint_attainment"] for n in names]
        rows.append(
            (tables.words(name), *(Cell(v, fmt.share(v)) for v in kept), tables.seconds(s["second_half"].get("ttft_p99_s")))
        )
        bars += [(f"{name} static", kept[1]), (f"{name} elastic", kept[2])]
    verdict = str(document.get("elasticity_pays", fmt.UNKNOWN))
    return Drawing(
        kind="Advice on a split",
        source=_source(document),
        says=tuple(str(line) for line in document.get("says", ())),
        facts=(
            *_workload(document),
            Fact("elasticity pays", tables.typed(verdict)),
            Fact("cost model", _any("cost", document.get("cost"))),
        ),
        bars_name="Requests inside both targets, second half",
        bars=_attainments(bars),
        stretches=(),
        tables=(Table("splits", "Every split, chosen on the first half, judged on the second", columns, tuple(rows)),),
    )


# ---------------------------------------------------------------- a record judged again


def _judged_again(document: Mapping[str, Any]) -> Drawing:
    found = document["differences"][:MOST_DIFFERENCES]
    cut = f", the first {len(found)}" if len(document["differences"]) > len(found) else ""
    then, now = document["then"], document["now"]
    reasons = sorted({*then["reasons_s"], *now["reasons_s"]})
    sums = tuple(_side(k, then.get(k), now.get(k)) for k in ("flip_wishes", "lending_s", "lent_worker_s"))
    spent = tuple(_side(r, then["reasons_s"].get(r, 0), now["reasons_s"].get(r, 0), fmt.reason_words(r)) for r in reasons)
    rows = tuple(_difference(d) for d in found)
    return Drawing(
        kind=f"Judged again: {now['policy']}",
        source=_source(document),
        says=(
            f"They act differently in {document['acts_differ_s']} s of {document['snapshots']} snapshots, and give another "
            f"reason for the same in {document['reasons_differ_s']} s.",
            *(str(n) for n in document.get("notes", ())),
            str(document.get("cannot_know", "")),
        ),
        facts=_terms(document),
        bars_name="",
        bars=(),
        stretches=_stretches(document["from_s"], document["to_s"], found),
        tables=(
            Table("sides", "Both sides", _SIDES, sums),
            Table("reasons", "Seconds for each reason", _SIDES, spent),
            Table("differences", f"Where they differ{cut}", _DIFFERENCES, rows, empty="They decide alike in every second."),
        ),
    )


def _terms(document: Mapping[str, Any]) -> tuple[Fact, ...]:
    before, after = document["then"]["settings"], document["now"]["settings"]
    changed = {k: (before.get(k), v) for k, v in after.items() if before.get(k) != v}
    alike, users = document["as_recorded"], document["recorded_attainment"]
    return (
        Fact("from", tables.moment(document["from_s"])),
        Fact("to", tables.moment(document["to_s"])),
        Fact("judged as recorded", Cell(alike, fmt.share(alike))),
        Fact("users, as recorded", Cell(users, fmt.share(users))),
        *(Fact(k, Cell([was, is_], f"{fmt.quantity(k, was)} → {fmt.quantity(k, is_)}")) for k, (was, is_) in changed.items()),
    )


def _stretches(first: float, last: float, found: Iterable[Mapping[str, Any]]) -> tuple[Stretch, ...]:
    whole = max(1.0, last - first + 1)
    return tuple(
        Stretch(
            start=(d["since"] - first) / whole,
            length=(d["until"] - d["since"] + 1) / whole,
            title=f"{fmt.when(d['since'])}: {_told(d['then'])} / {_told(d['now'])}",
            is_act=bool(d["act"]),
        )
        for d in found
    )


_SIDES = (Column("what", "What"), Column("then", "Then", is_number=True), Column("now", "Now", is_number=True))
_DIFFERENCES = (
    Column("since", "From"),
    Column("lasted_s", "For", is_number=True),
    Column("ppi", "PPI", is_number=True),
    Column("dpi", "DPI", is_number=True),
    Column("then", "Then"),
    Column("now", "Now"),
)


def _side(key: str, then: Any, now: Any, label: str = "") -> tuple[Cell, ...]:
    return Cell(key, label or fmt.label_of(key), "user"), tables.known(key, then), tables.known(key, now)


def _difference(d: Mapping[str, Any]) -> tuple[Cell, ...]:
    lasted = d["until"] - d["since"] + 1
    return (
        tables.moment(d["since"]),
        tables.seconds(lasted),
        tables.known("ppi", d["ppi"]),
        tables.known("dpi", d["dpi"]),
        Cell(_told(d["then"]), _told(d["then"]), "user"),
        Cell(_told(d["now"]), _told(d["now"]), "user"),
    )


def _told(side: Mapping[str, Any]) -> str:
    moves = " ".join(f"{f['worker']} to {f['to']}" for f in side.get("flips", ()))
    lent = f"lenders {fmt.listed(list(side['lenders']))}" if side.get("lenders") else ""
    return "; ".join(x for x in (fmt.reason_words(str(side.get("reason", ""))), moves, lent) if x)
