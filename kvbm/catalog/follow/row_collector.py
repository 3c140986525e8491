"""The SQL rows of what a sequencer has read, gathered until they are given out in a batch.

Rows are gathered of messages that SQL does not have yet. While the database is away for too long they are dropped, and
whoever drops them reads them again from where SQL stands.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Set

from kvbm.catalog.follow.instance_sequence import Changes
from kvbm.catalog.sql.rows import ClaimRun, EpochRow, InstanceRows, NamespaceRow, StoreBatch
from kvbm.core.ids import InstanceId, Namespace, NamespaceId
from kvbm.core.usage import UsageEntry
from kvbm.streams.base import Mark

_ROW_BYTES = 200  # what one gathered row takes, about
_USAGE_BYTES = 1000  # and one of usage, with its numbers


class RowCollector:
    """Gathers the rows of a stream.

    Args:
        stream: its name in SQL.
        stored: sequence up to which SQL has everything; rows are gathered from there on.

    Attributes:
        may_lack_claims: events were passed over, and no snapshot lists claims again.
    """

    def __init__(self, stream: str, stored: int = 0) -> None:
        self.may_lack_claims = False
        self._stream, self._stored = stream, stored
        self._is_behind = False  # rows were dropped: none are gathered until `gather_after`
        self._changed: set[InstanceId] = set()
        self._epochs: list[EpochRow] = []
        self._namespaces: dict[NamespaceId, NamespaceRow] = {}  # of each the first that was gathered
        self._claims: list[ClaimRun] = []
        self._usages: list[UsageEntry] = []
        self._claims_bytes = 0
        self._has_extra_rows, self._extra_claims = False, 0  # as in `StoreBatch`
        self._watched: list[ClaimRun] | None = None

    # -- input --------------------------------------------------------------------------------------------------------

    def take(self, changes: Changes) -> None:
        """Gather what a step has changed."""
        self.may_lack_claims |= changes.lacks_claims
        if self._watched is not None:
            self._watched += [run for _, run in changes.claims]
        if self._is_behind:
            return
        after = -1 if changes.renumbered else self._stored
        self._changed |= {instance for instance, at in changes.changed.items() if at > after}
        self._epochs += [row for at, row in changes.epochs if at > after]
        self._gather(row for at, row in changes.namespaces if at > after)
        claims = [run for at, run in changes.claims if at > after]
        self._claims += claims
        self._claims_bytes += sum(len(run.hashes) for run in claims)
        self._usages += [entry for at, entry in changes.usages if at > after]

    def renumber(self, stream: str, stored: int) -> None:
        """Go on in a stream whose sequences began anew, under another name in SQL."""
        self._stream, self._stored = stream, stored
        self.may_lack_claims = True

    def drop_rows(self) -> None:
        """Gather none any more: SQL has been away for too long.

        Whoever calls this reads them again from where SQL stands.
        """
        self._is_behind = True
        self._forget()

    def gather_after(self, sequence: int) -> None:
        """Gather rows of what comes after a sequence; SQL has all before. It must not lie before what was read here."""
        self._is_behind = False
        self._stored = sequence

    # -- rows that no new message brings ------------------------------------------------------------------------------

    def add_instances(self, instances: Iterable[InstanceId]) -> None:
        """Give out the rows of these instances as well: the stream may not have what they come from."""
        self._changed.update(instances)

    def forget(self, instance: InstanceId) -> None:
        """Give out no row of an instance that was gathered so far; claims stay, for they are the pool's."""
        self._changed.discard(instance)
        self._epochs = [row for row in self._epochs if row.instance != instance]

    def add_namespaces(self, namespaces: Mapping[NamespaceId, Namespace], seen_ns: int) -> None:
        """Give out the rows of these namespaces as well, with the next message: SQL may have lost them, and no start
        that names them comes again, or a heartbeat has told of them.
        """
        self._has_extra_rows = True
        self._gather(NamespaceRow(id=name, fields=fields, first_seen_ns=seen_ns) for name, fields in namespaces.items())

    def drop_namespaces(self, names: Collection[NamespaceId]) -> None:
        """Give out no row of these that was gathered so far: they are known no more."""
        for name in names:
            self._namespaces.pop(name, None)

    def add_claims(self, claims: Iterable[ClaimRun]) -> None:
        """Give out these as well, before those gathered here."""
        earlier = list(claims)
        self._extra_claims += len(earlier)
        self._claims = [*earlier, *self._claims]
        self._claims_bytes += sum(len(run.hashes) for run in earlier)

    def take_rows(self, other: RowCollector, followed: Set[InstanceId]) -> None:
        """Add what another has gathered and not given out; it has read the same stream.

        They are given out with the next message.

        Args:
            followed: the instances whose rows are known here.
        """
        self.may_lack_claims |= other.may_lack_claims
        self._changed |= other._changed & followed
        self._epochs += other._epochs
        self._usages += other._usages
        self._gather(other._namespaces.values())
        self._has_extra_rows |= other._has_extra_rows
        self._extra_claims += other._extra_claims if not self._claims else 0
        self._claims += other._claims
        self._claims_bytes += other._claims_bytes
        other._forget()

    # -- output -------------------------------------------------------------------------------------------------------

    def take_batch(self, end: Mark, rows: Callable[[InstanceId], InstanceRows]) -> StoreBatch | None:
        """What was gathered since the last call; None when the stream has not moved on.

        The caller stores it, and until it has, keeps it: the next batch begins where this one ends.

        Args:
            end: where the batch ends; rows of later messages repeat in the next one.
            rows: gives the rows of an instance as they are now.
        """
        if end.sequence <= self._stored or self._is_behind:
            return None
        changed = [rows(instance) for instance in sorted(self._changed)]
        batch = StoreBatch(
            stream=self._stream,
            previous=self._stored,
            stream_sequence=end.sequence,
            fingerprint=end.fingerprint,
            instances=tuple(row.instance for row in changed),
            epochs=(*self._epochs, *(row.epoch for row in changed)),
            namespaces=tuple(self._namespaces.values()),
            claims=tuple(self._claims),
            usages=tuple(self._usages),
            positions=tuple(row.position for row in changed),
            has_extra_rows=self._has_extra_rows,
            extra_claims=self._extra_claims,
            spoke={row.instance.id: row.spoke for row in changed},
        )
        self._stored = end.sequence
        self._forget()
        return batch

    @property
    def waiting_bytes(self) -> int:
        """What the rows that were gathered and not taken weigh, about."""
        rows = len(self._epochs) + len(self._namespaces) + len(self._claims)
        return self._claims_bytes + _ROW_BYTES * rows + _USAGE_BYTES * len(self._usages)

    def waiting_claims(self) -> list[ClaimRun]:
        """Claims that were gathered and not given out."""
        return list(self._claims)

    def watch_claims(self) -> None:
        """Remember what is claimed and withdrawn from here on, until `take_watched`."""
        self.may_lack_claims = False
        self._watched = []

    def take_watched(self) -> list[ClaimRun]:
        """What was claimed and withdrawn since `watch_claims`."""
        watched, self._watched = self._watched or [], None
        return watched

    def _gather(self, rows: Iterable[NamespaceRow]) -> None:
        for row in rows:
            self._namespaces.setdefault(row.id, row)

    def _forget(self) -> None:
        self._changed, self._epochs, self._namespaces, self._claims = set(), [], {}, []
        self._usages = []
        self._claims_bytes = self._extra_claims = 0
        self._has_extra_rows = False
