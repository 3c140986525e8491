"""Runs the migrations on the connection kvbm hands in; the caller owns its transaction."""

from __future__ import annotations

from alembic import context

from kvbm.catalog.sql.tables import VERSION_TABLE, metadata
from kvbm.core.errors import CatalogError

connection = context.config.attributes.get("connection")
if connection is None:
    raise CatalogError("migrations run when the catalog opens its database; start kvbm-catalog instead")
context.configure(connection=connection, target_metadata=metadata, version_table=VERSION_TABLE)
with context.begin_transaction():
    context.run_migrations()
