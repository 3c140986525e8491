"""Owners in processes of their own and readers of theirs, over RDMA.

What proves a connection is not here: two words stand in for it.
"""

from __future__ import annotations

import functools
import json
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np

from kvbm._native import RowCopier, crc32c
from kvbm.core.errors import VerbsError
from kvbm.core.ids import Namespace
from kvbm.transport.leased import LeasedRun
from kvbm.transport.rdma import RdmaReader
from kvbm.transport.rdma_hello import RDMA_HELLO, decode_hello, encode_ready, receive_message
from kvbm.transport.rdma_owner import RdmaOwner
from kvbm.transport.sockets import send_message
from kvbm.verbs.device import Device
from kvbm.verbs.memory import new_memory

NAMESPACE = Namespace(model="small", revision="1", block_tokens=16)
SLOTS, BLOCK_BYTES = 256, 16384
MISSING_FROM = 200  # blocks from here on are not held
_LEASE_S = 60.0
_SLOW_S = 60.0  # the processor of the VM is emulated, and the machine has other work


def hashes_of(first: int, count: int) -> bytes:
    """Packed hashes of blocks: their numbers."""
    return b"".join(block.to_bytes(16, "little") for block in range(first, first + count))


def block_bytes_of(blocks: range, block_bytes: int = BLOCK_BYTES) -> np.ndarray:
    """The bytes that these blocks have, a row each; the same in every process."""
    return np.stack([_block(block, block_bytes) for block in blocks])


@functools.cache  # what a process has made, its forks have
def _block(block: int, block_bytes: int) -> np.ndarray:
    return np.random.default_rng(block).integers(0, 256, block_bytes, dtype=np.uint8)


def slot_of(block: int) -> int:
    """Where the owner has it: neither in order nor beside the next one."""
    return block * 7 % SLOTS


def send(connection: socket.socket, words: dict[str, Any]) -> None:
    data = json.dumps(words).encode()
    connection.sendall(struct.pack("<I", len(data)) + data)


def receive(connection: socket.socket) -> dict[str, Any]:
    (size,) = struct.unpack("<I", _exactly(connection, 4))
    words: dict[str, Any] = json.loads(_exactly(connection, size))
    return words


def _exactly(connection: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        piece = connection.recv(size - len(data))
        if not piece:
            raise ConnectionResetError("the other end closed the connection")
        data += piece
    return data


class Owner:
    """Serves readers, and does what a test tells it, until it is told to stop."""

    def __init__(self, device: str, listener: socket.socket) -> None:
        self._memory = new_memory(SLOTS * BLOCK_BYTES).reshape(SLOTS, BLOCK_BYTES)
        blocks = range(MISSING_FROM)
        self._memory[[slot_of(block) for block in blocks]] = block_bytes_of(blocks)
        self._checksums = [crc32c(self._memory[slot_of(block)].tobytes()) for block in blocks]
        self.rdma = RdmaOwner(Device(device), self._memory)
        self._listener = listener
        self._failed: list[int] = []
        self._has_stopped = threading.Event()
        self._rewriting = threading.Event()

    def serve(self) -> None:
        threading.Thread(target=self._accept, daemon=True).start()
        self._has_stopped.wait(600)

    def _accept(self) -> None:
        while True:
            connection, _ = self._listener.accept()
            threading.Thread(target=self._talk, args=(connection,), daemon=True).start()

    def _talk(self, connection: socket.socket) -> None:
        number = 0
        try:
            first = receive(connection)
            if first["role"] == "reader":
                until_s = time.monotonic() + _SLOW_S
                hello = decode_hello(receive_message(connection, RDMA_HELLO, until_s))
                number, ready = self.rdma.admit(hello, first["proved"], self.rdma.revoked)
                send_message(connection, encode_ready(ready), until_s)
                connection.settimeout(None)
            while number or first["role"] == "tester":
                words = receive(connection)
                answer = getattr(self, f"_do_{words.pop('do')}")(**words)
                if answer is not None:
                    send(connection, answer)
        except OSError:
            pass  # the test has gone on
        finally:
            if number:
                self.rdma.dismiss(number)
            connection.close()

    def _do_ask(self, first: int, count: int) -> dict[str, Any]:
        held = range(first, min(first + count, MISSING_FROM))
        return {"slots": [slot_of(block) for block in held], "checksums": [self._checksums[block] for block in held]}

    def _do_end(self, failed: list[int]) -> None:
        self._failed += failed

    def _do_failed(self) -> dict[str, Any]:
        return {"failed": self._failed}

    def _do_readers(self) -> dict[str, Any]:
        return {"readers": self.rdma.readers}

    def _do_flip(self, block: int, byte: int) -> dict[str, Any]:
        self._memory[slot_of(block), byte] ^= 1
        return {}

    def _do_rewrite(self, block: int) -> dict[str, Any]:
        """From now on this block's slot changes all the time."""

        def rewrite() -> None:
            value = 0
            while True:
                value += 1
                self._memory[slot_of(block)] = value & 0xFF

        threading.Thread(target=rewrite, daemon=True).start()
        return {}

    def _do_deregister(self) -> dict[str, Any]:
        """The memory is lent no more, while readers are connected."""
        try:
            self.rdma._memory.close()
        except VerbsError as error:
            return {"refused": str(error)}
        return {}

    def _do_lie(self, key: int = 0, slots: int = 0) -> dict[str, Any]:
        """Readers that come from now on are told another key, or of fewer slots."""
        self.rdma._memory.remote_key ^= key
        self.rdma._slots -= slots
        return {}

    def _do_most_readers(self, most: int) -> dict[str, Any]:
        self.rdma.most_readers = most
        return {}

    def _do_revoke(self) -> dict[str, Any]:
        self.rdma.revoke()
        return {}

    def _do_stop(self) -> None:
        self._has_stopped.set()


class Connection:
    """A reader's connection to an `Owner`."""

    def __init__(self, address: str, is_proved: bool, until_s: float) -> None:
        self.socket = connected(address, until_s)
        send(self.socket, {"role": "reader", "proved": is_proved})

    def ask(self, namespace: Namespace, hashes: bytes, until_s: float) -> LeasedRun:
        asked_s = time.monotonic()
        self.socket.settimeout(max(0.001, until_s - asked_s))
        send(self.socket, {"do": "ask", "first": int.from_bytes(hashes[:16], "little"), "count": len(hashes) // 16})
        answer = receive(self.socket)
        slots, checksums = (np.array(answer[name], dtype=np.uint32) for name in ("slots", "checksums"))
        return LeasedRun(1 if len(slots) else 0, asked_s + _LEASE_S, slots, checksums)

    def end(self, namespace: Namespace, lease: int, failed: bytes) -> None:
        numbers = [int.from_bytes(failed[at : at + 16], "little") for at in range(0, len(failed), 16)]
        send(self.socket, {"do": "end", "failed": numbers})

    def close(self) -> None:
        self.socket.close()


class OwnerHandle:
    """What a test has of an owner: tells it what to do, and makes readers of it."""

    def __init__(self, address: str, reader_device: Device, pid: int = 0) -> None:
        self.address, self.pid = address, pid
        self._device = reader_device
        self._tester = connected(address, time.monotonic() + 120)
        self._tester.settimeout(120)
        self._readers: list[RdmaReader] = []
        send(self._tester, {"role": "tester"})
        self.tell("readers")  # it is there

    def tell(self, do: str, **words: Any) -> dict[str, Any]:
        send(self._tester, {"do": do, **words})
        return receive(self._tester)

    def reader(self, is_proved: bool = True, **options: Any) -> RdmaReader:
        def connect(until_s: float) -> Connection:
            return Connection(self.address, is_proved, until_s)

        reader = RdmaReader(
            self._device, connect, RowCopier(1), **({"lane_bytes": 1 << 20, "handshake_s": _SLOW_S} | options)
        )
        self._readers.append(reader)
        return reader

    def kill(self) -> None:
        """As the system does it: no word to anybody."""
        os.kill(self.pid, signal.SIGKILL)

    def close(self) -> None:
        for reader in self._readers:
            reader.close()
        self._tester.close()


@contextmanager
def forked(serve: Callable[[], object]) -> Iterator[int]:
    """A process that serves until it is killed here, by its number.

    It is forked from this one, which spares it the imports: on a machine that is emulated they take half a minute.
    """
    pid = os.fork()
    if not pid:
        status = 1
        try:
            serve()
            status = 0
        except BaseException:  # noqa: BLE001 - the parent's test shows it
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(status)
    try:
        yield pid
    finally:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


@contextmanager
def owner_process(folder: Path, owner_device: str, reader_device: Device) -> Iterator[OwnerHandle]:
    """An owner in a process of its own."""
    block_bytes_of(range(MISSING_FROM))
    address = str(folder / "owner.sock")
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(address)
    listener.listen()
    with forked(lambda: Owner(owner_device, listener).serve()) as pid:
        listener.close()
        handle = OwnerHandle(address, reader_device, pid)
        try:
            yield handle
        finally:
            handle.close()


def connected(address: str, until_s: float) -> socket.socket:
    """A connection to a unix path or host:port, tried until it is there. Raises OSError."""
    while True:
        try:
            left_s = max(0.001, until_s - time.monotonic())
            if address.startswith("/"):
                connection = socket.socket(socket.AF_UNIX)
                connection.settimeout(left_s)
                connection.connect(address)
                return connection
            host, _, port = address.rpartition(":")
            return socket.create_connection((host, int(port)), timeout=left_s)
        except OSError:
            if time.monotonic() >= until_s:
                raise
            time.sleep(0.1)


def run(*words: str) -> None:
    """A command of the system's, which must go well."""
    subprocess.run(words, check=True, timeout=120)


@contextmanager
def netem(interface: str, *how: str) -> Iterator[None]:
    """What leaves this interface is treated like that meanwhile: "loss 100%", "rate 20mbit"."""
    run("tc", "qdisc", "replace", "dev", interface, "root", "netem", *how)
    try:
        yield
    finally:
        run("tc", "qdisc", "del", "dev", interface, "root")
