"""The tables. Every one carries cluster, model and pool; enums are stored as their string values.

Never read or written here: the columns follow fluidpd.record, the mapping is in rows.py.
"""

from __future__ import annotations

import sqlalchemy as sa
from sqlalchemy import BigInteger, Boolean, Column, Float, ForeignKey, Index, Integer, MetaData, String, Table, Text

metadata = MetaData(
    naming_convention={
        "ix": "ix_%(table_name)s_%(column_0_N_name)s",
        "uq": "uq_%(table_name)s_%(column_0_N_name)s",
        "fk": "fk_%(table_name)s_%(column_0_N_name)s",
        "pk": "pk_%(table_name)s",
    }
)
# SQLite numbers rows by itself only for INTEGER keys, which have 64 bits there.
_ID = BigInteger().with_variant(Integer, "sqlite")


def _scope(*, key: bool = False) -> list[Column[str]]:
    return [Column(name, String(63), nullable=False, primary_key=key) for name in ("cluster", "model", "pool")]


def _wall(name: str, *, nullable: bool = False) -> Column[float]:
    return Column(name, Float(53), nullable=nullable)


leadership = Table(
    "leadership",
    metadata,
    *_scope(key=True),
    Column("holder", String(200), nullable=False),
    Column("epoch", BigInteger, nullable=False),
    _wall("expires_wall_s"),
    Column("address", String(300), nullable=False, server_default=""),
)

status = Table("status", metadata, *_scope(key=True), _wall("wall_s"), Column("body", sa.JSON, nullable=False))

worker = Table(
    "worker",
    metadata,
    *_scope(key=True),
    Column("name", String(63), primary_key=True),
    Column("role", String(16), nullable=False),
    Column("state", String(16), nullable=False),
    Column("worker_url", String(300), nullable=False),
    Column("sidecar_url", String(300), nullable=False),
    Column("bootstrap_port", Integer),
    Column("engine", String(63), nullable=False),
    Column("engine_version", String(63), nullable=False),
    Column("incarnation", BigInteger, nullable=False),
    Column("flippable", Boolean(create_constraint=False), nullable=False),
    Column("not_flippable_why", Text, nullable=False),
    Column("capabilities", sa.JSON, nullable=False),
    # What the worker says of itself; the scope columns say whose history this is.
    Column("reported_model", String(200), nullable=False),
    Column("reported_pool", String(63), nullable=False),
    Column("node", String(200), nullable=False),
    _wall("registered_wall_s"),
    _wall("seen_wall_s"),
    Column("plugin", String(16)),
    Column("plugin_why", Text, nullable=False, server_default=""),
    Column("cannot", sa.JSON, nullable=False, server_default="{}"),
    Column("prefill_start", Text, nullable=False, server_default=""),
)

decision = Table(
    "decision",
    metadata,
    Column("id", _ID, primary_key=True, autoincrement=True),
    *_scope(),
    _wall("wall_s"),
    Column("action", String(32), nullable=False),
    Column("reason", String(63), nullable=False),
    Column("numbers", sa.JSON, nullable=False),
    Column("flips", sa.JSON, nullable=False),
    Column("lenders", sa.JSON, nullable=False),
    Column("refusals", sa.JSON, nullable=False),
    Column("missing", sa.JSON, nullable=False),
    Column("would_have", Boolean(create_constraint=False), nullable=False),
    Column("epoch", BigInteger, nullable=False),
    Index(None, "cluster", "model", "pool", "wall_s"),
)

command = Table(
    "command",
    metadata,
    Column("id", String(63), primary_key=True),
    *_scope(),
    _wall("wall_s"),
    Column("worker", String(63), nullable=False),
    Column("kind", String(16), nullable=False),
    Column("epoch", BigInteger, nullable=False),
    Column("incarnation", BigInteger, nullable=False),
    Column("body", sa.JSON, nullable=False),
    Column("answer", String(32)),
    _wall("answered_wall_s", nullable=True),
    Column("detail", Text, nullable=False),
    Index(None, "cluster", "model", "pool", "wall_s"),
)

transition = Table(
    "transition",
    metadata,
    Column("id", String(63), primary_key=True),
    *_scope(),
    Column("worker", String(63), nullable=False),
    Column("incarnation", BigInteger, nullable=False),
    Column("from_role", String(16), nullable=False),
    Column("to_role", String(16), nullable=False),
    Column("trigger", String(16), nullable=False),
    Column("reason", Text, nullable=False),
    Column("numbers", sa.JSON, nullable=False),
    Column("epoch", BigInteger, nullable=False),
    _wall("started_wall_s"),
    Column("phase", String(16), nullable=False),
    Column("heading", String(16), nullable=False),
    Column("end", String(16)),
    _wall("ended_wall_s", nullable=True),
    Column("detail", Text, nullable=False),
    Column("actor", String(200), nullable=False),
    Column("slot", Integer),  # 0..max_concurrent-1; a move found in a sidecar's journal may have a higher one
    Index(None, "cluster", "model", "pool", "started_wall_s"),
)
# Never two open moves of one worker, nor two in one slot, whatever the code above this does.
Index(
    "uq_transition_open_worker",
    transition.c.cluster,
    transition.c.model,
    transition.c.pool,
    transition.c.worker,
    unique=True,
    sqlite_where=transition.c.end.is_(None),
    postgresql_where=transition.c.end.is_(None),
)
Index(
    "uq_transition_open_slot",
    transition.c.cluster,
    transition.c.model,
    transition.c.pool,
    transition.c.slot,
    unique=True,
    sqlite_where=transition.c.end.is_(None),
    postgresql_where=transition.c.end.is_(None),
)

phase = Table(
    "phase",
    metadata,
    Column("move_id", String(63), ForeignKey("transition.id", ondelete="CASCADE"), primary_key=True),
    Column("seq", _ID, primary_key=True, autoincrement=False),
    *_scope(),
    _wall("wall_s"),
    Column("phase", String(16), nullable=False),
    Column("heading", String(16), nullable=False),
    Column("event", String(32), nullable=False),
    Column("took_s", Float(53), nullable=False),
    Column("detail", Text, nullable=False),
    Column("numbers", sa.JSON, nullable=False),
)

# A dropped pin or pause keeps its row: versions only rise, so that a form made before the drop is still recognised as old.
pin = Table(
    "pin",
    metadata,
    *_scope(key=True),
    Column("worker", String(63), primary_key=True),
    Column("role", String(16), nullable=False),
    Column("reason", Text, nullable=False),
    Column("actor", String(200), nullable=False),
    _wall("created_wall_s"),
    _wall("expires_wall_s"),
    Column("version", Integer, nullable=False),
    Column("active", Boolean(create_constraint=False), nullable=False),
)

pause = Table(
    "pause",
    metadata,
    *_scope(key=True),
    Column("reason", Text, nullable=False),
    Column("actor", String(200), nullable=False),
    _wall("created_wall_s"),
    _wall("expires_wall_s"),
    Column("version", Integer, nullable=False),
    Column("active", Boolean(create_constraint=False), nullable=False),
)

audit = Table(
    "audit",
    metadata,
    Column("id", _ID, primary_key=True, autoincrement=True),
    *_scope(),
    _wall("wall_s"),
    Column("actor", String(200), nullable=False),
    Column("source", String(32), nullable=False),
    Column("verb", String(63), nullable=False),
    Column("subject", String(200), nullable=False),
    Column("outcome", String(16), nullable=False),
    Column("detail", Text, nullable=False),
    Column("reason", Text, nullable=False),
    Column("address", String(200), nullable=False, server_default=""),
    Column("token_id", String(32), nullable=False, server_default=""),
    Column("request_id", String(64), nullable=False, server_default=""),
    Column("before", sa.JSON),
    Column("after", sa.JSON),
    Index(None, "cluster", "model", "pool", "wall_s"),
)


def _index_numbers() -> list[Column[float]]:
    return [Column(name, Float(53)) for name in ("low", "mean", "high")]


# step_s is 1 for the seconds as they were seen, and 60, 300, 3600 for roll-ups of them.
index_history = Table(
    "index_history",
    metadata,
    *_scope(key=True),
    Column("step_s", Integer, primary_key=True),
    Column("name", String(16), primary_key=True),
    Column("second", BigInteger, primary_key=True),
    *_index_numbers(),
)

WORKER_NUMBERS = ("pressure", "slack_s", "kv_share", "batch", "waiting", "borrow_open_tokens", "borrowed_tokens_total", "age_s")

worker_history = Table(
    "worker_history",
    metadata,
    *_scope(key=True),
    Column("step_s", Integer, primary_key=True),
    Column("second", BigInteger, primary_key=True),
    Column("worker", String(63), primary_key=True),
    Column("role", String(16), nullable=False),
    Column("state", String(16), nullable=False),
    *[Column(name, Float(53)) for name in WORKER_NUMBERS],
    Column("lending", Boolean(create_constraint=False), nullable=False),
)

# What decisions were made on, so that they can be made again: one snapshot a second, packed (snapshots.py).
snapshot = Table(
    "snapshot",
    metadata,
    *_scope(key=True),
    Column("second", BigInteger, primary_key=True),
    Column("epoch", BigInteger, nullable=False),
    Column("basis", String(63), nullable=False),
    Column("packed", sa.LargeBinary, nullable=False),
)

basis = Table(
    "basis",
    metadata,
    *_scope(key=True),
    Column("id", String(63), primary_key=True),
    _wall("wall_s"),
    Column("policy", sa.JSON, nullable=False),
    Column("slo", sa.JSON, nullable=False),
    Column("cost", sa.JSON, nullable=False),
)

# Written by versions before slo_bucket (tables_alerts.py): kept so that one of these can still lead beside a newer standby.
slo_minute = Table(
    "slo_minute",
    metadata,
    *_scope(key=True),
    Column("slo", String(32), primary_key=True),
    Column("minute", BigInteger, primary_key=True),
    Column("good", Float(53), nullable=False),
    Column("total", Float(53), nullable=False),
)
