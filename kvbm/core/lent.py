"""What an instance has lent to others, in numbers that its heartbeats carry."""

from __future__ import annotations

import msgspec

LENT_BY = ("memory", "rdma", "nixl", "unix", "tcp")  # each has `…_bytes` in LentCounts
REFUSED_FOR = (
    "busy",
    "not_held",
    "not_opened",
    "unopened",
    "fenced",
    "closing",
    "crowded",
    "unproved",
    "broken",
)  # each is a field of LentCounts


class LentCounts(msgspec.Struct, frozen=True, array_like=True):
    """What one process has lent since it began, and what it lends now.

    Attributes:
        connections: of readers, open now. blocks_lent_now: pinned for them, under a lease or on their way.
        accepted: connections that were begun.
        memory_bytes: of blocks leased to be copied from HOST. rdma_bytes: leased to be read from there over RDMA.
        nixl_bytes: likewise by NIXL.
        unix_bytes, tcp_bytes: of blocks that were sent, to a process of this machine and over TCP.
        expired: leases that ended by time and not by their reader's word.
        busy: questions that were told to come again: as much is lent as may be.
        not_held: questions for blocks that are not here. not_opened: for those of a namespace that is not open to who
            asks. fenced: asked while another process has this instance's place. closing: asked while it ends.
        unopened: namespaces that a reader wanted opened and that are not lent, or not to who cannot prove their root.
        crowded: connections that found no place, or no thread.
        unproved: connections that ended before their peer had proved itself: by key, certificate or user.
        broken: connections that ended for what their peer said later.
        corrupt_blocks: whose bytes were found wrong where they lie; they are evicted.
    """

    connections: int = 0
    blocks_lent_now: int = 0
    accepted: int = 0
    memory_bytes: int = 0
    rdma_bytes: int = 0
    nixl_bytes: int = 0
    unix_bytes: int = 0
    tcp_bytes: int = 0
    expired: int = 0
    busy: int = 0
    not_held: int = 0
    not_opened: int = 0
    unopened: int = 0
    fenced: int = 0
    closing: int = 0
    crowded: int = 0
    unproved: int = 0
    broken: int = 0
    corrupt_blocks: int = 0
