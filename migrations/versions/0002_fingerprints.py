"""The fingerprint of the message a stream's position names. Positions from before have none and are believed once more."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

from kvbm.core.errors import CatalogError

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """From 0001 to 0002."""
    op.add_column("positions", sa.Column("fingerprint", sa.String(16)))


def downgrade() -> None:
    """Refused: migrations only go forward."""
    raise CatalogError("migrations only go forward; restore a backup of the database, or start an empty one")
