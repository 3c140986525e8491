"""Calls the owner of a publisher. What the owner raises is logged, and ends nothing."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

import msgspec

from kvbm.core.ids import Epoch, InstanceId, Offset
from kvbm.streams.base import AccessSample, Heartbeat, Position, PublisherOwner, StreamState
from kvbm.streams.publisher.reports import PublisherReports

T = TypeVar("T")


class OwnerCalls:
    """The owner as its publisher sees it: no call raises. In the publisher's thread."""

    def __init__(self, owner: PublisherOwner, cluster: str, instance: InstanceId, reports: PublisherReports) -> None:
        self._owner = owner
        self._cluster = cluster
        self._instance = instance
        self._reports = reports
        self._last: Heartbeat | None = None

    def heartbeat(self, confirmed: Position) -> tuple[Heartbeat, str]:
        """The heartbeat to send, and why the owner could not make it, else "".

        Without the owner's, its last one goes out again with what the publisher knows: to the catalog, and to another
        process that wants the instance, silence means that this process has ended.
        """
        made, why = self._call("heartbeat", lambda: self._owner.heartbeat(confirmed))
        if made is not None:
            self._last = made
            return made, ""
        epoch = self._owner.epoch
        published = confirmed.offset if confirmed.epoch == epoch else Offset(0)
        last = self._last or Heartbeat(
            instance=self._instance,
            cluster=self._cluster,
            epoch=epoch,
            published=published,
            wall_time_ns=0,
            run=self._owner.run,
        )
        known = last.applied if last.epoch == epoch else Offset(0)
        words = f"heartbeat: the manager fails to make it ({why}); the last one is sent again"
        again = msgspec.structs.replace(
            last,
            epoch=epoch,
            published=published,
            applied=max(known, published),
            wall_time_ns=time.time_ns(),
            trouble=words,
            transfers=(),  # they were told of already
        )
        return again, words

    def is_silent(self) -> bool:
        """See `PublisherOwner.is_silent`; never of an owner that cannot say it."""
        return bool(self._call("is_silent", self._owner.is_silent)[0])

    def on_published(self, position: Position) -> None:
        """See `PublisherOwner.on_published`."""
        self._call("on_published", lambda: self._owner.on_published(position))

    def on_fenced(self, newer: Epoch) -> None:
        """See `PublisherOwner.on_fenced`."""
        self._call("on_fenced", lambda: self._owner.on_fenced(newer))

    def on_snapshot_asked(self) -> None:
        """See `PublisherOwner.on_snapshot_asked`."""
        self._call("on_snapshot_asked", self._owner.on_snapshot_asked)

    def on_stream_state(self, state: StreamState) -> None:
        """See `PublisherOwner.on_stream_state`."""
        self._call("on_stream_state", lambda: self._owner.on_stream_state(state))

    def take_samples(self) -> list[AccessSample]:
        """See `PublisherOwner.take_samples`."""
        samples, _ = self._call("take_samples", self._owner.take_samples)
        return samples or []

    def _call(self, what: str, call: Callable[[], T]) -> tuple[T | None, str]:
        """What a call gives, and "", or None and what it has raised."""
        try:
            return call(), ""
        except Exception as error:  # noqa: BLE001 - an owner's fault must not end what carries its events
            why = f"{type(error).__name__}: {error}"
            self._reports.owner_failed(what, why)
            return None, why
