"""For how long instances are gone, and which were forgotten."""

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
    op.create_table(
        "absences",
        sa.Column("instance", sa.Text, primary_key=True),
        sa.Column("unheard_s", sa.BigInteger, nullable=False),
        sa.Column("sequence", sa.BigInteger, nullable=False),
    )
    op.create_table(
        "forgotten",
        sa.Column("instance", sa.Text, primary_key=True),
        sa.Column("stream", sa.Text, nullable=False),
        sa.Column("sequence", sa.BigInteger, nullable=False),
        sa.Column("until_ns", sa.BigInteger, nullable=False),
        sa.Column("pulse_ns", sa.BigInteger, nullable=False),
        sa.Column("declared", sa.JSON, nullable=False),
    )
    op.create_index("ix_forgotten_stream", "forgotten", ["stream"])


def downgrade() -> None:
    """Refused: migrations only go forward."""
    raise CatalogError("migrations only go forward; restore a backup of the database, or start an empty one")
