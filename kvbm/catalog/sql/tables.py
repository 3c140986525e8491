"""The catalog's tables: what SQL holds of the cluster.

Who runs and ran, what may share blocks, what the pools of cluster reach are claimed to hold, and how far the projection
has come. Residencies of volatile tiers are not here: the index in memory has them and a snapshot restores them. No
foreign keys: a claim may name an instance or a namespace whose start was never seen.

A change here needs a migration beside it; a test compares the two.
"""

from __future__ import annotations

from sqlalchemy import (
    JSON,
    BigInteger,
    Boolean,
    CheckConstraint,
    Column,
    Dialect,
    Integer,
    LargeBinary,
    MetaData,
    String,
    Table,
    Text,
    TypeDecorator,
    false,
)

VERSION_TABLE = "kvbm_schema"
LARGEST_COUNT = (1 << 63) - 1
_TIERS = ("hbm", "host", "nvme", "object")


def stored_words(text: str) -> str:
    """Text as it is stored. NUL becomes U+FFFD: Postgres refuses it, and one wild name would stop every batch."""
    return text.replace("\0", "\ufffd")


class Words(TypeDecorator[str]):
    """Text from the stream, stored as `stored_words` has it."""

    impl = Text
    cache_ok = True

    def process_bind_param(self, value: str | None, dialect: Dialect) -> str | None:
        """What is stored."""
        return None if value is None else stored_words(value)


class Count(TypeDecorator[int]):
    """A u64 of the wire in a signed column. What does not fit becomes the largest that does, for the same reason."""

    impl = BigInteger
    cache_ok = True

    def process_bind_param(self, value: int | None, dialect: Dialect) -> int | None:
        """What is stored."""
        return None if value is None else min(value, LARGEST_COUNT)


class Hex64(TypeDecorator[int]):
    """64 bits as 16 hex digits, as messages print them."""

    impl = String(16)
    cache_ok = True

    def process_bind_param(self, value: int | None, dialect: Dialect) -> str | None:
        """What is stored."""
        return None if value is None else f"{value:016x}"

    def process_result_value(self, value: str | None, dialect: Dialect) -> int | None:
        """What is read."""
        return None if value is None else int(value, 16)


metadata = MetaData()

instances = Table(
    "instances",
    metadata,
    Column("id", Words, primary_key=True),
    Column("cluster", Words, nullable=False),
    Column("epoch", Count, nullable=False),
    Column("first_seen_ns", Count, nullable=False),
    Column("last_frame_ns", Count, nullable=False),
    Column("engine", Words, nullable=False),
    Column("version", Words, nullable=False),
    Column("topology", JSON, nullable=False),  # ["zone-a", "rack-3", "host-17"], outermost first
    Column("pools", JSON, nullable=False),  # [{"tier": "HBM", "slots": …, "block_bytes": …, "reach": …, "name": …}]
    Column("state", String(8), nullable=False),  # "live" or "stopped"
    Column("run", Words, nullable=False, server_default=""),  # that began the epoch; "" when it is not known
)

epochs = Table(
    "epochs",
    metadata,
    Column("instance", Words, primary_key=True),
    Column("epoch", Count, primary_key=True, autoincrement=False),
    Column("started_ns", Count, nullable=False),
    Column("ended_ns", Count),  # NULL while it runs
    Column("end_reason", Words, nullable=False),  # "" while it runs
    Column("next_offset", Count, nullable=False),
    Column("digest", Hex64, nullable=False),
    Column("run", Words, nullable=False, server_default=""),
)

namespaces = Table(
    "namespaces",
    metadata,
    Column("id", LargeBinary(16), primary_key=True),
    Column("model", Words, nullable=False),
    Column("revision", Words, nullable=False),
    Column("kv_dtype", Words, nullable=False),
    Column("block_tokens", Count, nullable=False),
    Column("layout", Words, nullable=False),
    Column("kv_group", Count, nullable=False),
    Column("ranks", Words, nullable=False),
    Column("lora", Words, nullable=False),
    Column("tenant", Words, nullable=False, index=True),
    Column("scheme", Words, nullable=False),
    Column("scheme_seed", Words, nullable=False),  # decimal: its range is the engine's business
    Column("first_seen_ns", Count, nullable=False),
    CheckConstraint("length(id) = 16", name="namespaces_id_bytes"),
)

tenants = Table(
    "tenants",
    metadata,
    Column("name", Words, primary_key=True),
    Column("quota_bytes", Count),  # NULL: no quota
)

object_claims = Table(
    "object_claims",
    metadata,
    Column("pool", Words, primary_key=True),
    Column("namespace", LargeBinary(16), primary_key=True),
    Column("hash", LargeBinary(16), primary_key=True),
    Column("first_claimed_by", Words, nullable=False),
    Column("claimed_ns", Count, nullable=False),
    Column("last_claimed_ns", Count, nullable=False),
    CheckConstraint("length(namespace) = 16", name="object_claims_namespace_bytes"),
    CheckConstraint("length(hash) = 16", name="object_claims_hash_bytes"),
    sqlite_with_rowid=False,
)

checkpoints = Table(
    "checkpoints",
    metadata,
    Column("id", Words, primary_key=True),
    Column("created_ns", Count, nullable=False),
    Column("stream_sequence", Count, nullable=False),
    Column("path", Words, nullable=False),
    Column("chunks", Integer, nullable=False),
    Column("bytes", Count, nullable=False),
)

positions = Table(
    "positions",
    metadata,
    Column("stream", Words, primary_key=True),
    Column("stream_sequence", Count, nullable=False),  # the last one applied
    Column("fingerprint", Hex64),  # of the message there, as in `streams.base.Mark`; NULL: not known
    Column(
        "is_over", Boolean, nullable=False, server_default=false()
    ),  # another name counts the cluster's messages since
)

instance_positions = Table(
    "instance_positions",
    metadata,
    Column("instance", Words, primary_key=True),
    Column("epoch", Count, nullable=False),
    Column("next_offset", Count, nullable=False),
    Column("run", Words, nullable=False, server_default=""),  # that began the epoch
)

absences = Table(
    "absences",
    metadata,
    Column("instance", Words, primary_key=True),
    Column("unheard_s", Count, nullable=False),  # seconds in which a catalog listened and did not hear it
    Column("sequence", Count, nullable=False),  # of its last message
)

USAGE_NUMBERS = (
    *(f"{tier}_{what}" for what in ("byte_seconds", "put_blocks", "read_blocks") for tier in _TIERS),
    "saved_tokens",
    "unrated_tokens",
    "saved_gpu_us",
)

# What tenants have used of an instance in a stretch of time, which lies in one clock hour. A tenant without a name that
# has used nothing stands for a stretch in which nobody has.
usage = Table(
    "usage",
    metadata,
    Column("instance", Words, primary_key=True),
    Column("epoch", Count, primary_key=True, autoincrement=False),
    Column("event_offset", Count, primary_key=True, autoincrement=False),  # of its event in the epoch
    Column("tenant", Words, primary_key=True),
    Column("since_ms", Count, primary_key=True, autoincrement=False, index=True),  # Unix time in milliseconds
    Column("until_ms", Count, nullable=False),
    Column("is_last", Boolean, nullable=False),  # the instance stopped cleanly then
    *(Column(name, Count, nullable=False) for name in USAGE_NUMBERS),
)

forgotten = Table(
    "forgotten",
    metadata,
    Column("instance", Words, primary_key=True),
    Column("stream", Words, nullable=False, index=True),
    Column("sequence", Count, nullable=False),  # its messages up to here count for nothing
    Column("until_ns", Count, nullable=False),
    Column("pulse_ns", Count, nullable=False),
    Column("declared", JSON, nullable=False),  # a row of `instances`, or {}
)
