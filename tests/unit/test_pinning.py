"""Registering HOST's memory with CUDA: in pieces, within its time, and said."""

from __future__ import annotations

import numpy as np
import pytest
import structlog

from kvbm.pools.host import pinning
from kvbm.pools.host.pinning import Pinning, piece_bytes

ROW_BYTES = 6000


class Cuda:
    """What is registered; a call takes a second of the clock."""

    def __init__(self, refuses_at: int = -1) -> None:
        self.now_s = 0.0
        self.registered: dict[int, int] = {}
        self.begun = 0
        self._refuses_at = refuses_at

    def clock(self) -> float:
        return self.now_s

    def begin(self) -> None:
        self.begun += 1

    def register(self, address: int, size: int) -> str:
        assert self.begun == 1
        self.now_s += 1.0
        if len(self.registered) == self._refuses_at:
            return "cudaHostRegister answers 2"
        self.registered[address] = size
        return ""

    def unregister(self, address: int) -> None:
        del self.registered[address]


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> np.ndarray:
    """Memory of three pieces and a rest."""
    monkeypatch.setattr(pinning, "PIECE_BYTES", 1)
    monkeypatch.setattr(pinning, "_PAGES", (4096,))
    step = np.lcm(ROW_BYTES, 4096)
    return np.zeros(3 * step + 5000, dtype=np.uint8)


def test_all_of_it_is_registered_once_in_pieces_that_no_row_lies_in_two_of(memory: np.ndarray) -> None:
    cuda = Cuda()
    done = Pinning(memory, ROW_BYTES, cuda, 60.0, cuda.clock)
    with structlog.testing.capture_logs() as logs:
        done.run(lambda: True)
    assert done.is_whole and done.why == ""
    begins = [address - memory.ctypes.data for address in sorted(cuda.registered)]
    assert len(begins) == 4
    assert [begin % ROW_BYTES for begin in begins] == [0] * 4
    ends = [begin + cuda.registered[begin + memory.ctypes.data] for begin in begins]
    assert [*ends] == [*begins[1:], memory.nbytes]
    assert [log["event"] for log in logs] == ["host.pinned"]
    done.undo()
    done.undo()
    assert cuda.registered == {}


def test_it_says_how_far_it_is(memory: np.ndarray, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pinning, "_REPORT_S", 2.0)
    cuda = Cuda()
    with structlog.testing.capture_logs() as logs:
        Pinning(memory, ROW_BYTES, cuda, 60.0, cuda.clock).run(lambda: True)
    assert [log["event"] for log in logs] == ["host.pinning", "host.pinned"]
    assert 0 < logs[0]["bytes"] < logs[0]["of"] == memory.nbytes


def test_after_its_time_it_begins_nothing_more_and_warns(memory: np.ndarray) -> None:
    cuda = Cuda()
    done = Pinning(memory, ROW_BYTES, cuda, 2.0, cuda.clock)
    with structlog.testing.capture_logs() as logs:
        done.run(lambda: True)
    assert not done.is_whole
    assert len(cuda.registered) == 2
    (warning,) = [log for log in logs if log["log_level"] == "warning"]
    assert (warning["event"], warning["of"]) == ("host.unpinned", memory.nbytes)
    assert "after 2 s (pools.host.pin_s)" in warning["why"]


def test_what_cuda_refuses_is_said_and_not_asked_again(memory: np.ndarray) -> None:
    cuda = Cuda(refuses_at=1)
    done = Pinning(memory, ROW_BYTES, cuda, 60.0, cuda.clock)
    with structlog.testing.capture_logs() as logs:
        done.run(lambda: True)
    assert [log["why"] for log in logs] == ["cudaHostRegister answers 2"]
    assert done.pinned_bytes and not done.is_whole
    done.undo()
    assert cuda.registered == {}


def test_a_machine_without_the_driver_is_told(memory: np.ndarray, monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = Cuda()
    monkeypatch.setattr(cuda, "begin", lambda: (_ for _ in ()).throw(OSError("libcuda.so.1: cannot open")))
    done = Pinning(memory, ROW_BYTES, cuda, 60.0, cuda.clock)
    done.run(lambda: True)
    assert (done.why, done.pinned_bytes) == ("libcuda.so.1: cannot open", 0)


def test_it_ends_when_nobody_wants_it_any_more(memory: np.ndarray) -> None:
    cuda = Cuda()
    done = Pinning(memory, ROW_BYTES, cuda, 60.0, cuda.clock)
    with structlog.testing.capture_logs() as logs:
        done.run(lambda: len(cuda.registered) < 2)
    assert len(cuda.registered) == 2 and logs == []


@pytest.mark.parametrize("row_bytes", [4096, 6000, 2_621_440, 1 << 20, 999_983])
def test_pieces_are_whole_pages_and_rows_of_about_a_gib(row_bytes: int) -> None:
    whole = 1 << 40
    size = piece_bytes(row_bytes, whole)
    assert size == whole or (size % row_bytes == 0 and size % 4096 == 0 and 1 << 30 <= size <= 5 << 30)
    assert piece_bytes(row_bytes, 5) == 5
