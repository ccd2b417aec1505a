"""The first schema: who leads, who is there, what was decided, asked and done, what people said, and the history.

Never edited once released: a change is a new file.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "audit",
        sa.Column("id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), autoincrement=True, nullable=False),
        sa.Column("cluster", sa.String(length=63), nullable=False),
        sa.Column("model", sa.String(length=63), nullable=False),
        sa.Column("pool", sa.String(length=63), nullable=False),
        sa.Column("wall_s", sa.Float(precision=53), nullable=False),
        sa.Column("actor", sa.String(length=200), nullable=False),
        sa.Column("source", sa.String(length=32), nullable=False),
        sa.Column("verb", sa.String(length=63), nullable=False),
        sa.Column("subject", sa.String(length=200), nullable=False),
        sa.Column("outcome", sa.String(length=16), nullable=False),
        sa.Column("detail", sa.Text(), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_audit")),
    )
    op.create_index(op.f("ix_audit_cluster_model_pool_wall_s"), "audit", ["cluster", "model", "pool", "wall_s"], unique=False)
    op.create_table(
        "command",
        sa.Column("id", sa.String(length=63), nullable=False),
        sa.Column("cluster", sa.String(length=63), nullable=False),
        sa.Column("model", sa.String(length=63), nullable=False),
        sa.Column("pool", sa.String(length=63), nullable=False),
        sa.Column("wall_s", sa.Float(precision=53), nullable=False),
        sa.Column("worker", sa.String(length=63), nullable=False),
        sa.Column("kind", sa.String(length=16), nullable=False),
        sa.Column("epoch", sa.BigInteger(), nullable=False),
        sa.Column("incarnation", sa.BigInteger(), nullable=False),
        sa.Column("body", sa.JSON(), nullable=False),
        sa.Column("answer", sa.String(length=32), nullable=True),
        sa.Column("answered_wall_s", sa.Float(precision=53), nullable=True),
        sa.Column("detail", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_command")),
    )
    op.create_index(op.f("ix_command_cluster_model_pool_wall_s"), "command", ["cluster", "model", "pool", "wall_s"], unique=False)
    op.create_table(
        "decision",
        sa.Column("id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), autoincrement=True, nullable=False),
        sa.Column("cluster", sa.String(length=63), nullable=False),
        sa.Column("model", sa.String(length=63), nullable=False),
        sa.Column("pool", sa.String(length=63), nullable=False),
        sa.Column("wall_s", sa.Float(precision=53), nullable=False),
        sa.Column("action", sa.String(length=32), nullable=False),
        sa.Column("reason", sa.String(length=63), nullable=False),
        sa.Column("numbers", sa.JSON(), nullable=False),
        sa.Column("flips", sa.JSON(), nullable=False),
        sa.Column("lenders", sa.JSON(), nullable=False),
        sa.Column("refusals", sa.JSON(), nullable=False),
        sa.Column("missing", sa.JSON(), nullable=False),
        sa.Column("would_have", sa.Boolean(), nullable=False),
        sa.Column("epoch", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_decision")),
    )
    op.create_index(
        op.f("ix_decision_cluster_model_pool_wall_s"), "decision", ["cluster", "model", "pool", "wall_s"], unique=False
    )
    op.create_table(
        "index_history",
        sa.Column("cluster", sa.String(length=63), nullable=False),
        sa.Column("model", sa.String(length=63), nullable=False),
        sa.Column("pool", sa.String(length=63), nullable=False),
        sa.Column("step_s", sa.Integer(), nullable=False),
        sa.Column("name", sa.String(length=16), nullable=False),
        sa.Column("second", sa.BigInteger(), nullable=False),
        sa.Column("low", sa.Float(precision=53), nullable=True),
        sa.Column("mean", sa.Float(precision=53), nullable=True),
        sa.Column("high", sa.Float(precision=53), nullable=True),
        sa.PrimaryKeyConstraint("cluster", "model", "pool", "step_s", "name", "second", name=op.f("pk_index_history")),
    )
    op.create_table(
        "leadership",
        sa.Column("cluster", sa.String(length=63), nullable=False),
        sa.Column("model", sa.String(length=63), nullable=False),
        sa.Column("pool", sa.String(length=63), nullable=False),
        sa.Column("holder", sa.String(length=200), nullable=False),
        sa.Column("epoch", sa.BigInteger(), nullable=False),
        sa.Column("expires_wall_s", sa.Float(precision=53), nullable=False),
        sa.PrimaryKeyConstraint("cluster", "model", "pool", name=op.f("pk_leadership")),
    )
    op.create_table(
        "pause",
        sa.Column("cluster", sa.String(length=63), nullable=False),
        sa.Column("model", sa.String(length=63), nullable=False),
        sa.Column("pool", sa.String(length=63), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("actor", sa.String(length=200), nullable=False),
        sa.Column("created_wall_s", sa.Float(precision=53), nullable=False),
        sa.Column("expires_wall_s", sa.Float(precision=53), nullable=False),
        sa.Column("version", sa.Integer(), nullable=False),
        sa.Column("active", sa.Boolean(), nullable=False),
        sa.PrimaryKeyConstraint("cluster", "model", "pool", name=op.f("pk_pause")),
    )
    op.create_table(
        "pin",
        sa.Column("cluster", sa.String(length=63), nullable=False),
        sa.Column("model", sa.String(length=63), nullable=False),
        sa.Column("pool", sa.String(length=63), nullable=False),
        sa.Column("worker", sa.String(length=63), nullable=False),
        sa.Column("role", sa.String(length=16), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("actor", sa.String(length=200), nullable=False),
        sa.Column("created_wall_s", sa.Float(precision=53), nullable=False),
        sa.Column("expires_wall_s", sa.Float(precision=53), nullable=False),
        sa.Column("version", sa.Integer(), nullable=False),
        sa.Column("active", sa.Boolean(), nullable=False),
        sa.PrimaryKeyConstraint("cluster", "model", "pool", "worker", name=op.f("pk_pin")),
    )
    op.create_table(
        "slo_minute",
        sa.Column("cluster", sa.String(length=63), nullable=False),
        sa.Column("model", sa.String(length=63), nullable=False),
        sa.Column("pool", sa.String(length=63), nullable=False),
        sa.Column("slo", sa.String(length=32), nullable=False),
        sa.Column("minute", sa.BigInteger(), nullable=False),
        sa.Column("good", sa.Float(precision=53), nullable=False),
        sa.Column("total", sa.Float(precision=53), nullable=False),
        sa.PrimaryKeyConstraint("cluster", "model", "pool", "slo", "minute", name=op.f("pk_slo_minute")),
    )
    op.create_table(
        "status",
        sa.Column("cluster", sa.String(length=63), nullable=False),
        sa.Column("model", sa.String(length=63), nullable=False),
        sa.Column("pool", sa.String(length=63), nullable=False),
        sa.Column("wall_s", sa.Float(precision=53), nullable=False),
        sa.Column("body", sa.JSON(), nullable=False),
        sa.PrimaryKeyConstraint("cluster", "model", "pool", name=op.f("pk_status")),
    )
    op.create_table(
        "transition",
        sa.Column("id", sa.String(length=63), nullable=False),
        sa.Column("cluster", sa.String(length=63), nullable=False),
        sa.Column("model", sa.String(length=63), nullable=False),
        sa.Column("pool", sa.String(length=63), nullable=False),
        sa.Column("worker", sa.String(length=63), nullable=False),
        sa.Column("incarnation", sa.BigInteger(), nullable=False),
        sa.Column("from_role", sa.String(length=16), nullable=False),
        sa.Column("to_role", sa.String(length=16), nullable=False),
        sa.Column("trigger", sa.String(length=16), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("numbers", sa.JSON(), nullable=False),
        sa.Column("epoch", sa.BigInteger(), nullable=False),
        sa.Column("started_wall_s", sa.Float(precision=53), nullable=False),
        sa.Column("phase", sa.String(length=16), nullable=False),
        sa.Column("heading", sa.String(length=16), nullable=False),
        sa.Column("end", sa.String(length=16), nullable=True),
        sa.Column("ended_wall_s", sa.Float(precision=53), nullable=True),
        sa.Column("detail", sa.Text(), nullable=False),
        sa.Column("actor", sa.String(length=200), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_transition")),
    )
    op.create_index(
        op.f("ix_transition_cluster_model_pool_started_wall_s"),
        "transition",
        ["cluster", "model", "pool", "started_wall_s"],
        unique=False,
    )
    op.create_index(
        "uq_transition_open_worker",
        "transition",
        ["cluster", "model", "pool", "worker"],
        unique=True,
        sqlite_where=sa.text('"end" IS NULL'),
        postgresql_where=sa.text('"end" IS NULL'),
    )
    op.create_table(
        "worker",
        sa.Column("cluster", sa.String(length=63), nullable=False),
        sa.Column("model", sa.String(length=63), nullable=False),
        sa.Column("pool", sa.String(length=63), nullable=False),
        sa.Column("name", sa.String(length=63), nullable=False),
        sa.Column("role", sa.String(length=16), nullable=False),
        sa.Column("state", sa.String(length=16), nullable=False),
        sa.Column("worker_url", sa.String(length=300), nullable=False),
        sa.Column("sidecar_url", sa.String(length=300), nullable=False),
        sa.Column("bootstrap_port", sa.Integer(), nullable=True),
        sa.Column("engine", sa.String(length=63), nullable=False),
        sa.Column("engine_version", sa.String(length=63), nullable=False),
        sa.Column("incarnation", sa.BigInteger(), nullable=False),
        sa.Column("flippable", sa.Boolean(), nullable=False),
        sa.Column("not_flippable_why", sa.Text(), nullable=False),
        sa.Column("capabilities", sa.JSON(), nullable=False),
        sa.Column("reported_model", sa.String(length=200), nullable=False),
        sa.Column("reported_pool", sa.String(length=63), nullable=False),
        sa.Column("node", sa.String(length=200), nullable=False),
        sa.Column("registered_wall_s", sa.Float(precision=53), nullable=False),
        sa.Column("seen_wall_s", sa.Float(precision=53), nullable=False),
        sa.PrimaryKeyConstraint("cluster", "model", "pool", "name", name=op.f("pk_worker")),
    )
    op.create_table(
        "worker_history",
        sa.Column("cluster", sa.String(length=63), nullable=False),
        sa.Column("model", sa.String(length=63), nullable=False),
        sa.Column("pool", sa.String(length=63), nullable=False),
        sa.Column("step_s", sa.Integer(), nullable=False),
        sa.Column("second", sa.BigInteger(), nullable=False),
        sa.Column("worker", sa.String(length=63), nullable=False),
        sa.Column("role", sa.String(length=16), nullable=False),
        sa.Column("state", sa.String(length=16), nullable=False),
        sa.Column("pressure", sa.Float(precision=53), nullable=True),
        sa.Column("slack_s", sa.Float(precision=53), nullable=True),
        sa.Column("kv_share", sa.Float(precision=53), nullable=True),
        sa.Column("batch", sa.Float(precision=53), nullable=True),
        sa.Column("waiting", sa.Float(precision=53), nullable=True),
        sa.Column("borrow_open_tokens", sa.Float(precision=53), nullable=True),
        sa.Column("borrowed_tokens_total", sa.Float(precision=53), nullable=True),
        sa.Column("age_s", sa.Float(precision=53), nullable=True),
        sa.Column("lending", sa.Boolean(), nullable=False),
        sa.PrimaryKeyConstraint("cluster", "model", "pool", "step_s", "second", "worker", name=op.f("pk_worker_history")),
    )
    op.create_table(
        "phase",
        sa.Column("move_id", sa.String(length=63), nullable=False),
        sa.Column("seq", sa.Integer(), nullable=False),
        sa.Column("cluster", sa.String(length=63), nullable=False),
        sa.Column("model", sa.String(length=63), nullable=False),
        sa.Column("pool", sa.String(length=63), nullable=False),
        sa.Column("wall_s", sa.Float(precision=53), nullable=False),
        sa.Column("phase", sa.String(length=16), nullable=False),
        sa.Column("heading", sa.String(length=16), nullable=False),
        sa.Column("event", sa.String(length=32), nullable=False),
        sa.Column("took_s", sa.Float(precision=53), nullable=False),
        sa.Column("detail", sa.Text(), nullable=False),
        sa.Column("numbers", sa.JSON(), nullable=False),
        sa.ForeignKeyConstraint(["move_id"], ["transition.id"], name=op.f("fk_phase_move_id"), ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("move_id", "seq", name=op.f("pk_phase")),
    )


def downgrade() -> None:
    op.drop_table("phase")
    op.drop_table("worker_history")
    op.drop_table("worker")
    op.drop_index(
        "uq_transition_open_worker",
        table_name="transition",
        sqlite_where=sa.text('"end" IS NULL'),
        postgresql_where=sa.text('"end" IS NULL'),
    )
    op.drop_index(op.f("ix_transition_cluster_model_pool_started_wall_s"), table_name="transition")
    op.drop_table("transition")
    op.drop_table("status")
    op.drop_table("slo_minute")
    op.drop_table("pin")
    op.drop_table("pause")
    op.drop_table("leadership")
    op.drop_table("index_history")
    op.drop_index(op.f("ix_decision_cluster_model_pool_wall_s"), table_name="decision")
    op.drop_table("decision")
    op.drop_index(op.f("ix_command_cluster_model_pool_wall_s"), table_name="command")
    op.drop_table("command")
    op.drop_index(op.f("ix_audit_cluster_model_pool_wall_s"), table_name="audit")
    op.drop_table("audit")
