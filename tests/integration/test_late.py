"""A store that is away when an engine starts: everything asked of it is refused, until it comes.

An engine starts without it.
"""

from __future__ import annotations

import threading
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from structlog.testing import capture_logs

from kvbm import load_settings, open_manager
from kvbm.core.errors import PoolError
from kvbm.core.ids import NO_PARENT, Namespace
from kvbm.pools.stores.base import Get, Got, ObjectStore, Put, Refusal, StoreAwayError, StoreTrouble
from kvbm.pools.stores.late import LateStore
from kvbm.pools.stores.memory import MemoryStore
from tests.eventually import WAIT_S, eventually

AWAY = StoreAwayError("s3://bucket", "nobody answers", forgets=True)


def test_a_store_that_comes_late_refuses_everything_until_then_and_is_used_from_then_on() -> None:
    store, may_come, came, told = MemoryStore(), threading.Event(), threading.Event(), list[str]()
    tries = [AWAY, PoolError("it is forbidden"), PoolError("it is forbidden"), RuntimeError("no thread")]

    def reopen() -> ObjectStore:
        if tries:
            raise tries.pop(0)
        may_come.wait(WAIT_S)
        return store

    late = LateStore(AWAY, reopen, lambda _: came.set(), told.append, again_s=0.0)
    try:
        assert (late.name, late.forgets) == ("s3://bucket", True)
        answers = [*late.put([Put("a", b"1")], 1.0), *late.get([Get("a")], 1.0), *late.delete(["a"], 1.0)]
        answers.append(late.replace("a", b"1", None, 1.0))
        assert [one.trouble for one in answers if isinstance(one, Refusal)] == [StoreTrouble.SILENT] * 4
        assert late.absent(["a"], 1.0) == [False]
        with pytest.raises(PoolError):
            late.listed("", 1.0)
        may_come.set()
        assert came.wait(WAIT_S)
        assert late.put([Put("a", b"1")], 1.0) == [None]
        [got] = late.get([Get("a")], 1.0)
        assert isinstance(got, Got) and bytes(got.body) == b"1"
        assert [one.name for one in late.listed("", 1.0)] == ["a"]
        assert late.absent(["a"], 1.0) == [False]  # of a store that forgets nothing nobody knows it
        assert told == ["it is forbidden", "no thread"]
    finally:
        late.close()


def test_a_store_that_comes_after_the_end_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvbm.pools.stores.late._CLOSE_S", 0.0)
    closed, asked, may_come = threading.Event(), threading.Event(), threading.Event()

    class Closing(MemoryStore):
        def close(self) -> None:
            closed.set()

    def reopen() -> ObjectStore:
        asked.set()
        may_come.wait(WAIT_S)
        return Closing()

    late = LateStore(AWAY, reopen, again_s=0.0)
    assert asked.wait(WAIT_S)
    late.close()
    may_come.set()
    assert closed.wait(WAIT_S)


def test_an_engine_starts_while_its_store_and_its_front_are_away_and_takes_them_when_they_come(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stores = {"s3": MemoryStore("s3://bucket"), "redis": MemoryStore("redis://cache")}
    may_come = threading.Event()

    def open_store(url: str, **_: Any) -> ObjectStore:
        if not may_come.is_set():
            raise StoreAwayError(url, "nobody answers")
        return stores[url.partition(":")[0]]

    monkeypatch.setattr("kvbm.assembly.pools.open_store", open_store)
    monkeypatch.setattr("kvbm.assembly.pools.LateStore", partial(LateStore, again_s=0.01))
    namespace = Namespace(model="m", revision="r1", block_tokens=4)
    flags = {
        "instance.data_dir": str(tmp_path),
        "nats.enabled": False,
        "pools.hbm.device": "memory",
        "pools.hbm.slots": 16,
        "pools.object.url": "s3://bucket",
        "pools.object.front": "redis://cache",
        "pools.object.blocks": 1,
        "offload.object": "write_through",
    }

    def prefill(prompt: int) -> None:
        hashes = manager.hash_tokens(np.arange(4, dtype=np.uint32) + prompt, namespace.root(b""), 4)
        slots = manager.allocate(1, namespace.id)
        assert slots is not None
        manager.unpin(manager.create(namespace.id, NO_PARENT, 0, hashes, slots))
        assert manager.settle(60.0)

    with capture_logs() as logs, open_manager(load_settings(flags=flags), [namespace], 4096) as manager:
        prefill(1)  # costs a refusal, and nothing else
        assert [log["name"] for log in logs if log["event"] == "store.away"] == ["s3://bucket", "redis://cache"]
        assert manager.trouble() == (
            "OBJECT pool s3://bucket: nobody answers; OBJECT pool redis://cache: nobody answers; not used until it "
            "answers"
        )
        may_come.set()
        eventually(lambda: [log["event"] for log in logs].count("store.opened") == 2, "they are not taken")
        assert manager.trouble() == ""
        prefill(100)
        eventually(lambda: all(store.objects for store in stores.values()), "nothing is put")
