"""What is to be erased: numbered requests, and the record of all that are in force, as it lies on the stream.

The record names nobody. Of a tenant, a namespace and a block it has digests, salted anew for each erasure: who holds
blocks can tell which are meant, and who reads the record, today or years later, learns no name and no hash that he does
not guess whole.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Collection, Iterable
from typing import NamedTuple

import msgspec

from kvbm.core.errors import ErasureError
from kvbm.core.ids import HASH_BYTES, NamespaceId, SequenceHash, split_hashes

VERSION = 1
MOST_HASHES = 8192  # of one erasure: 128 KiB of the record
MOST_BYTES = 700_000  # of a record; nats-server takes messages of 1 MiB

_SECOND_NS = 1_000_000_000
_TENANT, _NAMESPACE, _BLOCK = b"tenant", b"namespace", b"block"


class DamagedRecordError(ErasureError):
    """What lies in the place of the record is none."""


class Subject(NamedTuple):
    """What somebody wants erased, by name; it stays with who asks.

    Attributes:
        tenant: whose blocks; None where namespaces are named.
        namespaces: those of the tenant as far as they are known, or the one that was named.
        hashes: packed; of a prompt. b"": all blocks.
    """

    tenant: str | None = None
    namespaces: tuple[NamespaceId, ...] = ()
    hashes: bytes = b""


class Erasure(msgspec.Struct, frozen=True, kw_only=True):
    """One request, as the record has it.

    Attributes:
        number: of the cluster's erasures; grows with the time, so that no number is given twice though the record was
            lost.
        at_ns: when it was asked for; it means what was there before.
        salt: of its digests.
        tenant: digest of the tenant's name; b"" where namespaces are named.
        namespaces: digests of namespace ids.
        hashes: digests of blocks, packed; b"": all blocks.
    """

    number: int
    at_ns: int
    salt: bytes
    tenant: bytes = b""
    namespaces: tuple[bytes, ...] = ()
    hashes: bytes = b""

    def is_of(self, wanted: Subject) -> bool:
        """Whether it is a request for just this."""
        tenant = b"" if wanted.tenant is None else self._digest(_TENANT, wanted.tenant.encode())
        blocks = b"".join(self._digest(_BLOCK, block) for block in split_hashes(wanted.hashes))
        spaces = {self._digest(_NAMESPACE, one) for one in wanted.namespaces}
        same_spaces = wanted.tenant is not None or spaces == set(self.namespaces)
        return tenant == self.tenant and blocks == self.hashes and same_spaces

    def is_within(self, wanted: Subject) -> bool:
        """Whether a request means all that this one does."""
        return self.is_of(wanted) and {self.namespace_digest(one) for one in wanted.namespaces} >= set(self.namespaces)

    def namespace_digest(self, namespace: NamespaceId) -> bytes:
        """What stands for a namespace here."""
        return self._digest(_NAMESPACE, namespace)

    def _digest(self, kind: bytes, value: bytes) -> bytes:
        return hmac.digest(self.salt, b"kvbm.erase.v1\0" + kind + b"\0" + value, hashlib.sha256)[:HASH_BYTES]


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """All erasures in force in a cluster. `newest`: the last number that was given out."""

    version: int = VERSION
    newest: int = 0
    erasures: tuple[Erasure, ...] = ()

    def find(self, number: int) -> Erasure | None:
        """The erasure of a number."""
        return next((one for one in self.erasures if one.number == number), None)


class Matcher:
    """Tells what an erasure means. One thread.

    Args:
        also: digests of further namespaces that are known to be its tenant's.
    """

    def __init__(self, erasure: Erasure, also: Iterable[bytes] = ()) -> None:
        self._erasure = erasure
        self._spaces = frozenset(erasure.namespaces).union(also)
        self._blocks = frozenset(split_hashes(erasure.hashes))
        self._by_id: dict[NamespaceId, bool] = {}

    @property
    def is_whole(self) -> bool:
        """Whether all blocks of its namespaces are meant, and not those of one prompt."""
        return not self._blocks

    def tenant(self, name: str) -> bool:
        """Whether a tenant is meant, with all that is the tenant's."""
        erasure = self._erasure
        return bool(erasure.tenant) and erasure._digest(_TENANT, name.encode()) == erasure.tenant

    def namespace(self, namespace: NamespaceId, tenant: str | None = None) -> bool:
        """Whether blocks of a namespace are meant; `tenant`: whose it is, where that is known."""
        known = self._by_id.get(namespace)
        if known is None:
            known = self._by_id[namespace] = self._erasure.namespace_digest(namespace) in self._spaces
        return known or (tenant is not None and self.tenant(tenant))

    def block(self, block: SequenceHash) -> bool:
        """Whether a block of such a namespace is meant."""
        return not self._blocks or self._erasure._digest(_BLOCK, block) in self._blocks

    def of(self, hashes: bytes) -> bytes:
        """Those of a run that are meant, packed."""
        return hashes if not self._blocks else b"".join(block for block in split_hashes(hashes) if self.block(block))

    def any(self, hashes: bytes) -> bool:
        """Whether any block of a run is meant."""
        return not self._blocks or any(map(self.block, split_hashes(hashes)))


def with_erasure(record: Record, wanted: Subject, at_ns: int, done: Collection[int] = ()) -> tuple[Record, Erasure]:
    """The record with a request in it, and the request. One for the same that nobody is done with is that request.

    What came after somebody was done is not meant by that one. The new one takes its place where it means all that it
    meant.

    Args:
        done: numbers of those that anybody is done with.
    Raises: ErasureError: too much for one record.
    """
    for known in record.erasures:
        if known.number not in done and known.is_of(wanted):
            return record, known
    if len(wanted.hashes) // HASH_BYTES > MOST_HASHES:
        raise ErasureError(
            f"{len(wanted.hashes) // HASH_BYTES} hashes; one erasure takes {MOST_HASHES}: erase them in parts"
        )
    number = max(record.newest + 1, at_ns // _SECOND_NS)
    bare = Erasure(number=number, at_ns=at_ns, salt=secrets.token_bytes(HASH_BYTES))
    erasure = msgspec.structs.replace(
        bare,
        tenant=b"" if wanted.tenant is None else bare._digest(_TENANT, wanted.tenant.encode()),
        namespaces=tuple(sorted(bare.namespace_digest(one) for one in wanted.namespaces)),
        hashes=b"".join(bare._digest(_BLOCK, block) for block in split_hashes(wanted.hashes)),
    )
    others = (known for known in record.erasures if not known.is_within(wanted))
    grown = Record(newest=number, erasures=(*others, erasure))
    if len(encoded(grown)) > MOST_BYTES:
        raise ErasureError(
            f"the record of erasures has {len(record.erasures)} in force and room for no more; lift those that are "
            "done: "
            "kvbm-catalog erase --lift N"
        )
    return grown, erasure


def without(record: Record, number: int) -> Record:
    """The record without a request: who returns later does not hear of it any more."""
    return msgspec.structs.replace(record, erasures=tuple(one for one in record.erasures if one.number != number))


def encoded(record: Record) -> bytes:
    """A record as it goes on the stream."""
    return msgspec.msgpack.encode(record)


def decoded(data: bytes) -> Record:
    """A record from the stream. Raises DamagedRecordError: it is none. ErasureError: it is a newer kvbm's."""
    try:
        version = msgspec.msgpack.decode(data, type=_Versioned).version
        if version > VERSION:
            raise ErasureError(f"the record of erasures is of version {version}; this kvbm reads {VERSION}: upgrade it")
        return msgspec.msgpack.decode(data, type=Record)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise DamagedRecordError(
            f"the record of erasures cannot be read ({error}); a catalog that knows it puts it back, or write it anew: "
            "kvbm-catalog erase"
        ) from None


class _Versioned(msgspec.Struct):
    version: int
