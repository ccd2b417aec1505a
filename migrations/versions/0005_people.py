"""Logins at dashboards; what the audit lacked: address, token, request, before, after. It is appended to, never changed.

Only adds: a controller of the version before goes on beside it. Never edited once released: a change is a new file.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None

_ID = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
_TEXTS = (("address", 200), ("token_id", 32), ("request_id", 64))


def upgrade() -> None:
    op.create_table(
        "session",
        sa.Column("sha256", sa.String(length=64), nullable=False),
        *_scope(),
        sa.Column("actor", sa.String(length=200), nullable=False),
        sa.Column("token_id", sa.String(length=32), nullable=False),
        sa.Column("scopes", sa.JSON(), nullable=False),
        sa.Column("address", sa.String(length=200), nullable=False),
        sa.Column("created_wall_s", sa.Float(precision=53), nullable=False),
        sa.Column("expires_wall_s", sa.Float(precision=53), nullable=False),
        sa.Column("ended_wall_s", sa.Float(precision=53), nullable=True),
        sa.PrimaryKeyConstraint("sha256", name=op.f("pk_session")),
    )
    op.create_index(op.f("ix_session_cluster_model_pool_expires_wall_s"), "session", _by("expires_wall_s"))
    op.create_table(
        "login_attempt",
        sa.Column("id", _ID, autoincrement=True, nullable=False),
        *_scope(),
        sa.Column("wall_s", sa.Float(precision=53), nullable=False),
        sa.Column("address", sa.String(length=200), nullable=False),
        sa.Column("failed", sa.Boolean(create_constraint=False), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_login_attempt")),
    )
    op.create_index(op.f("ix_login_attempt_cluster_model_pool_wall_s"), "login_attempt", _by("wall_s"))
    for name, length in _TEXTS:
        op.add_column("audit", sa.Column(name, sa.String(length=length), nullable=False, server_default=""))
    for name in ("before", "after"):
        op.add_column("audit", sa.Column(name, sa.JSON(), nullable=True))
    if op.get_bind().dialect.name == "postgresql":
        op.execute(
            "create function audit_is_append_only() returns trigger language plpgsql as "
            "$$ begin raise exception 'the audit is appended to, never changed'; end $$"
        )
        op.execute("create trigger audit_append_only before update on audit for each row execute function audit_is_append_only()")
    else:
        op.execute(
            "create trigger audit_append_only before update on audit "
            "begin select raise(abort, 'the audit is appended to, never changed'); end"
        )


def downgrade() -> None:
    if op.get_bind().dialect.name == "postgresql":
        op.execute("drop trigger audit_append_only on audit")
        op.execute("drop function audit_is_append_only()")
    else:
        op.execute("drop trigger audit_append_only")
    with op.batch_alter_table("audit") as audit:
        for name in ("after", "before", *(name for name, _ in reversed(_TEXTS))):
            audit.drop_column(name)
    op.drop_table("login_attempt")
    op.drop_table("session")


def _scope() -> list[sa.Column[str]]:
    return [sa.Column(name, sa.String(length=63), nullable=False) for name in ("cluster", "model", "pool")]


def _by(column: str) -> list[str]:
    return ["cluster", "model", "pool", column]
