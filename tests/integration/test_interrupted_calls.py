"""An exception before any line of a call, as a signal's handler raises one: nothing stays pinned, taken or waited for,
and all goes on.
"""

from __future__ import annotations

import asyncio
import inspect
import linecache
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import CodeType, FrameType, SimpleNamespace
from typing import Any

import pytest

from kvbm.assembly import NATIVE_INDEX, open_manager, services, start
from kvbm.assembly import manager as manager_opening
from kvbm.assembly.native import NATIVE, OPEN_BLOCK_IO
from kvbm.catalog.edge import server as catalog_server
from kvbm.catalog.edge.server import CatalogThread
from kvbm.catalog.service import ServiceSettings
from kvbm.config import load_settings
from kvbm.core.errors import LedgerError
from kvbm.core.ids import InstanceId, Tier
from kvbm.manager import acquiring, base, closing, engine_hbm, owned_hbm
from kvbm.manager.acquiring import Acquiring
from kvbm.manager.base import BlockManager
from kvbm.manager.copies import copies_in_flight
from kvbm.manager.engine_hbm import EngineHbmManager, Store
from kvbm.manager.offload import driver
from kvbm.manager.onboard import loads
from kvbm.manager.onboard.loads import Prefix
from kvbm.manager.owned_hbm import Manager
from kvbm.manager.record import event_writer, ledger_stream
from kvbm.pools.nvme import pool as nvme_pool
from kvbm.pools.nvme.pool import NvmePool
from tests.eventually import WAIT_S, eventually
from tests.managers import BLOCK_BYTES, NAMESPACE, hashes_of, make_manager, serve
from tests.owning_engines import OwningEngine, opened

Trace = Callable[[FrameType, str, Any], Any]


ENDS = ("return prefix", "return slots", "return store", "return acquiring", "return manager")


class Interrupted(BaseException):
    """What the handler of a signal raises."""


def files_of(*modules: Any) -> frozenset[str]:
    return frozenset(inspect.getfile(module) for module in modules)


def interrupted_at(number: int, files: frozenset[str], call: Callable[[], object]) -> str:
    """Interrupt a call before the line of these files that comes `number`-th, from 1 on; which it was, "" where it has
    not so many.

    Lines that begin with `with` or `try` are left out: there a trace function strikes where a lock is not given back,
    and no signal does. So is the ledger's call that unpins what the line before has taken out, or ends a copy that
    counts as ended from there on, and the end of a call, which no caller can be told of.
    """
    count, where = 0, ""
    left_out: dict[tuple[CodeType, int], bool] = {}

    def each_line(frame: FrameType, event: str, _: object) -> Trace:
        nonlocal count, where
        if event != "line" or where:
            return each_line
        place = (frame.f_code, frame.f_lineno)
        if place not in left_out:
            line = linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip()
            left_out[place] = (
                line.startswith(
                    ("with ", "try:", "self._ledger.unpin(", "return self._ledger.end_copy(", "self.open.discard(")
                )
                or line in ENDS
            )
        count += not left_out[place]
        if count == number:
            where = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
            raise Interrupted
        return each_line

    def each_call(frame: FrameType, *_: object) -> Trace | None:
        return each_line if frame.f_code.co_filename in files else None

    before = sys.gettrace()
    sys.settrace(each_call)
    try:
        call()
    except Interrupted:
        pass
    finally:
        sys.settrace(before)
    return where


def threads_of_managers() -> list[str]:
    return [one.name for one in threading.enumerate() if one.name.startswith(("kvbm-frames", "kvbm-offload"))]


def test_a_close_that_is_interrupted_anywhere_is_done_by_itself_or_by_the_next(tmp_path: Path) -> None:
    files = files_of(base, closing, event_writer, ledger_stream, driver)
    number, where = 0, "at first"
    while where:
        number += 1
        manager = opened(tmp_path)  # which the one before has left: its journal is locked by nobody
        OwningEngine(manager).store(number, 2)
        where = interrupted_at(number, files, manager.close)
        manager.close()
        eventually(lambda: not threads_of_managers(), f"a thread goes on after {where}", state=threads_of_managers)
    assert number > 20


@pytest.mark.parametrize("has_stream", [False, pytest.param(True, marks=pytest.mark.nightly)])
def test_an_opening_that_is_interrupted_anywhere_leaves_nothing_open(has_stream: bool, tmp_path: Path) -> None:
    (tmp_path / "pod").mkdir()
    flags = {
        "instance.data_dir": str(tmp_path / "data"),
        "nats.enabled": has_stream,
        "nats.url": "nats://127.0.0.1:1",
        "nats.timeout_s": 0.01,
        "pools.hbm.device": "memory",
        "pools.hbm.slots": 4,
        "pools.nvme.slots": 4,
        "pools.nvme.folder": str(tmp_path / "pod"),
    }
    settings = load_settings(flags=flags)
    before = set(threading.enumerate())

    def ours() -> list[str]:
        found = [one for one in threading.enumerate() if one not in before]
        return [one.name for one in found if one.name.startswith("kvbm-") and not one.name.startswith("kvbm-epoch-")]

    number, where = 0, "at first"
    managers: list[Manager] = []
    while where:
        number += 1
        # That its files are locked by nobody shows in the next.
        where = interrupted_at(
            number,
            files_of(manager_opening, services, start, base),
            lambda: managers.append(open_manager(settings, [NAMESPACE], BLOCK_BYTES)),
        )
        if where:
            assert not managers, f"it has come after {where}"
            eventually(lambda: not ours(), f"a thread goes on after {where}", state=ours)
    managers[0].close()
    assert number > 20


@pytest.mark.parametrize("step", ["wait_ended", "end", "stop", "close_pools"])
@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_a_step_of_a_close_that_fails_keeps_no_other_from_being_done(
    step: str, error: type[BaseException], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manager = opened(tmp_path)
    OwningEngine(manager).store(1, 2)
    whole: Any = {
        "wait_ended": manager._offloads,
        "end": manager._stream,
        "stop": manager._writer,
        "close_pools": manager._copies,
    }[step]
    real, errors = getattr(whole, step), iter([error])

    def fail_once(*given: Any) -> Any:
        for one in errors:
            raise one
        return real(*given)

    monkeypatch.setattr(whole, step, fail_once)
    with pytest.raises(error):
        manager.close()
    eventually(lambda: not threads_of_managers(), "a thread goes on", state=threads_of_managers)
    with opened(tmp_path) as again:
        again.begin_acquire(NAMESPACE.id, hashes_of(1, 2)).release()


ENGINE = files_of(acquiring, base, copies_in_flight, engine_hbm, ledger_stream, loads)
OWNER = files_of(base, copies_in_flight, ledger_stream, loads, owned_hbm)


def begun(tmp_path: Path) -> tuple[EngineHbmManager, OwningEngine]:
    """A manager of an engine with a prompt of 6 blocks, the first 2 of them in HOST, all in NVME."""
    manager = opened(tmp_path)
    one = OwningEngine(manager)
    one.store(1, 6)
    one.empty_host()
    one.store(1, 2)
    assert manager.settle(WAIT_S)
    return manager, one


def fresh(manager: EngineHbmManager) -> None:
    """What lies in HOST is as at first: 2 blocks of the prompt."""
    assert manager.settle(WAIT_S)
    manager.evict(Tier.HOST, hashes_of(1, 6, start=2))


def has_come(asked: Acquiring) -> bool:
    return not asked._is_under_way()


def ask(asked: Acquiring) -> list[bool]:
    return [asked.poll() for _ in range(3)]


def keep(got: list[Any], call: Callable[..., object], *given: object) -> None:
    got.append(call(*given))


def check_nothing_is_held(manager: BlockManager, where: str) -> None:
    """No slot is anybody's or pinned, no copy under way, nobody waited for."""
    # the thread of a copy that has just ended may still give its slots back
    eventually(
        lambda: manager.stats().copies_in_flight + manager.stats().late_slots == 0,
        f"{where}: a copy does not end",
        state=manager.stats,
    )
    stats = manager.stats()
    assert (stats.waiting_requests, stats.late_slots, stats.quarantined_slots) == (0, 0, 0), where
    assert manager._loads.nobody_waits.is_set(), where
    for tier, counts in stats.pools.items():
        assert (counts.allocated, counts.free + counts.held) == (0, counts.slots), f"{where}: {tier.name}"
        assert counts.evictable == counts.held, f"{where}: {tier.name} has pins"


def test_an_acquiring_that_is_interrupted_while_it_is_asked_is_released(tmp_path: Path) -> None:
    manager, one = begun(tmp_path)
    number, where = 0, "at first"
    with manager:
        while where:
            number += 1
            fresh(manager)
            asked = manager.begin_acquire(NAMESPACE.id, hashes_of(1, 6))
            eventually(partial(has_come, asked), "a copy does not end")
            where = interrupted_at(number, ENGINE, partial(ask, asked))
            asked.release()
            check_nothing_is_held(manager, where)
        assert one.acquired(1, 6).depth == 6
    assert number > 20


def test_a_release_that_is_interrupted_is_done_by_the_next(tmp_path: Path) -> None:
    manager, one = begun(tmp_path)
    with manager:
        for is_done in (False, True):
            number, where = 0, "at first"
            while where:
                number += 1
                fresh(manager)
                asked = manager.begin_acquire(NAMESPACE.id, hashes_of(1, 6))
                if is_done:
                    one.awaited(asked, 1)
                where = interrupted_at(number, ENGINE, asked.release)
                asked.release()
                asked.release()
                check_nothing_is_held(manager, where)
            assert number > 5


def test_an_acquiring_whose_begin_is_interrupted_pins_nothing(tmp_path: Path) -> None:
    manager, one = begun(tmp_path)
    number, where = 0, "at first"
    with manager:
        while where:
            number += 1
            fresh(manager)
            got: list[Acquiring] = []
            where = interrupted_at(
                number, ENGINE, partial(keep, got, manager.begin_acquire, NAMESPACE.id, hashes_of(1, 6))
            )
            for asked in got:
                asked.release()
            check_nothing_is_held(manager, where)
        assert one.acquired(1, 6).depth == 6
    assert number > 60


def test_an_acquire_that_is_interrupted_anywhere_pins_nothing() -> None:
    number, where = 0, "at first"
    with make_manager({Tier.HBM: 16, Tier.HOST: 32}, offload=(Tier.HOST,)) as manager:
        serve(manager, 1, 6)
        while where:
            number += 1
            assert manager.settle(WAIT_S)
            manager.evict(Tier.HBM, hashes_of(1, 6, start=2))
            got: list[Prefix] = []
            where = interrupted_at(number, OWNER, partial(keep, got, manager.acquire, NAMESPACE.id, hashes_of(1, 6)))
            for prefix in got:
                manager.unpin(prefix.slots)
            check_nothing_is_held(manager, where)
        assert serve(manager, 1, 6).prefix.depth == 6
    assert number > 60


def test_slots_whose_allocate_is_interrupted_are_free_again() -> None:
    number, where = 0, "at first"
    with make_manager({Tier.HBM: 16}) as manager:
        while where:
            number += 1
            got: list[list[int] | None] = []
            where = interrupted_at(number, OWNER, partial(keep, got, manager.allocate, 4))
            for slots in got:
                manager.release(slots or [])
            check_nothing_is_held(manager, where)
    assert number > 8


def test_a_store_that_is_interrupted_as_it_begins_or_ends_takes_nothing(tmp_path: Path) -> None:
    for call in ("begin", "end"):
        number, where = 0, "at first"
        with opened(tmp_path / call) as manager:
            one = OwningEngine(manager)
            one.compute(1, 4)
            while where:
                number += 1
                got: list[Store | None] = []

                def begin(one: OwningEngine = one, got: list[Store | None] = got) -> None:
                    got.append(one.begin_store(1, 4))

                if call == "begin":
                    where = interrupted_at(number, ENGINE, begin)
                else:
                    begin()
                for store in filter(None, got):

                    def end(one: OwningEngine = one, store: Store = store) -> None:
                        one.manager.end_store(store, [True] * len(store.slots), one.fill(store))

                    if call == "end":
                        where = interrupted_at(number, ENGINE, end)
                    with suppress(LedgerError):  # it has ended
                        end()
                assert manager.settle(WAIT_S)
                check_nothing_is_held(manager, where)
                for tier in (Tier.HOST, Tier.NVME):
                    manager.evict(tier, hashes_of(1, 4))
        assert number > 20, call


def test_what_an_engine_tells_is_held_and_pinned_by_nobody_wherever_it_is_interrupted(tmp_path: Path) -> None:
    number, where = 0, "at first"
    with opened(tmp_path) as manager:
        one = OwningEngine(manager)
        while where:
            number += 1
            where = interrupted_at(number, ENGINE, partial(one.compute, 1, 4))
            check_nothing_is_held(manager, where)
            manager.evict(Tier.HBM, hashes_of(1, 4))
    assert number > 20


def test_a_refresh_that_is_interrupted_pins_nothing(tmp_path: Path) -> None:
    manager, _ = begun(tmp_path)
    number, where = 0, "at first"
    with manager:
        while where:
            number += 1
            where = interrupted_at(number, ENGINE, partial(manager.refresh, hashes_of(1, 6)))
            check_nothing_is_held(manager, where)
    assert number > 5


def test_files_whose_close_is_interrupted_are_unlocked_by_the_next(tmp_path: Path) -> None:
    shape = NAMESPACE
    number, where = 0, "at first"
    while where:
        number += 1
        pool = NvmePool(  # which the one before has left: its files are locked by nobody
            (tmp_path / "one", tmp_path / "two"),
            8,
            BLOCK_BYTES,
            shape,
            InstanceId("a"),
            NATIVE.checksums,
            OPEN_BLOCK_IO,
        )
        where = interrupted_at(number, files_of(nvme_pool), pool.close)
        pool.close()
        pool.close()
    assert number > 5


def test_a_catalog_whose_start_is_interrupted_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    stopped: list[bool] = []

    async def serve_until_told(*given: Any) -> None:
        server = SimpleNamespace(should_exit=False)
        given[4](server, asyncio.get_running_loop())
        while not server.should_exit:  # noqa: ASYNC110 - as uvicorn does
            await asyncio.sleep(0.001)
        stopped.append(True)

    monkeypatch.setattr(catalog_server, "_serve", serve_until_told)
    catalog = CatalogThread(ServiceSettings(nats_url="", database_url=""), NATIVE, NATIVE_INDEX)

    def result(_: float) -> str:
        raise Interrupted

    monkeypatch.setattr(catalog._started, "result", result)
    with pytest.raises(Interrupted):
        catalog.start()
    assert stopped == [True] and not catalog._thread.is_alive()
