"""Which schema a database has, read without changing anything.

Never migrates: engine.migrate does.
"""

from __future__ import annotations

import asyncio

import sqlalchemy as sa
from alembic.runtime.migration import MigrationContext
from sqlalchemy.exc import DBAPIError

from controller.store.engine import StoreUnavailable, make_engine, trouble


def current_revision(url: str) -> str | None:
    """The revision of the database behind `url`, None where it has no schema yet. Blocking. Raises StoreUnavailable."""
    return asyncio.run(_read(url))


async def _read(url: str) -> str | None:
    engine = make_engine(url, read_only=True)
    try:
        async with engine.connect() as connection:
            return await connection.run_sync(_revision_of)
    except (DBAPIError, OSError) as error:
        raise StoreUnavailable(trouble(error)) from error
    finally:
        await engine.dispose()


def _revision_of(connection: sa.Connection) -> str | None:
    return MigrationContext.configure(connection).get_current_revision()
