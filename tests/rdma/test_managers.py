"""Two managers as engines open them, one on each device: what one has in HOST the other reads over RDMA, and over TCP
where that is not to be.

The catalog is not here: the reader believes what the owner's own heartbeats say of where it lends.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from kvbm.assembly.manager import open_engine_manager
from kvbm.config import load_settings
from kvbm.core.answers import PeerHolding
from kvbm.core.ids import Namespace, NamespaceId
from kvbm.locate.base import FoundElsewhere, Nowhere
from kvbm.manager.engine_hbm import EngineHbmManager
from tests.eventually import eventually
from tests.managers import BLOCK_BYTES, NAMESPACE, hashes_of
from tests.owning_engines import OwningEngine
from tests.rdma.instances import netem

pytestmark = pytest.mark.rdma
DEPTH = 8
OTHER = Namespace(model="test", revision="r2", block_tokens=16)
_LONG_S = 120.0


class Told(Nowhere):
    """What a catalog would say of one owner: it has every block."""

    def __init__(self, owner: EngineHbmManager) -> None:
        self._owner = owner

    def find(
        self, pool: str, namespace: NamespaceId, hashes: bytes, first: int, timeout_s: float, instance: str = ""
    ) -> FoundElsewhere:
        lends = self._owner.lends
        peer = PeerHolding(
            instance=self._owner.instance,
            depth=len(hashes) // 16 - first,
            tiers={},
            distance=1,
            suspect=False,
            lends=lends,
        )
        return FoundElsewhere(0, [peer])


class Pair:
    """An owner and a reader, which takes the owner to be on another machine."""

    def __init__(self, folder: Path, opened: ExitStack) -> None:
        self._folder, self._opened = folder, opened
        self.key = folder / "key"
        self.key.write_text("k" * 64)
        self.key.chmod(0o600)
        self.owner = OwningEngine(self._manager("owner", "rxe0"))
        self.reader = OwningEngine(self._manager("reader", "rxe1"))
        reader = self.reader.manager
        reader._loads.locator.close()
        reader._loads.locator = Told(self.owner.manager)
        assert reader.pools.peers is not None
        reader.pools.peers._host_id = "another machine"
        eventually(lambda: "rdma" in self.owner.manager.lends, "the owner does not lend over RDMA")

    def _manager(self, name: str, device: str) -> EngineHbmManager:
        settings = load_settings(
            flags={
                "instance.data_dir": str(self._folder),
                "instance.id": name,
                "nats.enabled": False,
                "journal.in_memory": True,
                "pools.hbm.owner": "engine",
                "pools.hbm.slots": 8192,
                "pools.host.slots": 64,
                "pools.host.huge_pages": "off",
                "catalog.url": "http://127.0.0.1:9",
                "onboard.wait_s": 5.0,
                "onboard.locate_s": 5.0,
                "transport.listen": "tcp://10.77.0.1:0",
                "transport.key_file": str(self.key),
                "transport.rdma": device,
            }
        )
        manager = open_engine_manager(settings, [NAMESPACE], BLOCK_BYTES, "test")
        self._opened.callback(manager.close)
        return manager

    def fetched(self) -> dict[str, int]:
        """Blocks that came, by transport."""
        stats = self.reader.manager.stats().peers
        assert stats is not None
        return {transport: blocks for transport, blocks in stats.blocks.items() if blocks}

    def read(self, prompt: int) -> int:
        """How many blocks of a prompt that the owner has the reader gets; their bytes are looked at."""
        if self.owner.manager.match(hashes_of(prompt, DEPTH)).depth < DEPTH:
            assert self.owner.store(prompt, DEPTH) == DEPTH
        acquiring = self.reader.acquired(prompt, DEPTH)
        depth = acquiring.depth
        acquiring.release()
        return depth

    def read_by(self, transport: str, prompts: Iterator[int]) -> None:
        """Read one prompt after the other until one comes whole by a transport; meanwhile none may come wrong."""
        before = self.fetched().get(transport, 0)
        eventually(
            lambda: self.read(next(prompts)) == DEPTH and self.fetched().get(transport, 0) == before + DEPTH,
            f"nothing comes by {transport}",
            timeout_s=_LONG_S,
            state=self.fetched,
        )


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    with ExitStack() as opened:
        yield Pair(tmp_path, opened)


@pytest.fixture
def prompts() -> Iterator[int]:
    return itertools.count(1)


def test_the_second_reads_over_rdma_what_the_first_has_in_host(pair: Pair, prompts: Iterator[int]) -> None:
    pair.read_by("rdma", prompts)
    assert pair.fetched() == {"rdma": DEPTH}


def test_a_namespace_that_is_added_closes_rdma_until_it_is_proved_and_tcp_serves(
    pair: Pair, prompts: Iterator[int]
) -> None:
    pair.read_by("rdma", prompts)
    pair.owner.manager.declare([OTHER])
    pair.read_by("tcp", prompts)
    assert pair.fetched()["rdma"] == DEPTH, "who has not proved the new namespace READs on"
    pair.reader.manager.declare([OTHER])
    pair.read_by("rdma", prompts)


def test_where_the_link_is_cut_tcp_serves_until_it_is_back(pair: Pair, prompts: Iterator[int]) -> None:
    pair.read_by("rdma", prompts)
    with netem("veth0", "loss", "100%"):
        assert pair.read(next(prompts)) in (0, DEPTH), "over TCP in the same read, as long as it has time"
        pair.read_by("tcp", prompts)
    pair.read_by("rdma", prompts)


def test_an_owner_that_closes_leaves_misses_and_its_reader_closes(pair: Pair, prompts: Iterator[int]) -> None:
    pair.read_by("rdma", prompts)
    pair.owner.manager.close()
    assert pair.reader.acquired(next(prompts), DEPTH).depth == 0
    pair.reader.manager.close()
