"""A system that gives no native thread: copies take the caller's, what needs one says so and leaves nothing, and the
next try has one.
"""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from structlog.testing import capture_logs

from kvbm.assembly import RowCopier, copy_queue, open_manager
from kvbm.config import load_settings
from kvbm.core.errors import PoolError
from kvbm.core.ids import Tier
from kvbm.manager.owned_hbm import Manager
from kvbm.pools.hbm.paged import SLOTS, PagedTensor, paged_layout
from kvbm.pools.nvme import pod as pod_module
from kvbm.pools.nvme.pod import PodFolder
from tests.eventually import eventually
from tests.extras import needed
from tests.managers import BLOCK_BYTES, NAMESPACE, serve
from tests.native_threads import no_native_threads
from tests.owning_engines import OwningEngine
from tests.owning_engines import opened as engine_opened

torch = needed("torch", "engine")

WAIT_S = 60.0


def opened(folder: Path, **more: Any) -> Manager:
    flags = {
        "instance.data_dir": str(folder),
        "nats.enabled": False,
        "pools.hbm.device": "cpu",
        "pools.hbm.slots": 16,
        "pools.host.slots": 16,
        "pools.host.copy_threads": 3,
    }
    return open_manager(load_settings(flags=flags | more), [NAMESPACE], BLOCK_BYTES)


def ours(before: set[threading.Thread]) -> list[str]:
    return [one.name for one in threading.enumerate() if one.name.startswith("kvbm-") and one not in before]


def test_a_manager_copies_without_threads_and_says_so_once(tmp_path: Path) -> None:
    with no_native_threads(), capture_logs() as logs, opened(tmp_path) as manager:
        serve(manager, 1, 8)
        assert manager.settle(WAIT_S)
        manager.evict(Tier.HBM, b"".join(manager.held(Tier.HBM)))
        assert serve(manager, 1, 8).prefix.depth == 8  # from HOST, with its bytes
    [told] = [line for line in logs if line["log_level"] == "warning" and line["event"] != "namespace.unnamed"]
    assert (told["event"], told["threads"], told["lacking"]) == ("pool.threads_lacking", 1, 2)
    assert RowCopier(3).lacking == 0


@pytest.mark.parametrize(
    ("more", "kind", "words"),
    [
        ({"pools.nvme.slots": 16}, PoolError, "gives no thread to move its bytes"),
        ({"transport.listen": "host"}, RuntimeError, "can't start new thread: lending"),
    ],
)
def test_what_needs_a_native_thread_leaves_nothing_open(
    more: dict[str, Any], kind: type[Exception], words: str, tmp_path: Path
) -> None:
    before = set(threading.enumerate())
    with no_native_threads(), pytest.raises(kind, match=words):
        opened(tmp_path, **more)
    eventually(lambda: not ours(before), "a thread stays", state=lambda: ours(before))
    assert not list(tmp_path.rglob("lend.sock"))
    with opened(tmp_path, **more) as manager:  # its files are nobody's
        serve(manager, 1, 4)


def test_a_queue_of_copies_without_a_thread_is_refused_and_the_next_one_copies() -> None:
    tensor = torch.arange(8 * 64).to(torch.uint8).reshape(8, 64)
    layout = paged_layout([[PagedTensor(tensor, (SLOTS, "bytes"))]])
    with no_native_threads(), pytest.raises(RuntimeError, match="temporarily unavailable"):
        copy_queue(layout)
    queue, rows = copy_queue(layout), np.zeros((2, 64), dtype=np.uint8)
    queue.gather(1, np.array([3, 5]), rows, np.array([0, 1]))
    assert queue.wait(WAIT_S)
    assert np.array_equal(rows, tensor.numpy()[[3, 5]])
    queue.close()


def test_a_file_of_the_pod_that_lacks_a_thread_is_a_miss_and_is_read_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pod_module, "POLL_S", 3600.0)  # they look when they are told to
    pod = {"pools__nvme__folder": str(tmp_path / "pod")}
    with (
        engine_opened(tmp_path / "a", instance__id="a", **pod) as owner,
        engine_opened(tmp_path / "b", instance__id="b", **pod) as manager,
    ):
        OwningEngine(owner).store(1, 6)
        assert owner.settle(WAIT_S)
        reader = OwningEngine(manager)
        assert isinstance(manager.pools.pod, PodFolder)
        for _ in range(2):
            manager.pools.pod.poll()  # twice: the clock of files ticks slowly
        with no_native_threads():
            assert reader.hits(1, 6) == {}
        counts = manager.stats().pools[Tier.HOST]
        assert (counts.held, counts.allocated, manager.stats().corrupt_blocks) == (0, 0, 0)
        eventually(lambda: reader.hits(1, 6) == {Tier.NVME: 6}, "the file is not read any more")
