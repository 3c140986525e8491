"""The error tree. An expected outcome (a miss, a short pool) is a return value; these are the rest.

KvbmError
├── ConfigError            a setting that cannot be used; fix it and start again
├── ArgumentError          an argument of a call that cannot be used; a bug in the caller, and nothing was done
│   ├── ArgumentTypeError  it is of another type (a TypeError too)
│   └── ArgumentValueError its value is none that can be used (a ValueError too)
├── LayoutError            dimensions that make no sense together (a ValueError too)
├── HashSchemeError        tokens of a namespace whose blocks another scheme hashes
├── LedgerError            a command that contradicts what the ledger holds; a bug in the caller
├── IllegalEventError      an event that contradicts what a fold holds
├── FrameError             bytes that are not a good frame
│   ├── NotAFrameError     no frame begins here
│   ├── NewerFrameError    written by a newer kvbm
│   ├── TornFrameError     the frame ends before its bytes do
│   ├── CorruptFrameError  the checksum does not match
│   └── MalformedFrameError  the checksum matches, the contents make no sense
├── CheckpointError        a checkpoint of the cluster index that cannot be written, or is not whole
├── JournalError           a journal folder that cannot be used
├── PoolError              a pool that cannot be opened or used
│   ├── PoolMismatchError  a stripe is that of another place or pool
│   └── PoolFullError      the device has no room for the pool
├── PeerWireError          bytes from another instance that are no message of the protocol
├── StreamError            NATS does not answer or refuses
│   ├── MessageTooLargeError  the server takes no message of that size
│   └── FencedError        another run or a newer epoch may publish an instance's events now
├── CatalogError           the catalog or its database does not answer or refuses
├── JanitorError           a janitor may not work, or not go on
│   └── JanitorBusyError   another janitor works on the pool now
├── VerbsError             an RDMA device that cannot be used
├── NixlError              NIXL, or the process it runs in, that cannot be used
├── MissingExtraError      an optional part of kvbm is not installed
└── TraceError             a workload trace that cannot be read
"""

from __future__ import annotations

HASHABLE_SCHEME = "sha256"  # what `core.hashing` computes


class KvbmError(Exception):
    """Any error of kvbm. The message says what happened, where, and what to do."""


class ConfigError(KvbmError):
    """A setting that cannot be used. A retry does not help; the message names the key and the remedy."""


class ArgumentError(KvbmError):
    """An argument of a call that cannot be used: a bug in the caller.

    The call has changed nothing. A retry does not help.

    Attributes:
        argument: its name, as the call's signature has it.
    """

    def __init__(self, argument: str, why: str) -> None:
        super().__init__(f"{argument} {why}")
        self.argument = argument


class ArgumentTypeError(ArgumentError, TypeError):
    """An argument is of another type than the call takes. Nothing was changed; a retry does not help."""


class ArgumentValueError(ArgumentError, ValueError):
    """An argument has a value that the call cannot use. Nothing was changed; a retry does not help."""


class LayoutError(KvbmError, ValueError):
    """Dimensions that make no sense together, with the numbers in the message. A retry does not help."""


class HashSchemeError(KvbmError):
    """Tokens of a namespace whose hashes are made by a scheme that is not known here. A retry does not help.

    Attributes:
        scheme: of the namespace, as its fields name it.
    """

    def __init__(self, scheme: str) -> None:
        super().__init__(
            f"tokens cannot be hashed here: the namespace's hash scheme is {scheme!r}, and only {HASHABLE_SCHEME!r} is "
            "known; "
            "take the hashes from the engine that makes them, and give these"
        )
        self.scheme = scheme


class LedgerError(KvbmError):
    """A command that contradicts what the ledger holds: a bug in the caller. A retry does not help.

    Attributes:
        tier: the tier of the slot that cannot be used as asked, a `Tier` as a number; None: no slot is to blame.
        slot: that slot; of several, the one the call came to first.
        copy: the id of a copy that is not in flight; None: no copy is to blame.
    """

    def __init__(self, message: str, tier: int | None = None, slot: int | None = None, copy: int | None = None) -> None:
        super().__init__(message)
        self.tier = tier
        self.slot = slot
        self.copy = copy


class IllegalEventError(KvbmError):
    """An event contradicts what the fold holds.

    Attributes:
        rule: short name of the rule that was broken, such as "created-twice".
    """

    def __init__(self, rule: str, detail: str) -> None:
        super().__init__(f"{rule}: {detail}")
        self.rule = rule


class FrameError(KvbmError):
    """Bytes at `at` are not a good frame. A retry does not help.

    Attributes:
        at: position in the buffer that was read, in bytes.
    """

    def __init__(self, at: int, detail: str) -> None:
        super().__init__(f"byte {at}: {detail}")
        self.at = at
        self.detail = detail


class NotAFrameError(FrameError):
    """No frame begins here: the magic is absent."""


class NewerFrameError(FrameError):
    """The frame was written by a newer kvbm; upgrade this one to read it.

    Attributes:
        version: the frame's version. supported: the newest that this kvbm reads.
    """

    def __init__(self, at: int, version: int, supported: int) -> None:
        super().__init__(
            at, f"frame version {version} is newer than {supported}, the newest this kvbm reads; upgrade kvbm"
        )
        self.version = version
        self.supported = supported


class TornFrameError(FrameError):
    """The buffer ends before the frame does: a write was cut short, or more bytes are still to come."""


class CorruptFrameError(FrameError):
    """The checksum does not match the bytes: they changed after they were written."""


class MalformedFrameError(FrameError):
    """The checksum matches but the contents make no sense: the writer was not kvbm, or has a bug."""


class CheckpointError(KvbmError):
    """A checkpoint of the cluster index cannot be written, or its bytes are not a whole one. Start without it.

    Attributes:
        at: position in the file, in bytes.
    """

    def __init__(self, at: int, detail: str) -> None:
        super().__init__(f"checkpoint, byte {at}: {detail}")
        self.at = at
        self.detail = detail


class JournalError(KvbmError):
    """A journal folder that cannot be used; the message says why and what to do."""


class PoolError(KvbmError):
    """A pool that cannot be opened or used; the message names the pool and the remedy."""


class PoolMismatchError(PoolError):
    """A stripe of the NVME pool has another place or belongs to another pool, or a device to another instance; it is
    left as it is.
    """


class PoolFullError(PoolError):
    """The device has no room for the pool.

    Attributes:
        wanted_bytes, free_bytes: what the pool needs, what the device has.
    """

    def __init__(self, message: str, wanted_bytes: int, free_bytes: int) -> None:
        super().__init__(message)
        self.wanted_bytes = wanted_bytes
        self.free_bytes = free_bytes


class PeerWireError(KvbmError):
    """Bytes from another instance that are no message of the protocol by which blocks are lent.

    Who sent them is hung up on.
    """


class StreamError(KvbmError):
    """NATS does not answer or refuses. A retry helps once the server is reachable again.

    Attributes:
        timeout_s: how long was waited for an answer that did not come; None: there was one, or nothing was waited for.
    """

    def __init__(self, message: str, *, timeout_s: float | None = None) -> None:
        super().__init__(message)
        self.timeout_s = timeout_s


class MessageTooLargeError(StreamError):
    """NATS takes no message that large. A retry does not help; raise `max_payload` there.

    Attributes:
        message_bytes, most_bytes: the message, and what the server takes.
    """

    def __init__(self, message: str, message_bytes: int, most_bytes: int) -> None:
        super().__init__(message)
        self.message_bytes = message_bytes
        self.most_bytes = most_bytes


class FencedError(StreamError):
    """The fence of an instance is not the one that was named.

    A retry does not help; reading the fence tells who has it.
    """


class CatalogError(KvbmError):
    """The catalog or its database does not answer or refuses. A retry may help; the message says what was seen."""


class CatalogClosedError(CatalogError):
    """A client or a replica was asked after its `close`: a bug in the caller, and no word about the catalog.

    A retry does not help.
    """


class CatalogRefusedError(CatalogError):
    """A catalog, or a replica of one, answered with an error.

    Attributes:
        status: as of HTTP.
        code: constant that names the error, such as "not_ready".
    """

    def __init__(self, message: str, status: int, code: str) -> None:
        super().__init__(message)
        self.status = status
        self.code = code


class ErasureError(KvbmError):
    """An erasure cannot be asked for, or not be read; the message says why. A retry does not help."""


class JanitorError(KvbmError):
    """A janitor of a pool may not work, or not go on; the message says why.

    What it has left undone the next run finishes.
    """


class JanitorBusyError(JanitorError):
    """Another janitor works on the pool now; there is nothing to do, and a later run may find something."""


class VerbsError(KvbmError):
    """An RDMA device, or something made in it, that cannot be used.

    A retry helps where the other end or the link was away.
    """


class NixlError(KvbmError):
    """NIXL, the process it runs in, or what was asked of it, that cannot be used.

    A retry helps: the process is started anew.
    """


class MissingExtraError(KvbmError):
    """An optional part is not installed.

    Attributes:
        extra: the extra to install, as in pip install 'kvbm-ledger[extra]'.
    """

    def __init__(self, what: str, extra: str) -> None:
        super().__init__(f"{what} is not installed; install it with: pip install 'kvbm-ledger[{extra}]'")
        self.extra = extra


class PackageConflictError(KvbmError):
    """The Python package kvbm is not kvbm-ledger's alone: another distribution of that name is installed.

    Only reinstalling helps.
    """


class TraceError(KvbmError):
    """A workload trace that cannot be read; the message names file, line, and what the line needs.

    Attributes:
        path, line_number: where; lines count from 1.
    """

    def __init__(self, path: str, line_number: int, why: str) -> None:
        super().__init__(f"{path} line {line_number}: {why}")
        self.path = path
        self.line_number = line_number
