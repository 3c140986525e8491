"""Reads from an owner on another machine, which has a kernel and a clock of its own."""

from __future__ import annotations

import os

import numpy as np
import pytest

from kvbm.core.reads import ReadOutcome
from tests.rdma.instances import BLOCK_BYTES, NAMESPACE, OwnerHandle, block_bytes_of, hashes_of, netem

pytestmark = [
    pytest.mark.rdma,
    pytest.mark.skipif(os.environ.get("NODE_COUNT") == "1", reason="there is one VM alone: --nodes 2"),
]


def test_a_run_is_read_whole_from_another_machine(far_owner: OwnerHandle) -> None:
    rows = np.zeros((150, BLOCK_BYTES), dtype=np.uint8)
    found = far_owner.reader().read(NAMESPACE, hashes_of(0, 150), rows, None, 60)
    assert found.result.outcomes == [ReadOutcome.GOOD] * 150
    assert (rows == block_bytes_of(range(150))).all()


def test_the_link_to_another_machine_is_cut_under_a_read_and_comes_back(far_owner: OwnerHandle) -> None:
    reader, rows = far_owner.reader(), np.zeros((100, BLOCK_BYTES), dtype=np.uint8)
    assert reader.read(NAMESPACE, hashes_of(0, 1), rows[:1], None, 30).trouble == ""
    with netem("eth0", "loss", "100%"):
        found = reader.read(NAMESPACE, hashes_of(0, 100), rows, None, 0.5)
    assert found.result.outcomes == [ReadOutcome.FAILED] * 100
    for _ in range(20):
        if (found := reader.read(NAMESPACE, hashes_of(0, 100), rows, None, 5)).trouble == "":
            break
    assert found.result.outcomes == [ReadOutcome.GOOD] * 100
    assert (rows == block_bytes_of(range(100))).all()
