"""What tenants use of this instance, from hour to hour: from the frames it cuts, and what its requests are given.

Blocks held and put are a fold over the frames. What requests get, and how quickly the engine computes, no other event
says. Each clock period, and at a clean stop, all of it becomes a UsageRecorded; what a crash loses is what came since
the last one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import msgspec

from kvbm.core.codec import FrameBytes
from kvbm.core.events import MAX_USAGE_ROWS, PoolStated, UsageRecorded, UsageRow
from kvbm.core.ids import MAX_NAME_BYTES, UNKNOWN, NamespaceId, Reach, Tier
from kvbm.core.usage import LONGEST_STEP_MS, NewUsageMeter, Numbers
from kvbm.manager.revisioned_namespaces import RevisionedNamespaces
from kvbm.safe_log import RateLimitedLog

_MOST = (1 << 64) - 1  # that an event has room for
_MOST_ERASED = 256  # erasures that are heeded; what older ones meant is past
_MOST_WAITING = 4096  # events that wait for a ledger that records nothing; older ones are lost, which readers see


class UsagePlan(NamedTuple):
    """How usage is recorded.

    Attributes:
        every_s: a divisor of an hour, at least a minute: a clock period, at whose end it is.
    """

    new_meter: NewUsageMeter
    every_s: int = 3600


class _Reads:
    """What requests were given of one namespace: blocks by tier, tokens in them, and what computing them would take."""

    def __init__(self) -> None:
        self.blocks = [0] * len(Tier)
        self.tokens = self.unrated_tokens = self.saved_us = 0


class UsageAccount:
    """See the module. What ends in `_locked`, `take_events` and `put_back` under the manager's lock; one thread at a
    time does the rest.

    Args:
        pools: of the ledger. namespaces: whose each is, and how many tokens its blocks have.

    Attributes:
        prefill_tokens_per_s: as the engine has measured; 0: it has not said.
    """

    def __init__(self, plan: UsagePlan, pools: Sequence[PoolStated], namespaces: RevisionedNamespaces) -> None:
        self.prefill_tokens_per_s = 0.0
        self._every_ms = plan.every_s * 1000
        shared = {pool.tier for pool in pools if pool.reach is Reach.CLUSTER}
        self._meter = plan.new_meter(sum(1 << tier for tier in shared))
        sizes = {pool.tier: pool.block_bytes for pool in pools}
        self._block_bytes = _by_tier(sizes)
        self._namespaces = namespaces
        self._reads: dict[NamespaceId, _Reads] = {}
        self._since_ms: int | None = None  # where the period under way began
        self._seen_ms = 0  # the clock when frames were taken last
        self._waiting: list[UsageRecorded] = []
        self._erased: dict[int, tuple[Callable[[str], bool], int]] = {}  # who is meant, and until when
        self._limited_log = RateLimitedLog()

    # -- under the manager's lock -------------------------------------------------------------------------------------

    def read_locked(self, namespace: NamespaceId, hits: Mapping[Tier, int]) -> None:
        """A request was given so many blocks of each tier."""
        reads = self._reads.get(namespace)
        if reads is None:
            reads = self._reads[namespace] = _Reads()
        blocks = 0
        for tier, count in hits.items():
            reads.blocks[tier] += count
            blocks += count
        tokens = blocks * self._namespaces.block_tokens.get(namespace, 0)
        reads.tokens += tokens
        if self.prefill_tokens_per_s > 0.0:
            reads.saved_us += round(min(tokens * 1e6 / self.prefill_tokens_per_s, float(1 << 62)))
        else:
            reads.unrated_tokens += tokens

    def take_reads_locked(self, now_ms: int, is_last: bool = False) -> dict[NamespaceId, _Reads]:
        """What requests were given, where a period ends now; nothing of it where none does."""
        if not is_last and not self._ends(now_ms):
            return {}
        reads, self._reads = self._reads, {}
        return reads

    def erase_locked(self, number: int, is_meant: Callable[[str], bool], now_ms: int) -> None:
        """What tenants have used until now, and until the period under way ends, is recorded no more.

        Args:
            number: of the erasure; its last call counts.
            is_meant: whether a tenant is.
        """
        self._erased.pop(number, None)
        self._erased[number] = is_meant, now_ms
        if len(self._erased) > _MOST_ERASED:
            oldest = next(iter(self._erased))
            del self._erased[oldest]
            self._limited_log.warn(
                "erasure.forgotten",
                number=oldest,
                notice=f"more than {_MOST_ERASED} erasures: what was used before it may still be recorded; erase again",
            )

    def take_events(self) -> list[UsageRecorded]:
        """What is to be recorded, in order."""
        events, self._waiting = self._waiting, []
        return [self._without_erased(event) for event in events] if self._erased else events

    def put_back(self, events: Sequence[UsageRecorded]) -> None:
        """What was taken, and is in no frame: it is to be recorded once more."""
        self._waiting = [*events, *self._waiting]

    # -- one thread at a time -----------------------------------------------------------------------------------------

    def take(
        self, frames: Iterable[FrameBytes], reads: dict[NamespaceId, _Reads], now_ms: int, is_last: bool = False
    ) -> None:
        """Take in frames that were cut now, and end each period whose time has come.

        Args:
            reads: as `take_reads_locked` gave them for this time.
            is_last: the instance stops: the period ends here.
        """
        if self._since_ms is None:
            self._since_ms = now_ms
        elif self._is_set(now_ms):
            reads = self._end(self._since_ms, self._seen_ms, reads)
            self._meter.cut(now_ms)  # no time has passed until now, and from now on it does
            self._since_ms = now_ms
        else:
            while (end_ms := self._end_of(self._since_ms)) <= now_ms:
                reads = self._end(self._since_ms, end_ms, reads)
                self._since_ms = end_ms
        self._seen_ms = now_ms
        for frame in frames:
            self._meter.take(frame.data)
        if is_last:
            self._end(self._since_ms, now_ms, reads, is_last=True)
            self._since_ms = now_ms

    def due_in_s(self, now_ms: int) -> float:
        """In how many seconds the period under way ends."""
        since_ms = now_ms if self._since_ms is None or self._is_set(now_ms) else self._since_ms
        return max(0.0, (self._end_of(since_ms) - now_ms) / 1000)

    # -- inside -------------------------------------------------------------------------------------------------------

    def _end_of(self, since_ms: int) -> int:
        return (since_ms // self._every_ms + 1) * self._every_ms

    def _is_set(self, now_ms: int) -> bool:
        """Whether the clock was set, or the machine slept, since frames were taken last."""
        return now_ms < self._seen_ms or now_ms - self._seen_ms > LONGEST_STEP_MS

    def _ends(self, now_ms: int) -> bool:
        since_ms = self._since_ms
        return since_ms is not None and (self._is_set(now_ms) or self._end_of(since_ms) <= now_ms)

    def _end(
        self, since_ms: int, until_ms: int, reads: dict[NamespaceId, _Reads], is_last: bool = False
    ) -> dict[NamespaceId, _Reads]:
        """A period is over. Returns what requests were given that no period has: nothing."""
        rows = self._rows(self._meter.cut(until_ms), reads)
        for at in range(0, max(1, len(rows)), MAX_USAGE_ROWS):
            event = UsageRecorded(
                since_ms=since_ms,
                until_ms=until_ms,
                block_bytes=self._block_bytes,
                rows=tuple(rows[at : at + MAX_USAGE_ROWS]),
                is_last=is_last,
            )
            self._waiting.append(event)
        del self._waiting[:-_MOST_WAITING]
        return {}

    def _without_erased(self, event: UsageRecorded) -> UsageRecorded:
        meant = [is_meant for is_meant, until_ms in self._erased.values() if event.since_ms <= until_ms]
        rows = tuple(row for row in event.rows if not any(is_meant(row.tenant) for is_meant in meant))
        return event if len(rows) == len(event.rows) else msgspec.structs.replace(event, rows=rows)

    def _rows(
        self, held: list[tuple[NamespaceId, Numbers, Numbers]], reads: dict[NamespaceId, _Reads]
    ) -> list[UsageRow]:
        sums: dict[str, list[int]] = {}

        def of(namespace: NamespaceId) -> list[int]:
            return sums.setdefault(_recorded_name(self._namespaces.tenants.get(namespace, UNKNOWN)), [0] * 15)

        for namespace, block_ms, put_blocks in held:
            _add(of(namespace), (*block_ms, *put_blocks), 0)
        for namespace, read in reads.items():
            _add(of(namespace), (*read.blocks, read.tokens, read.unrated_tokens, read.saved_us), 8)
        return [
            UsageRow(tenant, _four(numbers, 0), _four(numbers, 4), _four(numbers, 8), *numbers[12:])
            for tenant, numbers in sorted(sums.items(), key=lambda one: one[0].encode())
            if any(numbers)
        ]


def _recorded_name(tenant: str) -> str:
    """As an event has it: NUL becomes U+FFFD, as in SQL, and what no longer fits is left out."""
    return tenant.replace("\0", "\ufffd").encode(errors="replace")[:MAX_NAME_BYTES].decode(errors="ignore")


def _add(sums: list[int], numbers: Sequence[int], first: int) -> None:
    for at, number in enumerate(numbers, first):
        sums[at] = min(sums[at] + number, _MOST)


def _by_tier(numbers: Mapping[Tier, int]) -> Numbers:
    found = [numbers.get(tier, 0) for tier in Tier]
    return _four(found, 0)


def _four(numbers: Sequence[int], at: int) -> Numbers:
    one, two, three, four = numbers[at : at + 4]
    return one, two, three, four
