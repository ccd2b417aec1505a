"""Where the leader can be reached, so that a standby can name it; and room for a sidecar's numbering of its reports.

Only adds: a controller of the version before goes on beside it. Never edited once released: a change is a new file.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None


def upgrade() -> None:
    with op.batch_alter_table("leadership") as leadership:
        leadership.add_column(sa.Column("address", sa.String(length=300), nullable=False, server_default=""))
    if op.get_bind().dialect.name == "postgresql":  # SQLite's INTEGER has 64 bits already
        op.alter_column("phase", "seq", type_=sa.BigInteger(), existing_type=sa.Integer(), existing_nullable=False)


def downgrade() -> None:
    if op.get_bind().dialect.name == "postgresql":
        op.alter_column("phase", "seq", type_=sa.Integer(), existing_type=sa.BigInteger(), existing_nullable=False)
    with op.batch_alter_table("leadership") as leadership:
        leadership.drop_column("address")
