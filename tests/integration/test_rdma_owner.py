"""Who may READ an owner's memory, and that nobody may any more: queue pairs and memory are stand-ins that say what is
done to them.

`make test-rdma` has real ones.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from kvbm.core.errors import VerbsError
from kvbm.transport.rdma_hello import RdmaStatus
from kvbm.transport.rdma_owner import RdmaOwner
from kvbm.verbs.queue_pair import RemoteEnd
from tests.eventually import eventually

END = RemoteEnd(bytes(15) + b"\1", 0, 77, 5, 3, 16)
WAIT_S = 60.0


class Pair:
    """A queue pair of `Site`."""

    def __init__(self, site: Site) -> None:
        self._site = site
        self.end = END
        self.is_connecting = self.is_closed = self.has_failed = False

    def connect(self, remote: RemoteEnd) -> None:
        self.is_connecting = True
        try:
            self._site.while_connecting(remote)
        finally:
            self.is_connecting = False

    def close(self) -> None:
        assert not self.is_connecting, "a queue pair is destroyed under the call that connects it"
        if self._site.refuses_to_close:
            raise VerbsError("still in use")
        self.is_closed = True

    def fail(self) -> None:
        if self._site.refuses_to_fail:
            raise VerbsError("the device is gone")
        self.has_failed = True


class Site:
    """The device of a test, and what it is told to refuse."""

    def __init__(self) -> None:
        self.pairs: list[Pair] = []
        self.refuses_to_close = self.refuses_to_fail = self.is_registered = False
        self.while_connecting: Callable[[RemoteEnd], object] = lambda _: None
        self.address, self.remote_key = 4096, 7

    def pair(self, *_: object, **__: object) -> Pair:
        self.pairs.append(Pair(self))
        return self.pairs[-1]

    def register(self, _: object, array: np.ndarray, is_lent: bool) -> Site:
        self.is_registered, self.array = is_lent, array
        return self

    def close(self) -> None:
        self.is_registered = False


@pytest.fixture
def site(monkeypatch: pytest.MonkeyPatch) -> Site:
    site = Site()
    monkeypatch.setattr("kvbm.transport.rdma_owner.QueuePair", site.pair)
    monkeypatch.setattr("kvbm.transport.rdma_owner.RegisteredMemory", site.register)
    return site


@pytest.fixture
def owner(site: Site) -> RdmaOwner:
    device: Any = site
    return RdmaOwner(device, np.zeros((4, 64), dtype=np.uint8), most_readers=2)


def admitted(owner: RdmaOwner, end: RemoteEnd = END) -> int:
    admission = owner.admit(end, True, owner.revoked)
    assert (admission.ready.status is RdmaStatus.READY) == bool(admission.number)
    return admission.number


@pytest.mark.parametrize("end_all", [RdmaOwner.revoke, RdmaOwner.close])
def test_a_reader_that_is_being_connected_when_all_are_sent_away_is_sent_away_once_it_is(
    site: Site, owner: RdmaOwner, end_all: Callable[[RdmaOwner], None]
) -> None:
    connecting, goes_on = threading.Event(), threading.Event()

    def wait(_: RemoteEnd) -> None:
        connecting.set()
        assert goes_on.wait(WAIT_S)

    site.while_connecting = wait
    numbers: list[int] = []
    admitting = threading.Thread(target=lambda: numbers.append(admitted(owner)))
    admitting.start()
    assert connecting.wait(WAIT_S)
    failed: list[BaseException] = []

    def end() -> None:
        try:
            end_all(owner)
        except BaseException as error:  # noqa: BLE001 - shown by the test
            failed.append(error)

    ending = threading.Thread(target=end)
    ending.start()
    eventually(lambda: owner.revoked == 1 or not ending.is_alive(), "it has not begun to send readers away")
    assert not site.pairs[0].is_closed
    goes_on.set()
    for thread in (admitting, ending):
        thread.join(WAIT_S)
    assert (numbers, failed) == ([0], [])
    assert site.pairs[0].is_closed and owner.readers == 0


def test_an_end_that_cannot_be_reached_leaves_nothing(site: Site, owner: RdmaOwner) -> None:
    def nobody(_: RemoteEnd) -> None:
        raise VerbsError("no route")

    site.while_connecting = nobody
    assert admitted(owner) == 0
    assert site.pairs[0].is_closed and owner.readers == 0


def test_a_queue_pair_that_stays_answers_nothing_counts_and_goes_the_next_time(site: Site, owner: RdmaOwner) -> None:
    number = admitted(owner)
    site.refuses_to_close = True
    with pytest.raises(VerbsError, match="in use"):
        owner.dismiss(number)
    assert site.pairs[0].has_failed and not site.pairs[0].is_closed
    assert admitted(owner) and not admitted(owner), "one that stays takes a reader's place"
    site.refuses_to_close = False
    owner.revoke()
    assert [pair.is_closed for pair in site.pairs] == [True, True]
    assert site.is_registered and admitted(owner)


def test_memory_is_lent_no_more_where_a_queue_pair_can_neither_be_destroyed_nor_ended(
    site: Site, owner: RdmaOwner
) -> None:
    admitted(owner)
    site.refuses_to_close = site.refuses_to_fail = True
    with pytest.raises(VerbsError):
        owner.revoke()
    assert not site.is_registered
    assert admitted(owner) == 0


def test_a_queue_pair_that_stays_does_not_keep_the_memory_registered_when_the_owner_closes(
    site: Site, owner: RdmaOwner
) -> None:
    admitted(owner)
    site.refuses_to_close = True
    with pytest.raises(VerbsError):
        owner.close()
    assert not site.is_registered
