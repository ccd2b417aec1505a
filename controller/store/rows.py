"""Rows to records and back: the only place that knows both fluidpd.record and the columns.

Never touches a connection.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, fields
from typing import Any

from sqlalchemy import Table

from controller.store.engine import finite
from fluidpd import record
from fluidpd.names import Answer, CommandKind, End, Heading, Phase, PluginState, Role, Trigger, WorkerState

_WORKER_SECOND = tuple(f.name for f in fields(record.WorkerSecond))


def scope_values(scope: record.Scope) -> dict[str, str]:
    return {"cluster": scope.cluster, "model": scope.model, "pool": scope.pool}


def values(row: Any, scope: record.Scope, *, without: Iterable[str] = ()) -> dict[str, Any]:
    """A record as column values; numbers that are none become NULL."""
    dropped = set(without)
    return {**scope_values(scope), **{k: finite(v) for k, v in asdict(row).items() if k not in dropped}}


def worker_values(row: record.WorkerRow, scope: record.Scope) -> dict[str, Any]:
    out = values(row, scope, without=("model", "pool"))
    return {**out, "reported_model": row.model, "reported_pool": row.pool}


def seconds_values(
    taken: Iterable[record.IndexSecond | record.WorkerSecond], scope: record.Scope
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Column values for index_history and for worker_history."""
    where: dict[str, Any] = {**scope_values(scope), "step_s": 1}
    indices, workers = [], []
    for r in taken:
        if isinstance(r, record.IndexSecond):
            numbers = finite({"low": r.low, "mean": r.mean, "high": r.high})
            indices.append({**where, "second": r.second, "name": r.index, **numbers})
        else:
            workers.append(
                {**where, **{name: finite(getattr(r, name)) for name in _WORKER_SECOND}}
            )  # asdict takes thrice as long
    return indices, workers


def worker(r: Mapping[str, Any]) -> record.WorkerRow:
    return record.WorkerRow(
        name=r["name"],
        role=Role(r["role"]),
        state=WorkerState(r["state"]),
        worker_url=r["worker_url"],
        sidecar_url=r["sidecar_url"],
        bootstrap_port=r["bootstrap_port"],
        engine=r["engine"],
        engine_version=r["engine_version"],
        incarnation=r["incarnation"],
        flippable=r["flippable"],
        not_flippable_why=r["not_flippable_why"],
        capabilities=tuple(r["capabilities"]),
        model=r["reported_model"],
        pool=r["reported_pool"],
        node=r["node"],
        registered_wall_s=r["registered_wall_s"],
        seen_wall_s=r["seen_wall_s"],
        plugin=PluginState(r["plugin"]) if r["plugin"] else None,
        plugin_why=r["plugin_why"],
        cannot=dict(r["cannot"]),
        prefill_start=r["prefill_start"],
    )


def decision(r: Mapping[str, Any]) -> record.DecisionRow:
    return record.DecisionRow(
        id=r["id"],
        wall_s=r["wall_s"],
        action=r["action"],
        reason=r["reason"],
        numbers=r["numbers"],
        flips=tuple(r["flips"]),
        lenders=tuple(r["lenders"]),
        refusals=tuple(r["refusals"]),
        missing=tuple(r["missing"]),
        would_have=r["would_have"],
        epoch=r["epoch"],
    )


def command(r: Mapping[str, Any]) -> record.CommandRow:
    return record.CommandRow(
        id=r["id"],
        wall_s=r["wall_s"],
        worker=r["worker"],
        kind=CommandKind(r["kind"]),
        epoch=r["epoch"],
        incarnation=r["incarnation"],
        body=r["body"],
        answer=Answer(r["answer"]) if r["answer"] is not None else None,
        answered_wall_s=r["answered_wall_s"],
        detail=r["detail"],
    )


def transition(r: Mapping[str, Any], phases: tuple[record.PhaseRow, ...] = ()) -> record.TransitionRow:
    return record.TransitionRow(
        id=r["id"],
        worker=r["worker"],
        incarnation=r["incarnation"],
        from_role=Role(r["from_role"]),
        to_role=Role(r["to_role"]),
        trigger=Trigger(r["trigger"]),
        reason=r["reason"],
        numbers=r["numbers"],
        epoch=r["epoch"],
        started_wall_s=r["started_wall_s"],
        phase=Phase(r["phase"]),
        heading=Heading(r["heading"]),
        end=End(r["end"]) if r["end"] is not None else None,
        ended_wall_s=r["ended_wall_s"],
        detail=r["detail"],
        actor=r["actor"],
        phases=phases,
    )


def phase(r: Mapping[str, Any]) -> record.PhaseRow:
    return record.PhaseRow(
        move_id=r["move_id"],
        seq=r["seq"],
        wall_s=r["wall_s"],
        phase=Phase(r["phase"]),
        heading=Heading(r["heading"]),
        event=r["event"],
        took_s=r["took_s"],
        detail=r["detail"],
        numbers=r["numbers"],
    )


def pin(r: Mapping[str, Any]) -> record.PinRow:
    return record.PinRow(
        worker=r["worker"],
        role=Role(r["role"]),
        reason=r["reason"],
        actor=r["actor"],
        created_wall_s=r["created_wall_s"],
        expires_wall_s=r["expires_wall_s"],
        version=r["version"],
    )


def pause(r: Mapping[str, Any]) -> record.PauseRow:
    return record.PauseRow(
        everywhere=r["cluster"] == record.EVERYWHERE.cluster,
        reason=r["reason"],
        actor=r["actor"],
        created_wall_s=r["created_wall_s"],
        expires_wall_s=r["expires_wall_s"],
        version=r["version"],
    )


def audit(r: Mapping[str, Any]) -> record.AuditRow:
    return record.AuditRow(
        id=r["id"],
        wall_s=r["wall_s"],
        actor=r["actor"],
        source=r["source"],
        verb=r["verb"],
        subject=r["subject"],
        outcome=r["outcome"],
        detail=r["detail"],
        reason=r["reason"],
        address=r["address"],
        token_id=r["token_id"],
        request_id=r["request_id"],
        before=r["before"],
        after=r["after"],
    )


def session(r: Mapping[str, Any]) -> record.SessionRow:
    return record.SessionRow(
        actor=r["actor"],
        token_id=r["token_id"],
        scopes=tuple(r["scopes"]),
        address=r["address"],
        created_wall_s=r["created_wall_s"],
        expires_wall_s=r["expires_wall_s"],
    )


def status(body: Mapping[str, Any]) -> record.StatusRow:
    """A status written by another version may lack newer fields: their defaults apply, fields it does not know are dropped."""
    known = {k: v for k, v in body.items() if k in record.StatusRow.__dataclass_fields__}
    for name in ("refusals", "lenders", "engines", "attention", "triage"):
        known[name] = tuple(known.get(name) or ())
    return record.StatusRow(**known)


def index_second(r: Mapping[str, Any]) -> record.IndexSecond:
    return record.IndexSecond(second=int(r["second"]), index=r["name"], low=r["low"], mean=r["mean"], high=r["high"])


def worker_second(r: Mapping[str, Any]) -> record.WorkerSecond:
    return record.WorkerSecond(
        second=int(r["second"]),
        worker=r["worker"],
        role=Role(r["role"]),
        state=WorkerState(r["state"]),
        pressure=r["pressure"],
        slack_s=r["slack_s"],
        kv_share=r["kv_share"],
        batch=r["batch"],
        waiting=r["waiting"],
        borrow_open_tokens=r["borrow_open_tokens"],
        borrowed_tokens_total=r["borrowed_tokens_total"],
        age_s=r["age_s"],
        lending=bool(r["lending"]),
    )


def role_span(r: Mapping[str, Any]) -> record.RoleSpan:
    role, state = Role(r["role"]), WorkerState(r["state"])
    return record.RoleSpan(r["worker"], role, state, bool(r["lending"]), int(r["second"]), int(r["end_s"]))


def fitted(table: Table, values: Mapping[str, Any]) -> dict[str, Any]:
    """Text cut to its column, without NUL, which PostgreSQL has no place for: a name from outside must not fail a write."""
    out: dict[str, Any] = {}
    for name, value in values.items():
        length = getattr(table.c[name].type, "length", None)
        out[name] = value.replace("\x00", "")[:length] if isinstance(value, str) else value
    return out
