"""What a pool is claimed to hold beside what its listing shows, in columns: a pool may have tens of millions of blocks.

An object is known among the claims by its last block, the one that names it. A claim is renewed by whoever reads an
object, and objects are read to their end, so the claim of the last block tells when the object was last used. Prompts
that part within an object share the blocks before: several objects hold these, and their claims stand for all of them.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from kvbm.core.events import EvictReason
from kvbm.core.ids import HASH_BYTES, NamespaceId
from kvbm.core.policy import OTHERS
from kvbm.janitor.effects import ClaimColumns, Header, KnownClaims, ObjectSeen

_PLAIN = re.compile(r"([1-9][0-9]{0,4})/([0-9a-f]{32})/([0-9a-f]{32})")
_SEALED = re.compile(r"([1-9][0-9]{0,4})/e/([0-9a-f]{16})/([0-9a-f]{64})")
_COLUMN = f"S{HASH_BYTES}"


class ObjectName(NamedTuple):
    """The parts of an object's name.

    Attributes:
        blocks: k.
        namespace: None where the name does not tell.
        key: 16 bytes that tell it from others: the hash of its last block, or the first bytes of what stands for it.
    """

    blocks: int
    namespace: NamespaceId | None
    key: bytes


class ClaimRow(NamedTuple):
    """A claim: its position in the columns of a namespace."""

    namespace: NamespaceId
    at: int


class Victim(NamedTuple):
    """An object that is to go, by its last block; `blocks` is its k."""

    namespace: NamespaceId
    block: bytes
    blocks: int
    reason: EvictReason


def parse(name: str) -> ObjectName | None:
    """The parts of an object's name; None for what is none of ours."""
    if plain := _PLAIN.fullmatch(name):
        return ObjectName(int(plain[1]), NamespaceId(bytes.fromhex(plain[2])), bytes.fromhex(plain[3]))
    if sealed := _SEALED.fullmatch(name):
        return ObjectName(int(sealed[1]), None, bytes.fromhex(sealed[3])[:HASH_BYTES])
    return None


class NamespaceClaims:
    """One namespace: its claims, and which of them are the last block of an object that is there.

    Attributes:
        sizes, blocks: of the object whose last block a row is; `blocks` 0 where it is none.
        known_ns: when that object was put, or was last used in another cluster.
    """

    def __init__(self, columns: ClaimColumns) -> None:
        self.namespace, self.tenant = columns.namespace, columns.tenant
        self.hashes = np.frombuffer(columns.hashes, dtype=_COLUMN)
        self.last_ns = columns.last_ns
        self.sizes = np.zeros(len(self.hashes), dtype=np.int64)
        self.known_ns = np.zeros(len(self.hashes), dtype=np.int64)
        self.blocks = np.zeros(len(self.hashes), dtype=np.int64)
        self._shared = np.empty(0, dtype=_COLUMN)  # ascending: blocks of several objects
        self._holders = np.empty(0, dtype=np.int64)  # how many hold each of them
        self._knows_shared = True

    def row(self, block: bytes) -> int | None:
        """Where a block is claimed."""
        return _find(self.hashes, block)

    def block(self, row: int) -> bytes:
        """The hash of a row."""
        return self.hashes[row : row + 1].tobytes()

    def take(self, row: int, blocks: int, seen: ObjectSeen, elsewhere_ns: int) -> None:
        """An object is there whose last block this is; `elsewhere_ns`: when another cluster last used it."""
        self.blocks[row], self.sizes[row] = blocks, seen.size_bytes
        self.known_ns[row] = max(seen.modified_ns, elsewhere_ns)

    def used_ns(self) -> np.ndarray:
        """When each object was last claimed, used or put, whichever is latest: no clock that runs behind makes it older
        than it is.
        """
        used_ns: np.ndarray = np.maximum(self.last_ns, self.known_ns)
        return used_ns

    def learn_shared(self, held: np.ndarray | None) -> None:
        """Learn which blocks are in several objects: `held` are those of all objects, repeats included;

        None: nobody can tell.
        """
        self._knows_shared = held is not None
        if held is not None:
            blocks, counts = np.unique(held, return_counts=True)
            self._shared, self._holders = blocks[counts > 1], counts[counts > 1]

    def own(self, hashes: bytes) -> bytes:
        """Those blocks of an object that no other object holds; its last one always is."""
        return b"".join(block for block, row in self._with_rows(hashes) if row is None)

    def leave(self, hashes: bytes) -> bytes:
        """An object goes. Returns those of its blocks that no other holds any more."""
        last: list[bytes] = []
        for block, row in self._with_rows(hashes):
            if row is not None and row >= 0:
                self._holders[row] -= 1
            if row is None or (row >= 0 and not self._holders[row]):
                last.append(block)
        return b"".join(last)

    def _with_rows(self, hashes: bytes) -> Iterator[tuple[bytes, int | None]]:
        """The blocks of an object, each with its row among those shared: None where it is the object's own, -1 where
        nobody can tell.
        """
        for at in range(0, len(hashes), HASH_BYTES):
            block = hashes[at : at + HASH_BYTES]
            is_last = at + HASH_BYTES == len(hashes)
            yield block, (_find(self._shared, block) if self._knows_shared else None if is_last else -1)

    def packed(self, rows: np.ndarray) -> bytes:
        """The hashes of rows."""
        return bytes(self.hashes[rows].tobytes())


class Holdings:
    """See the module.

    Attributes:
        claims: of each namespace.
        young: name and k of objects without a claim that may get one yet.
        found: packed hashes of objects that nobody claimed, by namespace.
        nameless: namespaces of which nobody here can tell under what names they stand: whose tenant they are has not
            been said.
        names: of the objects of those, by namespace and last block; their headers told.
        untold: objects that look like ours and whose headers nobody here can read.
    """

    def __init__(self, claimed: KnownClaims) -> None:
        self.claims = {columns.namespace: NamespaceClaims(columns) for columns in claimed.columns}
        self.quotas = claimed.quotas
        self.young: list[tuple[str, int]] = []
        self.found: dict[NamespaceId, list[bytes]] = {}
        self.nameless: set[NamespaceId] = set()
        self.names: dict[tuple[NamespaceId, bytes], str] = {}
        self.untold = 0
        self._sealed: dict[int, tuple[np.ndarray, list[ClaimRow]]] = {}  # k → keys, ascending, and what each stands for

    def row(self, name: ObjectName) -> ClaimRow | None:
        """The claim of an object's last block; None when it is not claimed."""
        if name.namespace is None:
            keys, rows = self._sealed[name.blocks]
            at = _find(keys, name.key)
            return None if at is None else rows[at]
        claims = self.claims.get(name.namespace)
        index = None if claims is None else claims.row(name.key)
        return None if index is None else ClaimRow(name.namespace, index)

    def take_by_header(self, header: Header, seen: ObjectSeen, elsewhere_ns: int) -> bool:
        """An object is there that its name did not tell of; whether it is claimed."""
        claims, block = self.claims.get(header.namespace), header.hashes[-HASH_BYTES:]
        row = None if claims is None else claims.row(block)
        if claims is None or row is None or header.namespace not in self.nameless:
            return False
        claims.take(row, len(header.hashes) // HASH_BYTES, seen, elsewhere_ns)
        self.names[header.namespace, block] = seen.name
        return True

    def newest_ns(self, namespace: NamespaceId, hashes: bytes) -> int:
        """When any of some blocks was last claimed or used; 0 where none is claimed."""
        claims = self.claims[namespace]
        rows = (claims.row(hashes[at : at + HASH_BYTES]) for at in range(0, len(hashes), HASH_BYTES))
        return max((int(claims.last_ns[row]) for row in rows if row is not None), default=0)

    def knows_sealed(self, blocks: int) -> bool:
        """Whether `learn_sealed` has been told."""
        return blocks in self._sealed

    def learn_sealed(self, blocks: int, names: Mapping[NamespaceId, Sequence[str]]) -> None:
        """Learn what the claims of namespaces stand under whose names tell nothing, each in the order of its rows."""
        entries = []
        for namespace, named in names.items():
            for row, name in enumerate(named):
                parts = parse(name)
                if parts is not None and parts.namespace is None:
                    entries.append((parts.key, ClaimRow(namespace, row)))
        entries.sort()
        keys = np.frombuffer(b"".join(key for key, _ in entries), dtype=_COLUMN)
        self._sealed[blocks] = keys, [row for _, row in entries]


def expired(holdings: Holdings, now_ns: int, older_ns: int) -> Iterator[Victim]:
    """The objects last claimed, used or put longer ago than that."""
    for claims in holdings.claims.values():
        rows = np.flatnonzero((claims.blocks > 0) & (now_ns - claims.used_ns() > older_ns))
        yield from _victims(claims, rows, EvictReason.TTL)


def placed(claims: NamespaceClaims, reason: EvictReason) -> Iterator[Victim]:
    """All objects of a namespace that are there."""
    yield from _victims(claims, np.flatnonzero(claims.blocks > 0), reason)


class TenantPart(NamedTuple):
    """What a tenant may have of a pool.

    Attributes:
        weight: its part of a pool that is full, at least 1.
        quota_bytes: what it may have at most; None: what SQL says, or no limit.
    """

    weight: int = 1
    quota_bytes: int | None = None


_Entry = tuple[int, NamespaceId, int]  # (when it was used, namespace, row)


def over_quota(
    holdings: Holdings,
    gone: Mapping[NamespaceId, set[bytes]],
    quota_bytes: int,
    more_bytes: int,
    parts: Mapping[str, TenantPart] | None = None,
) -> list[Victim]:
    """The least recently used objects, as many as stand above what a tenant, and then the whole pool, may have.

    Args:
        gone: those that go anyway.
        quota_bytes: of the whole pool; 0: no limit.
        more_bytes: what the pool has beside the objects that can be chosen.
        parts: of tenants, where they have some: who has most for its weight gives up first what the pool has too much.
    """
    parts = parts or {}
    victims: list[Victim] = []
    shared: dict[str, list[_Entry]] = {}  # by whose share they are of; all in one where nobody has one
    by_tenant: dict[str, list[_Entry]] = {}
    for claims in holdings.claims.values():
        going = gone.get(claims.namespace, set())
        rows = [int(row) for row in np.flatnonzero(claims.blocks > 0) if claims.block(int(row)) not in going]
        used_ns = claims.used_ns()
        by_tenant.setdefault(claims.tenant, []).extend((int(used_ns[row]), claims.namespace, row) for row in rows)
    for tenant, entries in by_tenant.items():
        named = parts.get(tenant, TenantPart())
        quota = holdings.quotas.get(tenant) if named.quota_bytes is None else named.quota_bytes
        count = _first_above(holdings, entries, quota)
        victims += [_one(holdings, entry) for entry in entries[:count]]
        shared.setdefault(tenant if tenant in parts else OTHERS, []).extend(entries[count:])
    if others := shared.get(OTHERS):
        count = _first_above(holdings, others, parts.get(OTHERS, TenantPart()).quota_bytes)
        victims += [_one(holdings, entry) for entry in others[:count]]
        shared[OTHERS] = others[count:]
    if quota_bytes:
        victims += [_one(holdings, entry) for entry in _above(holdings, shared, quota_bytes, more_bytes, parts)]
    return victims


def _first_above(holdings: Holdings, entries: list[_Entry], quota_bytes: int | None) -> int:
    """Sorts objects by when they were used.

    Returns how many, from the first on, must go so that the rest is within a quota.
    """
    entries.sort()
    return 0 if quota_bytes is None else len(_above(holdings, {OTHERS: entries}, quota_bytes, 0, {}))


def _above(
    holdings: Holdings,
    shared: Mapping[str, Sequence[_Entry]],
    quota_bytes: int,
    more_bytes: int,
    parts: Mapping[str, TenantPart],
) -> list[_Entry]:
    """Which must go so that the rest is within a quota: always the next of the share with most bytes for its weight."""
    left = {
        share: deque((entry, int(holdings.claims[entry[1]].sizes[entry[2]])) for entry in entries)
        for share, entries in shared.items()
    }
    held = {share: sum(size for _, size in entries) for share, entries in left.items()}
    over, going = sum(held.values()) + more_bytes - quota_bytes, []
    while over > 0 and any(left.values()):
        share = max(
            (share for share in left if left[share]),
            key=lambda share: held[share] / parts.get(share, TenantPart()).weight,
        )
        entry, size = left[share].popleft()
        going.append(entry)
        held[share] -= size
        over -= size
    return going


def _one(holdings: Holdings, entry: _Entry) -> Victim:
    _, namespace, row = entry
    return next(_victims(holdings.claims[namespace], np.array([row]), EvictReason.QUOTA))


def _victims(claims: NamespaceClaims, rows: np.ndarray, reason: EvictReason) -> Iterator[Victim]:
    for row in rows.tolist():
        yield Victim(claims.namespace, claims.block(row), int(claims.blocks[row]), reason)


def lacking(hashes: np.ndarray, known: np.ndarray) -> np.ndarray:
    """Rows of `hashes` that are not among `known`, which is sorted."""
    if not len(known):
        return np.arange(len(hashes))
    at = np.minimum(np.searchsorted(known, hashes), len(known) - 1)
    return np.flatnonzero(known[at] != hashes)


def column(hashes: bytes) -> np.ndarray:
    """Packed hashes as a sorted column."""
    sorted_hashes: np.ndarray = np.sort(np.frombuffer(hashes, dtype=_COLUMN))
    return sorted_hashes


def _find(keys: np.ndarray, key: bytes) -> int | None:
    wanted = np.frombuffer(key, dtype=_COLUMN)
    row = int(np.searchsorted(keys, wanted)[0])
    return row if row < len(keys) and keys[row] == wanted[0] else None
