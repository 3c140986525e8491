"""Memory between two tiers: lanes, and CUDA, which has it registered for as long as somebody copies."""

from __future__ import annotations

import numpy as np
import pytest
from structlog.testing import capture_logs

from kvbm.manager.copies import staging
from kvbm.manager.copies.staging import Staging


def test_what_a_gpu_copies_through_is_registered_until_it_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    pinned: dict[int, int] = {}

    def register(memory: np.ndarray, whose: str) -> tuple[bool, str]:
        pinned[memory.ctypes.data] = memory.nbytes
        return True, ""

    monkeypatch.setattr(staging, "register", register)
    monkeypatch.setattr(staging, "unregister", pinned.pop)
    plain = Staging(1 << 20, 4096)
    assert not pinned
    made = Staging(1 << 20, 4096, pins=True)
    lane = made.take(0.0, is_offload=False)
    assert lane is not None
    ((begin, size),) = pinned.items()
    assert begin <= lane.ctypes.data < lane.ctypes.data + lane.nbytes <= begin + size
    for one in (plain, made, made):
        one.close()
    assert not pinned


def test_memory_that_cannot_be_registered_is_said_once_and_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staging, "register", lambda memory, whose: (False, f"{whose}: no"))
    monkeypatch.setattr(staging, "unregister", lambda address: pytest.fail("it was not registered"))
    with capture_logs() as logs:
        made = Staging(1 << 20, 4096, pins=True)
    assert [(line["event"], line["why"]) for line in logs] == [
        ("staging.unpinned", "staging (offload.staging_bytes): no")
    ]
    assert made.take(0.0, is_offload=True) is not None
    made.close()
