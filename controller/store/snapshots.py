"""Snapshots packed and unpacked: compressed JSON that leaves out what is as usual, and tolerates fields it does not know.

Never touches a connection, and never rounds what a judgement depends on.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import MISSING as REQUIRED
from dataclasses import fields
from typing import Any

import orjson

from controller.store.rows import scope_values
from fluidpd.names import Mode, Role, UnknownWhy, WorkerState
from fluidpd.record import Scope, SnapshotRow
from fluidpd.telemetry import (
    IDLE,
    MISSING,
    ConfirmedIdle,
    Known,
    OpenMove,
    Reading,
    Readings,
    Snapshot,
    Unknown,
    WaitingPrompt,
    WorkerView,
)

_LEVEL = 6
_READINGS = tuple(f.name for f in fields(Readings))
_USUAL = {
    f.name: f.default if f.default_factory is REQUIRED else f.default_factory()
    for f in fields(WorkerView)
    if f.default is not REQUIRED or f.default_factory is not REQUIRED
}


def values(row: SnapshotRow, scope: Scope) -> dict[str, Any]:
    """A row's columns."""
    where = {**scope_values(scope), "second": row.second, "epoch": row.epoch, "basis": row.basis}
    return {**where, "packed": pack(row)}


def row(r: Mapping[str, Any]) -> SnapshotRow:
    snapshot, told = unpack(r["packed"])
    return SnapshotRow(
        second=int(r["second"]),
        epoch=int(r["epoch"]),
        basis=r["basis"],
        snapshot=snapshot,
        action=told["action"],
        reason=told["reason"],
        flips=tuple(told["flips"]),
        lenders=tuple(told["lenders"]),
    )


def pack(row: SnapshotRow) -> bytes:
    s = row.snapshot
    body = {
        "now_s": s.now_s,
        "mode": s.mode,
        "paused": s.paused,
        "moves": [[m.id, m.worker, m.from_role, m.to_role, m.trigger] for m in s.open_moves],
        "workers": [_view(w) for w in s.workers],
        "told": {"action": row.action, "reason": row.reason, "flips": row.flips, "lenders": row.lenders},
    }
    return zlib.compress(orjson.dumps(body), _LEVEL)


def unpack(packed: bytes) -> tuple[Snapshot, Mapping[str, Any]]:
    """The snapshot, and what was decided on it."""
    body = orjson.loads(zlib.decompress(packed))
    snapshot = Snapshot(
        now_s=body["now_s"],
        workers=tuple(_worker(w) for w in body["workers"]),
        mode=Mode(body["mode"]),
        paused=body["paused"],
        open_moves=tuple(OpenMove(m[0], m[1], Role(m[2]), Role(m[3]), m[4]) for m in body["moves"]),
    )
    return snapshot, body["told"]


def _view(w: WorkerView) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for f in fields(WorkerView):
        value = getattr(w, f.name)
        if f.name == "readings":
            out["readings"] = {n: _packed(v, w.received_s) for n in _READINGS if (v := getattr(value, n)) != MISSING}
        elif f.name == "queue" and value is not None:
            out["queue"] = [[p.room, p.prompt_tokens, p.uncached_tokens, p.waited_s] for p in value]
        elif f.name not in _USUAL or value != _USUAL[f.name]:
            out[f.name] = value
    return out


def _worker(body: Mapping[str, Any]) -> WorkerView:
    known = {name: body[name] for name in body if name in WorkerView.__dataclass_fields__}
    received_s = known.get("received_s")
    read = known.get("readings", {})
    known["readings"] = Readings(**{n: _reading(read[n], received_s) for n in read if n in Readings.__dataclass_fields__})
    known["role"], known["state"] = Role(known["role"]), WorkerState(known["state"])
    if known.get("pinned_role") is not None:
        known["pinned_role"] = Role(known["pinned_role"])
    if known.get("queue") is not None:
        known["queue"] = tuple(
            WaitingPrompt.model_construct(room=r, prompt_tokens=p, uncached_tokens=u, waited_s=s) for r, p, u, s in known["queue"]
        )
    return WorkerView(**known)


def _packed(reading: Reading, received_s: float | None) -> Any:
    """A number or "idle" that came with the newest sample stands as it is; what is older, suspect or unknown says so."""
    if isinstance(reading, Unknown):
        return {"why": reading.why, "at": reading.at_s}
    if isinstance(reading, ConfirmedIdle):
        return IDLE if reading.at_s == received_s else {"idle": reading.at_s}
    usual = reading.at_s == received_s and not reading.flagged
    return reading.value if usual else {"value": reading.value, "at": reading.at_s, "flagged": reading.flagged}


def _reading(packed: Any, received_s: float | None) -> Reading:
    if isinstance(packed, Mapping):
        if "why" in packed:
            return Unknown(UnknownWhy(packed["why"]), packed["at"])
        return ConfirmedIdle(packed["idle"]) if "idle" in packed else Known(packed["value"], packed["at"], packed["flagged"])
    assert received_s is not None
    return ConfirmedIdle(received_s) if packed == IDLE else Known(float(packed), received_s)
