"""Reading blocks that other instances lend: a reader for each, made when it is first needed, the best way there is
between the two.

Who cannot give what it was said to have is left alone for a while, and a way that does not work too. What transfers
cost is measured.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import NamedTuple

import numpy as np

from kvbm.core.answers import PeerHolding
from kvbm.core.errors import KvbmError
from kvbm.core.fetching import LeftAlone, Links, Transfer
from kvbm.core.ids import InstanceId, Namespace, NamespaceId, hash_count
from kvbm.core.peer_address import PeerAddress, address_of
from kvbm.core.reads import ReadOutcome, ReadResult
from kvbm.core.topology import Link
from kvbm.safe_log import SafeLog
from kvbm.transport.base import PeerRead, PeerReader, failed_read

log = SafeLog()

MEMORY, RDMA, NIXL, TCP = "memory", "rdma", "nixl", "tcp"
MOST_READERS = 32
_MOST_PASSED_OVER = 1024  # ways that are remembered
_MOST_TRANSFERS = 64  # that wait to be told of; newer ones take the place of older ones

OpenReader = Callable[[InstanceId, str, PeerAddress], PeerReader]
"""Makes a reader: of whom, by which transport, and where it lends.

Raises KvbmError or OSError: it cannot be reached so.
"""


class PeerSource(NamedTuple):
    """An instance that may be read from.

    Attributes:
        end: blocks it is said to have, from the first that was asked for on.
        is_expected: it is about to get them, so those that it lacks now say nothing of it.
        link: what reading from it is taken to cost.
        together_bytes_per_s: as `core.fetching.FetchSource` has it.
    """

    instance: InstanceId
    end: int
    distance: int
    address: PeerAddress
    transport: str
    link: Link
    together_bytes_per_s: float = 0.0
    is_expected: bool = False


class PeerStats(NamedTuple):
    """What was counted since the start.

    Attributes:
        reads: questions to peers. failed_reads: those that did not go as they should.
        blocks, bytes: that came, verified, by transport.
        missing_blocks: that a peer was said to have and had not.
        corrupt_blocks: whose bytes were others, here or on the way.
        readers: open now.
    """

    reads: int = 0
    failed_reads: int = 0
    missing_blocks: int = 0
    corrupt_blocks: int = 0
    blocks: dict[str, int] = {}  # noqa: RUF012  # never changed in place
    bytes: dict[str, int] = {}  # noqa: RUF012
    readers: int = 0


class _Key(NamedTuple):
    """Of a reader. An instance that has moved is another."""

    instance: InstanceId
    transport: str
    address: PeerAddress


class _Open:
    """A reader, and how many read from it now."""

    def __init__(self, reader: PeerReader) -> None:
        self.reader, self.users = reader, 0


class Peers:
    """See the module. Any thread may call it.

    Args:
        open_reader: see OpenReader.
        host_id: of this machine, as in `PeerAddress`.
        transports: those that can be used from here, of "memory", "rdma", "nixl" and "tcp".
        may_open: whether a namespace's root is known, which its blocks are asked for with.
        most_readers: open at a time; the one that was not used for longest goes.
    """

    def __init__(
        self,
        open_reader: OpenReader,
        host_id: str,
        transports: Collection[str],
        may_open: Callable[[Namespace], bool] = lambda _: True,
        most_readers: int = MOST_READERS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._open_reader, self._host_id, self._transports = open_reader, host_id, frozenset(transports)
        self._may_open, self._most, self._clock = may_open, most_readers, clock
        self._guard = threading.Lock()
        self._namespaces: dict[NamespaceId, Namespace] = {}
        self._readers: OrderedDict[_Key, _Open] = OrderedDict()
        self._links = Links()
        self._lacking, self._broken = LeftAlone(), LeftAlone()  # instances, and ways to instances
        self._busy = LeftAlone(first_s=0.0)  # instances that have said when to come again: until then, and no longer
        self._shut = LeftAlone()  # namespaces of instances that do not lend them
        self._passed_over: OrderedDict[str, str] = OrderedDict()  # ways whose reads went by TCP instead, and why
        self._is_closed = False
        self._reads = self._failed = self._missing = self._corrupt = 0
        self._blocks: dict[str, int] = {}
        self._bytes: dict[str, int] = {}
        self._transfers: deque[Transfer] = deque(maxlen=_MOST_TRANSFERS)

    def declare(self, namespaces: Iterable[Namespace]) -> None:
        """Say what namespaces are, before their blocks are read."""
        with self._guard:
            self._namespaces.update((one.id, one) for one in namespaces)

    def declared(self) -> list[Namespace]:
        """The namespaces that are known."""
        with self._guard:
            return list(self._namespaces.values())

    def knows(self, namespace: NamespaceId) -> bool:
        """Whether blocks of a namespace can be asked for."""
        known = self._namespaces.get(namespace)
        return known is not None and self._may_open(known)

    def sources(self, namespace: NamespaceId, peers: Sequence[PeerHolding], expected: str = "") -> list[PeerSource]:
        """Whom of these to ask for blocks of a namespace now, and how, in their order.

        Args:
            expected: an instance that is about to get them. Whether it had what it was said to have does not matter.
        """
        found: list[PeerSource] = []
        with self._guard:
            now_s = self._clock()
            for one in peers:
                instance, address = InstanceId(one.instance), address_of(one.lends)
                is_expected = one.instance == expected
                if address is None or self._is_closed:
                    continue
                if not self._may_locked(now_s, instance, namespace, is_expected):
                    continue
                if (transport := self._best_locked(now_s, instance, address)) is None:
                    continue
                link = self._links.link(now_s, instance, transport, one.distance)
                together = 0.0
                if transport == TCP:
                    together = self._links.alone_bytes_per_s(now_s, instance, transport, one.distance)
                found.append(
                    PeerSource(instance, one.depth, one.distance, address, transport, link, together, is_expected)
                )
        return found

    def is_busy(self, instance: str) -> bool:
        """Whether an instance has said to come again later, and it is not later yet."""
        with self._guard:
            return not self._busy.may(self._clock(), instance)

    def read(
        self,
        source: PeerSource,
        namespace: NamespaceId,
        hashes: bytes,
        rows: np.ndarray,
        at: Sequence[int] | None,
        deadline_s: float,
    ) -> ReadResult:
        """Fill rows with blocks of an instance, verified; afterwards nobody writes them.

        Trouble is an outcome, and one warning.

        Args:
            hashes, rows, at, deadline_s: as `PeerReader.read`.
        """
        source = self._rerouted(source)
        key = _Key(source.instance, source.transport, source.address)
        known, count = self._namespaces.get(namespace), hash_count(hashes)
        try:
            held = self._taken(key, namespace, source.is_expected)
        except (KvbmError, OSError) as error:
            self._note(source, namespace, failed_read(count, str(error) or type(error).__name__), 0.0, 0)
            return failed_read(count, "").result
        if held is None or known is None:
            self._give_back(key, held)
            return failed_read(count, "").result
        begun_s = self._clock()
        try:
            read = held.reader.read(known, hashes, rows, at, deadline_s)
        finally:
            self._give_back(key, held)
        self._note(source, namespace, read, self._clock() - begun_s, rows.shape[1])
        return read.result

    def stats(self) -> PeerStats:
        """What was counted."""
        with self._guard:
            return PeerStats(
                self._reads,
                self._failed,
                self._missing,
                self._corrupt,
                dict(self._blocks),
                dict(self._bytes),
                len(self._readers),
            )

    def take_transfers(self) -> tuple[Transfer, ...]:
        """Reads since the last call, or the newest of them."""
        with self._guard:
            taken = tuple(self._transfers)
            self._transfers.clear()
        return taken

    def close(self) -> None:
        """End reads under way, which fail, and give back connections. Idempotent."""
        with self._guard:
            self._is_closed = True
            readers = [held.reader for held in self._readers.values()]
            self._readers.clear()
        for reader in readers:
            reader.close()

    # -- inside -------------------------------------------------------------------------------------------------------

    def _may_locked(self, now_s: float, instance: InstanceId, namespace: NamespaceId, is_expected: bool) -> bool:
        """Whether an instance may be asked for blocks of a namespace, by whatever way."""
        is_shut = not self._shut.may(now_s, _shut_name(instance, namespace))
        may_have = is_expected or self._lacking.may(now_s, instance)
        return not is_shut and may_have and self._busy.may(now_s, instance)

    def _best_locked(self, now_s: float, instance: InstanceId, address: PeerAddress) -> str | None:
        """How to read from an instance now; None: in no way."""
        ways = []
        if address.unix and address.host_id == self._host_id:
            ways.append(MEMORY)
        if address.rdma:  # refused as long as a namespace of the owner is not proved: TCP serves then
            ways.append(RDMA)
        if address.nixl:  # likewise; switched on where UCX has a fabric that RDMA here does not use (decision 143)
            ways.append(NIXL)
        if address.tcp:
            ways.append(TCP)
        return next(
            (way for way in ways if way in self._transports and self._broken.may(now_s, f"{instance} {way}")), None
        )

    def _rerouted(self, source: PeerSource) -> PeerSource:
        """The same, by TCP where it was planned by a way that is passed over since."""
        way, tcp = f"{source.instance} {source.transport}", f"{source.instance} {TCP}"
        with self._guard:
            now_s = self._clock()
            if way not in self._passed_over or self._broken.may(now_s, way) or not self._broken.may(now_s, tcp):
                return source
        return source._replace(transport=TCP)

    def _taken(self, key: _Key, namespace: NamespaceId, is_expected: bool) -> _Open | None:
        """A reader to use, made where there is none; None: not now. Raises KvbmError, OSError: it cannot be made."""
        with self._guard:
            now_s = self._clock()
            if self._is_closed or not self._broken.may(now_s, f"{key.instance} {key.transport}"):
                return None  # what was planned before the trouble fails at once
            if not self._may_locked(now_s, key.instance, namespace, is_expected):
                return None
            held = self._readers.get(key)
            if held is not None:
                self._readers.move_to_end(key)
                held.users += 1
                return held
        return self._kept(key, self._open_reader(*key))

    def _kept(self, key: _Key, reader: PeerReader) -> _Open | None:
        """A new reader to use, or the one that another thread has made meanwhile; None: it is over."""
        unused: list[PeerReader] = []
        with self._guard:
            if self._is_closed:
                unused.append(reader)
                made = None
            elif (other := self._readers.get(key)) is not None:
                unused.append(reader)
                made = other
            else:
                made = self._readers[key] = _Open(reader)
                unused += self._superfluous_locked(key)
            if made is not None:
                made.users += 1
        for one in unused:
            one.close()
        return made

    def _superfluous_locked(self, new: _Key) -> list[PeerReader]:
        """Readers that go for a new one: those of an address its instance has left, and the least used."""
        old = [key for key in self._readers if key[:2] == new[:2] and key != new]
        idle = [key for key, held in self._readers.items() if not held.users and key != new and key not in old]
        old += idle[: max(0, len(self._readers) - len(old) - self._most)]
        return [self._readers.pop(key).reader for key in old]

    def _give_back(self, key: _Key, held: _Open | None) -> None:
        if held is None:
            return
        with self._guard:
            held.users -= 1

    def _note(
        self, source: PeerSource, namespace: NamespaceId, read: PeerRead, took_s: float, block_bytes: int
    ) -> None:
        """Take note of how a read went: what it cost, and whether its peer is to be left alone."""
        instance, outcomes = source.instance, read.result.outcomes
        transport = read.by or source.transport
        good = outcomes.count(ReadOutcome.GOOD)
        missing, corrupt = outcomes.count(ReadOutcome.MISSING), outcomes.count(ReadOutcome.CORRUPT)
        if source.is_expected:  # they may come yet
            missing = 0
        is_news = is_passed = False
        with self._guard:
            now_s = self._clock()
            self._reads += 1
            self._missing += missing
            self._corrupt += corrupt
            self._failed += bool(read.trouble) or corrupt > 0
            self._blocks[transport] = self._blocks.get(transport, 0) + good
            self._bytes[transport] = self._bytes.get(transport, 0) + good * block_bytes
            if good or (read.trouble and not read.retry_s and not read.is_shut):
                self._links.measured(now_s, instance, transport, good * block_bytes, took_s, source.distance)
                told = Transfer(transport, source.distance, good * block_bytes, round(took_s * 1e6))
                self._transfers.append(told)
            way = f"{instance} {transport}"
            if self._is_closed:
                return
            if read.passed_over:
                is_passed = self._pass_over_locked(now_s, f"{instance} {source.transport}", read.passed_over)
            elif good or read.trouble:
                self._passed_over.pop(way, None)
            if read.retry_s:  # before its words: who is busy is not broken
                self._busy.failed(now_s, instance, read.retry_s)
            elif read.is_shut:  # others of its namespaces it may lend
                is_news = self._shut.failed(now_s, _shut_name(instance, namespace))
            elif read.trouble:
                is_news = self._broken.failed(now_s, way)
            elif good and not corrupt:
                self._broken.worked(way)
                self._shut.worked(_shut_name(instance, namespace))
                if ReadOutcome.MISSING not in outcomes:
                    self._lacking.worked(instance)
            elif missing or corrupt:
                self._lacking.failed(now_s, instance)
        if is_passed:
            log.warning(
                "peer.passed_over",
                peer=instance,
                transport=source.transport,
                why=read.passed_over,
                effect=f"its blocks are read over {transport}",
            )
        if is_news:
            log.warning(
                "peer.unread",
                peer=instance,
                transport=transport,
                why=read.trouble,
                effect="its blocks are computed or read elsewhere",
            )
        elif corrupt:
            log.warning(
                "peer.corrupt",
                peer=instance,
                transport=transport,
                blocks=corrupt,
                effect="they are computed or read elsewhere",
            )

    def _pass_over_locked(self, now_s: float, way: str, why: str) -> bool:
        """Leave a way alone for a while, for another serves.

        Whether that is news: it was not said before, or for another reason.
        """
        self._broken.failed(now_s, way)
        is_news = self._passed_over.pop(way, None) != why
        self._passed_over[way] = why
        if len(self._passed_over) > _MOST_PASSED_OVER:
            self._passed_over.popitem(last=False)
        return is_news


def _shut_name(instance: InstanceId, namespace: NamespaceId) -> str:
    return f"{instance} {namespace.hex()}"
