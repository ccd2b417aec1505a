"""How long a worker's decode steps take, what the cost model says they should, and how far apart that is.

Never predicts with another model than the one that decisions were made with.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib.resources import files
from pathlib import Path

from dashboard import tables
from dashboard.pages.evidence import reading_cell
from dashboard.tables import Cell, Column, Table
from fluidpd.cost import CostModel, parse_cost_table
from fluidpd.names import Role
from fluidpd.record import BasisRow, SnapshotRow
from fluidpd.telemetry import Known, Reading, WorkerView

MOST_BYTES = 4 << 20
COLUMNS = (
    Column("second", "At"),
    Column("batch", "Batch", is_number=True),
    Column("context_tokens", "Context", is_number=True),
    Column("step_s", "Measured step", is_number=True),
    Column("predicted_s", "Predicted", is_number=True),
    Column("off_share", "Off by", is_number=True),
    Column("residual_p995_s", "Residual p99.5", is_number=True),
    Column("tbt_p99_s", "TBT p99", is_number=True),
    Column("prefill_tokens_per_s", "Prefill rate", is_number=True),
    Column("prefill_busy_share", "Prefill busy", is_number=True),
)


@dataclass(frozen=True, slots=True)
class Step:
    """One look at a worker. `predicted_s` is None where it has no decode step to predict, or no model."""

    second: int
    worker: WorkerView
    predicted_s: float | None

    @property
    def measured_s(self) -> float | None:
        return value(self.worker.readings.step_s)

    @property
    def off_share(self) -> float | None:
        if self.measured_s is None or not self.predicted_s:
            return None
        return self.measured_s / self.predicted_s - 1.0


def value(reading: Reading) -> float | None:
    return reading.value if isinstance(reading, Known) else None


def of(worker: str, rows: Sequence[SnapshotRow], model: CostModel | None) -> tuple[Step, ...]:
    """Oldest first; seconds without that worker are absent."""
    found = []
    for row in rows:
        view = next((w for w in row.snapshot.workers if w.name == worker), None)
        if view is not None:
            found.append(Step(row.second, view, _predicted(view, model)))
    return tuple(found)


def _predicted(w: WorkerView, model: CostModel | None) -> float | None:
    batch, context = value(w.readings.batch), value(w.readings.context_tokens)
    if model is None or w.role is not Role.DECODE or not batch or context is None:
        return None
    return model.decode_s(round(batch), round(context))


def table(found: Sequence[Step], basis: BasisRow | None) -> Table:
    """Newest first. A step further off than the policy trusts the model is marked."""
    limit = basis.policy.get("goodput_residual_share") if basis is not None else None
    trusted = float(limit) if isinstance(limit, int | float) else None
    rows = tuple(_row(s, trusted) for s in reversed(found))
    empty = (
        "No snapshot of this worker in this time: the controller keeps one a second while retention.snapshots_days is above 0."
    )
    return Table("steps", "Decode steps, measured and predicted", COLUMNS, rows, empty=empty, most=60)


def _row(s: Step, trusted: float | None) -> tuple[Cell, ...]:
    r = s.worker.readings
    off = None if s.off_share is None else round(s.off_share, 4)
    nothing = Cell(None, "–", title="no decode step to predict")
    return (
        tables.moment(s.second),
        reading_cell("batch", r.batch),
        reading_cell("context_tokens", r.context_tokens),
        reading_cell("step_s", r.step_s),
        nothing if s.predicted_s is None else tables.seconds(round(s.predicted_s, 6)),
        nothing if off is None else Cell(off, f"{off * 100:+.1f}%".replace("-", "−"), tone=_tone(off, trusted)),
        reading_cell("residual_p995_s", r.residual_p995_s),
        reading_cell("tbt_p99_s", r.tbt_p99_s),
        reading_cell("prefill_tokens_per_s", r.prefill_tokens_per_s),
        reading_cell("prefill_busy_share", r.prefill_busy_share),
    )


def _tone(off: float, trusted: float | None) -> str:
    return "warn" if trusted is not None and abs(off) > trusted else ""


def model_of(basis: BasisRow | None) -> tuple[CostModel | None, str]:
    """The cost model that decisions were made with, and a sentence about it: where it is not known, why."""
    if basis is None:
        return None, "Which cost model decisions were made with is not recorded."
    key, file, fingerprint = (str(basis.cost.get(name) or "") for name in ("key", "file", "fingerprint"))
    try:
        model = _model(key, file)
    except (OSError, KeyError, ValueError) as error:
        return None, f"The cost model {key} cannot be read here ({type(error).__name__}), so nothing is predicted."
    if hashlib.sha256(repr(model).encode()).hexdigest()[:32] != fingerprint:
        return None, f"The cost model {key} is not the one here that decisions were made with, so nothing is predicted."
    return model, f"Predicted by the cost model {key}, the one that decisions were made with."


@lru_cache(maxsize=8)
def _model(key: str, file: str) -> CostModel:
    if not file:
        return parse_cost_table(files("config").joinpath("costs/h100_h200.json").read_text(), key)
    if Path(file).stat().st_size > MOST_BYTES:
        raise ValueError("too large for a cost table")
    return parse_cost_table(Path(file).read_text(encoding="utf-8"), key)
