"""Two instances with `transport.nixl`, a catalog and a nats-server: what the first has in HOST the second reads over
NIXL, and over TCP what cannot come so.

UCX has TCP on the loopback here.
"""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from kvbm.assembly import open_manager
from kvbm.config import load_settings
from kvbm.core.errors import MissingExtraError
from kvbm.core.ids import HASH_BYTES, Namespace, Tier
from kvbm.manager.owned_hbm import Manager
from kvbm.transport import nixl_process
from kvbm.transport.nixl_agent import missing_nixl
from tests.eventually import eventually
from tests.lending_pairs import DEPTH, Pair, computed
from tests.managers import BLOCK_BYTES, NAMESPACE, check_bytes, hashes_of

OTHER = Namespace(model="test", revision="r2", block_tokens=16)
LONG_S = 60.0
NIXL, TCP = "nixl", "tcp"


class NixlPair(Pair):
    """Instances that lend and read over NIXL, each of which takes the others to be on another machine."""

    def __init__(self, folder: Path, opened: ExitStack) -> None:
        super().__init__(folder, opened)
        self.prompts = itertools.count(1)

    def instance(self, name: str, namespaces: tuple[Namespace, ...] = (NAMESPACE,), **flags: Any) -> Manager:
        usual: dict[str, Any] = {"transport__nixl": True, "onboard__wait_s": LONG_S}
        manager = super().instance(name, namespaces, **usual | flags)
        assert manager.pools.peers is not None
        manager.pools.peers._host_id = f"the machine of {name}"
        return manager

    def read(self, first: Manager, second: Manager, tier: Tier = Tier.HOST) -> int:
        """How many blocks the second gets of a prompt that the first has; their bytes are looked at."""
        hashes = computed(first, tier, prompt := next(self.prompts))
        self.has_found("first", prompt)
        return acquired(second, hashes)

    def read_by(self, transport: str, first: Manager, second: Manager) -> None:
        """Read one prompt after the other until one comes whole by a transport; meanwhile none may come wrong."""

        def comes() -> bool:
            before = fetched(second)
            is_whole = self.read(first, second) == DEPTH
            return is_whole and fetched(second).get(transport, 0) == before.get(transport, 0) + DEPTH

        eventually(comes, f"nothing comes by {transport}", state=lambda: fetched(second))


def acquired(reader: Manager, hashes: bytes) -> int:
    prefix = reader.acquire(NAMESPACE.id, hashes)
    check_bytes(reader, hashes[: prefix.depth * HASH_BYTES], prefix.slots)
    reader.unpin(prefix.slots)
    return prefix.depth


def fetched(reader: Manager) -> dict[str, int]:
    """Blocks that came, by transport."""
    stats = reader.stats().peers
    assert stats is not None
    return {transport: blocks for transport, blocks in stats.blocks.items() if blocks}


def processes_of_nixl(parent: int, mapped: str = "") -> list[int]:
    """Those that a process has started, and that have such words in their maps."""
    found: list[int] = []
    for folder in Path("/proc").iterdir():
        try:
            words = (folder / "cmdline").read_bytes() if folder.name.isdigit() else b""
            if nixl_process.__file__.encode() not in words or mapped not in (folder / "maps").read_text():
                continue
            if int((folder / "stat").read_text().rpartition(")")[2].split()[1]) == parent:
                found.append(int(folder.name))
        except OSError:
            pass  # it has ended
    return found


@pytest.fixture
def pair(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[NixlPair]:
    if missing := missing_nixl():
        pytest.fail(str(missing))
    monkeypatch.setenv("UCX_TLS", "tcp")
    with ExitStack() as opened:
        yield NixlPair(tmp_path, opened)


def test_what_lies_in_host_comes_over_nixl_and_the_rest_over_tcp(pair: NixlPair) -> None:
    first, second = pair.instance("first"), pair.instance("second")
    assert first.lends["nixl"] == "UCX"
    pair.read_by(NIXL, first, second)
    before = fetched(second)
    assert pair.read(first, second, Tier.NVME) == DEPTH
    assert fetched(second) == before | {TCP: before.get(TCP, 0) + DEPTH}, "NVME's blocks are not counted as TCP's"
    hashes = computed(first, Tier.HOST, prompt := next(pair.prompts))
    first.evict(Tier.HOST, hashes[4 * HASH_BYTES :])
    assert first.settle(LONG_S)
    pair.has_found("first", prompt, 4)
    assert acquired(second, hashes) == 4
    told = 'transfer_bytes_total{distance="0",transport="nixl"}'
    eventually(lambda: told in pair.site.client.metrics(), "the catalog is not told of it")
    first.close()
    second.close()
    eventually(lambda: not processes_of_nixl(os.getpid()), "a process of NIXL lives on")


def test_a_namespace_that_is_added_closes_nixl_until_it_is_proved_and_tcp_serves(pair: NixlPair) -> None:
    first, second = pair.instance("first"), pair.instance("second")
    pair.read_by(NIXL, first, second)
    before = fetched(second)[NIXL]
    first.declare([OTHER])
    with capture_logs() as logs:
        pair.read_by(TCP, first, second)
    assert fetched(second)[NIXL] == before, "who has not proved the new namespace reads on"
    told = [one for one in logs if one["log_level"] == "warning"]
    assert [one["event"] for one in told] == ["peer.passed_over"] and "who has proved" in told[0]["why"]
    second.declare([OTHER])
    pair.read_by(NIXL, first, second)


def test_without_the_package_one_sentence_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nixl_process, "PACKAGES", ("nixl_of_nowhere",))
    key = tmp_path / "key"
    key.write_text("k" * 64)
    key.chmod(0o600)
    flags = {
        "instance.data_dir": str(tmp_path),
        "nats.enabled": False,
        "journal.in_memory": True,
        "pools.hbm.slots": 4,
        "pools.hbm.device": "memory",
        "pools.host.slots": 4,
        "catalog.url": "http://127.0.0.1:9",
        "transport.fetch": True,
        "transport.key_file": str(key),
        "transport.nixl": True,
    }
    with pytest.raises(MissingExtraError) as refused:
        open_manager(load_settings(flags=flags), [NAMESPACE], BLOCK_BYTES)
    assert str(refused.value) == (
        "NIXL (the Python package nixl-cu12) is not installed; install it with: pip install 'kvbm-ledger[nixl]'"
    )
    open_manager(load_settings(flags=flags | {"transport.nixl": False}), [NAMESPACE], BLOCK_BYTES).close()


@pytest.mark.nightly
@pytest.mark.parametrize(("side", "mapped"), [("lends", "r--s"), ("reads", "kvbm-lanes")])
def test_a_process_of_nixl_that_is_killed_costs_no_block_and_is_started_anew(
    pair: NixlPair, side: str, mapped: str
) -> None:
    first, second = pair.instance("first"), pair.instance("second")
    pair.read_by(NIXL, first, second)
    killed = processes_of_nixl(os.getpid(), mapped)
    assert killed
    for pid in killed:
        os.kill(pid, signal.SIGKILL)
    assert pair.read(first, second) == DEPTH, f"{side}: it comes over TCP in the same read"
    pair.read_by(NIXL, first, second)


@pytest.mark.nightly
def test_another_key_opens_nothing(pair: NixlPair) -> None:
    another = pair.key.with_name("another")
    another.write_text("x" * 64)
    another.chmod(0o600)
    first, second = pair.instance("first"), pair.instance("second", transport__key_file=str(another))
    for _ in range(3):
        assert pair.read(first, second) == 0
    assert fetched(second) == {}


OWNER = """
    import os, sys, time
    from kvbm.assembly import open_manager
    from kvbm.config import load_settings
    from tests.managers import BLOCK_BYTES, NAMESPACE, serve
    flags = dict(one.split("=", 1) for one in sys.argv[1:])
    manager = open_manager(load_settings(flags=flags), [NAMESPACE], BLOCK_BYTES)
    for prompt in range(1, 5):
        serve(manager, prompt, 8)
        assert manager.settle(60)
    print("ready", flush=True)
    word = sys.stdin.readline().strip()
    if word == "fork" and not os.fork():
        print(os.getpid(), flush=True)
        time.sleep(600)
    if word == "close":
        manager.close()
    if word == "fork":
        os._exit(7)  # nobody closes anything
    sys.exit(7)
"""


def start_owner(pair: NixlPair, stack: ExitStack) -> subprocess.Popen[str]:
    settings = pair.settings("first")
    flags = {
        "instance.data_dir": settings.instance.data_dir,
        "instance.cluster": "lend",
        "instance.id": "first",
        "pools.hbm.slots": 64,
        "pools.hbm.device": "cpu",
        "pools.host.slots": 64,
        "nats.url": settings.nats.url,
        "nats.heartbeat_s": 0.2,
        "catalog.url": settings.catalog.url,
        "journal.in_memory": "true",
        "transport.listen": "tcp://127.0.0.1:0",
        "transport.key_file": str(pair.key),
        "transport.nixl": "true",
    }
    words = [sys.executable, "-c", textwrap.dedent(OWNER), *(f"{key}={value}" for key, value in flags.items())]
    folder = Path(__file__).parents[2]
    owner = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=folder)
    stack.enter_context(owner)
    stack.callback(owner.kill)
    assert owner.stdout is not None and owner.stdout.readline() == "ready\n"
    return owner


@pytest.mark.nightly
def test_an_owner_that_is_killed_is_a_miss_and_its_process_of_nixl_ends(pair: NixlPair) -> None:
    with ExitStack() as stack:
        owner = start_owner(pair, stack)
        second = pair.instance("second")
        for prompt in (1, 2, 3, 4):
            pair.has_found("first", prompt)
        eventually(lambda: acquired(second, hashes_of(1, DEPTH)) == DEPTH, "nothing is read")
        acquired(second, hashes_of(2, DEPTH))
        lends = processes_of_nixl(owner.pid)
        assert lends
        owner.kill()
        owner.wait(LONG_S)
        assert acquired(second, hashes_of(3, DEPTH)) == 0
        assert acquired(second, hashes_of(1, DEPTH)) == DEPTH, "what is its own now stays"
        eventually(lambda: not any(is_alive(pid) for pid in lends), "a process of NIXL outlives its owner")


@pytest.mark.nightly
@pytest.mark.parametrize("word", ["close", "leave", "fork"])
def test_a_process_that_ends_has_its_own_status_and_leaves_no_process_of_nixl(pair: NixlPair, word: str) -> None:
    with ExitStack() as stack:
        owner = start_owner(pair, stack)
        assert owner.stdin is not None and owner.stdout is not None
        eventually(lambda: processes_of_nixl(owner.pid, "r--s"), "it does not lend")
        both = processes_of_nixl(owner.pid)
        assert len(both) == 2, "one lends and one reads"
        owner.stdin.write(f"{word}\n")
        owner.stdin.close()
        child = int(owner.stdout.readline()) if word == "fork" else 0
        try:
            assert owner.wait(LONG_S) == 7
            eventually(lambda: not any(is_alive(pid) for pid in both), "a process of NIXL outlives its owner")
            assert not child or is_alive(child), "it was the child's end that ended NIXL"
        finally:
            if child:
                os.kill(child, signal.SIGKILL)


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
