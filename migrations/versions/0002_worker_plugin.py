"""What stands between each worker and its engine: the plugin's state, what it cannot do, and which start was a prefill worker.

Never edited once released: a change is a new file.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    with op.batch_alter_table("worker") as worker:
        worker.add_column(sa.Column("plugin", sa.String(length=16), nullable=True))
        worker.add_column(sa.Column("plugin_why", sa.Text(), nullable=False, server_default=""))
        worker.add_column(sa.Column("cannot", sa.JSON(), nullable=False, server_default="{}"))
        worker.add_column(sa.Column("prefill_start", sa.Text(), nullable=False, server_default=""))


def downgrade() -> None:
    with op.batch_alter_table("worker") as worker:
        for name in ("prefill_start", "cannot", "plugin_why", "plugin"):
            worker.drop_column(name)
