"""Names of things: sequence hashes, namespaces, instances, epochs, offsets, slots, tiers.

A run of hashes or slots is packed, never a list: 16 bytes a hash and 4 little-endian bytes a slot, in order.
"""

from __future__ import annotations

import hashlib
import hmac
import sys
from array import array
from collections.abc import Iterable
from enum import IntEnum
from functools import cache, lru_cache
from typing import NewType

import msgspec

from kvbm.core.checks import check_plain_int, check_text, type_of
from kvbm.core.errors import ArgumentTypeError, LayoutError

SequenceHash = NewType("SequenceHash", bytes)  # 16 bytes
NamespaceId = NewType("NamespaceId", bytes)  # 16 bytes, public
InstanceId = NewType("InstanceId", str)
Epoch = NewType("Epoch", int)
Offset = NewType("Offset", int)

HASH_BYTES = 16
SLOT_BYTES = 4
NO_PARENT = SequenceHash(bytes(HASH_BYTES))  # the parent of a chain's first block; the root itself stays secret
UNKNOWN = "unknown"  # a field of a namespace that nobody has said: a value of its own, equal to no engine's


# Of the name of an instance, a cluster, a tenant or a pool: what databases take as a part of a key.
MAX_NAME_BYTES = 255
MAX_TEXT_BYTES = 8 << 10  # of any other text that an instance says of itself
MAX_FIELDS_BYTES = 64 << 10  # of a namespace that a heartbeat tells of: all of its texts at their longest

_TEXTS = {
    "model": MAX_TEXT_BYTES,
    "revision": MAX_TEXT_BYTES,
    "kv_dtype": MAX_TEXT_BYTES,
    "layout": MAX_TEXT_BYTES,
    "ranks": MAX_TEXT_BYTES,
    "lora": MAX_TEXT_BYTES,
    "tenant": MAX_NAME_BYTES,
    "scheme": MAX_TEXT_BYTES,
}


class Tier(IntEnum):
    """Class of medium. A smaller number is *hotter*, a larger one *colder*."""

    HBM = 0
    HOST = 1
    NVME = 2
    OBJECT = 3


DURABLE_TIERS = frozenset({Tier.NVME, Tier.OBJECT})  # what they hold outlives the process


class Reach(IntEnum):
    """Who can read a pool without its owner."""

    INSTANCE = 0
    POD = 1
    CLUSTER = 2


_FIRST_FIELDS = frozenset(
    (
        "model",
        "block_tokens",
        "revision",
        "kv_dtype",
        "layout",
        "kv_group",
        "ranks",
        "lora",
        "tenant",
        "scheme",
        "scheme_seed",
    )
)


class Namespace(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=False):
    """What may share blocks. Two blocks are the same only in one namespace. Immutable; any thread may use it.

    Calls of a manager take its `id`, 16 bytes.

    Attributes:
        model, revision: name and version of the weights. A namespace without a revision is kept out of tiers that
            outlive the process or are shared.
        kv_dtype: element type of the cache, such as "float32" or "bfloat16".
        block_tokens: tokens a block holds, at least 1.
        layout: order and sizes of a block's dimensions, as `core.layout` writes them.
        kv_group: which group of layers, in models with several.
        ranks: parallel layout, such as "tp1".
        lora: adapter, "" for none.
        tenant: whose blocks; tenants never share. At most MAX_NAME_BYTES, as UTF-8; every other text at most
            MAX_TEXT_BYTES.
        scheme, scheme_seed: how tokens become hashes.
    Raises: ArgumentTypeError, ArgumentValueError: a field that makes no sense.
    """

    model: str
    block_tokens: int
    revision: str = ""
    kv_dtype: str = "float32"
    layout: str = ""
    kv_group: int = 0
    ranks: str = "tp1"
    lora: str = ""
    tenant: str = ""
    scheme: str = "sha256"
    scheme_seed: int = 0

    def __post_init__(self) -> None:
        for name, most_bytes in _TEXTS.items():
            check_text(getattr(self, name), name, most_bytes)
        check_plain_int(self.block_tokens, "block_tokens", least=1)
        check_plain_int(self.kv_group, "kv_group")
        check_plain_int(self.scheme_seed, "scheme_seed", least=None)  # its range is the engine's business

    def fields(self) -> dict[str, str | int]:
        """The fields by name, in order.

        One that came after the first release is left out at its default, so ids stay what they are.
        """
        return {
            name: value
            for name, default in _defaults(type(self))
            if (value := getattr(self, name)) != default or name in _FIRST_FIELDS
        }

    def canonical(self) -> bytes:
        """The fields as sorted JSON: what both digests are made from."""
        return msgspec.json.encode(self.fields(), order="sorted")

    @property
    def id(self) -> NamespaceId:
        """The public name, 16 bytes: events, SQL and the API use it."""
        return _id_of(self)

    def root(self, secret: bytes = b"") -> SequenceHash:
        """The hash the namespace's chains start from, 16 bytes. It never leaves engine and client.

        Args:
            secret: the tenant's secret; whoever has it can test whether a prompt is cached. Empty: whoever knows the
                fields can.
        Raises: ArgumentTypeError: the secret is no bytes.
        """
        if not isinstance(secret, bytes | bytearray):
            raise ArgumentTypeError("secret", f"is {type_of(secret)}; give bytes, as text.encode() makes them")
        digest = hmac.new(secret, b"kvbm.root.v1\0" + self.canonical(), hashlib.sha256).digest()
        return SequenceHash(digest[:HASH_BYTES])


def namespace_in(canonical: bytes) -> Namespace | None:
    """The namespace whose `canonical` these bytes are;

    None: they are nobody's, or have fields that this kvbm does not know.
    """
    try:
        found = msgspec.json.decode(canonical, type=Namespace)
        msgspec.msgpack.encode(found)  # numbers of more than 64 bits neither a frame can carry nor a checkpoint keep
        return found if found.canonical() == canonical else None
    except (msgspec.MsgspecError, UnicodeError, RecursionError, OverflowError):
        return None


def namespace_id_of(canonical: bytes) -> NamespaceId:
    """The id of the namespace whose `canonical` these bytes are, if they are one's."""
    return NamespaceId(hashlib.sha256(b"kvbm.namespace.v1\0" + canonical).digest()[:HASH_BYTES])


@lru_cache(maxsize=1024)
def _id_of(namespace: Namespace) -> NamespaceId:
    return namespace_id_of(namespace.canonical())


@cache
def _defaults(kind: type[Namespace]) -> list[tuple[str, object]]:
    return [(field.name, field.default) for field in msgspec.structs.fields(kind)]


def hash_count(hashes: bytes) -> int:
    """How many hashes a packed run has. Raises LayoutError when its length is no multiple of 16 bytes."""
    count, rest = divmod(len(hashes), HASH_BYTES)
    if rest:
        raise LayoutError(f"a run of hashes has {len(hashes)} bytes, which is no multiple of {HASH_BYTES}")
    return count


def split_hashes(hashes: bytes) -> list[SequenceHash]:
    """A packed run as single hashes, in order. Raises LayoutError as `hash_count`."""
    hash_count(hashes)
    return [SequenceHash(hashes[at : at + HASH_BYTES]) for at in range(0, len(hashes), HASH_BYTES)]


def pack_slots(slots: Iterable[int]) -> bytes:
    """Slots as packed little-endian u32. Raises OverflowError: one does not fit."""
    column = array("I", slots)
    if sys.byteorder == "big":
        column.byteswap()
    return column.tobytes()


def split_slots(slots: bytes) -> list[int]:
    """A packed run of slots as integers, in order. Raises LayoutError when its length is no multiple of 4 bytes."""
    if len(slots) % SLOT_BYTES:
        raise LayoutError(f"a run of slots has {len(slots)} bytes, which is no multiple of {SLOT_BYTES}")
    column = array("I")
    column.frombytes(slots)
    if sys.byteorder == "big":
        column.byteswap()
    return column.tolist()


def short(hash_or_id: bytes) -> str:
    """The first 8 hex digits, for messages."""
    return hash_or_id[:4].hex()
