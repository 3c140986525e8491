"""What one part's process does: python -m gpu_parts.measure PART FILE UNTIL FOLDER [--dry-run]."""

from __future__ import annotations

import importlib.util
import os
import platform
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import torch

from gpu_parts import copies, first_token, suite, whole
from gpu_parts.copies import CopyPlan, Moves
from gpu_parts.devices import CpuDevice, CudaDevice, Device
from gpu_parts.first_token import TokenPlan
from gpu_parts.part import Steps
from gpu_parts.report import Machine
from gpu_parts.shapes import shape_of

TESTS, MANAGER = "tests", "manager"


def main(arguments: list[str]) -> int:
    """Always returns 0: what went wrong stands in the file."""
    part, file, until, folder, *rest = arguments
    steps = Steps(Path(file), float(until))
    if part == TESTS:
        steps.step(TESTS, lambda: _tests(steps, Path(folder), float(until)))
        return 0
    opened: list[Device] = []
    dry_run = "--dry-run" in rest
    if not steps.step("device", lambda: opened.append(CpuDevice() if dry_run else CudaDevice())):
        return 0
    if part == MANAGER:
        shape = shape_of("llama-3-8b")
        plan = whole.SMALL if dry_run else whole.WholePlan()
        whole.waits(shape.small() if dry_run else shape, opened[0], plan, steps)
    else:
        _shape(part, opened[0], dry_run, steps)
    return 0


def _tests(steps: Steps, folder: Path, until: float) -> None:
    steps.found.tests = suite.run(folder, until - time.time())


def _shape(name: str, device: Device, dry_run: bool, steps: Steps) -> None:
    """All that is measured of one shape."""
    steps.step("machine", lambda: setattr(steps.found, "machine", machine_of(device)))
    shape = shape_of(name).small() if dry_run else shape_of(name)
    copy_plan = copies.SMALL if dry_run else CopyPlan()
    token_plan = first_token.SMALL if dry_run else TokenPlan()
    made: list[Moves] = []
    with ExitStack() as opened:
        if not steps.step("tensors and pools", lambda: made.append(Moves(shape, device, copy_plan, opened))):
            return
        (moves,) = made
        if not dry_run and not moves.pinned:
            steps.trouble(f"HOST is not pinned: {'; '.join(moves.notices)}")
        copies.rates(device, moves, steps)
        for tokens in token_plan.lengths:
            steps.step(
                f"first token of {tokens} tokens",
                lambda tokens=tokens: steps.found.first_tokens.append(  # type: ignore[misc]
                    first_token.measure(shape, device, token_plan, moves, tokens)
                ),
            )
        copies.costs(device, copy_plan, moves, steps)


def machine_of(device: Device) -> Machine:
    """Where this runs."""
    link = device.link()
    return Machine(
        device=device.name,
        sms=device.sms,
        driver=device.driver(),
        link=link.words,
        link_gb_per_s=link.gb_per_s,
        python=platform.python_version(),
        torch=str(torch.__version__),
        triton=_triton(),
        cuda=str(torch.version.cuda or ""),
        cores=os.cpu_count() or 0,
        memory_gib=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / (1 << 30),
    )


def _triton() -> str:
    if importlib.util.find_spec("triton") is None:
        return ""
    import triton

    return str(triton.__version__)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
