"""What `kvbm-replay` writes: reports in words or as JSON, and what was found on the way."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TextIO

import msgspec

from kvbm.files import FILE_MODE
from kvbm.replay.findings import ReplayFinding, exit_code
from kvbm.replay.source import SourceError
from kvbm.terminal import as_json, plain, say

MOST_FINDINGS = 100  # in words; JSON has them all
_BEGINNINGS = (b'{\n  "source": ', b'{\n  "a": ', b'{"instance":')  # of what --json writes


def check_found(instance: str | None, found: Sequence[object]) -> None:
    """Raises SourceError: there is nothing of an instance that was named."""
    if instance is not None and not found:
        raise SourceError(f"no frame of instance {instance!r} is there; kvbm-replay stat lists the instances")


def check_json(name: str | None) -> None:
    """Refuse to write over what is no JSON of this command's. Raises SourceError."""
    if name is None or name == "-" or not os.path.isfile(name):
        return  # opened says what is wrong with it; a device or a pipe holds nothing
    try:
        with open(name, "rb") as file:
            head = file.read(max(map(len, _BEGINNINGS)))
    except OSError as error:
        raise SourceError(
            f"--json {name} cannot be read ({error.strerror}), and is there already; give another file"
        ) from None
    if head and not head.startswith(_BEGINNINGS):
        raise SourceError(
            f"--json {name} is there already and was not written by kvbm-replay: it stays as it is; give another file, "
            "or remove it"
        )


@contextmanager
def opened(name: str | None) -> Iterator[TextIO | None]:
    """The file JSON goes to, if any. Raises SourceError: it cannot be written."""
    if name is None or name == "-":
        yield sys.stdout if name else None
        return
    try:
        file = open(  # noqa: SIM115 - closed below; a device or a pipe is as good
            name, "w", encoding="utf-8", opener=lambda path, flags: os.open(path, flags, FILE_MODE)
        )
    except OSError as error:
        raise SourceError(
            f"--json {name} cannot be written ({error.strerror}); give a file in a folder that is there"
        ) from None
    with file:
        yield file


def write(name: str | None, report: msgspec.Struct, lines: Iterable[str]) -> None:
    """A report as JSON, into a file or standard output ("-"), and in words where that is free. Raises SourceError."""
    with opened(name) as file:
        if file is not None:
            file.write(as_json(report, indent=2) + "\n")
    if name != "-":
        sys.stdout.writelines(f"{plain(line)}\n" for line in lines)
    sys.stdout.flush()


def listed(findings: Sequence[ReplayFinding]) -> Iterator[str]:
    """The first findings in words, a line each."""
    for finding in findings[:MOST_FINDINGS]:
        yield f"  {finding.sentence()}"
    if len(findings) > MOST_FINDINGS:
        yield f"  … and {len(findings) - MOST_FINDINGS:,} more; --json FILE has them all"


def end(findings: Sequence[ReplayFinding], notes: Sequence[str]) -> int:
    """Say what was met on the way; the exit code is that of the findings."""
    for note in notes:
        say(f"kvbm-replay: {note}", to=sys.stderr)
    for line in listed(findings):
        say(f"kvbm-replay:{line[1:]}", to=sys.stderr)
    return exit_code(findings)
