"""A process that leaves with its manager open, in the way it is told: `python -m tests.faults.processes.leaver FOLDER
WAYS [NATS]`.

WAYS: one, or several with "+" between them, each with a manager of its own; all but the last are such as the process
survives. It serves prompts from threads that know of no end, so that copies, offloads and the publisher are under way
when it leaves.
"""

from __future__ import annotations

import fcntl
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

import numpy as np

from kvbm import KvbmError, KvShape, Manager, Namespace, Tier, load_settings, open_manager
from kvbm.assembly import NATIVE
from kvbm.core.errors import LedgerError
from kvbm.core.ids import HASH_BYTES, NO_PARENT
from kvbm.pools.nvme.pool import NvmePool
from kvbm.streams import at_exit
from tests.eventually import eventually
from tests.managers import hashes_of

SHAPE = KvShape(2, 16, 2, 64)
SPACE = Namespace(model="leaver", revision="1", block_tokens=16, layout=SHAPE.describe())
DEPTH = 8
PATIENT_S = 60.0  # given to what must come to its end; a stream that is away is given what the product gives it
BUSY_BLOCKS = 100  # created, copied to the disk and read from it before it leaves
PROMPTS = 60  # of one life; with their blocks the disk is nearly full


def serve(manager: Manager, prompt: int) -> None:
    """One prompt, as an engine serves it."""
    hashes = hashes_of(prompt, DEPTH)
    prefix = manager.acquire(SPACE.id, hashes, 0.2)  # what has not come by then is computed
    slots = list(prefix.slots)
    fresh = manager.allocate(DEPTH - prefix.depth, SPACE.id)
    if fresh:
        at = prefix.depth * HASH_BYTES
        parent = hashes[at - HASH_BYTES : at] if at else NO_PARENT
        slots += manager.create(SPACE.id, parent, prefix.depth, hashes[at:], fresh)
    manager.unpin(slots)


def keep_busy(manager: Manager, first: int) -> None:
    """Serve prompts of this life for ever; what a closed manager says ends it."""
    rng = np.random.default_rng(first)
    with suppress(KvbmError):
        while True:
            serve(manager, manager.epoch * PROMPTS + int(rng.integers(0, PROMPTS)))


def hash_for_ever() -> None:
    """Native work that gives the GIL away and takes it back, of no manager."""
    tokens = np.arange(1 << 16, dtype=np.uint32)
    while True:
        NATIVE.sequence_hashes(tokens, 16, bytes(16))


def open_one(folder: Path, nats: str) -> Manager:
    """A manager with pools in memory, on disk and, if wanted, a stream."""
    settings = load_settings(
        flags={
            "instance.data_dir": str(folder),
            "instance.id": "leaver",
            "pools.hbm.slots": 64,
            "pools.hbm.device": "cpu",
            "pools.host.slots": 128,
            "pools.nvme.slots": 512,
            "nats.enabled": nats != "none",
            "nats.url": "" if nats in ("none", "embedded") else nats,
            "offload.threads": 2,
        }
    )
    return open_manager(settings, [SPACE], SHAPE.block_bytes)


def leave(way: str, manager: Manager) -> None:
    """Leave in a way."""
    forks: dict[str, Callable[[], None]] = {
        "fork": lambda: _fork(lambda: sys.exit(9), 9),
        "fork_os_exit": lambda: _fork(lambda: os._exit(9), 9),
        "fork_fall_off": lambda: _fork(lambda: None, 9),
        "multiprocessing_fork": lambda: _multiprocessing("fork"),
        "multiprocessing_spawn": lambda: _multiprocessing("spawn"),
        "fork_close": lambda: _fork(manager.close, 9),
        "fork_while_locked": lambda: _fork_while_locked(manager),
    }
    match way:
        case "fall_off":
            return
        case "hashing":
            for _ in range(4):
                threading.Thread(target=hash_for_ever, daemon=True).start()
            time.sleep(0.1)
        case "closed":
            manager.close()
        case "sys_exit":
            sys.exit(7)
        case "exception":
            raise ValueError("nobody catches this")
        case "SIGTERM" | "SIGINT" | "SIGHUP":
            os.kill(os.getpid(), signal.Signals[way])
            time.sleep(600)  # it ends by the signal
        case "sigterm_exits":
            signal.signal(signal.SIGTERM, lambda *_: sys.exit(5))
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(600)  # it ends by the signal
        case "os_exit":
            os._exit(6)
        case "thread":
            threading.Thread(target=_serve_on, args=(manager,)).start()
        case "fork_outlives":
            outlived_by_child(manager)
        case _:
            forks[way]()
            serve(manager, 1)  # the parent's is as it was
            eventually(lambda: not manager.trouble(), "the parent has trouble")  # a busy disk may have some for a while
            for path in locked_files(manager):
                with path.open("ab") as file, suppress(BlockingIOError):
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    raise AssertionError(f"{path} is not locked any more")
            manager.close()
            print("the parent's is whole", flush=True)


def _serve_on(manager: Manager) -> None:
    """A thread the interpreter waits for: its manager is open until it has ended."""
    for prompt in range(200):
        serve(manager, prompt)
    print("served on", flush=True)
    sys.exit(3)


def locked_files(manager: Manager) -> list[Path]:
    """The files a manager keeps locked."""
    pool = manager.pools.slots[Tier.NVME]
    assert isinstance(pool, NvmePool)
    return [pool.path, pool.path.parent / "journal" / "LOCK"]


def outlived_by_child(manager: Manager) -> None:
    """A child that lives on, and knows that the manager is not its own."""
    if not os.fork():
        try:
            manager.allocate(1)
        except LedgerError as error:
            print(f"child {os.getpid()} {error}", flush=True)
    time.sleep(600)  # until it is killed


def _fork_while_locked(manager: Manager) -> None:
    """Fork when another thread has the manager's lock, and others wait for it."""
    lock = manager._stream.lock
    has_it, may_end = threading.Event(), threading.Event()

    def have() -> None:
        with lock:
            has_it.set()
            may_end.wait(PATIENT_S)

    holder = threading.Thread(target=have)
    holder.start()
    assert has_it.wait(PATIENT_S)
    time.sleep(0.1)  # every busy thread comes to wait for it
    assert lock.locked() and not lock.acquire(blocking=False), "nobody has the lock"
    try:
        _fork(manager.close, 9)
    finally:
        may_end.set()
        holder.join()


def _fork(child: Callable[[], object], wanted: int) -> None:
    pid = os.fork()
    if not pid:
        child()
        sys.exit(wanted)
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == wanted, f"the child ended with {os.waitstatus_to_exitcode(status)}"


def _multiprocessing(method: str) -> None:
    process = multiprocessing.get_context(method).Process(target=sys.exit, args=(9,))
    process.start()
    process.join(2 * PATIENT_S)
    assert process.exitcode == 9, f"the child ended with {process.exitcode}"


def is_busy(manager: Manager) -> bool:
    """Whether blocks are created, and copied to the disk and from it."""
    stats = manager.stats()
    return min(stats.created_blocks, stats.offloaded_blocks[Tier.NVME], stats.hit_blocks[Tier.NVME]) >= BUSY_BLOCKS


def main(folder: str, ways: str, nats: str = "none") -> None:
    """See the module."""
    if nats in ("none", "embedded"):
        at_exit.LEAVE_S, at_exit.STEP_S = 2 * PATIENT_S, PATIENT_S
    for way in ways.split("+"):
        manager = open_one(Path(folder), nats)
        for number in range(3):
            threading.Thread(target=keep_busy, args=(manager, number), daemon=True).start()
        eventually(partial(is_busy, manager), "nothing is copied", state=manager.stats)
        print(f"busy {os.getpid()} {way}", flush=True)
        leave(way, manager)


if __name__ == "__main__":
    main(*sys.argv[1:])
