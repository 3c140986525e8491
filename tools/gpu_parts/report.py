"""What a GPU check found: its JSON, its table, and what is wrong with it."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence

import msgspec

VERSION = 2
ONE_COPY, SWAP = "one copy", "swap"


class Measured(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The median of samples; `spread` is half the distance of their quartiles over it, None of a single one."""

    value: float
    spread: float | None
    samples: int


class Machine(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Where it ran.

    Attributes:
        device: the GPU's name, or the CPU's in a dry run.
        sms: multiprocessors. link: such as "PCIe 5 x16". link_gb_per_s: what that carries each way, before packets;
            None: unknown.
    """

    device: str
    sms: int
    driver: str
    link: str
    link_gb_per_s: float | None
    python: str
    torch: str
    triton: str
    cuda: str
    cores: int
    memory_gib: float


class TestsRun(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The tests that a machine without a GPU skips.

    `reasons` counts why some were skipped here; `failures` names those that failed.
    """

    selected: int
    passed: int
    failed: int
    skipped: int
    seconds: float
    reasons: dict[str, int]
    failures: list[str]


class CopyRow(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """One way to move the blocks of a run.

    Attributes:
        direction: "HBM to HOST" or "HOST to HBM".
        way: "one copy" of as many contiguous bytes (cudaMemcpyAsync), "swap" as vLLM queues it, or "kvbm" with a way of
            its HBM pool.
        pieces: copies that the run consists of, by tensor and slot.
        on_device_gb_per_s: by the device's own busy time alone, where a profile had it.
        of_one_copy, of_link: `gb_per_s` over that of "one copy" in this direction, and over the link's.
        sms: multiprocessors that its launches reach at most; 0 where copy engines do all; None: no profile.
        product_slowdown: time of matrix products while such runs go on, over their time alone; None: not measured.
    """

    shape: str
    direction: str
    way: str
    run_bytes: int
    pieces: int
    gb_per_s: Measured
    on_device_gb_per_s: float | None
    of_one_copy: float | None
    of_link: float | None
    sms: int | None
    product_slowdown: Measured | None


class FirstTokenRow(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The first token of a prompt that lies in HOST, beside computing the prompt.

    Attributes:
        copy_ms: its blocks into HBM. step_ms: the last block's tokens through all layers, over all of the prompt.
        from_host_ms: both. computed_ms: one layer of each kind, times as many as there are. times: the one over the
            other.
    """

    shape: str
    tokens: int
    copied_bytes: int
    copy_ms: Measured
    step_ms: Measured
    from_host_ms: float
    computed_ms: Measured
    times: float


class WaitRow(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """What an engine waits for that uses a whole manager, or another number of one; `unit` is "" for a ratio."""

    shape: str
    what: str
    number: Measured
    unit: str


class PartRun(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """How a part went.

    Attributes:
        outcome: "done", "failed" (something in it did; the rest is there), "cut" (its time was up) or "left out" (no
            time was left).
        troubles: what failed, or was not reached, a sentence each.
    """

    name: str
    outcome: str
    seconds: float
    troubles: list[str]


class Found(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """What one part writes down; each measurement as soon as it is there."""

    machine: Machine | None = None
    tests: TestsRun | None = None
    copies: list[CopyRow] = []
    first_tokens: list[FirstTokenRow] = []
    waits: list[WaitRow] = []
    troubles: list[str] = []
    cut: list[str] = []


class Report(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The whole of it.

    Attributes:
        dry_run: it ran on a CPU with small shapes, to try the program: its numbers are no GPU's.
        commit: of kvbm, "" where nobody said.
    """

    version: int
    dry_run: bool
    kvbm: str
    commit: str
    began: str
    seconds: float
    machine: Machine | None
    tests: TestsRun | None
    parts: list[PartRun]
    copies: list[CopyRow]
    first_tokens: list[FirstTokenRow]
    waits: list[WaitRow]


def measured(values: Sequence[float]) -> Measured:
    """Of at least one sample. Raises ValueError: one that is no measurement."""
    if bad := [value for value in values if not (math.isfinite(value) and value > 0)]:
        raise ValueError(f"{bad[0]} is no measurement")
    low, middle, high = statistics.quantiles(values, n=4) if len(values) > 1 else [values[0]] * 3
    middle = statistics.median(values)
    return Measured(middle, (high - low) / 2 / middle if len(values) > 1 and middle else None, len(values))


def encode(report: Report) -> bytes:
    """JSON of a report that reads back as the same one. Raises msgspec.ValidationError, ValueError: it would not."""
    text = msgspec.json.format(msgspec.json.encode(report), indent=1)
    if msgspec.json.decode(text, type=Report) != report:
        raise ValueError("the report's JSON reads back as another report")
    return text


def decode(text: bytes) -> Report:
    """A report from its JSON. Raises msgspec.ValidationError, ValueError: it is none."""
    report = msgspec.json.decode(text, type=Report)
    if report.version != VERSION:
        raise ValueError(f"a report of version {report.version}; this program reads {VERSION}")
    _refuse_nonsense(report)
    return report


def wrong(report: Report) -> list[str]:
    """What keeps a check from being a success, a sentence each."""
    found = [f"{part.name}: {trouble}" for part in report.parts for trouble in part.troubles]
    found += [f"{part.name}: {part.outcome}" for part in report.parts if part.outcome != "done" and not part.troubles]
    tests = report.tests
    if tests is None:
        found.append("tests: no result")
    else:
        found += [f"tests: {name} failed" for name in tests.failures]
        if not tests.selected:
            found.append("tests: none was selected")
        if tests.skipped and not report.dry_run:
            found.append(f"tests: {tests.skipped} were skipped: {', '.join(tests.reasons)}")
    return found


def table(report: Report) -> str:
    """All of it in Markdown."""
    return "\n".join(["| what | number | beside it |", "|---|---|---|", *_lines(report)])


def _lines(report: Report) -> Iterator[str]:
    if report.dry_run:
        yield "| **Dry run on a CPU with small shapes: these are no GPU's numbers** | | |"
    if report.tests is not None:
        tests = report.tests
        reasons = "; ".join(f"{count} skipped: {reason}" for reason, count in sorted(tests.reasons.items()))
        yield (
            f"| tests that need a GPU or Triton | {tests.passed} of {tests.selected} passed, {tests.failed} failed "
            "| "
            f"{reasons} |"
        )
    for row in report.copies:
        beside = [
            _of(row.of_one_copy, "of one copy") if row.way != ONE_COPY else "",
            _of(row.of_link, "of the link"),
            f"{row.on_device_gb_per_s:.1f} GB/s on the device" if row.on_device_gb_per_s is not None else "",
            f"at most {row.sms} SMs" if row.sms is not None else "",
            f"matrix products × {_number(row.product_slowdown, 2)}" if row.product_slowdown is not None else "",
        ]
        what = f"{row.shape}: {row.direction}, {row.way}, {row.run_bytes / (1 << 20):,.0f} MiB in {row.pieces:,}"
        yield f"| {what} | {_number(row.gb_per_s, 1)} GB/s | {'; '.join(filter(None, beside))} |"
    for first in report.first_tokens:
        what = f"{first.shape}: first token, {first.tokens:,} tokens from HOST"
        beside_it = f"computed {_number(first.computed_ms, 1)} ms: {first.times:.1f} × as long"
        parts = f"copy {_number(first.copy_ms, 1)} + step {_number(first.step_ms, 1)}"
        yield f"| {what} | {first.from_host_ms:,.1f} ms ({parts}) | {beside_it} |"
    for wait in report.waits:
        yield f"| {wait.shape}, a whole manager: {wait.what} | {_number(wait.number, 2)} {wait.unit} | |"
    for part in report.parts:
        if part.outcome != "done":
            yield (
                f"| {part.name} | **{part.outcome}** after {part.seconds:.0f} s | "
                f"{'; '.join(part.troubles).replace('|', '/')} |"
            )


def _of(share: float | None, what: str) -> str:
    return "" if share is None else f"{share:.2f} {what}"


def _number(one: Measured, digits: int) -> str:
    spread = "" if one.spread is None else f" ± {one.spread * 100:.0f} %"
    return f"{one.value:,.{digits}f}{spread}"


def _refuse_nonsense(report: Report) -> None:
    """Raises ValueError: a number that no measurement gives."""
    for row in report.copies:
        for what, number in (("gb_per_s", row.gb_per_s.value), ("run_bytes", row.run_bytes), ("pieces", row.pieces)):
            _refuse_number(f"{row.shape}, {row.direction}, {row.way}: {what}", number)
    for wait in report.waits:
        _refuse_number(f"{wait.shape}, {wait.what}", wait.number.value)
    for first in report.first_tokens:
        for what, number in (
            ("copy_ms", first.copy_ms.value),
            ("computed_ms", first.computed_ms.value),
            ("times", first.times),
        ):
            _refuse_number(f"{first.shape}, {first.tokens} tokens: {what}", number)


def _refuse_number(what: str, number: float) -> None:
    if not (math.isfinite(number) and number > 0):
        raise ValueError(f"{what} is {number}, no measurement")
