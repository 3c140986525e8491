"""`kvbm-replay …`: arguments in, words out."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

import msgspec

from kvbm.core.errors import KvbmError
from kvbm.core.kernels import REFERENCE, Kernels, NewFold
from kvbm.core.residency import Residencies
from kvbm.replay.cat import cat
from kvbm.replay.findings import Finding, exit_code
from kvbm.replay.progress import watched
from kvbm.replay.source import SourceError, open_source
from kvbm.replay.stat import stats_of
from kvbm.replay.state import states_at
from kvbm.replay.verify import verify
from kvbm.replay.words import END, parse_at

_LONGEST_S = 1e6
_MOST_FINDINGS = 100  # in words; JSON has them all
_SOURCES = """\
SOURCE is one of
  a journal folder        ~/.kvbm/instances/engine-1/journal   (while its manager writes it, too)
  a folder of journals    ~/.kvbm/instances
  a capture file          whole frames one after another, of any instances
  the live stream         nats://127.0.0.1:4222   (read up to where it ends now)
"""
_EXAMPLES = """
examples:
  kvbm-replay verify nats://127.0.0.1:4222
  kvbm-replay cat incident.kvbm --instance engine-1 --limit 20
  kvbm-replay state incident.kvbm --at 3:4711 --blocks
  kvbm-replay state incident.kvbm --at 2026-01-31T12:00:00Z --json -
  kvbm-replay stat ~/.kvbm/instances

It returns 0 when all is well, 1 with findings, 2 when the input cannot be used.
"""


def main(argv: Sequence[str] | None = None, kernels: Kernels = REFERENCE, fold: NewFold = Residencies) -> int:
    """The `kvbm-replay` command.

    Args:
        kernels: how frames are decoded, unless --reference is given.
        fold: what folds their events, unless --reference is given.
    Returns: 0, 1 with findings, 2 when the input cannot be used.
    """
    arguments = _parser().parse_args(argv)
    if arguments.reference:
        kernels, fold = REFERENCE, Residencies
    try:
        return _run(arguments, kernels, fold)
    except KvbmError as error:
        print(f"kvbm-replay: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("kvbm-replay: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # a pager or head has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _parser() -> argparse.ArgumentParser:
    layout = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        prog="kvbm-replay", description="What a stream of events says, and whether it is true.",
        epilog=_SOURCES + _EXAMPLES, formatter_class=layout,
    )  # fmt: skip
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    about = {
        "cat": "one line an event, as they lie: instance, epoch:offset, time, event",
        "stat": "epochs, frames, events, blocks and bytes of each instance",
        "state": "what each instance held in each tier, at the end or at a time or offset",
        "verify": "fold every stream and name each defect: damage, holes, illegal events, skipped rounds, wrong digests",
    }
    made = {}
    for name, words in about.items():
        command = made[name] = commands.add_parser(
            name, help=words, description=words, epilog=_SOURCES, formatter_class=layout
        )
        command.add_argument("source", metavar="SOURCE", help="a path or a nats:// URL; see below")
        command.add_argument(
            "--json", nargs="?", const="-", metavar="FILE",
            help="JSON to a file, or to standard output instead of words" + (", a line an event" if name == "cat" else ""),
        )  # fmt: skip
        command.add_argument("--instance", metavar="NAME", help="only this instance")
        command.add_argument("--reference", action="store_true", help="decode and fold with the Python specification")
        command.add_argument(
            "--timeout",
            type=_seconds,
            default=5.0,
            metavar="SECONDS",
            help="how long a server may keep silent (default 5)",
        )
    made["cat"].add_argument("--limit", type=_count, metavar="N", help="stop after N events")
    made["state"].add_argument(
        "--at", metavar="TIME|OFFSET",
        help="EPOCH:OFFSET or OFFSET (of the last epoch): before that event; ISO 8601 or Unix seconds: after the last frame cut by then",
    )  # fmt: skip
    made["state"].add_argument("--blocks", action="store_true", help="list every held block")
    return parser


def _seconds(text: str) -> float:
    """A time above 0; argparse names the option. Raises ArgumentTypeError."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value <= _LONGEST_S:
        raise argparse.ArgumentTypeError(f"{text!r} is no time in seconds; give a number above 0")
    return value


def _count(text: str) -> int:
    """A whole number from 0 on; argparse names the option. Raises ArgumentTypeError."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is no count; give a whole number, 0 or more")
    return int(text)


def _run(arguments: argparse.Namespace, kernels: Kernels, fold: NewFold) -> int:
    at = parse_at(arguments.at) if arguments.command == "state" and arguments.at else END
    source = open_source(arguments.source, arguments.timeout)
    located = watched(source.read(kernels), source)
    match arguments.command:
        case "cat":
            with _opened(arguments.json) as file:
                out, is_json = file or sys.stdout, file is not None
                findings, notes = cat(located, out, is_json, arguments.instance, arguments.limit, kernels.decode_frame)
            return _end(findings, notes)
        case "stat":
            stats = stats_of(source, kernels, fold, arguments.instance, located)
            _check_found(arguments.instance, stats.instances)
            _write(arguments.json, stats, stats.lines())
            return _end(stats.findings, stats.notes)
        case "state":
            states = states_at(source, at, kernels, fold, arguments.instance, arguments.blocks, located)
            _check_found(arguments.instance, states.instances)
            _write(arguments.json, states, (line for state in states.instances for line in state.lines()))
            return _end(states.findings, states.notes)
        case _:
            verified = verify(source, kernels, fold, arguments.instance, located)
            if not verified.instances and not verified.findings:
                _check_found(arguments.instance, [])
            _write(arguments.json, verified, [*verified.notes, verified.verdict(), *_listed(verified.findings)])
            return exit_code(verified.findings)


def _check_found(instance: str | None, found: Sequence[object]) -> None:
    if instance is not None and not found:
        raise SourceError(f"no frame of instance {instance!r} is there; kvbm-replay stat lists the instances")


@contextmanager
def _opened(name: str | None) -> Iterator[TextIO | None]:
    """The file JSON goes to, if any. Raises SourceError: it cannot be written."""
    if name is None or name == "-":
        yield sys.stdout if name else None
        return
    try:
        file = Path(name).open("w", encoding="utf-8")  # noqa: SIM115 - closed below
    except OSError as error:
        raise SourceError(
            f"--json {name} cannot be written ({error.strerror}); give a file in a folder that is there"
        ) from None
    with file:
        yield file


def _write(name: str | None, report: msgspec.Struct, lines: Iterable[str]) -> None:
    with _opened(name) as file:
        if file is not None:
            print(msgspec.json.format(msgspec.json.encode(report)).decode(), file=file)
    if name != "-":
        for line in lines:
            print(line)
    sys.stdout.flush()


def _listed(findings: Sequence[Finding]) -> Iterator[str]:
    for finding in findings[:_MOST_FINDINGS]:
        yield f"  {finding.sentence()}"
    if len(findings) > _MOST_FINDINGS:
        yield f"  … and {len(findings) - _MOST_FINDINGS:,} more; --json FILE has them all"


def _end(findings: Sequence[Finding], notes: Sequence[str]) -> int:
    """Say what was met on the way; the exit code is that of the findings."""
    for note in notes:
        print(f"kvbm-replay: {note}", file=sys.stderr)
    for line in _listed(findings):
        print(f"kvbm-replay:{line[1:]}", file=sys.stderr)
    return exit_code(findings)
