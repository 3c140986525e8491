"""What a store of objects promises: bytes under names, put once and never changed.

A store knows nothing of blocks. It has no owner and many writers; what lies there proves itself. A call takes a whole
run of requests, keeps some of them in flight at a time, tries those again that a retry can help, waits with jitter
between, and returns when all have ended or its deadline has passed, whichever is first. What went wrong is a `Refusal`
in its place, never an exception. Calls may come from any thread and never touch what they were given after they have
returned, except bodies of puts, which the caller must not change.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from enum import Enum
from typing import NamedTuple, Protocol, runtime_checkable

from kvbm.core.errors import PoolError
from kvbm.pools.stores.link import RequestLimits

TRIAL_PREFIX = ".kvbm/trial/"  # of objects that try a store; the janitor removes those that are left
OPEN_WAIT_S = 20.0  # for a store's first answer: a busy store is not an absent one

Body = bytes | bytearray | memoryview


class StoreAwayError(PoolError):
    """A store that does not answer at all, or says that it is not well; the same call may succeed later.

    Attributes:
        name, forgets: as the store would have them.
    """

    def __init__(self, name: str, why: str, forgets: bool = False) -> None:
        super().__init__(f"OBJECT pool {name}: {why}")
        self.name, self.forgets = name, forgets


class StoreTrouble(Enum):
    """Why a store did not do what it was asked, as far as the caller's next step depends on it."""

    ABSENT = "absent"  # nothing has this name
    TAKEN = "taken"  # something has this name already
    DENIED = "denied"  # credentials or policy; a retry does not help
    REFUSED = "refused"  # anything else the store said; a retry has been tried where it could help
    # What has this name is no object of ours: larger than was allowed, or of another type; the store is well
    UNUSABLE = "unusable"
    SILENT = "silent"  # no answer, or not in time


class Refusal(NamedTuple):
    """What a store answered instead of what was asked.

    Attributes:
        words: for people: status, code and cause in a line, such as "503 SlowDown after 3 attempts".
    """

    trouble: StoreTrouble
    words: str


class Put(NamedTuple):
    """An object to be put, if nothing has its name.

    Attributes:
        body: the bytes, or parts that make them, one behind the other.
    """

    name: str
    body: Body | tuple[Body, ...]

    @property
    def size_bytes(self) -> int:
        """Of the object."""
        return sum(map(len, self.body)) if isinstance(self.body, tuple) else len(self.body)

    def flat(self) -> Body:
        """The body in one piece; a copy when it has parts."""
        return b"".join(self.body) if isinstance(self.body, tuple) else self.body


class Get(NamedTuple):
    """An object, or a part of it, to be read.

    Attributes:
        first, count: bytes from `first` on, `count` of them or as many as there are; None: to the end.
        expected_bytes: how large the part probably is, 0 for unknown: a store may read large parts in parallel ranges.
        most_bytes: how large the part may be, 0 for any size: of a larger one no more is read, and it is UNUSABLE.
    """

    name: str
    first: int = 0
    count: int | None = None  # type: ignore[assignment]  # hides tuple's method, which nobody asks a request for
    expected_bytes: int = 0
    most_bytes: int = 0

    def refuse(self, part_bytes: int) -> Refusal | None:
        """The refusal of a part that is larger than allowed."""
        if not self.most_bytes or part_bytes <= self.most_bytes:
            return None
        return Refusal(
            StoreTrouble.UNUSABLE, f"{self.name} has {part_bytes} bytes, no object here has more than {self.most_bytes}"
        )


class Got(NamedTuple):
    """What was read.

    Attributes:
        body: the bytes; any object that gives a C-contiguous buffer.
        size_bytes: of the whole object.
    """

    body: Body
    size_bytes: int


class Listed(NamedTuple):
    """An object as a listing tells of it.

    Attributes:
        modified_ns: when it was put, by the store's clock, since 1970.
    """

    name: str
    size_bytes: int
    modified_ns: int


@runtime_checkable
class ForgetfulStore(Protocol):
    """What a `ObjectStore` that forgets can say besides."""

    def absent(self, names: Sequence[str], deadline_s: float) -> list[bool]:
        """For each name whether nothing has it, for certain: False where the store does not say.

        To ask is not to use an object.
        """


class DirectRequests(NamedTuple):
    """Requests for whole objects, for whoever sends them over plain TCP.

    Attributes:
        addresses: of the store, IP addresses in digits, at least one. port: of all of them.
        requests: of HTTP/1.1, a GET for each object, with all the store wants to see.
        connections: how many may be under way at a time.
        limits: of each.
    """

    addresses: tuple[str, ...]
    port: int
    requests: list[bytes]
    connections: int
    limits: RequestLimits


@runtime_checkable
class DirectStore(Protocol):
    """What an `ObjectStore` can do besides whose objects others may receive."""

    def direct(
        self, names: Sequence[str], expected_bytes: int, deadline_s: float
    ) -> AbstractContextManager[DirectRequests | None]:
        """Requests for objects, to be sent until the context ends: their connections count until then as requests in
        flight.

        None: ask `get`, which does better here, or says what is wrong.

        Args:
            expected_bytes: how large each probably is, 0 for unknown.
        """


class ObjectStore(Protocol):
    """A store of objects.

    Names are relative to its prefix: ASCII letters, digits, "-", "_", "." and "/", at most 512 bytes.

    Attributes:
        name: the same for every instance that uses this store and this prefix; claims are kept under it.
        forgets: whether it drops objects by itself, for want of memory or after a time: an object that is gone is
            nothing to warn of, and `absent` works.
    """

    name: str
    forgets: bool

    def put(self, puts: Sequence[Put], deadline_s: float) -> list[Refusal | None]:
        """Put objects where nothing has their names;

        None for each that was put by this call, TAKEN where something was there.
        """

    def get(self, gets: Sequence[Get], deadline_s: float) -> list[Got | Refusal]:
        """Read objects or parts of them."""

    def delete(self, names: Sequence[str], deadline_s: float) -> list[Refusal | None]:
        """Delete objects; None where nothing has the name any more."""

    def listed(self, prefix: str, deadline_s: float, after: str = "") -> Iterator[Listed]:
        """Objects whose names begin with `prefix` and sort behind `after`, in the order of names.

        Args:
            deadline_s: of each request of the listing.
        Raises: PoolError: the store refused or did not answer; what was given out before holds.
        """

    def replace(self, name: str, body: Body, expected: Body | None, deadline_s: float) -> Refusal | None:
        """Change a small object only if its bytes are `expected`, None for none there: for a lease, not for blocks.

        TAKEN: they are not.
        """

    def ignored_conditions(self, name: str, deadline_s: float) -> tuple[str, ...] | Refusal:
        """Which conditions of `put` and `replace` the store takes no notice of, in words; none of one on which a lease
        can rest.

        Args:
            name: of an object to try it on, which nothing has and nobody else uses. It is gone afterwards, where it can
                be deleted.
        """

    def close(self) -> None:
        """Give back connections; requests under way end by their timeouts. Idempotent."""


class OpenedStore(ObjectStore, Protocol):
    """A store as the function of its technology gives it to `opening.open_store`.

    Attributes:
        remarks: what is worth saying once about it, in sentences; opening it may add to them.
    """

    remarks: tuple[str, ...]


def why_no_place(url: str, what: str, marks: str) -> str:
    """What is wrong in the URL of a store whose first part is a name and whose rest is a prefix.

    Args:
        what: the first part names. marks: what it may have beside lower-case letters and digits.
    """
    first, _, rest = url.partition("://")[2].partition("/")
    if not re.fullmatch(rf"[a-z0-9][a-z0-9{re.escape(marks)}]{{1,61}}[a-z0-9]", first):
        return (
            f"{first[:80]!r} is no name of {what}, which has 3 to 63 lower-case letters, digits and any of {marks!r}, "
            "and begins and ends with a letter or digit"
        )
    if not re.fullmatch(r"[A-Za-z0-9._/=-]*", rest):
        return f"its prefix {rest[:80]!r} has others than letters, digits, and -._=/"
    return "no container is named behind the account"
