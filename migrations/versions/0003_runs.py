"""The run of the process that began an epoch: two lives of an instance may have had one of the same number."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

from kvbm.core.errors import CatalogError

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """From 0002 to 0003."""
    for table in ("instances", "epochs", "instance_positions"):
        op.add_column(table, sa.Column("run", sa.Text, nullable=False, server_default=""))


def downgrade() -> None:
    """Refused: migrations only go forward."""
    raise CatalogError("migrations only go forward; restore a backup of the database, or start an empty one")
