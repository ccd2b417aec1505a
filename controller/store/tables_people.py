"""The tables of people at dashboards: who is logged in, and who tried to.

Never holds a secret: a session is known by the SHA-256 of what the browser has.
"""

from __future__ import annotations

import sqlalchemy as sa
from sqlalchemy import BigInteger, Boolean, Column, Float, Index, Integer, String, Table

from controller.store.tables import metadata


def _scope() -> list[Column[str]]:
    return [Column(name, String(63), nullable=False) for name in ("cluster", "model", "pool")]


session = Table(
    "session",
    metadata,
    Column("sha256", String(64), primary_key=True),
    *_scope(),
    Column("actor", String(200), nullable=False),
    Column("token_id", String(32), nullable=False),
    Column("scopes", sa.JSON, nullable=False),
    Column("address", String(200), nullable=False),
    Column("created_wall_s", Float(53), nullable=False),
    Column("expires_wall_s", Float(53), nullable=False),
    Column("ended_wall_s", Float(53)),
    Index(None, "cluster", "model", "pool", "expires_wall_s"),
)

login_attempt = Table(
    "login_attempt",
    metadata,
    Column("id", BigInteger().with_variant(Integer, "sqlite"), primary_key=True, autoincrement=True),
    *_scope(),
    Column("wall_s", Float(53), nullable=False),
    Column("address", String(200), nullable=False),
    Column("failed", Boolean(create_constraint=False), nullable=False),
    Index(None, "cluster", "model", "pool", "wall_s"),
)
