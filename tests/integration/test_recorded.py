"""`kvbm.open_log`: a program reads what `kvbm-replay` reads, and the stream as it goes on."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

import kvbm
from tests.eventually import WAIT_S
from tests.nats_fixture import cluster, nats_url  # noqa: F401

SPACE = kvbm.Namespace(model="m", block_tokens=16)


def settings_of(folder: Path, **more: object) -> kvbm.Settings:
    flags = {
        "instance.id": "a",
        "instance.data_dir": str(folder),
        "nats.enabled": False,
        "pools.hbm.device": "memory",
        "pools.hbm.slots": 4,
    }
    return kvbm.load_settings(flags=flags | {name.replace("__", "."): value for name, value in more.items()})


def serve(settings: kvbm.Settings, prompts: int = 2) -> list[bytes]:
    """An instance that serves prompts of three blocks, with room for one of them."""
    asked = []
    with kvbm.open_manager(settings, [SPACE], block_bytes=64, engine="test") as manager:
        for number in range(prompts):
            hashes = manager.hash_tokens(range(1000 * number, 1000 * number + 48), SPACE.root(), 16)
            slots = manager.allocate(3)
            assert slots is not None
            manager.unpin(manager.create(SPACE.id, kvbm.NO_PARENT, 0, hashes, slots))
            asked.append(hashes)
    return asked


def test_a_journal_is_read_by_its_settings_or_its_folder(tmp_path: Path) -> None:
    settings = settings_of(tmp_path)
    first, second = serve(settings)
    by_folder = kvbm.open_log(tmp_path / "instances" / "a" / "journal")
    with kvbm.open_log(settings) as log:
        found = list(log.events())
        assert found == list(log.events()) == list(by_folder.events())  # each time from its beginning
        assert [one.offset for one in found] == list(range(len(found)))
        created = [one.event for one in found if isinstance(one.event, kvbm.BlocksCreated)]
        assert [event.hashes for event in created] == [first, second]
        assert isinstance(found[0].event, kvbm.InstanceStarted) and isinstance(found[-1].event, kvbm.InstanceStopped)
        [evicted] = [one for one in found if isinstance(one.event, kvbm.BlocksEvicted)]
        assert str(evicted).startswith(f"a e1+{evicted.offset} 20") and "BlocksEvicted HBM 2 blocks" in str(evicted)
        [before] = log.states(f"e1+{evicted.offset}")
        [end] = log.states()
        assert [(state.offset, state.tiers[0].held) for state in (before, end)] == [
            (evicted.offset, 3),
            (len(found), 4),
        ]
        assert log.verify().findings == []


def test_what_is_no_log_or_no_place_is_our_error(tmp_path: Path) -> None:
    settings = settings_of(tmp_path)
    with pytest.raises(kvbm.KvbmError, match="does not exist"):
        kvbm.open_log(tmp_path / "nothing")
    serve(settings, 1)
    log = kvbm.open_log(settings)
    with pytest.raises(kvbm.ConfigError, match="only a stream can be followed"):
        log.events(follow=True)
    with pytest.raises(kvbm.ConfigError):
        log.states("yesterday")


def test_a_stream_is_followed_from_its_beginning_and_before_there_is_one(
    tmp_path: Path,
    nats_url: str,  # noqa: F811
    cluster: str,  # noqa: F811
) -> None:
    settings = settings_of(
        tmp_path, nats__enabled=True, nats__url=nats_url, instance__cluster=cluster, instance__id=cluster
    )
    working = threading.Thread(target=serve, args=(settings,))
    with kvbm.open_log(settings, WAIT_S) as log:
        working.start()
        events = log.events(follow=True)
        found = []
        for one in events:
            if one.instance != cluster:  # another test's
                continue
            found.append(one.event)
            if isinstance(one.event, kvbm.InstanceStopped):
                break
        events.close()  # type: ignore[attr-defined]
    working.join(WAIT_S)
    assert sum(isinstance(event, kvbm.BlocksCreated) for event in found) == 2


def test_pools_of_other_sizes_are_tried_on_prompts() -> None:
    prompts = [bytes([number]) * 16 for number in (1, 2, 3, 1, 2, 3)]
    tried = kvbm.what_if(prompts, 16, ["lru"], [2, 3])
    assert {(one.policy, one.capacity): one.hit_blocks for one in tried.results} == {
        ("lru", 2): 0,
        ("lru", 3): 3,
        ("unbounded", 0): 3,
    }
