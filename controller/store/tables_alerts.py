"""The tables of SLO counting and alerting. Same rules as tables.py, same metadata.

Never read or written here: alerting.py does both.
"""

from __future__ import annotations

import sqlalchemy as sa
from sqlalchemy import BigInteger, Column, Float, Index, Integer, String, Table, Text

from controller.store.tables import _ID as ID
from controller.store.tables import _scope as scope_columns
from controller.store.tables import _wall as wall
from controller.store.tables import metadata

# What was judged in one minute (a shorter one where windows are scaled). A minute without a row is not known.
slo_bucket = Table(
    "slo_bucket",
    metadata,
    *scope_columns(key=True),
    Column("slo", String(32), primary_key=True),
    Column("of_model", String(63), primary_key=True),
    Column("second", BigInteger, primary_key=True),
    Column("good", Float(53), nullable=False),
    Column("total", Float(53), nullable=False),
    Column("known_s", Float(53), nullable=False),
)

# Running totals, and how far each worker's counters were counted: whoever leads next goes on from here, nothing twice.
slo_total = Table(
    "slo_total",
    metadata,
    *scope_columns(key=True),
    Column("slo", String(32), primary_key=True),
    Column("of_model", String(63), primary_key=True),
    Column("good", Float(53), nullable=False),
    Column("total", Float(53), nullable=False),
    Column("known_s", Float(53), nullable=False),
    # What it promises, as the leader last had it: pages read it here, whether or not a controller answers.
    Column("objective", Float(53), nullable=False),
    Column("target_s", Float(53)),
    Column("window_scale", Integer, nullable=False),
    Column("basis", Text, nullable=False),
)

slo_mark = Table(
    "slo_mark",
    metadata,
    *scope_columns(key=True),
    Column("worker", String(63), primary_key=True),
    Column("boot", Text, nullable=False),
    Column("counted", sa.JSON, nullable=False),
)

alert = Table(
    "alert",
    metadata,
    *scope_columns(key=True),
    Column("fingerprint", String(64), primary_key=True),
    Column("rule", String(63), nullable=False),
    Column("labels", sa.JSON, nullable=False),
    Column("annotations", sa.JSON, nullable=False),
    Column("state", String(16), nullable=False),
    wall("pending_s", nullable=True),
    wall("started_s", nullable=True),
    wall("calm_s", nullable=True),
    wall("resolved_s", nullable=True),
    wall("seen_s", nullable=True),
    Column("value", Float(53)),
)

alert_silence = Table(
    "alert_silence",
    metadata,
    Column("id", ID, primary_key=True, autoincrement=True),
    *scope_columns(),
    Column("matchers", sa.JSON, nullable=False),
    Column("reason", Text, nullable=False),
    Column("actor", String(200), nullable=False),
    wall("created_s"),
    wall("expires_s"),
    wall("ended_s", nullable=True),
    Index(None, "cluster", "model", "pool", "expires_s"),
)

# What receivers still have to be told, written in the transaction that changed the alert.
notification_outbox = Table(
    "notification_outbox",
    metadata,
    Column("id", ID, primary_key=True, autoincrement=True),
    *scope_columns(),
    Column("fingerprint", String(64), nullable=False),
    Column("receiver", String(63), nullable=False),
    Column("event", String(16), nullable=False),
    Column("idempotency_key", String(200), nullable=False, unique=True),
    Column("body", sa.JSON, nullable=False),
    Column("attempts", Integer, nullable=False),
    wall("created_s"),
    wall("next_s"),
    wall("sent_s", nullable=True),
    Column("outcome", String(16), nullable=False),
    Column("last_error", Text, nullable=False),
    Index("ix_notification_outbox_due", "cluster", "model", "pool", "receiver", "outcome", "next_s"),
)
