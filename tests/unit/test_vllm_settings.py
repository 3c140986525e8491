"""Settings of an instance inside vLLM: what a user writes in `kv_connector_extra_config`, and what comes of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvbm.config import Settings
from kvbm.core.errors import ConfigError
from kvbm.engines.vllm.settings import settings_of

ROOM = {"pools.host.capacity_bytes": 1 << 30}


def settings(extra: dict[str, Any], environment: dict[str, str] | None = None, **facts: Any) -> Settings:
    return settings_of(extra, environment=environment or {}, **({"hbm_slots": 100, "host": "gpu7.example.org"} | facts))


def refused(extra: dict[str, Any], environment: dict[str, str] | None = None) -> str:
    with pytest.raises(ConfigError) as caught:
        settings(extra, environment)
    return str(caught.value)


def test_dotted_keys_and_nested_tables_say_the_same() -> None:
    dotted = settings(ROOM | {"pools.nvme.folder": "/pod", "tenants.a.weight": 3, "catalog.tenant_secrets.a": "s"})
    nested = settings(
        {
            "pools": {"host": {"capacity_bytes": 1 << 30}, "nvme.folder": "/pod"},
            "tenants": {"a": {"weight": 3}},
            "catalog": {"tenant_secrets": {"a": "s"}},
        }
    )
    assert dotted == nested
    assert dotted.pools.host.capacity_bytes == 1 << 30
    assert dotted.catalog.tenant_secrets == {"a": "s"}


def test_the_engine_owns_hbm_and_has_no_stream_unless_one_is_named() -> None:
    plain = settings(ROOM)
    assert (plain.pools.hbm.owner, plain.pools.hbm.slots) == ("engine", 100)
    assert not plain.nats.enabled
    assert settings(ROOM | {"nats.url": "nats://n:4222"}).nats.enabled
    assert settings(ROOM, {"KVBM_NATS__URL": "nats://n:4222"}).nats.enabled
    assert settings(ROOM | {"nats.enabled": True}).nats.enabled
    assert not settings(ROOM | {"nats.url": "nats://n:4222", "nats.enabled": False}).nats.enabled


def test_the_extra_config_stands_above_the_environment_and_that_above_the_file(tmp_path: Path) -> None:
    file = tmp_path / "kvbm.toml"
    file.write_text("[pools.host]\nslots = 1\n[pools.nvme]\nslots = 2\n[onboard]\nwait_s = 3.5\n")
    extra = {"config": str(file), "pools.host.slots": 10}
    both = settings(extra, {"KVBM_POOLS__HOST__SLOTS": "20", "KVBM_POOLS__NVME__SLOTS": "30", "HOME": "/"})
    assert (both.pools.host.slots, both.pools.nvme.slots, both.onboard.wait_s) == (10, 30, 3.5)


def test_an_instance_is_named_after_its_host_and_its_data_parallel_rank() -> None:
    assert settings(ROOM).instance.id == "vllm-gpu7-example-org"
    assert settings(ROOM, data_parallel_size=2).instance.id == "vllm-gpu7-example-org-dp0"
    assert settings(ROOM, data_parallel_rank=3).instance.id == "vllm-gpu7-example-org-dp3"
    named = settings(ROOM | {"instance.id": "mine"}, data_parallel_size=2, data_parallel_rank=1)
    assert named.instance.id == "mine-dp1"
    assert len(settings(ROOM, host="h" * 300, data_parallel_size=8).instance.id) <= 128


def test_data_parallel_ranks_share_no_file_of_nvme() -> None:
    def paths(path: str, rank: int, size: int = 2) -> str:
        return settings(
            ROOM | {"pools.nvme.path": path}, data_parallel_size=size, data_parallel_rank=rank
        ).pools.nvme.path

    assert [paths("/a/one:/b/two", rank) for rank in (0, 1)] == ["/a/one-dp0:/b/two-dp0", "/a/one-dp1:/b/two-dp1"]
    assert paths("/a/{dp}/one:/dev/nvme{dp}n1", 1) == "/a/1/one:/dev/nvme1n1"
    assert paths("", 1) == ""  # below the instance's folder, which is named after the instance
    assert paths("/a/one", 0, size=1) == "/a/one"


def test_the_rank_is_put_wherever_its_place_is() -> None:
    extra = ROOM | {"instance.id": "gpu-{dp}", "nats.url": "nats://n:4222", "nats.nkey_seed": "/keys/{dp}.nk"}
    third = settings(extra, data_parallel_size=4, data_parallel_rank=3)
    assert (third.instance.id, third.nats.nkey_seed) == ("gpu-3", "/keys/3.nk")
    assert settings(extra).instance.id == "gpu-0"


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        ({"pools.hots.slots": 1}, ("kv_connector_extra_config", "'pools.hots.slots'", "'pools.host.slots'")),
        (
            {"pools.host.capacity_bytes": "8Gi"},
            ("kv_connector_extra_config", "pools.host.capacity_bytes", "'8Gi'", '"8GiB"'),
        ),
        ({"pools": {"host": {"slots": 1.5}}}, ("kv_connector_extra_config", "pools.host.slots", "1.5")),
        ({"pools.host.slots": 4, "pools": {"host": {"slots": 5}}}, ("pools.host.slots is given twice",)),
        ({"pools.host.slots": -1}, ("pools.host.slots is -1",)),
        ({"config": 5}, ("kv_connector_extra_config", "path of a TOML file")),
        ({"config": "/nowhere/kvbm.toml"}, ("/nowhere/kvbm.toml", '"config" of kv_connector_extra_config')),
        ({}, ("pools.host has no room", '"pools.host.capacity_bytes"', "8589934592")),
    ],
)
def test_what_cannot_be_used_is_refused_by_name(extra: dict[str, Any], words: tuple[str, ...]) -> None:
    said = refused(extra)
    for word in words:
        assert word in said


@pytest.mark.parametrize("key", ["slots", "capacity_bytes"])
def test_the_size_of_hbm_is_the_engines_business(key: str) -> None:
    assert f"pools.hbm.{key} is 5, but vLLM owns HBM" in refused(ROOM | {f"pools.hbm.{key}": 5})
    assert f"pools.hbm.{key} is 5, but vLLM owns HBM" in refused(ROOM, {f"KVBM_POOLS__HBM__{key.upper()}": "5"})


def test_a_device_for_hbm_is_refused_and_the_engine_as_its_owner_is_not() -> None:
    assert "pools.hbm.device is 'memory'" in refused(ROOM | {"pools.hbm.device": "memory"})
    assert settings(ROOM | {"pools.hbm.owner": "engine"}) == settings(ROOM)
    copying = settings(ROOM | {"pools.hbm.ring_bytes": 1 << 24, "pools.hbm.programs": 8}).pools.hbm
    assert (copying.ring_bytes, copying.programs, copying.owner, copying.slots) == (1 << 24, 8, "engine", 100)
    assert "pools.hbm.owner" in refused(ROOM | {"pools.hbm.owner": "kvbm"})
