"""The lease: one janitor at a time over all clusters that share a bucket.

It is one small object, changed by compare-and-swap. How old it is says the store: the time of the lease's last change
is held against that of an object put just now, so no two machines' clocks are ever compared. How long its holder may
rely on it the holder counts on its own monotonic clock, from before it asked.
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from kvbm.core.errors import JanitorBusyError

SLACK_S = 5.0  # a store's times may be whole seconds, and of several machines


class Lease(msgspec.Struct, frozen=True, kw_only=True):
    """What the lease object says.

    Attributes:
        holder: who has it: cluster, instance, host and process, for people; "" once it was given back.
        run: drawn by chance for each holder, so that two never take each other for themselves.
        epoch: grows with every holder.
        renewed: grows with every renewal, so that each is another content.
        held_s: for how long it is good after it was last changed.
    """

    holder: str
    run: str
    epoch: int
    renewed: int = 0
    held_s: float


class StoredLease(NamedTuple):
    """The lease as it lies in the store.

    Attributes:
        body: its bytes, b"" where there is none.
        age_s: since its last change, by the store's clock.
    """

    body: bytes
    age_s: float


class StoreStatus(NamedTuple):
    """What a janitor needs to know of the store before it begins.

    Attributes:
        store_ns: the store's time now.
        skew_s: this machine's clock less the store's.
        ignored: the conditions of puts that the store takes no notice of, in words: on such a store two may have the
            lease at once.
    """

    store_ns: int
    skew_s: float
    lease: StoredLease
    ignored: tuple[str, ...] = ()


def decode(body: bytes) -> Lease | None:
    """What a lease says; None where its bytes are none."""
    try:
        return msgspec.json.decode(body, type=Lease)
    except (msgspec.DecodeError, msgspec.ValidationError):
        return None


def encode(lease: Lease) -> bytes:
    """A lease as it lies in the store."""
    return msgspec.json.encode(lease)


def claimed(found: StoredLease, holder: str, run: str, held_s: float) -> Lease:
    """The lease that takes the place of what was found. Raises JanitorBusyError: another janitor has it."""
    there = decode(found.body)
    if there is not None and there.holder and there.run != run and found.age_s < there.held_s + SLACK_S:
        raise JanitorBusyError(
            f"another janitor works: {there.holder} renewed its lease {found.age_s:.0f} s ago, for {there.held_s:g} s; "
            "nothing to do"
        )
    return Lease(holder=holder, run=run, epoch=1 + (there.epoch if there is not None else 0), held_s=held_s)
