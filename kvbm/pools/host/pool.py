"""HOST: slots in this machine's memory, shared, touched when the pool is made, and pinned when a GPU is there."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import numpy as np

from kvbm.core.errors import ConfigError, PoolError, PoolFullError
from kvbm.core.ids import NamespaceId, Reach, Tier
from kvbm.pools.base import Proof, ReadOutcome, ReadResult
from kvbm.pools.host.rows import Arena, NewArena, RowCopies
from kvbm.pools.run import all_failed, check_proof, check_rows, check_sealed, check_size, check_slots

HUGE_PAGES = ("auto", "on", "off")

_MEMINFO = Path("/proc/meminfo")
_NODES = Path("/sys/devices/system/node")
_CORES = Path("/sys/devices/system/cpu")
_CGROUP = Path("/sys/fs/cgroup")
_REMEDY = "lower pools.host.slots or capacity_bytes, or free memory"


class HostPool:
    """Shared memory in slots, and a column of checksums beside them.

    A read verifies nothing: the ledger vouches for what a slot holds. The checksum taken when the block left HBM comes
    back with it, so that colder tiers and other instances prove the bytes the engine computed and not what became of
    them here.

    Attributes:
        pinned: whether CUDA has registered the memory.
        notice: one sentence for the operator when the memory is not what was asked for, else "".
    """

    def __init__(
        self,
        slots: int,
        block_bytes: int,
        new_arena: NewArena,
        copies: RowCopies,
        reach: Reach = Reach.INSTANCE,
        huge_pages: str = "auto",
        numa_node: int = -1,
        pins: bool = True,
    ) -> None:
        """Take the memory, every page of it.

        Args:
            copies: what copies rows; as many threads touch the memory.
            huge_pages: "auto": from the system's pool of huge pages where it has enough, else transparent ones, made by
                request (Linux 6.1) unless the system denies them; "on": from that pool, or not at all; "off".
            numa_node: the node every page is to be of; -1: where the machine has several, the one this thread runs on,
                if it has the room.
            pins: register it with CUDA where this process has that; false where other processes copy, each from a
                mapping of its own.
        Raises: LayoutError: below 1 slot or byte. ConfigError: `huge_pages` is no such word. PoolFullError: the
            machine, its NUMA node or this container's limit lacks the memory. PoolError: huge pages that must be are
            not there, or no such node is. Nothing was taken.
        """
        check_size("HOST", slots, block_bytes)
        if huge_pages not in HUGE_PAGES:
            raise ConfigError(f"pools.host.huge_pages {huge_pages!r} is unknown; use one of {', '.join(HUGE_PAGES)}")
        self.tier = Tier.HOST
        self.slots = slots
        self.block_bytes = block_bytes
        self.reach = reach
        self._copies = copies
        self._closed = False
        wanted_bytes = slots * block_bytes
        arena, notice = _take(wanted_bytes, huge_pages, numa_node, new_arena, copies.threads)
        self._arena: Arena | None = arena
        self._rows = arena.memory[:wanted_bytes].reshape(slots, block_bytes)
        self._checksums = np.zeros(slots, dtype=np.uint32)
        self.pinned, unpinned = register(arena.memory) if pins else (False, "")
        self.notice = "; ".join(filter(None, (notice, unpinned)))

    @property
    def memory(self) -> np.ndarray | None:
        """The slots; None once the pool is closed."""
        return None if self._closed else self._rows

    @property
    def fd(self) -> int:
        """Descriptor of the memory, for other processes to map `mapped_bytes` of; slot i begins at byte i *
        block_bytes. -1: none.
        """
        return -1 if self._arena is None else self._arena.fd

    @property
    def mapped_bytes(self) -> int:
        """Bytes of the memory: the slots, and what fills the last page."""
        return 0 if self._arena is None else self._arena.bytes

    @property
    def page_bytes(self) -> int:
        """Bytes of a page: of the system's pool of huge ones, or of plain ones, which the system may join to
        transparent huge ones.
        """
        return 0 if self._arena is None else self._arena.page_bytes

    @property
    def kept_checksums(self) -> np.ndarray:
        """The column itself, u32: entry i is the CRC-32C of what slot i holds, if it holds a block."""
        return self._checksums

    def write(self, slots: Sequence[int], rows: np.ndarray, proof: Proof, at: Sequence[int] | None = None) -> None:
        """Put rows into slots, their checksums beside them. Raises PoolError: the pool is closed."""
        count = check_proof("HOST", rows, proof, self.block_bytes, at)
        indexes = check_slots("HOST", slots, count, self.slots)
        self._require_open(f"{count} blocks were not written")
        self._copies.copy_rows(self._rows, indexes, rows, _indexes(at))
        self._checksums[indexes] = proof.checksums

    def read(
        self,
        slots: Sequence[int],
        namespace: NamespaceId,
        hashes: bytes,
        rows: np.ndarray,
        at: Sequence[int] | None = None,
    ) -> ReadResult:
        """Fill rows from slots, unverified, with the checksums they were written with."""
        count = check_rows("HOST", rows, hashes, self.block_bytes, at)
        indexes = check_slots("HOST", slots, count, self.slots)
        if self._closed:
            return all_failed(count)
        self._copies.copy_rows(rows, _indexes(at), self._rows, indexes)
        return ReadResult([ReadOutcome.GOOD] * count, self._checksums[indexes])

    def checksums(self, slots: Sequence[int]) -> np.ndarray:
        """CRC-32C of the blocks in slots as they were written or sealed, u32. Raises PoolError: the pool is closed."""
        indexes = check_slots("HOST", slots, len(slots), self.slots)
        self._require_open(f"the checksums of {len(indexes)} blocks are gone")
        kept: np.ndarray = self._checksums[indexes]
        return kept

    def seal(self, slots: Sequence[int], proof: Proof) -> None:
        """Keep the checksums of blocks that lie in `memory` already. Raises PoolError: the pool is closed."""
        count = check_sealed("HOST", proof)
        indexes = check_slots("HOST", slots, count, self.slots)
        self._require_open(f"{count} blocks were not sealed")
        self._checksums[indexes] = proof.checksums

    def close(self) -> None:
        """Give the memory back once the last view of it is gone. Idempotent; no call may be under way."""
        if self._closed:
            return
        self._closed = True
        if self.pinned and self._arena is not None:
            unregister(self._arena.memory.ctypes.data)
            self.pinned = False
        self._rows = np.empty((0, self.block_bytes), dtype=np.uint8)
        self._arena = None

    def _require_open(self, else_what: str) -> None:
        if self._closed:
            raise PoolError(f"HOST pool: it is closed; {else_what}")


def available_memory_bytes() -> int | None:
    """Memory a new pool may take: the machine's, or what the container's limit leaves if less. None: unknown here."""
    if not _MEMINFO.exists():
        return None
    machine_bytes = _meminfo(_MEMINFO)["MemAvailable"] * 1024
    limit = _CGROUP / "memory.max"
    if not limit.exists() or (limit_text := limit.read_text().strip()) == "max":
        return machine_bytes
    used_bytes = int((_CGROUP / "memory.current").read_text())
    stat = dict(line.split() for line in (_CGROUP / "memory.stat").read_text().splitlines())
    return min(machine_bytes, int(limit_text) - used_bytes + int(stat["inactive_file"]))


def require_memory(pool: str, wanted_bytes: int, remedy: str) -> None:
    """Refuse what this machine cannot hold, before the kernel kills somebody for it. Raises PoolFullError."""
    free_bytes = available_memory_bytes()
    if free_bytes is not None and wanted_bytes > free_bytes:
        raise PoolFullError(
            f"{pool} pool: {wanted_bytes} bytes wanted, {free_bytes} bytes of memory available; {remedy}",
            wanted_bytes,
            free_bytes,
        )


def _take(wanted_bytes: int, huge_pages: str, numa_node: int, new_arena: NewArena, threads: int) -> tuple[Arena, str]:
    """The memory of a pool, as near to what was asked for as the system has it; and in words what is not."""
    node, far = _bindable(numa_node, new_arena)
    scattered = ""
    if huge_pages != "off":
        pages = huge_page_pool()
        wanted = -(-wanted_bytes // pages.page_bytes)
        scattered = (
            f"HOST pool: {wanted} huge pages of {pages.page_bytes} bytes wanted, {pages.free} of {pages.total} free; "
            "set"
            f" sysctl vm.nr_hugepages={pages.total - pages.free + wanted}"
        )
        if pages.free >= wanted:
            try:
                return new_arena("kvbm-host", wanted_bytes, True, False, node, threads), far
            except OSError as error:  # of a limit of this container, say, or of the node alone
                scattered = (
                    f"HOST pool: {wanted} huge pages of {pages.page_bytes} bytes wanted, the system refuses them "
                    f"({error})"
                    f" though {pages.free} are free; look at the node's and the container's"
                )
        if huge_pages == "on":
            raise PoolError(f'{scattered}, or pools.host.huge_pages = "auto"')
        if not pages.total:
            scattered = ""  # nobody has set any aside: they were not asked for
    require_memory("HOST", wanted_bytes, _REMEDY)
    if node >= 0 and (free_bytes := _node_memory_bytes(node)) < wanted_bytes:
        if numa_node >= 0:
            raise PoolFullError(
                f"HOST pool: {wanted_bytes} bytes wanted of NUMA node {node}, which has {free_bytes} available; set"
                f" pools.host.numa_node to another, or {_REMEDY}",
                wanted_bytes,
                free_bytes,
            )
        far = (
            f"HOST pool: {wanted_bytes} bytes wanted, NUMA node {node} has {free_bytes} available, so it lies on other "
            "nodes too;"
            f" {_REMEDY} there"
        )
        node = -1
    try:
        arena = new_arena("kvbm-host", wanted_bytes, False, huge_pages != "off", node, threads)
    except (OSError, OverflowError, TypeError) as error:
        raise PoolFullError(
            f"HOST pool: {wanted_bytes} bytes wanted, the system refuses them ({error}); {_REMEDY}", wanted_bytes, 0
        ) from error
    return arena, "; ".join(filter(None, (scattered, far)))


def _bindable(numa_node: int, new_arena: NewArena) -> tuple[int, str]:
    """The node memory can be bound to, -1 for none, and why it cannot be the one that was asked for.

    Raises: PoolError: the machine has no such node.
    """
    nodes = numa_nodes()
    if numa_node >= 0 and numa_node not in nodes:
        raise PoolError(
            f"HOST pool: NUMA node {numa_node} wanted, this machine has {', '.join(map(str, nodes))}; set"
            " pools.host.numa_node to one of them, or to -1"
        )
    if len(nodes) < 2:
        return -1, ""
    node = numa_node if numa_node >= 0 else _own_node()
    try:
        if node >= 0:
            new_arena("kvbm-probe", 1, False, False, node)
    except OSError as error:
        return -1, (
            f"HOST pool: the system does not let it choose NUMA node {node} ({error}), so it may lie on any; a "
            "container needs"
            " CAP_SYS_NICE and the node in its cpuset"
        )
    return node, ""


def numa_nodes() -> list[int]:
    """NUMA nodes of this machine; one where the system does not say."""
    online = _NODES / "online"
    if not online.exists():
        return [0]
    spans = [span.partition("-") for span in online.read_text().strip().split(",") if span]
    return [node for first, _, last in spans for node in range(int(first), int(last or first) + 1)] or [0]


class HugePagePool(NamedTuple):
    """Huge pages that the operator has set aside, for those who ask for them by name.

    Attributes:
        free: that nobody has taken or been promised.
    """

    page_bytes: int
    total: int
    free: int


def huge_page_pool() -> HugePagePool:
    """The system's pool of huge pages of its usual size, which may be empty."""
    fields = _meminfo(_MEMINFO)
    if "HugePages_Free" not in fields:
        return HugePagePool(2 << 20, 0, 0)
    free = fields["HugePages_Free"] - fields.get("HugePages_Rsvd", 0)
    return HugePagePool(fields["Hugepagesize"] * 1024, fields["HugePages_Total"], max(0, free))


def _own_node() -> int:
    """NUMA node of the core this thread runs on; -1 where the system does not say."""
    try:
        core = Path("/proc/thread-self/stat").read_text().rpartition(")")[2].split()[36]
        return next((int(folder.name[4:]) for folder in (_CORES / f"cpu{core}").glob("node[0-9]*")), -1)
    except (OSError, IndexError):
        return -1


def _node_memory_bytes(node: int) -> int:
    """Memory of a node that a new pool may take: what is free, and what only caches files."""
    fields = _meminfo(_NODES / f"node{node}" / "meminfo")
    return 1024 * sum(fields.get(name, 0) for name in ("MemFree", "Active(file)", "Inactive(file)", "SReclaimable"))


def _meminfo(path: Path) -> dict[str, int]:
    """Numbers of a meminfo file by name, most of them in KiB. Those of a node have the node's name before each."""
    if not path.exists():
        return {}
    named = (line.split(":", 1) for line in path.read_text().splitlines() if ":" in line)
    return {name.split()[-1]: int(value.split()[0]) for name, value in named}


def _indexes(at: Sequence[int] | None) -> np.ndarray | None:
    return None if at is None else np.ascontiguousarray(at, dtype=np.int64)


def register(memory: np.ndarray, whose: str = "HOST pool") -> tuple[bool, str]:
    """Pin memory for CUDA; whether it was done, and else why not if it should have been.

    Args:
        whose: in the words why not.

    Only who has loaded torch copies to a GPU, so we never load it here.
    """
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available():
        return False, ""
    try:
        torch.cuda.init()
        error = int(torch.cuda.cudart().cudaHostRegister(memory.ctypes.data, memory.nbytes, 0))
        if not error:
            return True, ""
        with suppress(RuntimeError):
            torch.zeros(1, device="cuda")  # CUDA remembers the refusal for whoever starts the next kernel: that is we
        why = f"cudaHostRegister answers {error}"
    except RuntimeError as refusal:
        why = str(refusal)
    return False, (
        f"{whose}: its {memory.nbytes} bytes are not pinned ({why}), so copies to and from the GPU take a detour; "
        "raise the limit"
        " of locked memory (ulimit -l)"
    )


def unregister(address: int) -> None:
    """CUDA no longer has the memory pinned that `register` pinned and that begins here."""
    import torch

    torch.cuda.cudart().cudaHostUnregister(address)  # type: ignore[no-untyped-call]
