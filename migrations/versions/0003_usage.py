"""What tenants have used, by instance and stretch of time."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

from kvbm.core.errors import CatalogError

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None

_TIERS = ("hbm", "host", "nvme", "object")
_NUMBERS = (
    *(f"{tier}_{what}" for what in ("byte_seconds", "put_blocks", "read_blocks") for tier in _TIERS),
    "saved_tokens",
    "unrated_tokens",
    "saved_gpu_us",
)


def upgrade() -> None:
    """From 0002 to 0003."""
    op.create_table(
        "usage",
        sa.Column("instance", sa.Text, primary_key=True),
        sa.Column("epoch", sa.BigInteger, primary_key=True, autoincrement=False),
        sa.Column("event_offset", sa.BigInteger, primary_key=True, autoincrement=False),
        sa.Column("tenant", sa.Text, primary_key=True),
        sa.Column("since_ms", sa.BigInteger, primary_key=True, autoincrement=False),
        sa.Column("until_ms", sa.BigInteger, nullable=False),
        sa.Column("is_last", sa.Boolean, nullable=False),
        *(sa.Column(name, sa.BigInteger, nullable=False) for name in _NUMBERS),
    )
    op.create_index("ix_usage_since_ms", "usage", ["since_ms"])


def downgrade() -> None:
    """Refused: migrations only go forward."""
    raise CatalogError("migrations only go forward; restore a backup of the database, or start an empty one")
