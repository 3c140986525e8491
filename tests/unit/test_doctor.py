"""What `kvbm doctor` makes of facts, without the machine they were found on."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvbm.config import load_settings
from kvbm.core.answers import ReadyAnswer
from kvbm.core.errors import MissingExtraError
from kvbm.doctor import disks, gpu, machine, services
from kvbm.doctor.agreement import judge_settings
from kvbm.doctor.clock import ClockFacts, judge_clock
from kvbm.doctor.finding import DoctorFinding, Result, refused, size
from kvbm.doctor.peers import judge_peers
from kvbm.doctor.plan import MachinePlan, WantedBytes, plan_of
from kvbm.doctor.probes import cuda as cuda_probe
from kvbm.doctor.rdma import RdmaFacts
from kvbm.pools.nvme.generations import TAIL_BYTES
from kvbm.pools.stores.base import StoreTrouble
from kvbm.streams.nats.server_view import ServerView, StreamView
from kvbm.transport import nixl_process
from kvbm.verbs.ports import Port

MIB, GIB = 1 << 20, 1 << 30
OK, WARNING, PROBLEM, UNUSED = Result.OK, Result.WARNING, Result.PROBLEM, Result.UNUSED

NVME = {"pools.hbm.slots": 4, "pools.nvme.slots": 100}
HOST = {"pools.hbm.slots": 4, "pools.host.slots": 1024}


def plan(flags: dict[str, Any], block_bytes: int = MIB) -> MachinePlan:
    return plan_of(load_settings(flags=flags), block_bytes)


def expect(found: DoctorFinding, result: Result, *words: str) -> None:
    """The result, its words, and something to do exactly where something is wrong."""
    assert found.result is result, found
    for word in words:
        assert word in f"{found.found} {found.fix}", found
    assert bool(found.fix) == (result in (WARNING, PROBLEM)), found
    assert "\n" not in found.found + found.fix


# -- peers ------------------------------------------------------------------------------------------------------------


def test_peers_says_where_an_instance_lends_and_how_it_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def judged(facts: RdmaFacts | None = None, **flags: Any) -> DoctorFinding:
        changed = {name.replace("__", "."): value for name, value in flags.items()}
        known = {"instance.data_dir": str(tmp_path), "catalog.url": "http://127.0.0.1:1"}
        return judge_peers(load_settings(flags=HOST | known | changed), facts)

    key = tmp_path / "key"
    key.write_text("k" * 64)
    key.chmod(0o600)
    tcp = {"transport__listen": "tcp://0.0.0.0:7711", "transport__advertise": "10.0.0.7:7711"}
    expect(judged(), UNUSED, "transport.listen is not set")
    expect(judged(transport__listen="host"), OK, ".sock", "memory on this machine; no TCP")
    expect(judged(**tcp, transport__key_file=str(key)), OK, "tcp://10.0.0.7:7711", "TCP beyond it")
    rdma = tcp | {"transport__key_file": str(key), "transport__rdma": "auto"}
    up, down = Port("mlx5_1", 1, "ACTIVE", "Ethernet"), Port("mlx5_0", 1, "DOWN", "Ethernet")
    expect(judged(RdmaFacts([down, up], "pyverbs", ""), **rdma), OK, "RDMA by mlx5_1 beyond it, and TCP where")
    expect(
        judged(RdmaFacts([down], "pyverbs", ""), **rdma), WARNING, "TCP beyond it", "no RDMA device whose link is up"
    )
    expect(judged(RdmaFacts([up], "", "RDMA needs pyverbs"), **rdma), WARNING, "no RDMA: RDMA needs pyverbs")
    named = rdma | {"transport__rdma": "mlx5_0"}
    expect(judged(RdmaFacts([down, up], "pyverbs", ""), **named), WARNING, "no RDMA: mlx5_0 is down")
    nixl = tcp | {"transport__key_file": str(key), "transport__nixl": True}
    expect(judged(RdmaFacts([up], "", "none"), **nixl), OK, "NIXL beyond it, and TCP where")
    expect(judged(RdmaFacts([up], "pyverbs", ""), **nixl | rdma), OK, "RDMA by mlx5_1, then NIXL beyond it")
    expect(judged(RdmaFacts([down], "", "none"), **nixl), WARNING, "no fabric", "leave transport.nixl out")
    with monkeypatch.context() as without:
        without.setattr(nixl_process, "PACKAGES", ("nixl_of_nowhere",))
        expect(judged(RdmaFacts([up], "", ""), **nixl), PROBLEM, "TCP beyond it", "pip install 'kvbm-ledger[nixl]'")
    certified = {f"transport__tls_{part}": part for part in ("cert", "key", "ca")}
    expect(judged(**tcp, **certified), OK, "TCP under TLS beyond it")
    expect(judged(transport__fetch=True), OK, "lends at no place")
    expect(judged(**tcp, transport__key_file=str(tmp_path / "none")), PROBLEM, "cannot be read")
    key.chmod(0o644)
    expect(judged(**tcp, transport__key_file=str(key)), PROBLEM, "chmod 600")
    expect(judged(transport__listen="host", pools__host__slots=0), PROBLEM, "HOST is what is lent")
    expect(judged(transport__listen="host", catalog__url=""), WARNING, "set catalog.url")
    assert list(tmp_path.iterdir()) == [key], "the doctor makes nothing"


# -- the plan ---------------------------------------------------------------------------------------------------------


def test_slots_are_weighed_only_when_the_size_of_a_block_is_known() -> None:
    wanted = plan({"pools.hbm.slots": 4, "pools.host.slots": 10, "pools.nvme.capacity_bytes": 100}, 0)
    assert (wanted.hbm, wanted.host, wanted.nvme) == (WantedBytes(None), WantedBytes(None), WantedBytes(100))
    assert wanted.hbm and wanted.host and wanted.nvme
    assert not plan({}).host


def test_the_files_of_an_nvme_pool_are_as_large_as_the_pool_makes_them() -> None:
    wanted = plan(NVME | {"pools.nvme.path": "/a/one:/b/two"}, 4096)
    assert wanted.nvme_paths == ("/a/one", "/b/two")
    assert wanted.nvme.bytes == 100 * 8192 + 2 * (
        4096 + TAIL_BYTES
    )  # header and tail of each file, header of each slot
    assert plan(NVME, 0).nvme_paths == ("kvbm-data/instances/instance-0/nvme.pool",)


# -- CPU and files ----------------------------------------------------------------------------------------------------

FLAGS = frozenset({"sha_ni", "sse4_1", "ssse3", "sse4_2", "pclmulqdq", "avx2"})


@pytest.mark.parametrize(
    ("facts", "cores", "kernels", "words"),
    [
        (("x86_64", 8, 0.0, FLAGS), OK, OK, "by SHA"),
        (("x86_64", 8, 0.0, FLAGS - {"sha_ni"}), OK, OK, "by AVX2"),
        (("x86_64", 8, 0.0, FLAGS - {"pclmulqdq"}), OK, WARNING, "CRC-32C by portable"),
        (("x86_64", 8, 0.0, FLAGS - {"sha_ni", "avx2"}), OK, WARNING, "hashes by portable"),
        (("aarch64", 8, 0.0, frozenset({"crc32"})), OK, WARNING, "aarch64"),
        (("x86_64", 8, 1.5, FLAGS), WARNING, OK, "by SHA"),
        (("x86_64", 1, 0.0, FLAGS), WARNING, OK, "by SHA"),
    ],
)
def test_a_cpu_without_fast_kernels_or_without_cores_is_a_warning(
    facts: tuple[str, int, float, frozenset[str]], cores: Result, kernels: Result, words: str
) -> None:
    first, second = machine.judge_cpu(machine.CpuFacts(*facts, 1e10))
    expect(first, cores)
    expect(second, kernels, words, "10.0 GB/s")


def test_the_time_a_container_may_use_is_read_from_both_versions_of_cgroups() -> None:
    assert machine.cpu_quota("150000 100000\n", "") == 1.5
    assert machine.cpu_quota("max 100000\n", "") == 0
    assert machine.cpu_quota("", "50000\n") == 0.5
    assert machine.cpu_quota("", "-1\n") == 0


def test_few_open_files_are_a_warning_and_very_few_a_problem() -> None:
    expect(machine.judge_open_files(-1, -1), OK, "no limit")
    expect(machine.judge_open_files(1024, 4096), OK)
    expect(machine.judge_open_files(512, 4096), WARNING, "512", "ulimit -n")
    expect(machine.judge_open_files(100, 100), PROBLEM)


# -- memory -----------------------------------------------------------------------------------------------------------

MEMORY = machine.MemoryFacts(
    total=64 * GIB,
    available=32 * GIB,
    limit=0,
    used=0,
    kernel=(6, 1),
    locked=8 * MIB,
    may_lock=False,
    huge_page=2 * MIB,
    huge_free=0,
    huge_count=0,
    anonymous_huge="madvise",
    shared_huge="advise",
    nodes={0: 16 * GIB},
)


def judged(flags: dict[str, Any], block_bytes: int = MIB, **facts: Any) -> dict[str, DoctorFinding]:
    found = machine.judge_memory(MEMORY._replace(**facts), plan(flags, block_bytes))
    return {one.check: one for one in found}


def test_pools_are_held_against_free_memory_and_the_containers_limit() -> None:
    expect(judged(HOST)["memory"], OK, "1.0 GiB HOST")
    expect(judged(HOST, 40 * MIB)["memory"], PROBLEM, "40 GiB HOST", "free memory")
    expect(judged(HOST, 30 * MIB)["memory"], WARNING)
    expect(
        judged(HOST, 8 * MIB, limit=10 * GIB, used=5 * GIB)["memory"], PROBLEM, "may use 10 GiB", "container's limit"
    )
    expect(judged(HOST, 0)["memory"], OK, "pools.host.slots", "--block-bytes")
    expect(judged(HOST | {"pools.hbm.slots": 40, "pools.hbm.device": "cpu"}, GIB)["memory"], PROBLEM, "40 GiB HBM")


def test_a_limit_on_locked_memory_matters_where_an_old_kernel_counts_rings() -> None:
    expect(judged({})["locked memory"], OK, "nothing configured")
    expect(judged(NVME)["locked memory"], OK, "8.0 MiB may be locked", "nothing configured")
    old = {"kernel": (5, 4), "locked": 16 << 10}
    expect(judged(HOST, **old)["locked memory"], OK, "nothing configured")
    expect(judged(NVME, **old)["locked memory"], WARNING, "Linux 5.4", "20 KiB", "memlock=-1")
    expect(judged(NVME | {"pools.nvme.path": "/a:/b"}, **old)["locked memory"], WARNING, "40 KiB")
    expect(judged(NVME, **old | {"locked": 64 << 10})["locked memory"], OK, "20 KiB")
    expect(judged(NVME, **old | {"locked": -1})["locked memory"], OK, "no limit")
    expect(judged(NVME, **old, may_lock=True)["locked memory"], OK, "CAP_IPC_LOCK")
    expect(judged(NVME | {"pools.nvme.io": "threads"}, **old)["locked memory"], OK, "nothing configured")


@pytest.mark.parametrize(
    ("mode", "facts", "result", "words"),
    [
        ("auto", {"huge_free": 512, "huge_count": 600}, OK, "HOST takes 512"),
        ("auto", {}, OK, "transparent"),
        ("auto", {"shared_huge": "never"}, OK, "transparent ones by request"),
        ("auto", {"shared_huge": "never", "kernel": (6, 0)}, WARNING, "vm.nr_hugepages=512"),
        ("auto", {"shared_huge": "deny", "huge_free": 100, "huge_count": 300}, WARNING, "vm.nr_hugepages=712"),
        ("auto", {"shared_huge": "deny", "huge_page": 0}, WARNING, "kernel that has them"),
        ("on", {}, PROBLEM, "pools.host.huge_pages=auto"),
        ("on", {"huge_free": 512, "huge_count": 512}, OK, "HOST takes 512"),
        ("off", {}, UNUSED, "is off"),
    ],
)
def test_huge_pages_are_held_against_the_host_pool(
    mode: str, facts: dict[str, Any], result: Result, words: str
) -> None:
    expect(judged(HOST | {"pools.host.huge_pages": mode}, **facts)["huge pages"], result, words)


def test_huge_pages_without_a_host_pool_are_not_used() -> None:
    expect(judged({})["huge pages"], UNUSED, "no HOST pool")
    expect(judged(HOST, 0)["huge pages"], UNUSED, "--block-bytes")


def test_a_numa_node_must_exist_and_have_room() -> None:
    two = {"nodes": {0: 16 * GIB, 1: 100 * MIB}}
    expect(judged(HOST)["NUMA"], OK, "one node")
    expect(judged({}, **two)["NUMA"], OK, "2 nodes")
    expect(judged(HOST | {"pools.host.numa_node": 0}, **two)["NUMA"], OK, "node 0")
    expect(judged(HOST | {"pools.host.numa_node": 1}, **two)["NUMA"], WARNING, "100 MiB free", "1.0 GiB")
    expect(judged(HOST, **two)["NUMA"], WARNING)
    expect(judged(HOST | {"pools.host.numa_node": 7}, **two)["NUMA"], PROBLEM, "numa_node is 7", "0 or 1")
    expect(judged(HOST | {"pools.host.numa_node": 1})["NUMA"], PROBLEM, "to 0")


def test_the_kernels_words_are_read() -> None:
    assert machine.chosen_mode("always [madvise] never\n") == "madvise"
    assert machine.chosen_mode("") == ""


# -- CUDA -------------------------------------------------------------------------------------------------------------

DEVICE = {"name": "H", "total_bytes": 80 * GIB, "compute_mode": 0, "capability": "9.0"}
CUDA: dict[str, Any] = {
    "cards": 1,
    "module": "580.1",
    "library": "",
    "error": "",
    "version": 13000,
    "devices": [DEVICE, DEVICE],
    "pinned": "",
}
NO_CUDA: dict[str, Any] = CUDA | {"cards": 0, "module": "", "library": "not there", "version": 0, "devices": []}
TORCH = gpu.Torch("2.9.0", "12.8")


def judged_gpu(cuda: dict[str, Any], torch: gpu.Torch | None, device: str = "auto") -> dict[str, DoctorFinding]:
    found = gpu.judge_gpu(cuda, torch, plan({"pools.hbm.slots": 4, "pools.hbm.device": device}))
    return {one.check: one for one in found}


def test_a_gpu_that_works_is_told_with_its_numbers() -> None:
    found = judged_gpu(CUDA, TORCH, "cuda")
    assert {one.result for one in found.values()} == {OK}
    expect(found["CUDA driver"], OK, "CUDA 13.0", "580.1")
    expect(found["CUDA devices"], OK, "2: 2 x H, 80 GiB, sm_90")


@pytest.mark.parametrize(
    ("change", "result", "words"),
    [
        ({}, UNUSED, "libcuda"),
        ({"module": "580.1"}, WARNING, "--gpus all"),
        ({"cards": 2}, WARNING, "2 NVIDIA cards"),
        ({"library": "", "error": "CUDA_ERROR_UNKNOWN (999)"}, WARNING, "999"),
        ({"library": "", "module": "580.1"}, WARNING, "CUDA_VISIBLE_DEVICES"),
    ],
)
def test_a_gpu_that_cannot_be_used_is_a_problem_where_it_is_wanted(
    change: dict[str, Any], result: Result, words: str
) -> None:
    expect(judged_gpu(NO_CUDA | change, TORCH)["CUDA driver"], result, words)
    expect(judged_gpu(NO_CUDA | change, TORCH, "cuda")["CUDA driver"], PROBLEM, "device is cuda")


def test_a_compute_mode_that_shuts_others_out_is_named() -> None:
    prohibited, exclusive = DEVICE | {"compute_mode": 2}, DEVICE | {"compute_mode": 3}
    expect(judged_gpu(CUDA | {"devices": [exclusive]}, TORCH)["CUDA devices"], WARNING, "exclusive process", "-c 0")
    expect(judged_gpu(CUDA | {"devices": [prohibited]}, TORCH)["CUDA devices"], PROBLEM, "prohibited")


def test_torch_has_to_fit_the_device_and_the_driver() -> None:
    plain = gpu.Torch("2.9.0+cpu", "")
    for cuda, torch, device, result, words in (
        (NO_CUDA, None, "memory", UNUSED, "works without it"),
        (NO_CUDA, None, "auto", PROBLEM, "kvbm-ledger[engine]"),
        (NO_CUDA, plain, "cpu", OK, "without CUDA"),
        (NO_CUDA, plain, "auto", OK, "without CUDA"),
        (CUDA, plain, "auto", WARNING, "there is a GPU"),
        (CUDA, plain, "cuda", PROBLEM, "CUDA build"),
        (CUDA | {"version": 12040}, gpu.Torch("2.9.0", "13.0"), "cuda", PROBLEM, "driver has CUDA 12.4"),
        (CUDA | {"version": 12040}, TORCH, "cuda", OK, "CUDA 12.8"),
    ):
        expect(judged_gpu(cuda, torch, device)["torch"], result, words)
    text = "from typing import Optional\n__version__ = '2.9.0+cu128'\ncuda: Optional[str] = '12.8'\nhip = None\n"
    assert gpu.torch_of(text) == gpu.Torch("2.9.0+cu128", "12.8")
    assert gpu.torch_of("__version__ = '2.13.0+cpu'\ncuda: Optional[str] = None\n") == gpu.Torch("2.13.0+cpu", "")


def test_memory_that_cannot_be_pinned_makes_copies_slow() -> None:
    refusal = CUDA | {"pinned": "CUDA_ERROR_OUT_OF_MEMORY (2)"}
    expect(judged_gpu(refusal, TORCH)["pinned memory"], WARNING, "OUT_OF_MEMORY")
    assert "pinned memory" not in judged_gpu(NO_CUDA, TORCH)


class Driver:
    """A driver of one device, as far as the probe asks; the calls it got, and answers other than 0 by name."""

    def __init__(self, **answers: int) -> None:
        self.answers = answers
        self.calls: list[str] = []

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any) -> int:
            self.calls.append(name)
            out = arguments[0]
            values = {"cuDriverGetVersion": 13020, "cuDeviceGetCount": 1, "cuDeviceTotalMem_v2": 80 * GIB}
            if name in values:
                out._obj.value = values[name]
            elif name == "cuDeviceGetName":
                out.value = b"H200"
            elif name == "cuDeviceGetAttribute":
                out._obj.value = {20: 3, 75: 9, 76: 0}[arguments[1]]
            elif name == "cuGetErrorName":
                arguments[1]._obj.value = b"CUDA_ERROR_X"
            return self.answers.get(name, 0)

        return call


def test_the_driver_is_asked_without_torch_and_gets_back_what_was_pinned() -> None:
    driver = Driver()
    found = cuda_probe.probe(driver)
    assert found["devices"] == [{"name": "H200", "total_bytes": 80 * GIB, "compute_mode": 3, "capability": "9.0"}]
    assert (found["version"], found["pinned"], found["error"]) == (13020, "", "")
    assert driver.calls.count("cuMemHostRegister_v2") == driver.calls.count("cuMemHostUnregister") == 1
    assert driver.calls[-1] == "cuDevicePrimaryCtxRelease_v2"


def test_what_the_driver_refuses_is_named_and_nothing_stays_taken() -> None:
    assert cuda_probe.probe(Driver(cuInit=999))["error"] == "CUDA_ERROR_X (999)"
    driver = Driver(cuMemHostRegister_v2=2)
    assert cuda_probe.probe(driver)["pinned"] == "CUDA_ERROR_X (2)"
    assert driver.calls.count("cuDevicePrimaryCtxRetain") == driver.calls.count("cuDevicePrimaryCtxRelease_v2") == 1
    assert "no context" in cuda_probe.probe(Driver(cuDevicePrimaryCtxRetain=2))["pinned"]


# -- disks ------------------------------------------------------------------------------------------------------------

RING: dict[str, Any] = {"setup": "", "nop": "", "register": "", "disabled": 0}
DISK = disks.Disk(
    path="/data/nvme.pool",
    folder="/data",
    system="ext4",
    mount="/data",
    number="259:0",
    free_bytes=10 * GIB,
    total_bytes=20 * GIB,
    write_bytes_s=2_000_000_000,
    read_bytes_s=3_000_000_000,
)


@pytest.mark.parametrize(
    ("change", "result", "words"),
    [
        ({}, OK, "no-op"),
        ({"setup": "ENOSYS"}, WARNING, "gVisor"),
        ({"setup": "EPERM"}, WARNING, "seccomp"),
        ({"setup": "EPERM", "disabled": 2}, WARNING, "kernel.io_uring_disabled=0"),
        ({"setup": "ENOMEM"}, WARNING, "MEMLOCK"),
        ({"nop": "no completion"}, WARNING, "threads are used"),
        ({"register": "ENOMEM"}, OK, "registers no buffers"),
    ],
)
def test_a_refused_io_uring_says_who_refuses_it(change: dict[str, Any], result: Result, words: str) -> None:
    expect(disks.judge_io_uring(RING | change, plan(NVME)), result, words)
    expect(disks.judge_io_uring(RING | change, plan({})), UNUSED, "no NVME pool")
    expect(disks.judge_io_uring(RING | change, plan(NVME | {"pools.nvme.io": "threads"})), UNUSED)
    if change.get("setup"):
        expect(
            disks.judge_io_uring(RING | change, plan(NVME | {"pools.nvme.io": "io_uring"})), PROBLEM, "pools.nvme.io"
        )


def judged_disk(flags: dict[str, Any] | None = None, **facts: Any) -> dict[str, DoctorFinding]:
    return {one.check: one for one in disks.judge_nvme(DISK._replace(**facts), plan(NVME | (flags or {})))}


def test_a_good_disk_is_told_with_its_speed() -> None:
    found = judged_disk()
    assert [one.result for one in found.values()] == [OK, OK, OK]
    expect(found["NVME speed"], OK, "2.0 GB/s written, 3.0 GB/s read")
    assert "NVME speed" not in judged_disk(write_bytes_s=0, read_bytes_s=0)


@pytest.mark.parametrize(
    ("facts", "result", "words"),
    [
        ({"system": "tmpfs"}, WARNING, "gone with a reboot"),
        ({"system": "overlay"}, WARNING, "mount a volume"),
        ({"system": "nfs4"}, WARNING, "over a network"),
        ({"rotational": True, "read_bytes_s": 150_000_000, "write_bytes_s": 150_000_000}, WARNING, "flash disk"),
        ({"rotational": True}, OK, "too fast for it"),
        ({"write": "ENOSPC"}, PROBLEM, "is full"),
        ({"write": "EFBIG"}, PROBLEM, "ulimit -f"),
        ({"write": "EROFS"}, PROBLEM, "read-only"),
        ({"write": "EACCES"}, PROBLEM, "may not be written"),
        ({"write": "ENOTDIR"}, PROBLEM, "not a folder"),
        ({"write": "EIO"}, PROBLEM, "dmesg"),
        ({"kind": "folder"}, PROBLEM, "/data/nvme.pool/nvme.pool"),
        ({"kind": "device", "mount": "/data"}, PROBLEM, "mounted at /data"),
        ({"kind": "device", "mount": ""}, OK, "block device of 20 GiB"),
    ],
)
def test_a_place_that_does_not_do_for_blocks_is_named(facts: dict[str, Any], result: Result, words: str) -> None:
    expect(judged_disk(**facts)["NVME disk"], result, words)


def test_o_direct_that_is_refused_costs_memory_and_is_a_problem_where_it_is_demanded() -> None:
    expect(judged_disk(direct="EINVAL")["NVME O_DIRECT"], WARNING, "page cache")
    expect(judged_disk({"pools.nvme.direct": "on"}, direct="EINVAL")["NVME O_DIRECT"], PROBLEM, "pools.nvme.direct")
    expect(judged_disk({"pools.nvme.direct": "off"}, direct="EINVAL")["NVME O_DIRECT"], UNUSED)


def test_a_slow_disk_is_a_warning() -> None:
    expect(judged_disk(read_bytes_s=100_000_000)["NVME speed"], WARNING, "100 MB/s")


def test_a_journal_that_a_snapshot_does_not_fit_into_is_warned_of() -> None:
    small = {"pools.hbm.slots": 120_000, "journal.capacity_bytes": MIB, "journal.segment_bytes": MIB // 4}
    expect(disks.judge_journal_room(plan(small)), WARNING, "1.0 MiB", "120000 slots", "journal.capacity_bytes=11520000")
    expect(disks.judge_journal_room(plan(small | {"journal.capacity_bytes": 11_520_000})), OK, "120000 slots")


def test_slow_syncs_matter_where_the_journal_waits_for_them() -> None:
    slow = DISK._replace(path="/data/journal", sync_s=[0.01, 0.02, 0.08])
    for mode, result in (("off", OK), ("interval", OK), ("always", WARNING)):
        found = disks.judge_journal(slow, plan({"journal.fsync": mode}))[1]
        expect(found, result, "20 ms a sync, 80 ms at worst of 3")


def test_all_that_is_wanted_of_one_device_is_added_up() -> None:
    journal = DISK._replace(path="/data/journal")
    for nvme_bytes, held, result, words in (
        (5 * GIB, 0, OK, "10 GiB free on /data, wanted 5.0 GiB NVME and 4.0 GiB journal"),
        (7 * GIB, 0, PROBLEM, "1.0 GiB are missing"),
        (7 * GIB, 7 * GIB, OK, "7.0 GiB of it there"),
        (6 * GIB - 5 * MIB, 0, WARNING, "a twentieth"),
    ):
        entries = [
            ("NVME", DISK._replace(held_bytes=held), WantedBytes(nvme_bytes)),
            ("journal", journal, WantedBytes(4 * GIB)),
        ]
        (found,) = disks.judge_room(entries)
        expect(found, result, words)
    entries = [("NVME", DISK, WantedBytes(7 * GIB)), ("journal", journal._replace(number="8:1"), WantedBytes(4 * GIB))]
    assert [one.result for one in disks.judge_room(entries)] == [OK, OK]
    assert disks.judge_room([("NVME", DISK._replace(write="EIO"), WantedBytes(7 * GIB))]) == []
    expect(disks.judge_room([("NVME", DISK, WantedBytes(None))])[0], OK, "--block-bytes")


# -- services ---------------------------------------------------------------------------------------------------------

STREAM = StreamView((), 5 * MIB, 1 * GIB, 86400.0, "file", 3)
VIEW = ServerView("nats://n:4222", "2.12.1", 8 * MIB, True, 0.0004, "", STREAM, "", -1, -1)


def judged_nats(**facts: Any) -> list[DoctorFinding]:
    settings = load_settings(flags={"nats.url": "nats://n:4222"})
    return services.judge_nats(services.Nats(False, "", "", VIEW._replace(**facts), "instance"), settings)


def test_a_good_server_and_its_stream_are_told_with_their_numbers() -> None:
    server, stream = judged_nats()
    expect(server, OK, "nats-server 2.12.1", "0.40 ms", "TLS", "8.0 MiB")
    expect(stream, OK, "holds 5.0 MiB, keeps 1.0 GiB, 24 h; file, 3 replicas")


@pytest.mark.parametrize(
    ("facts", "result", "words"),
    [
        ({"max_payload": 1 << 14}, PROBLEM, "max_payload"),
        ({"max_payload": 1 << 19}, WARNING, "max_payload"),
        ({"max_payload": 1 << 20}, OK, "1.0 MiB"),
        ({"version": "2.9.25"}, PROBLEM, "2.12 or newer"),
        ({"version": "2.11.0-RC.1"}, WARNING, "2.12 or newer"),
        ({"version": "2.12"}, OK, "2.12"),
        ({"version": "dev"}, OK, "dev"),
        ({"round_trip_s": 0.2}, WARNING, "200 ms"),
    ],
)
def test_a_server_that_does_not_do_is_named(facts: dict[str, Any], result: Result, words: str) -> None:
    expect(judged_nats(**facts)[0], result, words)


@pytest.mark.parametrize(
    ("facts", "result", "words"),
    [
        ({"has_jetstream": "the server runs without JetStream", "stream": None}, PROBLEM, "-js"),
        ({"unseen": "permissions violation", "stream": None}, PROBLEM, "kvbm nats-permissions"),
        ({"stream": None}, OK, "not there yet"),
        ({"stream": None, "stored_bytes": 99, "may_store_bytes": 100}, PROBLEM, "cannot be made"),
        ({"stream": STREAM._replace(missing=("kvbm.v1.fence.>",))}, WARNING, "kvbm.v1.fence.>"),
        ({"stream": STREAM._replace(storage="memory")}, WARNING, "file storage"),
        ({"stream": STREAM._replace(max_bytes=-1)}, OK, "no limit of bytes"),
        ({"stream": STREAM._replace(max_bytes=-1), "stored_bytes": 85, "may_store_bytes": 100}, WARNING, "nearly full"),
        ({"stream": STREAM._replace(max_bytes=-1), "stored_bytes": 99, "may_store_bytes": 100}, PROBLEM, "it is full"),
        ({"stored_bytes": 99, "may_store_bytes": 100}, OK, "99 bytes of 100 bytes"),
    ],
)
def test_a_stream_that_cannot_take_events_is_named(facts: dict[str, Any], result: Result, words: str) -> None:
    expect(judged_nats(**facts)[1], result, words)


DATABASE = {
    "shown": "postgresql://p/x",
    "server": "PostgreSQL 17",
    "is_there": True,
    "folder": "",
    "schema": "3",
    "head": "3",
    "is_newer": False,
    "unwritable": "",
    "round_trip_s": 0.001,
}


@pytest.mark.parametrize(
    ("facts", "result", "words"),
    [
        ({}, OK, "is the newest"),
        ({"schema": "2"}, OK, "migrates it to 3"),
        ({"schema": ""}, OK, "no schema"),
        ({"schema": "9", "is_newer": True}, PROBLEM, "upgrade kvbm"),
        ({"unwritable": "cannot execute INSERT in a read-only transaction"}, PROBLEM, "replica"),
        ({"is_there": False}, OK, "the catalog makes it"),
    ],
)
def test_a_database_is_held_to_its_schema_and_to_writing(facts: dict[str, Any], result: Result, words: str) -> None:
    settings = load_settings(flags={"catalog.database": "postgresql://p/x"})
    expect(services.judge_database(SimpleNamespace(**(DATABASE | facts)), settings), result, words)


def test_a_machine_without_the_catalogs_libraries_runs_no_catalog() -> None:
    error = MissingExtraError("sqlalchemy", "catalog")
    expect(services.refused_database(error, load_settings()), UNUSED, "only kvbm-catalog")
    configured = load_settings(flags={"catalog.database": "postgresql://p/x"})
    expect(services.refused_database(error, configured), PROBLEM, "pip install")


OBJECTS = services.ObjectTrial("s3://b/x", "", None, "", (), "", 0.005)


@pytest.mark.parametrize(
    ("facts", "result", "words"),
    [
        ({}, OK, "conditional put"),
        ({"ignored": ("If-Match is ignored",)}, WARNING, "If-Match is ignored"),
        ({"failed": "put", "trouble": StoreTrouble.DENIED, "why": "403 AccessDenied"}, PROBLEM, "credentials"),
        ({"failed": "put", "trouble": StoreTrouble.SILENT, "why": "no connection"}, PROBLEM, "start the store"),
        ({"failed": "put", "trouble": StoreTrouble.REFUSED, "why": "507 StorageFull"}, PROBLEM, "free room"),
        ({"failed": "put", "trouble": StoreTrouble.REFUSED, "why": "301 Moved"}, PROBLEM, "pools.object.region"),
        ({"failed": "get", "trouble": StoreTrouble.REFUSED, "why": "other bytes came back"}, PROBLEM, "cannot be read"),
        (
            {"failed": "delete", "trouble": StoreTrouble.DENIED, "why": "403", "left": "x/k"},
            PROBLEM,
            "x/k is left there",
        ),
    ],
)
def test_a_store_that_refuses_a_step_is_named_with_it(facts: dict[str, Any], result: Result, words: str) -> None:
    settings = load_settings(flags={"pools.object.url": "s3://bbb/x"})
    expect(services.judge_objects(OBJECTS._replace(**facts), settings), result, words)


@pytest.mark.parametrize(
    ("ready", "round_trip_s", "result", "words"),
    [
        ({}, 0.002, OK, "3 messages behind"),
        ({}, 0.5, WARNING, "onboard.locate_s"),
        ({"ready": False, "reason": "reads the stream"}, 0.002, WARNING, "reads the stream"),
        ({"degraded": "SQL does not answer"}, 0.002, WARNING, "SQL does not answer"),
    ],
)
def test_a_catalog_is_held_to_what_managers_wait_for(
    ready: dict[str, Any], round_trip_s: float, result: Result, words: str
) -> None:
    whole: dict[str, Any] = {
        "ready": True,
        "reason": "",
        "degraded": "",
        "stream_sequence": 9,
        "lag_messages": 3,
    } | ready
    settings = load_settings(flags={"catalog.url": "http://c:7700"})
    expect(
        services.judge_catalog(services.CatalogHealth(ReadyAnswer(**whole), round_trip_s, "http://c:7700"), settings),
        result,
        words,
    )


# -- clock and settings -----------------------------------------------------------------------------------------------

CLOCK = ClockFacts(True, True, 0.001, 0.0, False, 1.8e9)


@pytest.mark.parametrize(
    ("facts", "result", "words"),
    [
        ({}, OK, "1.00 ms"),
        ({"known": False}, WARNING, "does not say"),
        ({"synchronized": False}, WARNING, "chrony"),
        ({"error_s": 0.5}, WARNING, "500 ms"),
        ({"drift_s": -0.02}, WARNING, "20 ms"),
        ({"went_back": True}, PROBLEM, "went back"),
        ({"now_s": 0.0}, PROBLEM, "1970-01-01"),
    ],
)
def test_a_clock_that_nobody_keeps_or_that_jumps_is_named(facts: dict[str, Any], result: Result, words: str) -> None:
    expect(judge_clock(CLOCK._replace(**facts)), result, words)


@pytest.mark.parametrize(
    ("heartbeat_s", "liveness_s", "result"), [(1.0, 3.5, OK), (1.0, 2.5, WARNING), (2.0, 3.5, PROBLEM), (0.2, 1.0, OK)]
)
def test_heartbeats_have_to_be_well_below_liveness(heartbeat_s: float, liveness_s: float, result: Result) -> None:
    found = judge_settings(plan({"nats.heartbeat_s": heartbeat_s, "catalog.liveness_s": liveness_s}))[1]
    expect(found, result, "heartbeats")


@pytest.mark.parametrize(
    ("flags", "result", "words"),
    [
        ({}, UNUSED, "catalog alone"),
        (HOST | NVME, OK, "HBM, HOST, NVME"),
        ({"pools.host.slots": 4}, PROBLEM, "pools.hbm.slots"),
        ({"pools.object.url": "s3://b/p"}, UNUSED, "OBJECT alone, as for a catalog and a janitor"),
        ({"pools.object.url": "s3://b/p", "pools.nvme.slots": 4}, PROBLEM, "pools.hbm.slots"),
        (NVME | {"journal.in_memory": True}, WARNING, "journal.in_memory=false"),
        (NVME | {"offload.nvme": "never"}, WARNING, "offload.nvme"),
    ],
)
def test_pools_that_nothing_can_fill_are_named(flags: dict[str, Any], result: Result, words: str) -> None:
    expect(judge_settings(plan(flags))[0], result, words)


def test_an_errors_last_words_are_what_to_do() -> None:
    expect(
        refused("x", MissingExtraError("boto3", "s3")),
        PROBLEM,
        "boto3 is not installed",
        "pip install 'kvbm-ledger[s3]'",
    )
    expect(refused("x", ValueError("no more words")), PROBLEM, "no more words")


def test_sizes_are_written_for_people() -> None:
    assert [size(count) for count in (0, 1023, 1536, 15 << 20, 5 << 40, 50 << 40)] == [
        "0 bytes",
        "1023 bytes",
        "1.5 KiB",
        "15 MiB",
        "5.0 TiB",
        "50 TiB",
    ]
