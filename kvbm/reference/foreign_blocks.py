"""What one engine holds, block by block, under its own hashes: events → facts. The specification of `bridge.table`."""

from __future__ import annotations

import struct
from collections import Counter, OrderedDict
from collections.abc import Iterator, Sequence

from kvbm.core.backend import SequenceHashes
from kvbm.core.errors import KvbmError
from kvbm.core.events import MAX_RUN_BLOCKS, EvictReason
from kvbm.core.ids import HASH_BYTES, NO_PARENT, NamespaceId, SequenceHash, Tier
from kvbm.streams.foreign.blocks import (
    OWN_TIERS,
    Arrived,
    Emptied,
    Fact,
    Gained,
    Lost,
    NamedBlocks,
    NamespaceNamed,
    cleared_tiers,
)
from kvbm.streams.foreign.events import (
    BlockKey,
    BlocksStored,
    Cleared,
    EventRefusal,
    ForeignEvent,
    RefusedEvent,
    Removed,
)
from kvbm.streams.foreign.identity import ForeignSource, Homes

_Remembered = BlockKey | tuple[int, BlockKey]  # a block's key; with its group, where the engine has several

# our hash, position in its chain, number of its namespace, copies in HBM, other tiers
_ENTRY = struct.Struct("<16sIBHB")
_START, _REST = struct.Struct("<I"), struct.Struct("<BHB")  # its parts behind the hash
_NUMBER, _TIERS = 20, 21  # where in it
_IN_HBM_ONCE, _NOWHERE = struct.pack("<HB", 1, 0), struct.pack("<HB", 0, 0)
_MOST_COPIES = 0xFFFF
_MOST_START = 0xFFFFFFFF
_COLDER = {Tier.HOST: 1, Tier.NVME: 2, Tier.OBJECT: 4}  # bits of the other tiers


class ForeignBlocks(NamedBlocks):
    """See the module. No clock, no I/O. `bridge.table.TableBlocks` is the native implementation.

    Args:
        hash_tokens: `sequence_hashes` or its native implementation.
    """

    def __init__(self, source: ForeignSource, hash_tokens: SequenceHashes) -> None:
        super().__init__(source)
        self._hash_tokens = hash_tokens
        self._known: dict[_Remembered, bytes] = {}
        # Of the known, those that no tier holds, the longest gone first: a plain dict finds its first slowly
        self._gone: OrderedDict[_Remembered, None] = OrderedDict()

    @property
    def counts(self) -> Counter[EventRefusal]:
        """Events and blocks that count for nothing."""
        return self._counts

    @property
    def is_empty(self) -> bool:
        """Whether no tier holds anything."""
        return len(self._known) == len(self._gone)

    @property
    def remembered(self) -> int:
        """How many blocks are remembered, those that are gone included."""
        return len(self._known)

    def take(self, payload: bytes, rank: int | None) -> bool:
        """See `EngineBlocks.take`: events alone are applied here."""
        return False

    def apply(self, event: ForeignEvent) -> Iterator[Fact]:
        """What an event changes. Raises Uncertain: it may have said that blocks are gone."""
        match event:
            case BlocksStored():
                yield from self._store(event)
            case Removed():
                yield from self._remove(event)
            case Cleared():
                for tier in cleared_tiers(event):
                    yield from self._clear(tier)
            case RefusedEvent():
                self.refuse_event(event)

    def drop(self, forgets: bool) -> None:
        """Hold nothing any more.

        Args:
            forgets: whether what the engine's hashes mean is forgotten as well: another process may mean something else
                by them.
        """
        if forgets:
            self._known.clear()
            self._gone.clear()
            self._homes = Homes(self._source)
            return
        gone: list[_Remembered] = []
        for key, entry in self._known.items():
            ours, start, number, copies, others = _ENTRY.unpack(entry)
            if copies or others:
                self._known[key] = _ENTRY.pack(ours, start, number, 0, 0)
                gone.append(key)
        self._note_gone(gone)

    # -- stored -------------------------------------------------------------------------------------------------------

    def _store(self, event: BlocksStored) -> Iterator[Fact]:
        home = self.home(event)
        if home is None:
            return
        tier, number, is_new = home
        if is_new:
            yield NamespaceNamed(self._homes.all[number].namespace)
        keys: Sequence[_Remembered] = event.keys
        if event.group:
            keys = [(event.group, key) for key in event.keys]
        count, width = len(event.keys), event.width or event.block_tokens
        before = self._before(event, number) if len(event.tokens) == count * width else None
        if before is None:
            yield from self._store_known(tier, keys)
            return
        parent, start = before
        root = parent if start else self._homes.all[number].root
        try:
            hashes = self._hash_tokens(event.tokens, width, root, event.extra)
        except (KvbmError, TypeError, ValueError, OverflowError):  # a token that is none
            self.counts[EventRefusal.MALFORMED] += 1
            return
        yield from self._store_chain(tier, keys, number, parent, start, hashes)

    def _before(self, event: BlocksStored, number: int) -> tuple[SequenceHash, int] | None:
        """The block before the first, and the first's position; None: it is not known."""
        if event.parent is None:
            return NO_PARENT, 0
        entry = self._known.get((event.group, event.parent) if event.group else event.parent)
        if entry is None:
            return None
        ours, start, of, _, _ = _ENTRY.unpack(entry)
        if of != number or start + len(event.keys) >= _MOST_START:
            return None
        return SequenceHash(ours), start + 1

    def _store_chain(
        self, tier: Tier, keys: Sequence[_Remembered], number: int, parent: SequenceHash, start: int, hashes: bytes
    ) -> Iterator[Fact]:
        """Blocks whose own hashes are known from their tokens."""
        known, bit = self._known, _COLDER.get(tier, 0)
        id_ = self._homes.all[number].namespace.id
        room = self._source.most_blocks - len(known) + len(self._gone)
        if len(keys) <= room and known.keys().isdisjoint(keys) and len({*keys}) == len(keys):  # as most are
            rest = _REST.pack(number, not bit, bit)
            starts = range(0, len(hashes), HASH_BYTES)
            entries = [hashes[at : at + HASH_BYTES] + _START.pack(start + n) + rest for n, at in enumerate(starts)]
            known.update(zip(keys, entries, strict=True))
            yield from _gained(id_, tier, parent, start, hashes, 0, len(keys))
            return
        begin = 0  # of the run that is being gathered
        for at, key in enumerate(keys):
            ours = hashes[at * HASH_BYTES : at * HASH_BYTES + HASH_BYTES]
            entry = known.get(key)
            if entry is None:
                if len(known) - len(self._gone) < self._source.most_blocks:
                    known[key] = _ENTRY.pack(ours, start + at, number, not bit, bit)
                    continue
                self.counts[EventRefusal.BEYOND] += 1
            elif entry[:HASH_BYTES] != ours:
                self.counts[EventRefusal.CONFLICT] += 1
            elif self._gain(key, entry, bit):
                continue
            yield from _gained(id_, tier, parent, start, hashes, begin, at)
            begin = at + 1
        yield from _gained(id_, tier, parent, start, hashes, begin, len(keys))

    def _store_known(self, tier: Tier, keys: Sequence[_Remembered]) -> Iterator[Fact]:
        """Blocks that only the engine's hashes tell of."""
        bit = _COLDER.get(tier, 0)
        arrived: dict[int, bytearray] = {}
        for key in keys:
            entry = self._known.get(key)
            if entry is None:
                self.counts[EventRefusal.UNMAPPED] += 1
            elif self._gain(key, entry, bit):
                arrived.setdefault(entry[_NUMBER], bytearray()).extend(entry[:HASH_BYTES])
        for number, hashes in arrived.items():
            for run in _runs(bytes(hashes)):
                yield Arrived(self._homes.all[number].namespace.id, tier, run)

    def _gain(self, key: _Remembered, entry: bytes, bit: int) -> bool:
        """Note that a tier has a known block; whether it had none before."""
        ours, start, number, copies, others = _ENTRY.unpack(entry)
        if bit:
            if others & bit:
                return False
            is_first, others = True, others | bit
        else:
            is_first = not copies
            if copies and not self._source.counts_copies:
                return False
            copies = min(copies + 1, _MOST_COPIES)
        self._known[key] = _ENTRY.pack(ours, start, number, copies, others)
        self._gone.pop(key, None)
        return is_first

    # -- removed ------------------------------------------------------------------------------------------------------

    def _remove(self, event: Removed) -> Iterator[Fact]:
        if not event.medium:
            yield from self._remove_anywhere(event)
            return
        tier = self.tier(event.medium, event.ownership)
        if tier is not None:
            self._removed += len(event.keys)
            yield from self._remove_from(tier, event)

    def _remove_anywhere(self, event: Removed) -> Iterator[Fact]:
        """Blocks that the engine has in no medium any more.

        One that is not known counts for nothing: such engines also name blocks that were never full.
        """
        self._removed += len(event.keys)
        for tier in OWN_TIERS:
            bit = _COLDER.get(tier, 0)
            held = [key for key in event.keys if self._is_held((event.group, key) if event.group else key, bit)]
            yield from self._remove_from(tier, event._replace(keys=held))

    def _is_held(self, key: _Remembered, bit: int) -> bool:
        entry = self._known.get(key)
        if entry is None:
            return False
        _, _, _, copies, others = _ENTRY.unpack(entry)
        return bool(others & bit if bit else copies)

    def _remove_from(self, tier: Tier, event: Removed) -> Iterator[Fact]:
        bit, known = _COLDER.get(tier, 0), self._known
        lost: dict[int, bytearray] = {}
        for plain in event.keys:
            key = (event.group, plain) if event.group else plain
            entry = known.get(key)
            if entry is None:
                self.counts[EventRefusal.NOT_HELD] += 1
            elif entry[_TIERS:] == _IN_HBM_ONCE and not bit:  # as most are
                known[key] = entry[:_TIERS] + _NOWHERE
                self._gone[key] = None
                number = entry[_NUMBER]
                if number not in lost:
                    lost[number] = bytearray()
                lost[number] += entry[:HASH_BYTES]
            elif self._remove_one(key, entry, tier, bit):
                lost.setdefault(entry[_NUMBER], bytearray()).extend(entry[:HASH_BYTES])
        for number, hashes in lost.items():
            for run in _runs(bytes(hashes)):
                yield Lost(self._homes.all[number].namespace.id, tier, EvictReason.CAPACITY, run)
        self._forget_gone()

    def _remove_one(self, key: _Remembered, entry: bytes, tier: Tier, bit: int) -> bool:
        """Note that a tier has one copy of a known block less; whether it has none now."""
        ours, start, number, copies, others = _ENTRY.unpack(entry)
        # a claim of an object is everybody's, whatever this source was known to have put
        if not (tier is Tier.OBJECT or (others & bit if bit else copies)):
            self.counts[EventRefusal.NOT_HELD] += 1
            return False
        if bit:
            others &= ~bit
        else:
            copies -= 1
        self._known[key] = _ENTRY.pack(ours, start, number, copies, others)
        if not (copies or others):
            self._gone.setdefault(key)
        return bool(bit or not copies)

    def _clear(self, tier: Tier) -> Iterator[Fact]:
        """The engine empties a tier; what it has in others stays there."""
        bit = _COLDER.get(tier, 0)
        gone: list[_Remembered] = []
        for key, entry in self._known.items():
            ours, start, number, copies, others = _ENTRY.unpack(entry)
            if others & bit if bit else copies:
                copies, others = (copies, others & ~bit) if bit else (0, others)
                self._known[key] = _ENTRY.pack(ours, start, number, copies, others)
                if not (copies or others):
                    gone.append(key)
        self._note_gone(gone)
        yield Emptied(tier)

    def _note_gone(self, keys: list[_Remembered]) -> None:
        """Note blocks as gone that went together.

        The deepest are forgotten first: what is stored next is more often behind the others.
        """

        def order(key: _Remembered) -> tuple[int, bytes, bool, BlockKey]:
            ours, start, _, _, _ = _ENTRY.unpack(self._known[key])
            plain = key[1] if isinstance(key, tuple) else key
            return -start, ours, isinstance(plain, bytes), plain

        self._gone.update(dict.fromkeys(sorted(keys, key=order)))
        self._forget_gone()

    def _forget_gone(self) -> None:
        while len(self._gone) > self._source.most_gone:
            del self._known[self._gone.popitem(last=False)[0]]


def _gained(
    namespace: NamespaceId, tier: Tier, parent: SequenceHash, start: int, hashes: bytes, begin: int, end: int
) -> Iterator[Gained]:
    """Blocks [begin, end) of a chain that begins at `start` behind `parent`."""
    for at in range(begin, end, MAX_RUN_BLOCKS):
        stop = min(end, at + MAX_RUN_BLOCKS)
        before = SequenceHash(hashes[(at - 1) * HASH_BYTES : at * HASH_BYTES]) if at else parent
        yield Gained(namespace, tier, before, start + at, hashes[at * HASH_BYTES : stop * HASH_BYTES])


def _runs(hashes: bytes) -> Iterator[bytes]:
    width = MAX_RUN_BLOCKS * HASH_BYTES
    for at in range(0, len(hashes), width):
        yield hashes[at : at + width]
