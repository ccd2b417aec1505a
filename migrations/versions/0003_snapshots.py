"""What decisions were made on: one packed snapshot a second, and the settings that stood then.

Never edited once released: a change is a new file.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "snapshot",
        sa.Column("cluster", sa.String(length=63), nullable=False),
        sa.Column("model", sa.String(length=63), nullable=False),
        sa.Column("pool", sa.String(length=63), nullable=False),
        sa.Column("second", sa.BigInteger(), nullable=False),
        sa.Column("epoch", sa.BigInteger(), nullable=False),
        sa.Column("basis", sa.String(length=63), nullable=False),
        sa.Column("packed", sa.LargeBinary(), nullable=False),
        sa.PrimaryKeyConstraint("cluster", "model", "pool", "second", name=op.f("pk_snapshot")),
    )
    op.create_table(
        "basis",
        sa.Column("cluster", sa.String(length=63), nullable=False),
        sa.Column("model", sa.String(length=63), nullable=False),
        sa.Column("pool", sa.String(length=63), nullable=False),
        sa.Column("id", sa.String(length=63), nullable=False),
        sa.Column("wall_s", sa.Float(precision=53), nullable=False),
        sa.Column("policy", sa.JSON(), nullable=False),
        sa.Column("slo", sa.JSON(), nullable=False),
        sa.Column("cost", sa.JSON(), nullable=False),
        sa.PrimaryKeyConstraint("cluster", "model", "pool", "id", name=op.f("pk_basis")),
    )


def downgrade() -> None:
    op.drop_table("basis")
    op.drop_table("snapshot")
