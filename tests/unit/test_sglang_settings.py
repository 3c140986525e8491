"""Settings of an instance inside SGLang: what a user writes in the extra config, and what comes of it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvbm.core.errors import ConfigError, MissingExtraError
from kvbm.engines.sglang.identity import Place
from kvbm.engines.sglang.settings import ExtraConfig, read_extra

SGLANG = {
    "backend_name": "kvbm",
    "module_path": "kvbm.engines.sglang",
    "class_name": "KvbmHiCache",
    "interface_v1": 1,
}


def read(extra: dict[str, Any], environment: dict[str, str] | None = None, rank: str = "") -> ExtraConfig:
    return read_extra(SGLANG | extra, environment=environment or {}, rank=rank, host="gpu7.example.org")


def test_sglangs_own_keys_are_no_settings_and_ours_are() -> None:
    found = read({"prefetch_threshold": 1, "pools": {"nvme": {"capacity_bytes": "1GiB"}}, "revision": "abc"})
    assert (found.settings.pools.nvme.capacity_bytes, found.revision, found.model) == (1 << 30, "abc", "")
    assert (found.settings.pools.hbm.owner, found.settings.pools.host.capacity_bytes) == ("engine", 1 << 30)
    assert found.settings.instance.id == "sglang-gpu7-example-org" and not found.settings.nats.enabled
    assert read({"nats.url": "nats://n:4222"}).settings.nats.enabled
    assert read({}, {"KVBM_POOLS__HOST__SLOTS": "9"}).settings.pools.host.slots == 9


def test_each_rank_is_an_instance_of_its_own_with_files_of_its_own() -> None:
    found = read({"instance.id": "a", "pools.nvme.path": "/x:/y", "pools.nvme.slots": 8}, rank="-tp1").settings
    assert (found.instance.id, found.pools.nvme.path) == ("a-tp1", "/x-tp1:/y-tp1")
    assert read({"pools.nvme.capacity_bytes": "1GiB"}, rank="-tp1").settings.pools.nvme.path == ""


def test_a_block_device_is_no_ranks_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "is_block_device", lambda path: path == Path("/dev/nvme0n1"))
    found = read({"pools.nvme.path": "/x:/dev/nvme0n1", "pools.nvme.slots": 8}, rank="-tp1").settings
    assert found.pools.nvme.path == "/x-tp1:/dev/nvme0n1"


def test_objects_have_one_block_because_a_get_begins_anywhere() -> None:
    assert read({"pools.object.url": "s3://b/p", "pools.object.blocks": 8}).settings.pools.object.blocks == 1


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        ({"interface_v1": 0}, "interface_v1"),
        ({"pools.hbm.slots": 5}, "pools.hbm"),
        ({"offload.host": "second_use"}, "offload.host"),
        ({"pool.nvme.slots": 5}, "pool.nvme.slots"),
        ({"revision": 5}, "revision"),
        ({"pools.nvme.slots": 5, "pools": {"nvme": {"slots": 6}}}, "twice"),
    ],
)
def test_what_cannot_be_used_is_refused_in_words(extra: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        read(extra)


def test_a_place_names_what_tells_ranks_apart_and_copies_share_their_pages() -> None:
    def place(**given: Any) -> Place:
        config = {"tp_rank": 0, "tp_size": 1, "pp_rank": 0, "pp_size": 1, "attn_cp_rank": 0, "attn_cp_size": 1}
        return Place.of(SimpleNamespace(**config | {"dp_rank": 0, "is_mla_model": False} | given))

    assert (place().suffix, place().words) == ("", "tp1")
    assert (place(tp_rank=1, tp_size=2).suffix, place(tp_rank=1, tp_size=2).words) == ("-tp1", "tp1of2")
    mla = place(tp_rank=1, tp_size=2, is_mla_model=True)
    assert (mla.suffix, mla.words) == ("-tp1", "tp2")
    staged = place(pp_rank=1, pp_size=2, dp_rank=3)
    assert (staged.suffix, staged.words) == ("-pp1-dp3", "tp1pp1of2")


def test_without_sglang_the_backend_says_what_to_install() -> None:
    import kvbm.engines.sglang as package

    with pytest.raises(MissingExtraError, match=r"SGLang 0\.5\.23"):
        _ = package.KvbmHiCache
    with pytest.raises(AttributeError):
        _ = package.Other
