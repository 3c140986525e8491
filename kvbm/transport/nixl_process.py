"""NIXL in a process of its own: what its libraries do to a process, they do to this one.

It polls all reads in one thread.

    python -P nixl_process.py DESCRIPTOR OPTIONS

DESCRIPTOR is a socket (SOCK_SEQPACKET) to the process that started it; OPTIONS are those of NIXL's UCX, as JSON. When
the socket ends, so does this process, at once: destructors of the wheel's libraries crash (decision 135). Each thing it
does has a socket of its own, which comes over the first one together with the memory that is meant; the first message
on it says what is wanted, and its end is the end of that.

Nothing of kvbm is imported, so that it starts quickly and is small.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import mmap
import os
import select
import signal
import socket
import sys
import time
from collections import deque
from typing import Any, NamedTuple

import msgspec
import numpy as np

PACKAGES = ("nixl", "nixl_cu13", "nixl_cu12")  # the first chooses among the others by the CUDA of torch
MOST_MESSAGE_BYTES = 192 << 10  # a socket takes no more at once
STUCK = 3  # the status of a process that has too many reads which do not end
_MOST_STUCK = 4
_WAKE_US = 100_000  # NIXL's thread looks whether it is to end; what arrives wakes it at once
_SPIN_S, _NAP_S = 0.001, 0.00005


class Ready(msgspec.Struct, tag=True, array_like=True):
    """It has begun. `trouble`: why it cannot do anything; empty: it can."""

    trouble: str


class Lend(msgspec.Struct, tag=True, array_like=True):
    """Let others read so many bytes of the memory that came with this socket."""

    size: int


class Lent(msgspec.Struct, tag=True, array_like=True):
    """How others reach that memory: what NIXL tells of this agent, and where the memory lies here."""

    metadata: bytes
    address: int


class Join(msgspec.Struct, tag=True, array_like=True):
    """Get ready to read an owner's memory into the memory that came with this socket, in lanes of so many bytes."""

    metadata: bytes
    lanes: int
    lane_bytes: int


class Joined(msgspec.Struct, tag=True, array_like=True):
    """It is."""


class Fetch(msgspec.Struct, tag=True, array_like=True):
    """Read from these addresses of the owner into these lanes, all in one transfer."""

    addresses: list[int]
    lanes: list[int]


class Fetched(msgspec.Struct, tag=True, array_like=True):
    """The transfer that was asked for first of those under way is done."""


class Failed(msgspec.Struct, tag=True, array_like=True):
    """It is not, and nothing more comes of this socket's thing."""

    words: str


Message = Ready | Lend | Lent | Join | Joined | Fetch | Fetched | Failed
_ENCODER, _DECODER = msgspec.msgpack.Encoder(), msgspec.msgpack.Decoder(Message)


def send(to: socket.socket, message: Message) -> None:
    """Raises OSError: nobody is there, or it is too long."""
    to.sendall(_ENCODER.encode(message))


def receive(from_: socket.socket) -> Message | None:
    """The next message; None: the other end is gone. Raises OSError."""
    data = from_.recv(MOST_MESSAGE_BYTES)
    return _DECODER.decode(data) if data else None


def find_nixl() -> str:
    """The package that would be used; empty: none is installed. Nothing is imported."""
    for name in PACKAGES:
        if importlib.util.find_spec(name) is not None:
            return name
    return ""


def load_bindings() -> Any:
    """NIXL's functions. Raises ImportError: there are none that fit."""
    complaints: list[str] = []
    for name in PACKAGES:
        try:
            return importlib.import_module(f"{name}._bindings")
        except ImportError as error:
            complaints.append(str(error))
    raise ImportError("; ".join(complaints))


def main(descriptor: int, options: dict[str, str]) -> int:
    """See the module."""
    control = socket.socket(fileno=descriptor)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        bindings = load_bindings()
        agent = _new_agent(bindings, options)
    except Exception as error:  # noqa: BLE001 - who started it is told
        send(control, Ready(f"NIXL cannot be used: {error}"))
        return 1
    send(control, Ready(""))
    return _Loop(control, bindings, agent, options).run()


def _new_agent(bindings: Any, options: dict[str, str]) -> Any:
    config = bindings.nixlAgentConfig()
    config.useProgThread, config.pthrDelay, config.syncMode = True, _WAKE_US, bindings.NIXL_THREAD_SYNC_STRICT
    agent = bindings.nixlAgent(f"kvbm-{os.urandom(12).hex()}", config)
    agent.createBackend("UCX", options)
    return agent


class _Memory(NamedTuple):
    """Memory that NIXL knows: its address here, and what it is registered as."""

    mapping: mmap.mmap
    address: int
    known: Any


def _registered(bindings: Any, agent: Any, descriptor: int, size: int, is_read: bool) -> _Memory:
    access = mmap.PROT_READ if is_read else mmap.PROT_READ | mmap.PROT_WRITE
    mapping = mmap.mmap(descriptor, size, mmap.MAP_SHARED, access)
    address = np.frombuffer(mapping, dtype=np.uint8).ctypes.data
    known = bindings.nixlRegDList(bindings.DRAM_SEG, [(address, size, 0, "")])
    agent.registerMem(known, [])
    return _Memory(mapping, address, known)


class _Lending:
    """Memory that others read, with an agent of its own: what a reader knows of it ends with it."""

    def __init__(self, bindings: Any, descriptor: int, wanted: Lend, options: dict[str, str]) -> None:
        self._agent = _new_agent(bindings, options)
        self._memory = _registered(bindings, self._agent, descriptor, wanted.size, is_read=True)
        self.lent = Lent(self._agent.getLocalMD(), self._memory.address)

    def close(self) -> None:
        del self._agent


class _Remote:
    """An owner, with an agent that knows no other: what one says of itself changes nothing for the others."""

    def __init__(self, agent: Any, metadata: bytes) -> None:
        self.agent = agent
        self.name = agent.loadRemoteMD(metadata)
        self.readings = 0
        self.has_failed = False


class _Remotes:
    """Owners that are read from, each once for all that read from it.

    An agent that is free is kept for the next: one takes a while to make.
    """

    def __init__(self, bindings: Any, spare: Any, options: dict[str, str]) -> None:
        self._bindings, self._spare, self._options = bindings, spare, options
        self._known: dict[bytes, _Remote] = {}

    def join(self, metadata: bytes) -> _Remote:
        remote = self._known.get(metadata)
        if remote is None or remote.has_failed:
            agent, self._spare = self._spare or _new_agent(self._bindings, self._options), None
            remote = self._known[metadata] = _Remote(agent, metadata)
        remote.readings += 1
        return remote

    def leave(self, metadata: bytes, remote: _Remote) -> None:
        remote.readings -= 1
        if remote.readings:
            return
        if self._known.get(metadata) is remote:
            del self._known[metadata]
        if not remote.has_failed:
            remote.agent.invalidateRemoteMD(remote.name)
            self._spare = remote.agent


class _Reading:
    """Transfers from one owner into lanes.

    What is under way when its socket ends is waited for: nothing else ever uses its lanes.
    """

    def __init__(self, bindings: Any, remotes: _Remotes, descriptor: int, wanted: Join) -> None:
        self._bindings, self._remotes, self._wanted = bindings, remotes, wanted
        self._remote = remotes.join(wanted.metadata)
        self._agent = self._remote.agent
        try:
            size = wanted.lanes * wanted.lane_bytes
            self._memory = _registered(bindings, self._agent, descriptor, size, is_read=False)
        except BaseException:
            self.failed()
            remotes.leave(wanted.metadata, self._remote)
            raise
        self._under_way: deque[Any] = deque()

    def failed(self) -> None:
        """Who comes to this owner from now on gets another agent."""
        self._remote.has_failed = True

    @property
    def under_way(self) -> int:
        return len(self._under_way)

    def post(self, fetch: Fetch) -> None:
        """Begin. Raises Exception: NIXL does not."""
        size = self._wanted.lane_bytes
        ours = np.array([(self._memory.address + lane * size, size, 0) for lane in fetch.lanes], dtype=np.uint64)
        theirs = np.array([(address, size, 0) for address in fetch.addresses], dtype=np.uint64)
        segment = self._bindings.DRAM_SEG
        lists = [self._bindings.nixlXferDList(segment, one) for one in (ours, theirs)]
        handle = self._agent.createXferReq(self._bindings.NIXL_READ, *lists, self._remote.name, b"", [])
        self._under_way.append(handle)
        self._agent.postXferReq(handle, b"")

    def poll(self) -> int:
        """How many have ended since, in the order in which they were begun. Raises Exception: one has failed."""
        done = 0
        while self._under_way:
            state = self._agent.getXferStatus(self._under_way[0])
            if state == self._bindings.NIXL_IN_PROG:
                break
            if state != self._bindings.NIXL_SUCCESS:
                raise ValueError(f"a transfer ended with {state}")
            self._agent.releaseXferReq(self._under_way.popleft())
            done += 1
        return done

    def has_ended(self) -> bool:
        """Nothing is under way any more, whether it failed or not.

        A transfer is never released before: that crashes.
        """
        while self._under_way:
            try:
                if self._agent.getXferStatus(self._under_way[0]) == self._bindings.NIXL_IN_PROG:
                    return False
            except Exception:  # noqa: BLE001 - NIXL's, of a transfer that has failed
                self.failed()
            self._agent.releaseXferReq(self._under_way.popleft())
        return True

    def close(self) -> None:
        """Once it has ended."""
        self._agent.deregisterMem(self._memory.known, [])
        self._remotes.leave(self._wanted.metadata, self._remote)


class _Loop:
    """All sockets, and all transfers."""

    def __init__(self, control: socket.socket, bindings: Any, agent: Any, options: dict[str, str]) -> None:
        self._control, self._bindings, self._options = control, bindings, options
        self._remotes = _Remotes(bindings, agent, options)
        self._poller = select.poll()
        self._poller.register(control, select.POLLIN)
        self._waiting: dict[int, tuple[socket.socket, int]] = {}  # nothing said yet; the descriptor of its memory
        self._things: dict[int, tuple[socket.socket, _Lending | _Reading]] = {}
        self._stuck: list[_Reading] = []
        self._moved_s = 0.0

    def run(self) -> int:
        while True:
            is_busy = any(isinstance(thing, _Reading) and thing.under_way for _, thing in self._things.values())
            for descriptor, _ in self._poller.poll(0 if is_busy else 200 if self._stuck else None):
                if descriptor == self._control.fileno():
                    if not self._take():
                        return 0
                elif descriptor in self._waiting:
                    self._begin(descriptor)
                elif descriptor in self._things:
                    self._hear(descriptor)
            for descriptor in list(self._things):
                self._move(descriptor)
            self._stuck = [one for one in self._stuck if not self._is_over(one)]
            if len(self._stuck) > _MOST_STUCK:
                return STUCK
            if is_busy and time.monotonic() - self._moved_s > _SPIN_S:
                time.sleep(_NAP_S)

    def _take(self) -> bool:
        """A socket and its memory; False: nobody wants anything any more."""
        data, descriptors, _, _ = socket.recv_fds(self._control, 1, 2)
        if len(descriptors) == 2:
            thing = socket.socket(fileno=descriptors[0])
            self._waiting[thing.fileno()] = (thing, descriptors[1])
            self._poller.register(thing, select.POLLIN)
        return bool(data)

    def _begin(self, descriptor: int) -> None:
        thing, memory = self._waiting.pop(descriptor)
        try:
            match receive(thing):
                case Lend() as wanted:
                    lending = _Lending(self._bindings, memory, wanted, self._options)
                    self._things[descriptor] = (thing, lending)
                    send(thing, lending.lent)
                case Join() as wanted:
                    self._things[descriptor] = (thing, _Reading(self._bindings, self._remotes, memory, wanted))
                    send(thing, Joined())
                case _:
                    self._drop(descriptor, thing)
        except Exception as error:  # noqa: BLE001 - who waits for it is told
            self._fail(descriptor, thing, error)
        finally:
            os.close(memory)

    def _hear(self, descriptor: int) -> None:
        thing, what = self._things[descriptor]
        try:
            message = receive(thing)
            if isinstance(message, Fetch) and isinstance(what, _Reading):
                what.post(message)
                self._moved_s = time.monotonic()
            else:
                self._drop(descriptor, thing)
        except Exception as error:  # noqa: BLE001 - who waits for it is told
            self._fail(descriptor, thing, error)

    def _move(self, descriptor: int) -> None:
        thing, what = self._things[descriptor]
        if not isinstance(what, _Reading):
            return
        try:
            for _ in range(what.poll()):
                send(thing, Fetched())
                self._moved_s = time.monotonic()
        except Exception as error:  # noqa: BLE001 - who waits for it is told
            self._fail(descriptor, thing, error)

    def _fail(self, descriptor: int, thing: socket.socket, error: Exception) -> None:
        try:
            send(thing, Failed(str(error) or type(error).__name__))
        except OSError:
            pass  # nobody waits for it
        _, what = self._things.get(descriptor, (thing, None))
        if isinstance(what, _Reading):
            what.failed()
        self._drop(descriptor, thing)

    def _drop(self, descriptor: int, thing: socket.socket) -> None:
        self._poller.unregister(descriptor)
        _, what = self._things.pop(descriptor, (thing, None))
        if isinstance(what, _Reading):
            self._stuck.append(what)
        elif what is not None:
            what.close()
        thing.close()  # tells who waits for the end that this was it

    def _is_over(self, reading: _Reading) -> bool:
        if reading.has_ended():
            reading.close()
            return True
        return False


if __name__ == "__main__":
    status = 1
    try:
        status = main(int(sys.argv[1]), json.loads(sys.argv[2]))
    finally:
        os._exit(status)  # see the module
