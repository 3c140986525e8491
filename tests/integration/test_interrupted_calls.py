"""An exception before any line of a call, as a signal's handler raises one: nothing stays pinned, taken or waited for, and all goes on."""

from __future__ import annotations

import inspect
import linecache
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest

from kvbm.manager import base, closing, event_writer, ledger_stream, offload_driver
from tests.eventually import eventually
from tests.managers import NAMESPACE, hashes_of
from tests.owning_engines import OwningEngine, opened

Trace = Callable[[FrameType, str, Any], Any]


class Interrupted(BaseException):
    """What the handler of a signal raises."""


def files_of(*modules: Any) -> frozenset[str]:
    return frozenset(inspect.getfile(module) for module in modules)


def interrupted_at(number: int, files: frozenset[str], call: Callable[[], object]) -> str:
    """Interrupt a call before the line of these files that comes `number`-th, from 1 on; which it was, "" where it has not so many.

    Lines that begin with `with` or `try` are left out: there a trace function strikes where a lock is not given back, and no signal does.
    """
    count, where = 0, ""
    left_out: dict[tuple[CodeType, int], bool] = {}

    def each_line(frame: FrameType, event: str, _: object) -> Trace:
        nonlocal count, where
        if event != "line" or where:
            return each_line
        place = (frame.f_code, frame.f_lineno)
        if place not in left_out:
            left_out[place] = linecache.getline(frame.f_code.co_filename, frame.f_lineno).lstrip().startswith(("with ", "try:"))
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
    files = files_of(base, closing, event_writer, ledger_stream, offload_driver)
    number, where = 0, "at first"
    while where:
        number += 1
        manager = opened(tmp_path)  # which the one before has left: its journal is locked by nobody
        OwningEngine(manager).store(number, 2)
        where = interrupted_at(number, files, manager.close)
        manager.close()
        eventually(lambda: not threads_of_managers(), f"a thread goes on after {where}", state=threads_of_managers)
    assert number > 20


@pytest.mark.parametrize("step", ["wait_ended", "end", "stop", "close_pools"])
@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_a_step_of_a_close_that_fails_keeps_no_other_from_being_done(
    step: str, error: type[BaseException], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manager = opened(tmp_path)
    OwningEngine(manager).store(1, 2)
    whole: Any = {
        "wait_ended": manager._offloads, "end": manager._stream, "stop": manager._writer, "close_pools": manager._copies,
    }[step]  # fmt: skip
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
