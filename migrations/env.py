"""Alembic's entry: runs the migrations on the connection it is given, or on one of its own for the `alembic` command.

Never decides which database: the caller passes a connection, or FLUIDPD_DATABASE__URL names it.
"""

from __future__ import annotations

import asyncio
import os

from alembic import context
from sqlalchemy.engine import Connection

from controller.store import tables_alerts  # noqa: F401  its tables belong to the same metadata
from controller.store.engine import make_engine
from controller.store.tables import metadata


def _run(connection: Connection) -> None:
    context.configure(connection=connection, target_metadata=metadata, render_as_batch=True, compare_type=True)
    with context.begin_transaction():
        context.run_migrations()


async def _run_alone() -> None:
    engine = make_engine(os.environ.get("FLUIDPD_DATABASE__URL") or context.config.get_main_option("sqlalchemy.url") or "")
    async with engine.begin() as connection:
        await connection.run_sync(_run)
    await engine.dispose()


given = context.config.attributes.get("connection")
if given is not None:
    _run(given)
else:
    asyncio.run(_run_alone())
