"""What settings become for a kind of engine: who neither lends blocks nor reads what others lend."""

from __future__ import annotations

import pytest
from structlog.testing import capture_logs

from kvbm.config import Settings, TransportSettings, load_settings
from kvbm.engines.vllm.opening import _of_hosts, _suited
from kvbm.engines.vllm.requests import KvGroup

WHOLE = KvGroup(0, 16, 16)
WINDOW = KvGroup(1, 16, 16, window_blocks=4)
STATE = KvGroup(2, 16, 16, 1, is_state=True)
CHUNKS = KvGroup(3, 16, 16, chunk_tokens=64)


def lends(url: str = "") -> Settings:
    return load_settings(flags={"transport.listen": "host", "transport.fetch": True, "pools.object.url": url})


def test_a_model_whose_groups_keep_everything_lends_and_reads() -> None:
    with capture_logs() as logs:
        assert _suited(lends(), [WHOLE]) == lends()
    assert logs == []


@pytest.mark.parametrize("groups", [[WINDOW], [CHUNKS], [WHOLE, WINDOW], [WHOLE, STATE], [WHOLE, KvGroup(4, 16, 16)]])
@pytest.mark.parametrize("url", ["", "s3://bucket/blocks"])
def test_a_model_with_windows_states_or_chunks_keeps_to_its_own_tiers(groups: list[KvGroup], url: str) -> None:
    with capture_logs() as logs:
        found = _suited(lends(url), groups)
    assert found.transport == TransportSettings()
    assert [one["event"] for one in logs] == ["transport.left_out"]
    assert found.pools.object.blocks == (1 if url else 0)


def test_an_engine_on_several_hosts_neither_lends_nor_reads() -> None:
    with capture_logs() as logs:
        assert _of_hosts(lends(), 2).transport == TransportSettings()
        assert _of_hosts(load_settings(), 2) == load_settings()
    assert [one["event"] for one in logs] == ["transport.left_out"]
