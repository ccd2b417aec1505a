"""A slot for every open move, so that the database itself counts them against max_concurrent.

Only adds: a controller of the version before goes on beside it, with moves that have no slot. Never edited once released: a
change is a new file.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None

_INDEX = "uq_transition_open_slot"
# Moves that are open now take the first slots of their pool, in the order of their start.
_NUMBERED = """
update transition set slot = (
  select count(*) from transition other
  where other.cluster = transition.cluster and other.model = transition.model and other.pool = transition.pool
    and other."end" is null
    and (other.started_wall_s < transition.started_wall_s
         or (other.started_wall_s = transition.started_wall_s and other.id < transition.id))
) where "end" is null
"""


def upgrade() -> None:
    # Not in a batch: on SQLite that makes the table anew, and the rows of its phases go with the old one.
    op.add_column("transition", sa.Column("slot", sa.Integer(), nullable=True))
    op.execute(_NUMBERED)
    is_open = sa.text('"end" IS NULL')
    scope = ["cluster", "model", "pool", "slot"]
    op.create_index(_INDEX, "transition", scope, unique=True, sqlite_where=is_open, postgresql_where=is_open)


def downgrade() -> None:
    op.drop_index(_INDEX, "transition")
    op.drop_column("transition", "slot")
