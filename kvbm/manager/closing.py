"""The end of a manager, step by step: what an exception has ended, a signal's handler's for one, is gone on with."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from contextlib import suppress

from kvbm.core.ids import InstanceId, Tier
from kvbm.manager.copies.copies_in_flight import CopiesInFlight
from kvbm.manager.offload.driver import OffloadDriver
from kvbm.manager.offload.queue import Offloader
from kvbm.manager.onboard.loads import Loads
from kvbm.manager.record.event_writer import EventWriter
from kvbm.manager.record.ledger_stream import LedgerStream
from kvbm.manager.record.publisher_port import PublisherPort
from kvbm.safe_log import SafeLog

log = SafeLog()

_HURRIED_S = 0.1  # each step is given after an exception

Step = Callable[[float], object]  # it waits so long at most, and may be done twice


class Closing:
    """The steps that are left. One thread at a time does them."""

    def __init__(
        self,
        instance: InstanceId,
        stream: LedgerStream,
        loads: Loads,
        executor: Executor,
        offloader: Offloader,
        offloads: OffloadDriver,
        writer: EventWriter,
        port: PublisherPort,
        copies: CopiesInFlight,
    ) -> None:
        self._instance, self._stream, self._loads, self._executor = instance, stream, loads, executor
        self._offloader, self._offloads, self._writer, self._port = offloader, offloads, writer, port
        self._copies = copies
        self._turn = threading.Lock()
        self._left: list[Step] = [
            self._end_copies,
            self._tell_of_slots,
            self._end_stream,
            self._end_publisher,
            self._close_pools,
        ]

    def add(self, first: Sequence[Step], last: Sequence[Callable[[], None]]) -> None:
        """Further steps, before and behind all others."""
        self._left = [*first, *self._left, *(_without_time(close) for close in last)]

    def forget(self) -> None:
        """Nothing is to be done in this process."""
        self._left = []

    def go_on(self, timeout_s: float) -> bool:
        """Do what is left, each step within `timeout_s`; False where nothing is, or another call does it now.

        After an exception hardly anything is waited for any more. The step that it ended is done once more, since it
        may not have told others to end; then come the others, and the exception is raised. What is left after a second
        one is done by the next call.
        """
        if not self._left or self._turn.locked():
            return False
        raised: BaseException | None = None
        with self._turn:
            self._stream.begin_closing()
            while self._left:
                try:
                    self._left[0](timeout_s)
                except BaseException as error:  # noqa: BLE001 - raised once all is done
                    raised, timeout_s = raised or error, min(timeout_s, _HURRIED_S)
                    with suppress(Exception):
                        self._left[0](timeout_s)
                del self._left[:1]
        if raised is not None:
            raise raised
        return True

    @property
    def is_over(self) -> bool:
        """Whether nothing is left to be done."""
        return not self._left

    # -- the steps ----------------------------------------------------------------------------------------------------

    def _end_copies(self, timeout_s: float) -> None:
        self._offloader.wanted.set()
        self._loads.nobody_waits.set()
        self._executor.shutdown(wait=False, cancel_futures=True)
        self._offloads.wait_ended(timeout_s)

    def _tell_of_slots(self, _: float) -> None:
        """Say what nobody has given back: of requests that the engine has not ended, or forgotten."""
        ledger = self._stream.ledger
        with self._stream.lock:
            tiers = [pool.tier for pool in ledger.pools if pool.slots and pool.tier in (Tier.HBM, Tier.HOST)]
            used = {tier: ledger.counts(tier) for tier in tiers} if not ledger.copies_in_flight() else {}
        for tier, counts in used.items():
            if counts.allocated or counts.held > counts.evictable:
                log.info(
                    "manager.closed_in_use",
                    instance=self._instance,
                    tier=tier.name,
                    allocated_slots=counts.allocated,
                    pinned_or_kept_blocks=counts.held - counts.evictable,
                    remedy="end requests first: unpin what they have, and release what they have not filled",
                )

    def _end_stream(self, timeout_s: float) -> None:
        self._stream.end()
        if not self._writer.stop(timeout_s):
            log.warning(
                "manager.closed_unwritten", instance=self._instance, remedy="the journal's device refuses writes"
            )

    def _end_publisher(self, timeout_s: float) -> None:
        publishing = self._port.publishing
        if publishing is not None and not publishing.stop(timeout_s):
            log.warning(
                "manager.closed_unpublished", instance=self._instance, remedy="the next start publishes the rest"
            )

    def _close_pools(self, _: float) -> None:
        self._loads.locator.close()
        if unended := self._copies.close_pools():
            log.warning(
                "manager.closed_in_copy",
                instance=self._instance,
                copies=unended,
                remedy="their device does not answer; their memory and files are kept",
            )


def _without_time(close: Callable[[], None]) -> Step:
    return lambda _: close()
