"""SLO minutes with what is known of them, how far counters were counted, alerts, silences, and what receivers must be told.

Only adds: a controller of the version before goes on beside it. Never edited once released: a change is a new file.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None

_ID = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def _scope() -> list[sa.Column[str]]:
    return [sa.Column(name, sa.String(length=63), nullable=False) for name in ("cluster", "model", "pool")]


def _wall(name: str, *, nullable: bool = True) -> sa.Column[float]:
    return sa.Column(name, sa.Float(precision=53), nullable=nullable)


def _counts() -> list[sa.Column[float]]:
    return [_wall(name, nullable=False) for name in ("good", "total", "known_s")]


def upgrade() -> None:
    op.create_table(
        "slo_bucket",
        *_scope(),
        sa.Column("slo", sa.String(length=32), nullable=False),
        sa.Column("of_model", sa.String(length=63), nullable=False),
        sa.Column("second", sa.BigInteger(), nullable=False),
        *_counts(),
        sa.PrimaryKeyConstraint("cluster", "model", "pool", "slo", "of_model", "second", name=op.f("pk_slo_bucket")),
    )
    op.create_table(
        "slo_total",
        *_scope(),
        sa.Column("slo", sa.String(length=32), nullable=False),
        sa.Column("of_model", sa.String(length=63), nullable=False),
        *_counts(),
        _wall("objective", nullable=False),
        _wall("target_s"),
        sa.Column("window_scale", sa.Integer(), nullable=False),
        sa.Column("basis", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("cluster", "model", "pool", "slo", "of_model", name=op.f("pk_slo_total")),
    )
    op.create_table(
        "slo_mark",
        *_scope(),
        sa.Column("worker", sa.String(length=63), nullable=False),
        sa.Column("boot", sa.Text(), nullable=False),
        sa.Column("counted", sa.JSON(), nullable=False),
        sa.PrimaryKeyConstraint("cluster", "model", "pool", "worker", name=op.f("pk_slo_mark")),
    )
    op.create_table(
        "alert",
        *_scope(),
        sa.Column("fingerprint", sa.String(length=64), nullable=False),
        sa.Column("rule", sa.String(length=63), nullable=False),
        sa.Column("labels", sa.JSON(), nullable=False),
        sa.Column("annotations", sa.JSON(), nullable=False),
        sa.Column("state", sa.String(length=16), nullable=False),
        *[_wall(name) for name in ("pending_s", "started_s", "calm_s", "resolved_s", "seen_s")],
        sa.Column("value", sa.Float(precision=53)),
        sa.PrimaryKeyConstraint("cluster", "model", "pool", "fingerprint", name=op.f("pk_alert")),
    )
    op.create_table(
        "alert_silence",
        sa.Column("id", _ID, autoincrement=True, nullable=False),
        *_scope(),
        sa.Column("matchers", sa.JSON(), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("actor", sa.String(length=200), nullable=False),
        _wall("created_s", nullable=False),
        _wall("expires_s", nullable=False),
        _wall("ended_s"),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_alert_silence")),
    )
    op.create_index(
        op.f("ix_alert_silence_cluster_model_pool_expires_s"), "alert_silence", ["cluster", "model", "pool", "expires_s"]
    )
    op.create_table(
        "notification_outbox",
        sa.Column("id", _ID, autoincrement=True, nullable=False),
        *_scope(),
        sa.Column("fingerprint", sa.String(length=64), nullable=False),
        sa.Column("receiver", sa.String(length=63), nullable=False),
        sa.Column("event", sa.String(length=16), nullable=False),
        sa.Column("idempotency_key", sa.String(length=200), nullable=False),
        sa.Column("body", sa.JSON(), nullable=False),
        sa.Column("attempts", sa.Integer(), nullable=False),
        _wall("created_s", nullable=False),
        _wall("next_s", nullable=False),
        _wall("sent_s"),
        sa.Column("outcome", sa.String(length=16), nullable=False),
        sa.Column("last_error", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_notification_outbox")),
        sa.UniqueConstraint("idempotency_key", name=op.f("uq_notification_outbox_idempotency_key")),
    )
    due = ["cluster", "model", "pool", "receiver", "outcome", "next_s"]
    op.create_index("ix_notification_outbox_due", "notification_outbox", due)


def downgrade() -> None:
    for name in ("notification_outbox", "alert_silence", "alert", "slo_mark", "slo_total", "slo_bucket"):
        op.drop_table(name)
