"""The first tables. Types are spelled out, so that later changes of the model leave this file true."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

from kvbm.core.errors import CatalogError

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    """From an empty database to 0001."""
    op.create_table(
        "instances",
        sa.Column("id", sa.Text, primary_key=True),
        sa.Column("cluster", sa.Text, nullable=False),
        sa.Column("epoch", sa.BigInteger, nullable=False),
        sa.Column("first_seen_ns", sa.BigInteger, nullable=False),
        sa.Column("last_frame_ns", sa.BigInteger, nullable=False),
        sa.Column("engine", sa.Text, nullable=False),
        sa.Column("version", sa.Text, nullable=False),
        sa.Column("topology", sa.JSON, nullable=False),
        sa.Column("pools", sa.JSON, nullable=False),
        sa.Column("state", sa.String(8), nullable=False),
        sa.Column("run", sa.Text, nullable=False, server_default=""),
    )
    op.create_table(
        "epochs",
        sa.Column("instance", sa.Text, primary_key=True),
        sa.Column("epoch", sa.BigInteger, primary_key=True, autoincrement=False),
        sa.Column("started_ns", sa.BigInteger, nullable=False),
        sa.Column("ended_ns", sa.BigInteger),
        sa.Column("end_reason", sa.Text, nullable=False),
        sa.Column("next_offset", sa.BigInteger, nullable=False),
        sa.Column("digest", sa.String(16), nullable=False),
        sa.Column("run", sa.Text, nullable=False, server_default=""),
    )
    op.create_table(
        "namespaces",
        sa.Column("id", sa.LargeBinary(16), primary_key=True),
        sa.Column("model", sa.Text, nullable=False),
        sa.Column("revision", sa.Text, nullable=False),
        sa.Column("kv_dtype", sa.Text, nullable=False),
        sa.Column("block_tokens", sa.BigInteger, nullable=False),
        sa.Column("layout", sa.Text, nullable=False),
        sa.Column("kv_group", sa.BigInteger, nullable=False),
        sa.Column("ranks", sa.Text, nullable=False),
        sa.Column("lora", sa.Text, nullable=False),
        sa.Column("tenant", sa.Text, nullable=False),
        sa.Column("scheme", sa.Text, nullable=False),
        sa.Column("scheme_seed", sa.Text, nullable=False),
        sa.Column("first_seen_ns", sa.BigInteger, nullable=False),
        sa.CheckConstraint("length(id) = 16", name="namespaces_id_bytes"),
    )
    op.create_index("ix_namespaces_tenant", "namespaces", ["tenant"])
    op.create_table(
        "tenants",
        sa.Column("name", sa.Text, primary_key=True),
        sa.Column("quota_bytes", sa.BigInteger),
    )
    op.create_table(
        "object_claims",
        sa.Column("pool", sa.Text, primary_key=True),
        sa.Column("namespace", sa.LargeBinary(16), primary_key=True),
        sa.Column("hash", sa.LargeBinary(16), primary_key=True),
        sa.Column("first_claimed_by", sa.Text, nullable=False),
        sa.Column("claimed_ns", sa.BigInteger, nullable=False),
        sa.Column("last_claimed_ns", sa.BigInteger, nullable=False),
        sa.CheckConstraint("length(namespace) = 16", name="object_claims_namespace_bytes"),
        sa.CheckConstraint("length(hash) = 16", name="object_claims_hash_bytes"),
        sqlite_with_rowid=False,
    )
    op.create_table(
        "checkpoints",
        sa.Column("id", sa.Text, primary_key=True),
        sa.Column("created_ns", sa.BigInteger, nullable=False),
        sa.Column("stream_sequence", sa.BigInteger, nullable=False),
        sa.Column("path", sa.Text, nullable=False),
        sa.Column("chunks", sa.Integer, nullable=False),
        sa.Column("bytes", sa.BigInteger, nullable=False),
    )
    op.create_table(
        "positions",
        sa.Column("stream", sa.Text, primary_key=True),
        sa.Column("stream_sequence", sa.BigInteger, nullable=False),
        sa.Column("fingerprint", sa.String(16)),
        sa.Column("is_over", sa.Boolean, nullable=False, server_default=sa.false()),
    )
    op.create_table(
        "instance_positions",
        sa.Column("instance", sa.Text, primary_key=True),
        sa.Column("epoch", sa.BigInteger, nullable=False),
        sa.Column("next_offset", sa.BigInteger, nullable=False),
        sa.Column("run", sa.Text, nullable=False, server_default=""),
    )


def downgrade() -> None:
    """Refused: migrations only go forward."""
    raise CatalogError("migrations only go forward; restore a backup of the database, or start an empty one")
