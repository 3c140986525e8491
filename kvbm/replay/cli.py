"""`kvbm-replay …`: arguments in, words out."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import NamedTuple

from kvbm.catalog.index.cluster_index import NewIndex
from kvbm.core.ages import NewAges
from kvbm.core.backend import Backend, NewFold
from kvbm.core.clock_times import clock_us
from kvbm.core.errors import KvbmError
from kvbm.core.ids import HASH_BYTES
from kvbm.core.state_admission import STATE_POLICIES
from kvbm.core.stays import NewStayFold
from kvbm.core.usage import TIMES_HOW, UsageReport, csv_of, gap_lines, parse_stretch, parse_time
from kvbm.progress import allow_bars
from kvbm.replay.cat import cat, followed
from kvbm.replay.compare_catalog import AskCatalog, CatalogComparison
from kvbm.replay.diff import diff
from kvbm.replay.export import DecodeColumns, export
from kvbm.replay.findings import exit_code
from kvbm.replay.format import END, parse_at
from kvbm.replay.history_cli import (
    HistoryParts,
    add_arguments,
    run_changes,
    run_history,
    run_sql,
    run_tenants,
    run_why,
    seconds,
)
from kvbm.replay.history_manifest import HistoryManifest
from kvbm.replay.opening import OPEN, open_source
from kvbm.replay.output import MOST_FINDINGS, check_found, check_json, end, listed, opened, write
from kvbm.replay.progress import watched
from kvbm.replay.serve import MAX_SPEED, OpenStream, serve
from kvbm.replay.source import ARCHIVE_SUFFIX, FrameSource, SourceError
from kvbm.replay.stat import stats_of
from kvbm.replay.state import last_us, states_at
from kvbm.replay.usage import UsageStretch, usage_of
from kvbm.replay.verify import Verified, verify
from kvbm.replay.whatif import POLICIES, ComputeCost, ReadTrace, read_accesses, what_if
from kvbm.replay.whatif_states import what_if_states
from kvbm.shells import SHELLS, completion
from kvbm.streams.nats.credentials import Credentials
from kvbm.terminal import say_csv, say_error, say_text

_AGAIN_S = (0.5, 1.5, 3.0)  # before a log is read again that ends before where a catalog stood
_BEHIND = 3  # the exit status where it does not come there, or not all was compared that should have been
_CLUSTER = "local"
_CAPACITY = 1_000_000_000  # of a rebuilt index: all there is
_SOURCES = """\
SOURCE is one of
  a journal folder        kvbm-data/instances/engine-1/journal   (while its manager writes it, too)
  a folder of journals    kvbm-data/instances
  an archive folder       what kvbm-catalog --archive DIR writes, while it writes it, too
  a capture file          whole frames one after another, of any instances
  the live stream         nats://127.0.0.1:4222   (read up to where it ends now)
"""
_QUESTIONS = {"why": run_why, "changes": run_changes, "tenants": run_tenants, "sql": run_sql}
_ENDS = "\nIt returns 0 when all is well, 1 with findings, 2 when the input cannot be used.\n"


class _Command(NamedTuple):
    """What --help says of one command."""

    about: str
    examples: str
    ends: str = _ENDS


_COMMANDS = {
    "cat": _Command(
        "one line an event, as they lie: instance, e<epoch>+<offset>, time, event",
        "kvbm-replay cat incident.kvbm --instance engine-1 --limit 20\n  kvbm-replay cat /archive --json | jq .event\n"
        "  kvbm-replay cat nats://127.0.0.1:4222 --hash 5cf0eca7 --follow",
    ),
    "stat": _Command(
        "epochs, frames, events, blocks and bytes of each instance",
        "kvbm-replay stat kvbm-data/instances\n  kvbm-replay stat nats://127.0.0.1:4222 --json stat.json",
    ),
    "state": _Command(
        "what each instance held in each tier, at the end or at a time or offset",
        "kvbm-replay state incident.kvbm --at e3+4711 --blocks\n  kvbm-replay state /archive --at 2026-01-31T12:00:00Z "
        "--json -",
    ),
    "verify": _Command(
        "fold every stream and name each defect: damage, holes, illegal events, skipped snapshots, wrong digests",
        "kvbm-replay verify nats://127.0.0.1:4222 --catalog http://127.0.0.1:7700\n  kvbm-replay verify /archive "
        "--reference",
        "\nIt returns 0 when all is well, 1 with findings or where a catalog differs, 2 when the input cannot be\n"
        "used, 3 when what was compared is equal, and the log ends before where the catalog stood or not all\n"
        "instances were compared that should have been.\n",
    ),
    "diff": _Command(
        "compare the events of two sources and name the first one in which they differ, for each instance",
        "kvbm-replay diff kvbm-data/instances/engine-1/journal /archive --instance engine-1\n  kvbm-replay diff "
        "before.kvbm after.kvbm",
        "\nIt returns 0 when they tell the same, 1 when they differ, 2 when they cannot be compared.\n",
    ),
    "rebuild": _Command(
        "make a catalog's state from the log: SQL rows and a checkpoint of the index",
        "kvbm-replay rebuild /archive --database sqlite:///catalog.db --checkpoint /checkpoints\n"
        "  kvbm-replay rebuild /archive --database sqlite:///new.db --checkpoint /new --stream nats://127.0.0.1:4222",
    ),
    "export": _Command(
        "write the events as Parquet: one row an event, or one row a block with --blocks",
        "kvbm-replay export /archive events.parquet\n  kvbm-replay export nats://127.0.0.1:4222 /warehouse/today "
        "--blocks",
    ),
    "whatif": _Command(
        "run other eviction policies and capacities on the prompts that were asked",
        "kvbm-replay whatif /archive --policy lru,s3fifo,cost --capacity 10000,40000\n"
        "  kvbm-replay whatif conversation_trace.jsonl --capacity 5000,20000,60000 --json whatif.json\n"
        "  kvbm-replay whatif /archive --capacity 10000 --tiers 4,16\n"
        "  kvbm-replay whatif conversation_trace.jsonl --capacity 20000 --states ends,second_use --state-slots 3",
    ),
    "history": _Command(
        "make Parquet of since when and until when each block was held, for the next four",
        "kvbm-replay history /archive today\n  kvbm-replay history nats://127.0.0.1:4222 today",
    ),
    "why": _Command(
        "what happened to a block, event by event with cause: why it came, moved and left, and where it is",
        "kvbm-replay why 5cf0eca7 /archive\n  kvbm-replay why 5cf0eca756058bcb2be9b8aeb52c1cf5 today --json",
    ),
    "changes": _Command(
        "what began and ended in a stretch of time, by instance, tier and cause",
        "kvbm-replay changes /archive --from 12:00 --to 12:05\n  kvbm-replay changes today --from 12:00 --instance "
        "engine-1 --json",
    ),
    "tenants": _Command(
        "whose blocks fill which tier, at the end or at a time, and what pools of the cluster have",
        "kvbm-replay tenants /archive --at 12:00\n  kvbm-replay tenants today --json",
    ),
    "usage": _Command(
        "what tenants have used by clock hour: bytes held by tier, blocks put and read, tokens and GPU seconds saved",
        "kvbm-replay usage /archive --from 2026-01-01 --to 2026-02-01 --csv\n"
        "  kvbm-replay usage /archive --tenant acme --json -",
    ),
    "sql": _Command(
        "ask in SQL (DuckDB): history, residencies, events, instances, namespaces, tenants, pools, holes, "
        "claimed_objects; residencies_at(TIMESTAMP '…'), tenants_at, claimed_objects_at; block_life('5cf0eca7'), "
        "changes(TIMESTAMP '…', TIMESTAMP '…')",
        'kvbm-replay sql today "SELECT tier, count(*) FROM residencies GROUP BY tier"\n  kvbm-replay sql /archive '
        "\"FROM residencies_at(TIMESTAMP '2026-01-31 12:00') LIMIT 10\" --csv",
    ),
    "serve": _Command(
        "feed a captured log into the stream of a test cluster, at the speed it was recorded with or another",
        "kvbm-replay serve incident.kvbm --to nats://127.0.0.1:4222 --speed 1.0\n  kvbm-replay serve /archive --to "
        "nats://test:4222 --cluster again",
    ),
}


class Parts(NamedTuple):
    """What the tool is made of, where that is not its own to choose.

    Attributes:
        backend, fold, decode_columns, new_ages: native, or the readable specification of the same.
        new_stays: of `history` and what asks it.
        new_index: of `rebuild`; one that writes checkpoints.
        ask: gives who answers for a catalog at a URL.
        read_trace: reads a trace in Mooncake's format.
        credentials: (file of settings, KEY=VALUE settings) → how to prove to the stream who reads.
        version: of kvbm.
        readable: gives those of the readable specification, for --reference.
    """

    backend: Backend
    fold: NewFold
    decode_columns: DecodeColumns
    new_index: NewIndex
    new_ages: NewAges
    new_stays: NewStayFold
    ask: AskCatalog | None = None
    read_trace: ReadTrace | None = None
    credentials: Callable[[Path | None, Sequence[str]], Credentials] | None = None
    version: str = ""
    readable: Callable[[], Parts] | None = None


def main(argv: Sequence[str], parts: Parts) -> int:
    """The `kvbm-replay` command.

    Args:
        parts: what to run on, unless --reference is given.
    Returns: 0, 1 with findings, 2 when the input cannot be used.
    """
    arguments = replay_parser(parts.version).parse_args(argv)
    if arguments.command == "completion":
        say_text(completion(replay_parser(parts.version), arguments.shell))
        return 0
    allow_bars(not (arguments.quiet or arguments.json is not None))
    if getattr(arguments, "reference", False) and parts.readable is not None:
        parts = parts.readable()._replace(ask=parts.ask, read_trace=parts.read_trace, credentials=parts.credentials)
    try:
        check_json(arguments.json)
        return _RUN[arguments.command](arguments, parts)
    except KvbmError as error:
        say_error("kvbm-replay", error)
        return 2
    except KeyboardInterrupt:
        say_error("kvbm-replay", "interrupted")
        return 130
    except BrokenPipeError:  # a pager or head has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


# -- arguments --------------------------------------------------------------------------------------------------------


def replay_parser(version: str) -> argparse.ArgumentParser:
    """What `kvbm-replay` takes."""
    layout = argparse.RawDescriptionHelpFormatter
    examples = "".join(f"\n  {command.examples.splitlines()[0]}" for command in _COMMANDS.values())
    parser = argparse.ArgumentParser(
        prog="kvbm-replay",
        description="What a stream of events says, and whether it is true.",
        epilog=f"{_SOURCES}\nexamples:{examples}\n{_ENDS}\n`kvbm-replay COMMAND --help` says more.",
        formatter_class=layout,
    )
    parser.add_argument("--version", action="version", version=f"kvbm-replay {version}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    made = {}
    for name, (about, shown, ends) in _COMMANDS.items():
        sources = "" if name == "whatif" else _SOURCES
        command = made[name] = commands.add_parser(
            name,
            help=about,
            description=about,
            epilog=f"{sources}\nexamples:\n  {shown}\n{ends}",
            formatter_class=layout,
        )
        _add_common(command, name)
    made["cat"].add_argument("--limit", type=_count, metavar="N", help="stop after N events")
    made["cat"].add_argument(
        "--hash", type=_digits, metavar="HASH", help="only events of blocks whose hash begins so: 8 digits or more"
    )
    made["cat"].add_argument(
        "--follow", action="store_true", help="go on with what comes, until it is interrupted or --limit is reached"
    )
    made["state"].add_argument(
        "--at",
        metavar="TIME|OFFSET",
        help="ISO 8601, Unix seconds or a clock time such as 13:19 (UTC, the last one the log reaches): after the last "
        "frame cut by then; "
        "e3+4711 (epoch 3, offset 4711) or 4711 (of the last epoch): before that event",
    )
    made["state"].add_argument("--blocks", action="store_true", help="list every held block")
    made["verify"].add_argument(
        "--catalog", metavar="URL", help="also compare with what a running catalog answers, at equal offsets"
    )
    _add_rebuild(made["rebuild"])
    made["export"].add_argument("target", type=Path, metavar="DIR|FILE.parquet", help="a new file or folder")
    made["export"].add_argument("--blocks", action="store_true", help="one row a block instead of one row an event")
    _add_whatif(made["whatif"])
    add_arguments(made)
    _add_usage(made["usage"])
    _add_serve(made["serve"])
    scripts = commands.add_parser(
        "completion",
        help="print a script with which a shell completes this program's commands and options",
        description="Print a script with which a shell completes this program's commands and options.",
        epilog='example:\n  eval "$(kvbm-replay completion bash)"',
        formatter_class=layout,
    )
    scripts.add_argument("shell", choices=SHELLS, help="the shell that reads it")
    return parser


def _add_common(command: argparse.ArgumentParser, name: str) -> None:
    if name == "diff":
        command.add_argument("a", metavar="A", help="a SOURCE; see below")
        command.add_argument("b", metavar="B", help="another")
    elif name == "whatif":
        command.add_argument(
            "source",
            metavar="SOURCE",
            help="an archive folder with samples, a folder or file of them, or a trace in Mooncake's format as *.jsonl",
        )
    else:
        if name == "why":
            command.add_argument("hash", metavar="HASH", help="of a block, in hexadecimal: its first 8 digits or more")
        made = ", or a folder that `kvbm-replay history` made" if name in _QUESTIONS else ""
        command.add_argument("source", metavar="SOURCE", help=f"a path or a nats:// URL; see below{made}")
    command.add_argument(
        "--json",
        nargs="?",
        const="-",
        metavar="FILE",
        help="JSON to a file, or to standard output instead of words"
        + (", a line an event" if name == "cat" else "")
        + "; over an older one, and over no other file",
    )
    command.add_argument("--quiet", "-q", action="store_true", help="no progress bar on the terminal")
    if name == "whatif":
        return
    command.add_argument("--instance", metavar="NAME", help="only this instance")
    command.add_argument("--reference", action="store_true", help="decode and fold with the Python specification")
    command.add_argument(
        "--timeout", type=seconds, default=5.0, metavar="SECONDS", help="how long a server may keep silent (default 5)"
    )
    command.add_argument(
        "--config", type=Path, metavar="FILE", help="settings as TOML; nats.* say how to prove to a stream who reads"
    )
    command.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        dest="sets",
        help="one setting, such as nats.nkey_seed=replay-desk.nk or nats.tls_ca=ca.pem; may be given several times",
    )


def _add_rebuild(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--database", required=True, metavar="URL", help="sqlite:///path or postgresql://…; without rows"
    )
    command.add_argument("--checkpoint", type=Path, metavar="DIR", help="folder for the index; without it, rows alone")
    command.add_argument(
        "--stream",
        metavar="URL",
        help="nats://…: the stream a catalog will go on with, where the source is neither its archive nor itself",
    )
    command.add_argument(
        "--cluster",
        default=_CLUSTER,
        metavar="NAME",
        help=f"of the instances, which files do not say (default {_CLUSTER})",
    )


def _add_whatif(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--policy",
        type=_policies,
        default=list(POLICIES),
        metavar="NAME[,…]",
        help=f"{', '.join(POLICIES)} (default all). cost keeps what takes longest to compute again",
    )
    command.add_argument(
        "--capacity",
        type=_capacities,
        required=True,
        metavar="N[,…]",
        help="slots of each instance; where a share of the prompts was sampled, it is scaled by that share",
    )
    command.add_argument(
        "--tiers",
        type=_sizes,
        default=[],
        metavar="X[,…]",
        help="colder tiers, each X times the capacity, that take what the one above evicts",
    )
    command.add_argument(
        "--states",
        type=_states,
        metavar="NAME[,…]",
        help=f"of a model with recurrent states: which of them are stored ({', '.join(STATE_POLICIES)}), beside "
        "storing all",
    )
    command.add_argument("--state-slots", type=_positive, default=1, metavar="N", help="slots of a state (default 1)")
    command.add_argument("--block-tokens", type=_positive, metavar="N", help="of sampled blocks (default 16)")
    command.add_argument(
        "--prefill-rate",
        type=_amount,
        default=ComputeCost().tokens_per_s,
        metavar="TOKENS/S",
        help=f"at the beginning of a prompt (default {ComputeCost().tokens_per_s:,.0f})",
    )
    command.add_argument(
        "--attention-doubles",
        type=_amount,
        default=ComputeCost().double_tokens,
        metavar="TOKENS",
        help="where in a prompt a token takes twice as long: 2 × parameters / (4 × layers × width) "
        f"(default {ComputeCost().double_tokens:,.0f}, of a 70B model)",
    )


def _add_usage(command: argparse.ArgumentParser) -> None:
    times = (
        "ISO 8601, in UTC where it says no zone, Unix seconds or a clock time such as 13:19 (UTC, the last one the log "
        "reaches)"
    )
    command.add_argument(
        "--from",
        dest="since",
        type=_time_text,
        metavar="TIME",
        help=f"hours that begin from here on: {times} (default: all of the log)",
    )
    command.add_argument(
        "--to",
        dest="until",
        type=_time_text,
        metavar="TIME",
        help="hours that begin before; a clock time is the first one after --from (default: all of the log)",
    )
    command.add_argument("--tenant", action="append", metavar="NAME", help="only this one; may be given several times")
    command.add_argument("--csv", action="store_true", help="a line an hour and tenant, as kvbm-catalog usage gives it")


def _add_serve(command: argparse.ArgumentParser) -> None:
    command.add_argument("--to", required=True, metavar="URL", help="nats://… of the test cluster")
    command.add_argument(
        "--speed",
        type=_speed,
        default=MAX_SPEED,
        metavar="X|max",
        help="1.0 keeps the gaps as they were recorded, 2.0 halves them, max leaves none (default max)",
    )
    command.add_argument("--cluster", default=_CLUSTER, metavar="NAME", help=f"to feed as (default {_CLUSTER})")
    command.add_argument(
        "--anyway",
        action="store_true",
        help="also where the stream has newer events of an instance: readers ignore older ones, and a running instance "
        "is shut out",
    )


def _amount(text: str) -> float:
    """A number above 0; argparse names the option. Raises ArgumentTypeError."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} will not do; give a number above 0")
    return value


def _speed(text: str) -> float:
    return MAX_SPEED if text == "max" else _amount(text)


def _time_text(text: str) -> str:
    """Raises ArgumentTypeError: it is no time."""
    if parse_time(text) is None and clock_us(text) is None:
        raise argparse.ArgumentTypeError(f"{text[:80]!r} is no time; {TIMES_HOW}")
    return text


def _count(text: str) -> int:
    """A whole number from 0 on; argparse names the option. Raises ArgumentTypeError."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is no count; give a whole number, 0 or more")
    return int(text)


def _digits(text: str) -> str:
    """The beginning of a hash, in lower case; argparse names the option. Raises ArgumentTypeError."""
    digits = text.lower().removeprefix("0x")
    if not 8 <= len(digits) <= 2 * HASH_BYTES or digits.strip("0123456789abcdef"):
        raise argparse.ArgumentTypeError(f"{text!r} is no hash; give 8 to {2 * HASH_BYTES} hexadecimal digits")
    return digits


def _positive(text: str) -> int:
    if not _count(text):
        raise argparse.ArgumentTypeError("0 will not do; give 1 or more")
    return int(text)


def _capacities(text: str) -> list[int]:
    return [_positive(one) for one in text.split(",")]


def _sizes(text: str) -> list[float]:
    return [_amount(one) for one in text.split(",")]


def _policies(text: str) -> list[str]:
    return _names(text, POLICIES)


def _states(text: str) -> list[str]:
    return _names(text, STATE_POLICIES)


def _names(text: str, known: Collection[str]) -> list[str]:
    names = text.split(",")
    for name in names:
        if name not in known:
            raise argparse.ArgumentTypeError(f"{name!r} is no policy; give some of {', '.join(known)}")
    return names


# -- commands ---------------------------------------------------------------------------------------------------------


def _cat(arguments: argparse.Namespace, parts: Parts) -> int:
    if arguments.follow:
        located = followed(lambda: _source(arguments, parts), parts.backend)
    else:
        source = _source(arguments, parts)
        located = watched(source.read(parts.backend), source)
    with opened(arguments.json) as file:
        findings, notes = cat(
            located,
            file or sys.stdout,
            file is not None,
            parts.backend.decode_frame,
            arguments.instance,
            arguments.limit,
            arguments.hash or "",
            arguments.follow,
        )
    return end(findings, notes)


def _stat(arguments: argparse.Namespace, parts: Parts) -> int:
    source = _source(arguments, parts)
    located = watched(source.read(parts.backend), source)
    stats = stats_of(source, parts.backend, parts.fold, parts.new_ages, arguments.instance, located)
    check_found(arguments.instance, stats.instances)
    write(arguments.json, stats, stats.lines())
    return end(stats.findings, stats.notes)


def _state(arguments: argparse.Namespace, parts: Parts) -> int:
    at = parse_at(arguments.at) if arguments.at else END
    source = _source(arguments, parts)
    located = watched(source.read(parts.backend), source)
    states = states_at(source, at, parts.backend, parts.fold, arguments.instance, arguments.blocks, located)
    check_found(arguments.instance, [*states.instances, *states.later])
    lists = arguments.json is None  # else the file has the blocks
    write(arguments.json, states, (line for state in states.instances for line in state.lines(lists)))
    return end(states.findings, states.notes)


def _verify(arguments: argparse.Namespace, parts: Parts) -> int:
    against = None
    if arguments.catalog:
        if parts.ask is None:
            raise SourceError("nothing here can ask a catalog")
        catalog = parts.ask(arguments.catalog, arguments.config, arguments.sets, arguments.timeout)
        against = CatalogComparison(catalog, arguments.instance)
    verified = _verified(arguments, parts, against)
    for pause_s in _AGAIN_S:  # the log may be written still
        if against is None or not against.report.ahead:
            break
        time.sleep(pause_s)
        against = against.again()
        verified = _verified(arguments, parts, against)
    if not verified.instances and not verified.findings:
        check_found(arguments.instance, [])
    lines = [*verified.notes, f"{verified.verdict()} ({verified.fold} fold)", *listed(verified.findings)]
    asked = verified.catalog
    if asked is not None:
        told = [*asked.differences, *asked.ahead]
        lines += [*asked.notes, asked.verdict(), *(f"  {one.sentence()}" for one in told[:MOST_FINDINGS])]
    write(arguments.json, verified, lines)
    code = exit_code(verified.findings)
    if asked is None or code:
        return code
    if asked.differences:
        return 1
    return 1 if not asked.compared else 0 if asked.is_whole else _BEHIND


def _verified(arguments: argparse.Namespace, parts: Parts, against: CatalogComparison | None) -> Verified:
    source = _source(arguments, parts)
    located = watched(source.read(parts.backend), source)
    return verify(source, parts.backend, parts.fold, arguments.instance, located, against)


def _diff(arguments: argparse.Namespace, parts: Parts) -> int:
    a, b = (_open(name, arguments, parts) for name in (arguments.a, arguments.b))
    report = diff(a, b, parts.backend, arguments.instance)
    write(arguments.json, report, report.lines())
    return 1 if report.divergences else 0


def _rebuild(arguments: argparse.Namespace, parts: Parts) -> int:
    from kvbm.replay.rebuild import RebuildOptions, rebuild  # it needs the extra "catalog"

    connect = None if arguments.stream is None else _connect(arguments.stream, arguments, parts, makes=True)
    source = _source(arguments, parts)
    folder = Path(arguments.source)
    is_archive = folder.is_dir() and any(folder.glob(f"*{ARCHIVE_SUFFIX}"))
    is_own_stream = connect is None and "://" in arguments.source
    if is_own_stream:
        connect = _connect(arguments.source, arguments, parts, makes=False)
    options = RebuildOptions(
        database=arguments.database,
        checkpoint=arguments.checkpoint,
        cluster=arguments.cluster,
        capacity=_CAPACITY,
        instance=arguments.instance,
        archive=folder if is_archive else None,
        is_own_stream=is_own_stream,
    )
    report = rebuild(source, options, parts.backend, parts.new_index, connect)
    write(arguments.json, report, report.lines())
    return end(report.findings, report.notes) or (1 if report.suspect else 0)


def _export(arguments: argparse.Namespace, parts: Parts) -> int:
    source = _source(arguments, parts)
    located = watched(source.read(parts.backend), source)
    report = export(
        source, arguments.target, parts.backend, parts.decode_columns, arguments.instance, arguments.blocks, located
    )
    write(arguments.json, report, report.lines())
    return end(report.findings, report.notes)


def _usage(arguments: argparse.Namespace, parts: Parts) -> int:
    if arguments.csv and arguments.json is not None:
        raise SourceError("--csv and --json: give one of them")
    source = _source(arguments, parts)
    located = watched(source.read(parts.backend), source)
    stretch = _usage_stretch(arguments, parts)
    report = usage_of(source, parts.backend, stretch, arguments.instance, located)
    if arguments.csv:
        say_csv(csv_of(report.hours))
        return end(report.findings, [*report.notes, *gap_lines(UsageReport(gaps=report.gaps))])
    write(arguments.json, report, report.lines())
    return end(report.findings, report.notes)


def _usage_stretch(arguments: argparse.Namespace, parts: Parts) -> UsageStretch:
    """Of which hours. A time of day is the last one the log reaches, or the first one after another: it is read once
    before, to see where it ends.
    """
    has_clock = any(text is not None and parse_time(text) is None for text in (arguments.since, arguments.until))
    end_us = last_us(_source(arguments, parts), parts.backend) if has_clock else 0
    since, until = parse_stretch(arguments.since, arguments.until, end_us // 1000)
    return UsageStretch(since_ms=since, until_ms=until, tenants=arguments.tenant)


def _whatif(arguments: argparse.Namespace, parts: Parts) -> int:
    if parts.read_trace is None and arguments.source.endswith((".json", ".jsonl")):
        raise SourceError("nothing here can read a trace; give an archive with samples")
    accesses = read_accesses(arguments.source, parts.read_trace or (lambda path: ()), arguments.block_tokens)
    if arguments.states:
        found = what_if_states(accesses, arguments.states, arguments.capacity, arguments.state_slots)
        write(arguments.json, found, found.lines())
        return 0
    cost = ComputeCost(arguments.prefill_rate, arguments.attention_doubles)
    report = what_if(accesses, arguments.policy, arguments.capacity, arguments.tiers, cost)
    write(arguments.json, report, report.lines())
    return 0


def _serve(arguments: argparse.Namespace, parts: Parts) -> int:
    from kvbm.streams.nats.connection import shown

    source = _source(arguments, parts)
    report = serve(
        source,
        _connect(arguments.to, arguments, parts, makes=True),
        shown(arguments.to),
        arguments.cluster,
        parts.backend,
        arguments.speed,
        arguments.anyway,
        arguments.instance,
    )
    write(arguments.json, report, report.lines())
    return end(report.findings, report.notes)


def _history_command(
    run: Callable[[argparse.Namespace, HistoryParts], HistoryManifest],
) -> Callable[[argparse.Namespace, Parts], int]:
    def command(arguments: argparse.Namespace, parts: Parts) -> int:
        taken = HistoryParts(parts.backend, parts.new_stays, lambda: _source(arguments, parts), write)
        history = run(arguments, taken)
        return end(history.findings, history.notes)

    return command


_RUN: dict[str, Callable[[argparse.Namespace, Parts], int]] = {
    "cat": _cat,
    "history": _history_command(run_history),
    **{name: _history_command(run) for name, run in _QUESTIONS.items()},
    "stat": _stat,
    "usage": _usage,
    "state": _state,
    "verify": _verify,
    "diff": _diff,
    "rebuild": _rebuild,
    "export": _export,
    "whatif": _whatif,
    "serve": _serve,
}


def _source(arguments: argparse.Namespace, parts: Parts) -> FrameSource:
    return _open(arguments.source, arguments, parts)


def _open(name: str, arguments: argparse.Namespace, parts: Parts) -> FrameSource:
    return open_source(name, arguments.timeout, _credentials(arguments, parts) if "://" in name else OPEN)


def _credentials(arguments: argparse.Namespace, parts: Parts) -> Credentials:
    """How to prove to a stream who reads. Raises SourceError, ConfigError, MissingExtraError."""
    if parts.credentials is not None:
        return parts.credentials(arguments.config, arguments.sets)
    if arguments.config is not None or arguments.sets:
        raise SourceError("nothing here reads settings; use the command kvbm-replay")
    return OPEN


def _connect(url: str, arguments: argparse.Namespace, parts: Parts, makes: bool) -> OpenStream:
    from kvbm.streams.nats.stream import NatsStream

    credentials = _credentials(arguments, parts)
    return lambda: NatsStream.connect(url, arguments.timeout, credentials=credentials, makes=makes)
