"""All checks, one after the other in the table, most at the same time in fact; then the words and the exit status."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvbm.assembly import kvbm_version
from kvbm.config import Settings
from kvbm.core.errors import KvbmError
from kvbm.doctor import disks, gpu, machine, modes, services
from kvbm.doctor.agreement import judge_settings
from kvbm.doctor.clock import judge_clock, look_at_clock
from kvbm.doctor.deadline import PROBE_S, LateProbe, PendingProbe
from kvbm.doctor.finding import DoctorFinding, Result, problem, refused, unused, warning
from kvbm.doctor.nixl import judge_nixl, look_at_nixl
from kvbm.doctor.peers import judge_peers
from kvbm.doctor.plan import MachinePlan, WantedBytes, plan_of
from kvbm.doctor.rdma import judge_rdma, look_at_rdma
from kvbm.progress import Watch
from kvbm.reports import check_report_path, write_report
from kvbm.terminal import as_json, plain

_STYLES = {Result.OK: "green", Result.WARNING: "yellow", Result.PROBLEM: "bold red", Result.UNUSED: "dim"}
_TABLE_WIDTH = 110
_GRACE_S = 0.5  # a probe's own deadline comes first


class DoctorOptions(NamedTuple):
    """What is asked for.

    Attributes:
        block_bytes: of one block, so that slots can be weighed; 0 where it is not known.
        quick: measure no speeds, and do not try NIXL, which takes a second or two.
        json: file for the findings as JSON; "-": standard output, instead of words; "": nowhere.
    """

    block_bytes: int = 0
    quick: bool = False
    json: str = ""


class DoctorReport(msgspec.Struct, frozen=True, kw_only=True):
    """All findings. `problems`, `warnings`: how many."""

    version: str
    problems: int
    warnings: int
    elapsed_s: float
    findings: list[DoctorFinding]


class _Check(NamedTuple):
    """A probe, and who judges what it found.

    Attributes:
        name: of the line, when there is nothing to judge.
        look: finds the facts and judges them; may raise an error of ours.
        late: what to do when it does not answer.
        on_error: a finding from an error of ours.
    """

    name: str
    look: Callable[[], list[DoctorFinding]]
    late: str
    on_error: Callable[[KvbmError], DoctorFinding] | None = None


def main(settings: Settings, options: DoctorOptions) -> int:
    """Check, and print the table or JSON.

    Returns 1 when there is a problem, else 0. Raises ConfigError: no such JSON file can be.
    """
    path = Path(options.json) if options.json not in ("", "-") else None
    check_report_path(path)
    report = examine(settings, options)
    write_report(path, report)
    if options.json == "-":
        sys.stdout.write(as_json(report, indent=2) + "\n")
    else:
        _print(report)
    return 1 if report.problems else 0


def examine(settings: Settings, options: DoctorOptions) -> DoctorReport:
    """Run every check. Never raises for what it finds, never waits longer than each probe's five seconds."""
    begin_s = time.monotonic()
    plan = plan_of(settings, options.block_bytes)
    with Watch("checks") as watch:
        at_once = [(check, PendingProbe(check.look, check.name)) for check in _checks(plan, options.quick)]
        watch.total = len(at_once) + len(plan.nvme_paths) + (plan.journal is not None)
        results = {check.name: _finish(check, asked, watch) for check, asked in at_once}
        # Disks come after, one by one: what else is under way would be measured with them.
        disk_findings = _examine_disks(plan, options, watch)
    findings = [found for name in _FIRST for found in results.pop(name, ())]
    findings += disk_findings + [found for rest in results.values() for found in rest]
    counts = {result: sum(found.result is result for found in findings) for result in Result}
    return DoctorReport(
        version=kvbm_version(),
        problems=counts[Result.PROBLEM],
        warnings=counts[Result.WARNING],
        elapsed_s=round(time.monotonic() - begin_s, 2),
        findings=findings,
    )


_FIRST = ("settings", "CPU", "open files", "memory", "CUDA", "io_uring")


def _checks(plan: MachinePlan, is_quick: bool) -> list[_Check]:
    """Everything but the disks, in the order of the table."""
    settings = plan.settings
    checks = [
        _Check("settings", lambda: judge_settings(plan), ""),
        _Check("CPU", lambda: machine.judge_cpu(machine.look_at_cpu()), "see why the CPU is stalled (uptime, dmesg)"),
        _Check("open files", lambda: [machine.judge_open_files(*machine.look_at_open_files())], ""),
        _Check("memory", lambda: machine.judge_memory(machine.look_at_memory(), plan), "see dmesg"),
        _Check(
            "CUDA",
            lambda: gpu.judge_gpu(gpu.look_at_cuda(), gpu.look_at_torch(), plan),
            "see nvidia-smi and dmesg: the driver does not answer; reset the GPU or the machine",
        ),
        _Check(
            "io_uring",
            lambda: [disks.judge_io_uring(disks.look_at_io_uring(), plan)],
            "see dmesg; or set pools.nvme.io=threads",
        ),
        _Check("peers", lambda: [judge_peers(settings)], "see why the disk does not answer (dmesg)"),
        _Check("RDMA", lambda: [judge_rdma(look_at_rdma())], "see dmesg: a device or its library does not answer"),
        _Check(
            "NIXL",
            lambda: [judge_nixl(look_at_nixl(is_tried=not is_quick))],
            "see dmesg: NIXL does not answer; it is not needed",
        ),
        _Check(
            "file modes",
            lambda: [modes.judge_modes(modes.look_at_modes(settings))],
            "see why the disk does not answer (dmesg)",
        ),
        _Check("clock", lambda: [judge_clock(look_at_clock())], "see dmesg"),
    ]
    return [*checks, *_service_checks(settings)]


def _service_checks(settings: Settings) -> list[_Check]:
    def nats() -> list[DoctorFinding]:
        if not settings.nats.enabled:
            return [unused("NATS", "nats.enabled is false: events stay local")]
        return services.judge_nats(services.look_at_nats(settings), settings)

    def database() -> list[DoctorFinding]:
        return [services.judge_database(services.look_at_database(settings), settings)]

    def objects() -> list[DoctorFinding]:
        if not settings.pools.object.url:
            return [unused("object store", "pools.object.url is not set")]
        return [services.judge_objects(services.look_at_objects(settings), settings)]

    def catalog() -> list[DoctorFinding]:
        if not settings.catalog.url:
            return [unused("catalog", "catalog.url is not set: managers ask nobody")]
        return [services.judge_catalog(services.look_at_catalog(settings), settings)]

    def without_database(error: KvbmError) -> DoctorFinding:
        return services.refused_database(error, settings)

    return [
        _Check("NATS", nats, "start a nats-server there, or correct nats.url"),
        _Check("SQL", database, "start the database, or correct catalog.database", without_database),
        _Check("object store", objects, "check pools.object.endpoint, the network and the credentials"),
        _Check("catalog", catalog, "start it with kvbm-catalog serve, or correct catalog.url"),
    ]


def _examine_disks(plan: MachinePlan, options: DoctorOptions, watch: Watch) -> list[DoctorFinding]:
    findings: list[DoctorFinding] = []
    kept: list[tuple[str, disks.Disk, WantedBytes]] = []
    share = WantedBytes(plan.nvme.bytes and -(-plan.nvme.bytes // max(1, len(plan.nvme_paths))))
    for number, path in enumerate(plan.nvme_paths, 1):
        label = f"NVME {number}" if len(plan.nvme_paths) > 1 else "NVME"

        def look_at_nvme(path: str = path, label: str = label) -> list[DoctorFinding]:
            disk = disks.look_at_disk(path, is_file=True, measured=not options.quick)
            kept.append((label, disk, share))
            return disks.judge_nvme(disk, plan, label)

        late = "the disk does not answer: see dmesg and its health (smartctl), or set another pools.nvme.path"
        findings += _finish_now(_Check(f"{label} disk", look_at_nvme, late), watch)
    if not plan.nvme_paths:
        findings.append(unused("NVME disk", "there is no NVME pool"))
    if plan.journal is None:
        findings.append(unused("journal disk", "journal.in_memory is true"))
    else:
        folder, room = (
            plan.journal,
            WantedBytes(max(plan.settings.journal.capacity_bytes, plan.settings.journal.max_bytes)),
        )

        def look_at_journal() -> list[DoctorFinding]:
            disk = disks.look_at_disk(folder, is_file=False, measured=False, syncs=not options.quick)
            kept.append(("journal", disk, room))
            return disks.judge_journal(disk, plan)

        late = "the disk does not answer: see dmesg and its health (smartctl), or set another instance.data_dir"
        findings += [*_finish_now(_Check("journal disk", look_at_journal, late), watch), disks.judge_journal_room(plan)]
    return findings + disks.judge_room(kept)


def _finish_now(check: _Check, watch: Watch) -> list[DoctorFinding]:
    return _finish(check, PendingProbe(check.look, check.name), watch)


def _finish(check: _Check, asked: PendingProbe[list[DoctorFinding]], watch: Watch) -> list[DoctorFinding]:
    """What it has found; `watch` counts it."""
    try:
        return asked.result(PROBE_S + _GRACE_S)
    except LateProbe:
        return [problem(check.name, f"no answer within {PROBE_S:g} s", check.late)]
    except KvbmError as error:
        return [check.on_error(error) if check.on_error is not None else refused(check.name, error)]
    except Exception as error:  # noqa: BLE001 - one check that fails must not hide the others
        found = f"could not be checked ({type(error).__name__}: {str(error) or 'no words'})"
        return [warning(check.name, found, "check it by hand, and tell kvbm's developers")]
    finally:
        watch.done += 1


# -- words ------------------------------------------------------------------------------------------------------------


def table_of(findings: Sequence[DoctorFinding]) -> Table:
    """The findings for people."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("check", no_wrap=True)
    table.add_column("result", no_wrap=True)
    table.add_column("found", overflow="fold")
    for found in findings:
        table.add_row(
            plain(found.check), Text(found.result.value, style=_STYLES[found.result]), Text(plain(found.found))
        )
    return table


def _print(report: DoctorReport) -> None:
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=max(_TABLE_WIDTH, console.width))
    console.print(table_of(report.findings))
    for result, title in ((Result.WARNING, "warnings"), (Result.PROBLEM, "problems")):
        found = [one for one in report.findings if one.result is result]
        if found:
            console.print(Text(f"{len(found)} {title if len(found) > 1 else title[:-1]}", style=_STYLES[result]))
        for one in found:
            console.print(Text(plain(f"  {one.check}: {one.found}")), soft_wrap=True)
            console.print(Text(plain(f"    to do: {one.fix}")), soft_wrap=True)
    if not report.problems:
        console.print(f"no problems ({report.elapsed_s:g} s)")
