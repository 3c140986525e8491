"""Readers that come to a native server for RDMA, up to the device: who is admitted, who is sent away, and what a lease
of slots says.

Queue pairs are numbers here; `make test-rdma` has real ones.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvbm.core.errors import KvbmError, PeerWireError, VerbsError
from kvbm.core.ids import NamespaceId
from kvbm.transport.leasing_connection import LeasingConnection
from kvbm.transport.rdma_hello import (
    RDMA_READY,
    RdmaReady,
    RdmaStatus,
    decode_ready,
    encode_hello,
    receive_message,
)
from kvbm.transport.rdma_owner import RdmaAdmission
from kvbm.transport.sockets import send_message
from kvbm.transport.wire import GrantTransport
from kvbm.verbs.queue_pair import RemoteEnd
from tests.eventually import eventually
from tests.lenders import NAMESPACE, OTHER, blocks_of, hashes_of
from tests.rdma_site import BLOCK, END, WAIT_S, Owner


@pytest.fixture
def owner(tmp_path: Path) -> Iterator[Owner]:
    owner = Owner(tmp_path)
    owner.rdma.start()
    yield owner
    owner.close()


def joined(connection: LeasingConnection) -> RdmaReady:
    until_s = time.monotonic() + WAIT_S
    send_message(connection.socket, encode_hello(END), until_s)
    return decode_ready(receive_message(connection.socket, RDMA_READY, until_s))


def test_who_has_proved_everything_is_admitted_and_gets_leases_of_slots(owner: Owner) -> None:
    connection = owner.connection(NAMESPACE)
    ready = joined(connection)
    assert (ready.status, ready.end, owner.pairs.ends) == (RdmaStatus.READY, END, [END])
    run = connection.ask(NAMESPACE, hashes_of(10), time.monotonic() + WAIT_S)
    assert run.lease and run.trouble == "" and len(run.slots) == len(run.checksums) == 8
    assert time.monotonic() < run.until_s
    rows = owner.lender.host[list(run.slots)]
    assert (rows == blocks_of(8, BLOCK)).all()
    assert owner.lender.pinned == 8
    connection.end(NAMESPACE, run.lease, b"")
    eventually(lambda: owner.lender.pinned == 0, "a lease that has ended pins blocks")
    gone = connection.ask(NAMESPACE, hashes_of(1, 9), time.monotonic() + WAIT_S)
    assert (gone.lease, gone.trouble, gone.retry_s) == (0, "", 0.0)
    with pytest.raises(VerbsError, match="does not open"):
        connection.ask(OTHER, hashes_of(1), time.monotonic() + WAIT_S)
    connection.close()
    eventually(lambda: not owner.pairs.open, "its queue pair stays")


def test_a_lease_ends_with_the_connection(owner: Owner) -> None:
    connection = owner.connection(NAMESPACE)
    joined(connection)
    assert connection.ask(NAMESPACE, hashes_of(8), time.monotonic() + WAIT_S).lease
    connection.close()
    eventually(lambda: owner.lender.pinned == 0, "blocks stay pinned")


def test_who_lacks_a_namespace_is_refused_until_it_proves_it(owner: Owner) -> None:
    first = owner.connection(NAMESPACE)
    assert joined(first).status is RdmaStatus.READY
    owner.rdma.declare([OTHER])
    assert not owner.pairs.open, "who has not proved the new namespace READs on"
    assert joined(owner.connection(NAMESPACE)).status is RdmaStatus.NOT_PROVED
    owner.rdma.declare([OTHER])
    assert joined(owner.connection(NAMESPACE, OTHER)).status is RdmaStatus.READY
    assert owner.pairs.revoked == 1, "what is known already sends nobody away"


def test_a_root_that_counts_no_more_proves_nothing(owner: Owner) -> None:
    connection = owner.connection(NAMESPACE)
    owner.lender.withdraw(NAMESPACE)
    assert joined(connection).status is RdmaStatus.NOT_PROVED
    with pytest.raises(VerbsError, match="does not open"):
        connection.ask(NAMESPACE, hashes_of(1), time.monotonic() + WAIT_S)


def test_what_changes_while_a_reader_is_admitted_sends_it_away(owner: Owner, monkeypatch: pytest.MonkeyPatch) -> None:
    admit = owner.pairs.admit

    def late(end: RemoteEnd, has_proved_all: bool, revoked: int) -> RdmaAdmission:
        owner.rdma.declare([OTHER])
        return admit(end, has_proved_all, revoked)

    monkeypatch.setattr(owner.pairs, "admit", late)
    assert joined(owner.connection(NAMESPACE)).status is RdmaStatus.FULL
    assert not owner.pairs.open


def test_another_key_or_a_second_hello_ends_the_connection(owner: Owner) -> None:
    with pytest.raises(PeerWireError, match="the key is another"):
        owner.connection(NAMESPACE, key=b"x" * 64)
    connection = owner.connection(NAMESPACE)
    joined(connection)
    with pytest.raises((PeerWireError, OSError)):
        joined(connection)
    eventually(lambda: not owner.pairs.open, "its queue pair stays")


def test_a_hello_that_makes_no_sense_is_refused(owner: Owner) -> None:
    connection = owner.connection(NAMESPACE)
    broken = bytearray(encode_hello(END))
    broken[8:24] = bytes(16)  # no address
    send_message(connection.socket, bytes(broken), time.monotonic() + WAIT_S)
    ready = decode_ready(receive_message(connection.socket, RDMA_READY, time.monotonic() + WAIT_S))
    assert ready.status is RdmaStatus.FULL


def test_slots_are_not_granted_to_who_has_no_queue_pair(owner: Owner) -> None:
    connection = owner.connection(NAMESPACE)
    with pytest.raises((PeerWireError, OSError)):
        connection.ask(NAMESPACE, hashes_of(1), time.monotonic() + WAIT_S)
    assert owner.lender.pinned == 0


def test_slots_are_not_granted_to_who_was_refused_a_queue_pair(owner: Owner) -> None:
    connection = owner.connection(NAMESPACE)
    owner.rdma.declare([OTHER])
    assert joined(connection).status is RdmaStatus.NOT_PROVED
    with pytest.raises((PeerWireError, OSError)):
        connection.ask(NAMESPACE, hashes_of(1), time.monotonic() + WAIT_S)
    assert owner.lender.pinned == 0


def test_an_owner_that_does_not_lend_over_rdma_says_so_after_the_proof(tmp_path: Path) -> None:
    owner = Owner(tmp_path)
    try:
        with pytest.raises(KvbmError, match="lends nothing over RDMA"):
            owner.connection(NAMESPACE)
    finally:
        owner.close()


def test_who_waits_for_an_answer_while_the_owner_closes_is_told(tmp_path: Path) -> None:
    owner = Owner(tmp_path)
    owner.server.native.open_joins(GrantTransport.RDMA)  # and nobody answers
    connection = owner.connection(NAMESPACE)
    send_message(connection.socket, encode_hello(END), time.monotonic() + WAIT_S)
    [(number, hello)] = owner.server.native.take_joins(GrantTransport.RDMA, WAIT_S)
    assert hello is not None and len(hello) == 28
    assert owner.server.native.opened_by(GrantTransport.RDMA, number) == [bytes(NamespaceId(NAMESPACE.id))]
    owner.close()
    assert owner.pairs.is_closed
    with pytest.raises((PeerWireError, OSError)):
        receive_message(connection.socket, RDMA_READY, time.monotonic() + WAIT_S)
    assert not owner.server.native.answer_join(GrantTransport.RDMA, number, b"late")
