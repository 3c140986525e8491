"""Whether a stream is over: its store was replaced, or has lost its end, and another name counts the messages of its cluster since."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

from kvbm.core.errors import CatalogError

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """From 0003 to 0004."""
    op.add_column("positions", sa.Column("is_over", sa.Boolean, nullable=False, server_default=sa.false()))


def downgrade() -> None:
    """Refused: migrations only go forward."""
    raise CatalogError("migrations only go forward; restore a backup of the database, or start an empty one")
