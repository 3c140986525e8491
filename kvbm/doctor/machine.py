"""CPU, open files, memory: what the machine and its container give this process."""

from __future__ import annotations

import os
import platform
import re
import resource
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from kvbm.assembly import NATIVE
from kvbm.doctor.finding import DoctorFinding, ok, problem, size, speed, unused, warning
from kvbm.doctor.plan import MachinePlan

_SHA = ("sha_ni", "sse4_1", "ssse3")
_CRC = ("sse4_2", "pclmulqdq")
_OTHERS = ("avx2", "avx512f")
_CHECKED_BYTES = 1 << 20
_FEW_FILES, _TOO_FEW_FILES = 1024, 256
_CAP_IPC_LOCK = 1 << 14
_JOINS_BY_REQUEST = (6, 1)  # the first Linux that joins pages of shared memory when asked, though it does not by itself
_FREE_RINGS = (5, 12)  # the first Linux that counts them as the container's memory instead
_RING_BYTES, _RING_ENTRY_BYTES = 16 << 10, 128  # whole pages of a ring, and what an entry takes in its three parts


# -- CPU --------------------------------------------------------------------------------------------------------------


class CpuFacts(NamedTuple):
    """The CPU as this process may use it.

    Attributes:
        cores: that this process may run on; `quota`: of their time, in cores, 0 for all.
        flags: as /proc/cpuinfo has them.
        crc_bytes_s: CRC-32C of one core, now.
    """

    architecture: str
    cores: int
    quota: float
    flags: frozenset[str]
    crc_bytes_s: float


def look_at_cpu() -> CpuFacts:
    """See `CpuFacts`."""
    flags: set[str] = set()
    for line in _text("/proc/cpuinfo").splitlines():
        name, _, value = line.partition(":")
        if name.strip() in ("flags", "Features"):
            flags.update(value.split())
            break
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    data, best_s = os.urandom(_CHECKED_BYTES), float("inf")
    for _ in range(5):
        begin = time.perf_counter()
        NATIVE.crc32c(data)
        best_s = min(best_s, time.perf_counter() - begin)
    quota = cpu_quota(_text("/sys/fs/cgroup" + _own_group("", "cpu.max")), _text(_old_group("cpu", "cpu.cfs_quota_us")))
    return CpuFacts(platform.machine(), cores, quota, frozenset(flags), _CHECKED_BYTES / best_s)


def cpu_quota(newer: str, older: str) -> float:
    """Cores' worth of time from cgroup v2's `cpu.max` or v1's `cpu.cfs_quota_us` (of 100 ms); 0 for no limit."""
    parts = newer.split()
    if len(parts) == 2 and parts[0].isdecimal() and parts[1].isdecimal():
        return int(parts[0]) / int(parts[1])
    return int(older) / 100_000 if older.strip().isdecimal() else 0.0


def judge_cpu(facts: CpuFacts) -> list[DoctorFinding]:
    """Cores, and which of the native kernels this CPU can run."""
    found = f"{facts.cores} cores, {facts.architecture}"
    if 0 < facts.quota < facts.cores:
        found += f", limited to the time of {facts.quota:g}"
    effective = min(facts.cores, facts.quota or facts.cores)
    cores = (
        ok("CPU cores", found)
        if effective >= 2
        else warning("CPU cores", found, "give at least 2: copies, publisher and engine share them")
    )
    hashing = "SHA" if facts.flags.issuperset(_SHA) else "AVX2" if "avx2" in facts.flags else "portable"
    crc = "SSE4.2" if facts.flags.issuperset(_CRC) else "portable"
    others = [name.upper() for name in _OTHERS if name in facts.flags]
    found = (
        f"hashes by {hashing}, CRC-32C by {crc}: {speed(facts.crc_bytes_s)} a core; has "
        f"{', '.join(others) or 'no AVX2'}"
    )
    if facts.architecture not in ("x86_64", "AMD64"):
        fix = f"native kernels for {facts.architecture} are portable C++ and slow; expect checksums to cost time"
        return [cores, warning("CPU kernels", found, fix)]
    if "portable" in (hashing, crc):
        fix = "let the virtual machine have the host's CPU flags (SHA or AVX2, SSE4.2, PCLMULQDQ)"
        return [cores, warning("CPU kernels", found, fix)]
    return [cores, ok("CPU kernels", found)]


def look_at_open_files() -> tuple[int, int]:
    """Files this process may have open, and how far it may raise that itself."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _limit(soft), _limit(hard)


def judge_open_files(soft: int, hard: int) -> DoctorFinding:
    """`ulimit -n`. -1 is no limit."""
    found = f"{_count(soft)} at most (hard limit {_count(hard)})"
    fix = "raise it: ulimit -n 65536, LimitNOFILE=65536 in a systemd unit, or docker run --ulimit nofile=65536"
    if 0 <= soft < _TOO_FEW_FILES:
        return problem("open files", found, fix)
    return warning("open files", found, fix) if 0 <= soft < _FEW_FILES else ok("open files", found)


# -- memory -----------------------------------------------------------------------------------------------------------


class MemoryFacts(NamedTuple):
    """Memory, in bytes.

    Attributes:
        limit, used: of the container; limit 0 for none.
        kernel: its version.
        locked: RLIMIT_MEMLOCK, -1 for no limit; `may_lock`: this process may pass it (CAP_IPC_LOCK).
        huge_free, huge_count: free huge pages and all of them; huge_page: size of one, 0 where there are none.
        anonymous_huge, shared_huge: modes of transparent huge pages, "" where the kernel has none.
        nodes: NUMA node → bytes free or taken by the page cache alone.
    """

    total: int
    available: int
    limit: int
    used: int
    kernel: tuple[int, int]
    locked: int
    may_lock: bool
    huge_page: int
    huge_free: int
    huge_count: int
    anonymous_huge: str
    shared_huge: str
    nodes: Mapping[int, int]


def look_at_memory() -> MemoryFacts:
    """See `MemoryFacts`."""
    known = _meminfo(_text("/proc/meminfo"))
    limit, used = _container_memory()
    capabilities = re.search(r"^CapEff:\s*([0-9a-f]+)", _text("/proc/self/status"), re.MULTILINE)
    soft = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    release = re.match(r"(\d+)\.(\d+)", platform.release())
    return MemoryFacts(
        known.get("MemTotal", 0),
        known.get("MemAvailable", 0),
        limit,
        used,
        (int(release[1]), int(release[2])) if release else _FREE_RINGS,
        _limit(soft),
        capabilities is not None and bool(int(capabilities[1], 16) & _CAP_IPC_LOCK),
        known.get("Hugepagesize", 0),
        known.get("HugePages_Free", 0) - known.get("HugePages_Rsvd", 0),
        known.get("HugePages_Total", 0),
        chosen_mode(_text("/sys/kernel/mm/transparent_hugepage/enabled")),
        chosen_mode(_text("/sys/kernel/mm/transparent_hugepage/shmem_enabled")),
        {
            int(folder.name.removeprefix("node")): _node_room(_meminfo(_text(str(folder / "meminfo"))))
            for folder in sorted(Path("/sys/devices/system/node").glob("node[0-9]*"))
        },
    )


def chosen_mode(text: str) -> str:
    """The word in brackets of the kernel's `always [madvise] never`."""
    found = re.search(r"\[(\w+)\]", text)
    return found[1] if found else ""


def judge_memory(facts: MemoryFacts, plan: MachinePlan) -> list[DoctorFinding]:
    """Room, what may be locked, huge pages, NUMA."""
    return [
        _judge_room(facts, plan),
        _judge_locked_memory(facts, plan),
        _judge_huge_pages(facts, plan),
        _judge_numa(facts, plan),
    ]


def _judge_room(facts: MemoryFacts, plan: MachinePlan) -> DoctorFinding:
    found = f"{size(facts.available)} of {size(facts.total)} available"
    room = facts.available
    if facts.limit:
        found += f"; the container may use {size(facts.limit)} and uses {size(facts.used)}"
        room = min(room, max(0, facts.limit - facts.used))
    pools = [("HOST", plan.host)]
    if plan.settings.pools.hbm.device in ("cpu", "memory"):
        pools.append(("HBM", plan.hbm))
    wanted = sum(pool.bytes or 0 for _, pool in pools)
    unknown = [f"pools.{name.lower()}.slots" for name, pool in pools if pool.bytes is None]
    if unknown:
        found += f"; {' and '.join(unknown)} not weighed: give --block-bytes"
    if not wanted:
        return ok("memory", found)
    words = " and ".join(f"{size(pool.bytes)} {name}" for name, pool in pools if pool.bytes)
    found += f"; wanted for {words}"
    if wanted > room:
        where = "raise the container's limit" if facts.limit and room < facts.available else "free memory"
        return problem("memory", found, f"lower pools.host (and pools.hbm on a CPU), or {where}")
    if wanted > 0.9 * room:
        return warning("memory", found, "leave a tenth free for the engine, the copies and the page cache")
    return ok("memory", found)


def _judge_locked_memory(facts: MemoryFacts, plan: MachinePlan) -> DoctorFinding:
    """Old kernels count io_uring's rings against the limit.

    What CUDA pins is its driver's matter and counts nowhere.
    """
    check = "locked memory"
    found = "no limit" if facts.locked < 0 else f"{size(facts.locked)} may be locked"
    if facts.locked >= 0 and facts.may_lock:
        return ok(check, f"{found}, which binds no process with CAP_IPC_LOCK, as this one")
    nvme = plan.settings.pools.nvme
    if not plan.nvme or nvme.io == "threads" or facts.kernel >= _FREE_RINGS:
        return ok(check, f"{found}; nothing configured counts against it (CUDA's pinned memory does not)")
    wanted = len(plan.nvme_paths) * (_RING_BYTES + nvme.depth * _RING_ENTRY_BYTES)
    found += f"; Linux {facts.kernel[0]}.{facts.kernel[1]} counts io_uring's rings, {size(wanted)}"
    if 0 <= facts.locked < wanted:
        fix = (
            "raise it: ulimit -l unlimited, LimitMEMLOCK=infinity in a systemd unit, or docker run --ulimit memlock=-1"
        )
        return warning(check, found, fix)
    return ok(check, found)


def _judge_huge_pages(facts: MemoryFacts, plan: MachinePlan) -> DoctorFinding:
    check = "huge pages"
    mode = plan.settings.pools.host.huge_pages
    found = f"{facts.huge_free} of {facts.huge_count} free, {size(facts.huge_page)} each" if facts.huge_page else "none"
    found += f"; transparent: {facts.anonymous_huge or 'none'}, shared memory: {facts.shared_huge or 'none'}"
    if not plan.host:
        return unused(check, f"{found}; there is no HOST pool")
    if mode == "off":
        return unused(check, f"{found}; pools.host.huge_pages is off")
    if plan.host.bytes is None:
        return unused(check, f"{found}; give --block-bytes to hold them against pools.host.slots")
    pages = -(-plan.host.bytes // facts.huge_page) if facts.huge_page else 0
    if pages and pages <= facts.huge_free:
        return ok(check, f"{found}; HOST takes {pages}")
    transparent = facts.shared_huge in ("always", "advise", "within_size", "force")
    by_request = facts.shared_huge == "never" and facts.kernel >= _JOINS_BY_REQUEST
    if mode == "auto" and (transparent or by_request):
        return ok(check, f"{found}; HOST takes transparent ones{' by request' if by_request else ''}")
    missing = f"{found}; HOST wants {pages or 'some'}"
    fix = (
        f"sysctl vm.nr_hugepages={facts.huge_count - facts.huge_free + pages}"
        if pages
        else "use a kernel that has them"
    )
    if mode == "on":
        return problem(check, missing, f"{fix}, or set pools.host.huge_pages=auto")
    fix += " early after the boot, or echo advise > /sys/kernel/mm/transparent_hugepage/shmem_enabled" if pages else ""
    return warning(
        check, missing, f"{fix}; without them copies walk more page tables, and NVME moves lists of small pages"
    )


def _judge_numa(facts: MemoryFacts, plan: MachinePlan) -> DoctorFinding:
    nodes, chosen, wanted = facts.nodes, plan.settings.pools.host.numa_node, plan.host.bytes or 0
    found = ", ".join(f"node {node}: {size(free)} free" for node, free in nodes.items()) or "not known"
    if len(nodes) <= 1 and chosen <= 0:
        return ok("NUMA", "one node")
    if not plan.host:
        return ok("NUMA", f"{len(nodes)} nodes ({found})")
    if chosen >= 0 and chosen not in nodes:
        there = " or ".join(str(node) for node in nodes) or "-1"
        return problem("NUMA", f"pools.host.numa_node is {chosen}; {found}", f"set pools.host.numa_node to {there}")
    bound = f"HOST is bound to node {chosen}" if chosen >= 0 else "HOST is bound to the node the manager starts on"
    short = [node for node, free in nodes.items() if free < wanted and chosen in (-1, node)]
    if short:
        return warning(
            "NUMA",
            f"{found}; {bound} and wants {size(wanted)}",
            "free page cache there (sysctl vm.drop_caches=1), lower pools.host, or bind to the other node",
        )
    return ok("NUMA", f"{found}; {bound}")


# -- reading what the kernel says -------------------------------------------------------------------------------------


def _text(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _meminfo(text: str) -> dict[str, int]:
    """Names → bytes, or counts where there is no unit. A node's lines begin with its name."""
    found = {}
    for line in text.splitlines():
        match = re.search(r"([\w()]+):\s+(\d+)( kB)?$", line.strip())
        if match:
            found[match[1]] = int(match[2]) * (1024 if match[3] else 1)
    return found


def _node_room(known: Mapping[str, int]) -> int:
    return sum(known.get(name, 0) for name in ("MemFree", "Active(file)", "Inactive(file)"))


def _container_memory() -> tuple[int, int]:
    """The tightest limit of the cgroups above this process, and what counts against it; 0, 0 for none."""
    found: list[tuple[int, int]] = []
    folder = Path("/sys/fs/cgroup" + _own_group("", ""))
    for above in (folder, *folder.parents):
        limit, used = _text(str(above / "memory.max")).strip(), _text(str(above / "memory.current")).strip()
        if limit.isdecimal():
            found.append((int(limit), int(used or 0)))
        if str(above) == "/sys/fs/cgroup":
            break
    older = Path(_old_group("memory", "memory.limit_in_bytes"))
    for above in (older.parent, Path("/sys/fs/cgroup/memory")):
        limit, used = _text(str(above / older.name)).strip(), _text(str(above / "memory.usage_in_bytes")).strip()
        if limit.isdecimal() and int(limit) < 1 << 60:
            found.append((int(limit), int(used or 0)))
    return min(found, key=_left, default=(0, 0))


def _left(limit_and_used: Sequence[int]) -> int:
    return limit_and_used[0] - limit_and_used[1]


def _own_group(controller: str, file: str) -> str:
    """Path of this process's cgroup below the mount, with a file in it. `controller`: "" for version 2."""
    for line in _text("/proc/self/cgroup").splitlines():
        _, names, path = line.split(":", 2)
        if (not names and not controller) or (controller and controller in names.split(",")):
            return f"{path.rstrip('/')}/{file}" if file else path.rstrip("/")
    return f"/{file}"


def _old_group(controller: str, file: str) -> str:
    """The file of this process's cgroup of version 1; inside a container its own is mounted at the root."""
    path = Path(f"/sys/fs/cgroup/{controller}{_own_group(controller, file)}")
    return str(path if path.exists() else Path(f"/sys/fs/cgroup/{controller}") / file)


def _limit(value: int) -> int:
    return -1 if value == resource.RLIM_INFINITY else value


def _count(limit: int) -> str:
    return "no limit" if limit < 0 else str(limit)
