"""The disks of the NVME pool and of the journal, and io_uring."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from kvbm.doctor.deadline import run_probe
from kvbm.doctor.finding import DoctorFinding, milliseconds, ok, problem, size, speed, unused, warning
from kvbm.doctor.plan import MachinePlan, WantedBytes
from kvbm.streams.journal.writer import least_capacity

_IN_MEMORY = ("tmpfs", "ramfs")
_LAYERED = ("overlay", "overlayfs", "aufs")
_REMOTE = ("nfs", "nfs4", "cifs", "smb3", "9p", "ceph", "glusterfs", "virtiofs")
_FLASH_BYTES_S = 400e6  # what no disk with heads does
_SLOW_SYNC_S, _VERY_SLOW_SYNC_S = 0.005, 0.05
_NO_ROOM = ("ENOSPC", "EDQUOT", "EFBIG")
_DIRECT_NEEDED = "choose a folder on ext4 or xfs on the device itself (a volume, not the container's layers)"


class Disk(NamedTuple):
    """What `probes/disk.py` found at a place; what it could not find out is 0 or "".

    Attributes:
        kind: file, folder, device, other or absent; `folder`: the nearest that is there.
        system: of files; `mount`: where it is mounted; `number`: of its device.
        held_bytes: what the file, or the folder's files, take already.
        write, direct: "" or the name of an error.
        write_bytes_s, read_bytes_s: 0 where not measured.
        sync_s: times of one small write brought to the device, ascending.
    """

    path: str
    kind: str = "absent"
    folder: str = ""
    system: str = ""
    mount: str = ""
    number: str = ""
    rotational: bool = False
    free_bytes: int = 0
    total_bytes: int = 0
    held_bytes: int = 0
    write: str = ""
    direct: str = ""
    write_bytes_s: int = 0
    read_bytes_s: int = 0
    sync_s: Sequence[float] = ()

    @property
    def is_refused(self) -> bool:
        """Whether nothing can be kept there."""
        return bool(self.write)


def look_at_disk(path: str | Path, *, is_file: bool, measured: bool, syncs: bool = False) -> Disk:
    """Try a place: a file's folder, a folder that may not exist yet, or a block device. Raises LateProbe."""
    question = {"path": str(Path(path).absolute()), "is_file": is_file, "speed": measured, "syncs": syncs}
    return Disk(**run_probe("disk", question))


def look_at_io_uring() -> dict[str, Any]:
    """See `probes/io_uring.py`. Raises LateProbe."""
    return run_probe("io_uring")


def judge_io_uring(facts: dict[str, Any], plan: MachinePlan) -> DoctorFinding:
    """Whether the kernel, its settings and the container's filter let this process use io_uring."""
    check = "io_uring"
    refusal = facts["setup"] or facts["nop"]
    wanted = plan.settings.pools.nvme.io
    if not plan.nvme or wanted == "threads":
        why = "there is no NVME pool" if not plan.nvme else "pools.nvme.io is threads"
        return unused(check, f"{f'refused ({refusal})' if refusal else 'works'}; {why}")
    if not refusal:
        buffers = f"no buffers ({facts['register']}), and kvbm needs none" if facts["register"] else "1 MiB of buffers"
        return ok(check, f"set up, a no-op came back, registers {buffers}")
    disabled = facts["disabled"]
    if facts["setup"] == "ENOSYS":
        fix = "use Linux 5.6 or newer, or a sandbox that has it (gVisor has none)"
    elif disabled in (1, 2) and facts["setup"] == "EPERM":
        refusal += f", kernel.io_uring_disabled is {disabled}"
        fix = "sysctl kernel.io_uring_disabled=0"
    elif facts["setup"] == "EPERM":
        fix = (
            "allow io_uring_setup, io_uring_enter and io_uring_register in the container's seccomp profile "
            "(Docker's "
            "forbids them)"
        )
    elif facts["setup"] == "ENOMEM":
        fix = "raise RLIMIT_MEMLOCK (ulimit -l unlimited)"
    else:
        fix = "set pools.nvme.io=threads"
    if wanted == "io_uring":
        return problem(check, f"refused ({refusal}) and pools.nvme.io is io_uring", f"{fix}; or set pools.nvme.io=auto")
    return warning(check, f"refused ({refusal}); threads are used instead", fix)


def judge_nvme(disk: Disk, plan: MachinePlan, label: str = "NVME") -> list[DoctorFinding]:
    """One path of the NVME pool: what it is, past the page cache, how fast."""
    place = _judge_place(disk, f"{label} disk", "pools.nvme.path")
    if disk.is_refused:
        return [place]
    findings = [place, _judge_direct(disk, plan, f"{label} O_DIRECT")]
    if disk.write_bytes_s or disk.read_bytes_s:
        parts = [f"{speed(disk.write_bytes_s)} written" if disk.write_bytes_s else "not written to"]
        parts.append(f"{speed(disk.read_bytes_s)} read" if disk.read_bytes_s else "reads not measured (page cache)")
        found = f"{', '.join(parts)}; 1 MiB at a time, one in flight"
        slowest = min(number for number in (disk.write_bytes_s, disk.read_bytes_s) if number)
        if slowest < _FLASH_BYTES_S and disk.system not in _IN_MEMORY:
            fix = "recomputing may be faster than reading: choose a local NVMe disk for pools.nvme.path"
            findings.append(warning(f"{label} speed", found, fix))
        else:
            findings.append(ok(f"{label} speed", found))
    return findings


def judge_journal_room(plan: MachinePlan) -> DoctorFinding:
    """Whether a snapshot of what the pools can hold fits into the journal."""
    check, capacity_bytes, least_bytes = (
        "journal room",
        plan.settings.journal.capacity_bytes,
        least_capacity(plan.slots),
    )
    found = f"{size(capacity_bytes)} for snapshots of {plan.slots} slots, which need {size(least_bytes)}"
    if capacity_bytes >= least_bytes:
        return ok(check, found)
    return warning(check, f"{found}; it will take those", f"set journal.capacity_bytes={least_bytes}")


def judge_journal(disk: Disk, plan: MachinePlan) -> list[DoctorFinding]:
    """The journal's folder: what it is, how long a sync takes."""
    place = _judge_place(disk, "journal disk", "instance.data_dir")
    if disk.is_refused or not disk.sync_s:
        return [place]
    middle, worst = disk.sync_s[len(disk.sync_s) // 2], disk.sync_s[-1]
    mode = plan.settings.journal.fsync
    found = (
        f"{milliseconds(middle)} a sync, {milliseconds(worst)} at worst of {len(disk.sync_s)}; journal.fsync is {mode}"
    )
    fix = "put instance.data_dir on a disk with a protected write cache"
    if mode == "always" and middle > _SLOW_SYNC_S:
        return [place, warning("journal sync", found, f"{fix}, or set journal.fsync=interval")]
    if mode == "interval" and middle > _VERY_SLOW_SYNC_S:
        return [place, warning("journal sync", found, fix)]
    return [place, ok("journal sync", found)]


def judge_room(disks: Sequence[tuple[str, Disk, WantedBytes]]) -> list[DoctorFinding]:
    """Free bytes of each device against all that wants some of it.

    Args:
        disks: what for, where, and how much in all.
    """
    findings = []
    by_device: dict[str, list[tuple[str, Disk, WantedBytes]]] = {}
    for entry in disks:
        if not entry[1].is_refused:
            by_device.setdefault(entry[1].number or entry[1].mount, []).append(entry)
    for entries in by_device.values():
        disk = entries[0][1]
        free = disk.free_bytes
        wanted = sum(max(0, (want.bytes or 0) - one.held_bytes) for _, one, want in entries)
        words = " and ".join(f"{size(want.bytes)} {what}" for what, _, want in entries if want.bytes)
        found = f"{size(free)} free on {disk.mount or disk.path}"
        found += f", wanted {words}" if words else ""
        held = sum(one.held_bytes for _, one, _ in entries)
        found += f", {size(held)} of it there" if held else ""
        unknown = [what for what, _, want in entries if want.bytes is None]
        found += f"; {' and '.join(unknown)} not weighed: give --block-bytes" if unknown else ""
        check = f"room of {' and '.join(dict.fromkeys(what for what, _, _ in entries))}"
        if wanted > free:
            fix = "lower pools.nvme or journal.capacity_bytes, free the disk, or choose another"
            findings.append(problem(check, f"{found}; {size(wanted - free)} are missing", fix))
        elif wanted > 0.95 * free:
            findings.append(warning(check, found, "leave a twentieth free: file systems and flash slow down when full"))
        else:
            findings.append(ok(check, found))
    return findings


def _judge_place(disk: Disk, check: str, key: str) -> DoctorFinding:
    found = f"{disk.path}: {_kind(disk)}"
    if disk.write:
        return _refused(disk, check, key)
    if disk.kind in ("folder", "other") and key == "pools.nvme.path":
        return problem(
            check, f"{disk.path} is a {disk.kind}", f"set {key} to a file in it, such as {disk.path}/nvme.pool"
        )
    if disk.kind == "device" and disk.mount:
        return problem(
            check, f"{found}, mounted at {disk.mount}", f"unmount it, or set {key} to a file in {disk.mount}"
        )
    if disk.system in _IN_MEMORY:
        return warning(check, f"{found}: memory, gone with a reboot", f"set {key} to a disk; use pools.host for memory")
    if disk.system in _LAYERED:
        return warning(check, f"{found}: a container's layers, gone with it", f"mount a volume and set {key} to it")
    if disk.system in _REMOTE:
        return warning(check, f"{found}: over a network", f"set {key} to a local disk: latency and locks depend on it")
    is_slow = (
        not (disk.read_bytes_s or disk.write_bytes_s) or max(disk.read_bytes_s, disk.write_bytes_s) < _FLASH_BYTES_S
    )
    if disk.rotational and key == "pools.nvme.path":
        if is_slow:
            return warning(
                check, f"{found}, rotational", f"set {key} to a flash disk (virtual ones may claim to rotate)"
            )
        found += ", says it is rotational and is too fast for it"
    return ok(check, found)


def _kind(disk: Disk) -> str:
    if disk.kind == "device":
        return f"block device of {size(disk.total_bytes)}"
    system = f"{disk.system or 'unknown file system'} on {disk.mount or disk.folder}"
    made = "" if disk.kind != "absent" else f", will be made in {disk.folder}"
    return f"{system}{made}"


def _refused(disk: Disk, check: str, key: str) -> DoctorFinding:
    error = disk.write
    where = disk.folder or disk.path
    if error in _NO_ROOM:
        words = {"ENOSPC": "is full", "EDQUOT": "is over its quota", "EFBIG": "takes no larger files (ulimit -f)"}
        return problem(check, f"{where} {words[error]} ({error})", f"free room there, or set another {key}")
    if error == "EROFS":
        return problem(check, f"{where} is mounted read-only", f"mount it writable, or set another {key}")
    if error in ("EACCES", "EPERM"):
        return problem(
            check, f"{where} may not be written ({error})", f"give this user the right, or set another {key}"
        )
    if error == "ENOTDIR":
        return problem(check, f"a part of {disk.path} is a file, not a folder", f"set another {key}")
    return problem(check, f"{where} cannot be used ({error})", f"see the kernel's log (dmesg), or set another {key}")


def _judge_direct(disk: Disk, plan: MachinePlan, check: str) -> DoctorFinding:
    mode = plan.settings.pools.nvme.direct
    if mode == "off":
        return unused(check, f"{f'refused ({disk.direct})' if disk.direct else 'works'}; pools.nvme.direct is off")
    if not disk.direct:
        return ok(check, "4096 bytes written and read past the page cache" if disk.kind != "device" else "1 MiB read")
    found = f"refused ({disk.direct}) by {disk.system}"
    if mode == "on":
        return problem(
            check, f"{found} and pools.nvme.direct is on", f"{_DIRECT_NEEDED}, or set pools.nvme.direct=auto"
        )
    return warning(check, f"{found}; the page cache is used, and takes memory", _DIRECT_NEEDED)
