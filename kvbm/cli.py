"""`kvbm …`, `kvbm-catalog …` and `kvbm-replay …`: arguments in, words out."""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, TextIO, TypeAlias, cast

import structlog

from kvbm.assembly import (
    NATIVE,
    NATIVE_FOLD,
    NATIVE_INDEX,
    catalog_client,
    catalog_credentials,
    decode_columns,
    kvbm_version,
)
from kvbm.config import Settings, default_lines, load_settings
from kvbm.core.errors import ConfigError, JanitorBusyError, KvbmError
from kvbm.core.ids import InstanceId
from kvbm.locate.http import CatalogClient

if TYPE_CHECKING:
    from kvbm.streams.nats.credentials import Credentials

_Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"


def main(argv: Sequence[str] | None = None) -> int:
    """The `kvbm` command. Returns 0, 1 when a check failed, 2 when it could not start."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments[:1] == ["catalog"]:
        return catalog_main(arguments[1:])
    if arguments[:1] == ["replay"]:
        return replay_main(arguments[1:])
    parser = argparse.ArgumentParser(
        prog="kvbm",
        description="An event-sourced lifecycle manager for the KV-cache blocks of LLM inference.",
        epilog="`kvbm COMMAND --help` says more. A command returns 0 when all is well, 1 when a check failed, 2 when it cannot "
        "start, 130 when interrupted.",
    )
    parser.add_argument("--version", action="version", version=f"kvbm {kvbm_version()}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    _add_demo(commands)
    _add_simulate(commands)
    _add_engine(commands)
    _add_bench(commands)
    _add_doctor(commands)
    _add_probe(commands)
    commands.add_parser("catalog", help="same as kvbm-catalog: the cluster-wide view of which block lies where")
    commands.add_parser("replay", help="same as kvbm-replay: what a stream of events says, and whether it is true")
    _add_permissions(commands)
    _add_keys(commands)
    _add_command(commands, "settings", "print every setting with its default, as TOML")
    return _run(_dispatch, parser.parse_args(arguments), "kvbm")


def catalog_main(argv: Sequence[str] | None = None) -> int:
    """The `kvbm-catalog` command."""
    parser = argparse.ArgumentParser(
        prog="kvbm-catalog",
        description="The cluster-wide view of which block lies where.",
        epilog="`kvbm-catalog COMMAND --help` says more. It returns 0 after a clean stop, 2 when it cannot start.",
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    serve = _add_command(
        commands,
        "serve",
        "follow the stream and answer over HTTP until stopped",
        "kvbm-catalog serve --set nats.url=nats://127.0.0.1:4222 --set catalog.listen=127.0.0.1:7700",
    )
    serve.add_argument(
        "--archive", metavar="DIR", help="as catalog.archive: keep all frames as files there, for kvbm-replay"
    )
    _add_settings(serve)
    gc = _add_command(
        commands,
        "gc",
        "clean up the object pool: claim what nobody claims, delete what is too old or too much",
        "kvbm-catalog gc --dry-run --set pools.object.url=s3://bucket/kv --set gc.ttl_s=604800 --set gc.quota_bytes=1000000000000",
    )
    gc.description = """Clean up the object pool that pools.object names, as the only janitor of all clusters that share it.

It claims the objects nobody claims, withdraws claims without an object, and withdraws, waits for gc.grace_s and deletes
what nobody has put or read for gc.ttl_s, and the least recently used above gc.quota_bytes. It runs beside `kvbm-catalog
serve`, on the same database and stream. What is not a block of kvbm's is never touched. While another janitor works it
says so and returns 0."""
    gc.add_argument(
        "--every",
        type=_seconds,
        default=None,
        metavar="S",
        help="go on, with so many seconds between runs (gc.every_s)",
    )
    gc.add_argument("--dry-run", action="store_true", help="tell what would be done, and change nothing")
    gc.add_argument("--json", action="store_true", help="print reports as JSON, one a line")
    _add_settings(gc)
    forget = _add_command(
        commands,
        "forget",
        "have a running catalog forget an instance that is gone",
        "kvbm-catalog forget gpu-7 --set catalog.url=http://catalog:7700",
    )
    forget.description = """Have the catalog at catalog.url forget an instance that has stopped or is not heard, before catalog.forget_s is over.

It leaves the catalog's memory, its database, metrics and answers. What it has put in object stores stays there and is found, and
files and the archive have its events. An instance that is alive is not forgotten. One that comes back is asked for a snapshot."""
    forget.add_argument("instance", metavar="NAME", help="the instance's id")
    _add_settings(forget)
    _add_token(commands)
    _add_erase(commands)
    arguments = parser.parse_args(argv)
    work = {
        "serve": _serve_catalog,
        "gc": _collect_garbage,
        "forget": _forget_instance,
        "token": _make_token,
        "erase": _erase,
    }[arguments.command]
    return _run(work, arguments, "kvbm-catalog")


def replay_main(argv: Sequence[str] | None = None) -> int:
    """The `kvbm-replay` command."""
    from kvbm.replay.cli import Parts
    from kvbm.replay.cli import main as replay
    from kvbm.workload.trace import read_trace

    _configure_logs()
    parts = Parts(
        NATIVE, NATIVE_FOLD, decode_columns, NATIVE_INDEX, _replay_catalog, read_trace, _replay_credentials
    )  # fmt: skip
    return replay(list(sys.argv[1:] if argv is None else argv), parts)


def _add_erase(commands: _Commands) -> None:
    erase = _add_command(
        commands,
        "erase",
        "have everything of a tenant, of a namespace or of a prompt be gone, everywhere",
        "kvbm-catalog erase --tenant acme --set nats.url=nats://127.0.0.1:4222 --set catalog.database=sqlite:///catalog.db",
    )
    erase.description = """Have everything of a tenant, of a namespace or of a prompt be gone: from the tiers and journals of
all instances, from the object pool and its front, from the catalog's database, index, checkpoints and archive.

It prints what is gone and what waits for whom, and returns 0 only when all is gone, else 1. Instances that are away
erase before they serve when they return. To ask again for the same goes on with the same erasure. What is used anew
afterwards is new; take a tenant out of the engines' configuration first."""
    what = erase.add_mutually_exclusive_group(required=True)
    what.add_argument("--tenant", metavar="NAME", help="all namespaces of this tenant")
    what.add_argument("--namespace", metavar="ID", type=_namespace_id, help="one namespace, 32 hex digits")
    what.add_argument("--status", metavar="N", type=_small_number, help="tell how far an erasure has come")
    what.add_argument(
        "--lift",
        metavar="N",
        type=_small_number,
        help="take an erasure out of the record: who returns later does not do it",
    )
    erase.add_argument(
        "--hashes", metavar="FILE|HEX", default="", help="with --namespace: only these blocks, 32 hex digits each"
    )
    erase.add_argument(
        "--wait",
        type=_wait_seconds,
        default=60.0,
        metavar="S",
        help="wait so long for the others; 0: do not (default 60)",
    )
    erase.add_argument("--json", action="store_true", help="print the report as one line of JSON")
    _add_settings(erase)


def _namespace_id(text: str) -> bytes:
    try:
        found = bytes.fromhex(text)
    except ValueError:
        found = b""
    if len(found) != 16:
        raise argparse.ArgumentTypeError(f"{text!r} is no namespace id; give its 32 hex digits")
    return found


def _small_number(text: str) -> int:
    return _count_between(text, 1, 1 << 31)


def _wait_seconds(text: str) -> float:
    return 0.0 if text == "0" else _seconds(text)


def _add_command(commands: _Commands, name: str, words: str, example: str = "") -> argparse.ArgumentParser:
    return commands.add_parser(
        name,
        help=words,
        description=words[0].upper() + words[1:] + ".",
        epilog=example and f"example:\n  {example}",
        formatter_class=argparse.RawDescriptionHelpFormatter if example else argparse.HelpFormatter,
    )


def _add_demo(commands: _Commands) -> None:
    demo = _add_command(
        commands,
        "demo",
        "run engines, tiers, stream, catalog and replay once on embedded servers; 1 when any check of the outcome fails",
        "kvbm demo --json demo.json --keep demo-files",
    )
    demo.add_argument("--json", type=Path, metavar="FILE", help="write the report as JSON")
    demo.add_argument(
        "--keep", type=Path, metavar="FOLDER", help="keep journals, pools and logs in this folder, which must be new"
    )


def _add_simulate(commands: _Commands) -> None:
    simulate = _add_command(
        commands,
        "simulate",
        "drive several managers with a trace: synthetic bytes, real events, a real catalog that routes",
        "kvbm simulate --trace conversation_trace.jsonl --instances 4 --pools hbm=12500 --json sim.json",
    )
    simulate.add_argument(
        "--trace", type=Path, metavar="FILE", help="Mooncake's JSONL; without it, a generated workload"
    )
    simulate.add_argument(
        "--requests", type=int, default=2000, metavar="N", help="requests of the generated workload (default 2000)"
    )
    simulate.add_argument(
        "--seed",
        type=int,
        default=1,
        metavar="N",
        help="seed of the generated workload and of random routing (default 1)",
    )
    simulate.add_argument("--instances", type=int, default=4, metavar="N", help="how many managers (default 4)")
    simulate.add_argument(
        "--pools",
        default="hbm=12500",
        metavar="TIER=SLOTS,…",
        help='slots of each instance, such as "hbm=4000,host=8500", or "unbounded" (default hbm=12500)',
    )
    simulate.add_argument("--json", type=Path, metavar="FILE", help="write the report as JSON")


def _add_engine(commands: _Commands) -> None:
    engine = _add_command(
        commands,
        "engine",
        "run the reference engine as a process: requests in and answers out as JSON lines",
        "kvbm engine --set pools.hbm.slots=256 --set pools.nvme.slots=1024 --set instance.id=engine-a",
    )
    engine.add_argument("--threads", type=_thread_count, default=1, metavar="N", help="torch threads (default 1)")
    engine.add_argument(
        "--weights",
        default="",
        metavar="FILE",
        help="weights to load (made by Weights.save); without it, random ones from a fixed seed",
    )
    _add_settings(engine)


def _add_bench(commands: _Commands) -> None:
    bench = _add_command(
        commands,
        "bench",
        "measure the native core, the pools, and the line from instance to catalog, on this machine",
        "kvbm bench index --live 1000000 --live 10000000 --replacements 10 --json index.json",
    )
    bench.add_argument(
        "what",
        choices=[
            "hash",
            "codec",
            "ledger",
            "events",
            "index",
            "replay",
            "ingest",
            "stream",
            "connector",
            "pools",
            "all",
        ],
        help="which part; pools: NVME, HOST, HBM, metadata, lossless coding of KV",
    )
    bench.add_argument(
        "--live",
        type=_live_count,
        action="append",
        metavar="N",
        help="residencies the index holds; may be given several times (default 1000000)",
    )
    bench.add_argument(
        "--replacements",
        type=_small_count,
        default=3,
        metavar="N",
        help="how often the whole set is replaced to see whether memory grows; 0 leaves it out (default 3)",
    )
    bench.add_argument(
        "--samples", type=_sample_count, metavar="N", help="of each number; of pools, pairs (default 7; pools alone 5)"
    )
    bench.add_argument("--seed", type=int, default=1, metavar="N", help="of the workload (default 1)")
    bench.add_argument(
        "--dir",
        type=Path,
        metavar="FOLDER",
        help="of pools: on the device to measure; the files made there go afterwards (default: tmp in the data folder)",
    )
    bench.add_argument(
        "--file-mib",
        type=_file_mib,
        default=2048,
        metavar="N",
        help="of pools: size of the pool's file, which fio works on too (default 2048)",
    )
    bench.add_argument(
        "--s3",
        metavar="URL",
        help="of pools: s3://bucket/prefix of a store to put objects into, and delete them again; credentials from the environment",
    )
    bench.add_argument("--endpoint", default="", metavar="URL", help="of --s3, where it is not Amazon's")
    bench.add_argument("--json", type=Path, metavar="FILE", help="write the numbers as JSON")


def _add_doctor(commands: _Commands) -> None:
    doctor = _add_command(
        commands,
        "doctor",
        "check this machine against a configuration and say what to fix",
        "kvbm doctor --config kvbm.toml --block-bytes 2097152",
    )
    doctor.description = (
        "Check this machine against a configuration and say what to fix: CPU, memory, CUDA, io_uring, disks, clock, and that NATS, "
        "SQL, object store and catalog can be reached and used. What is not configured is not used, and no problem. It returns 1 "
        "when there is a problem. Nothing is left behind; no check takes longer than 5 seconds."
    )
    doctor.add_argument(
        "--block-bytes",
        type=_block_bytes,
        default=0,
        metavar="N",
        help="bytes of one block, so that slots can be held against memory and disks",
    )
    doctor.add_argument("--quick", action="store_true", help="measure neither speeds nor syncs of disks")
    doctor.add_argument(
        "--json",
        nargs="?",
        const="-",
        default="",
        metavar="FILE",
        help="JSON to a file, or to standard output instead of words",
    )
    _add_settings(doctor)


def _add_probe(commands: _Commands) -> None:
    probe = _add_command(
        commands,
        "probe",
        "ask whether NATS, a database or an HTTP service answers: for health checks, and to wait for one",
        "kvbm probe nats://127.0.0.1:4222 --wait 30",
    )
    probe.add_argument("url", metavar="URL", help="nats://…, http://…, https://… or postgresql://…")
    probe.add_argument(
        "--wait", type=_seconds, default=0.0, metavar="S", help="ask again for so many seconds (default: once)"
    )
    _add_settings(probe)


def _block_bytes(text: str) -> int:
    return _count_between(text, 1, 1 << 40)


def _count_between(text: str, least: int, most: int) -> int:
    if not text.isdecimal() or not least <= int(text) <= most:
        raise argparse.ArgumentTypeError(f"{text!r} will not do; give {least} to {most}")
    return int(text)


def _live_count(text: str) -> int:
    return _count_between(text, 100_000, 1_000_000_000)


def _file_mib(text: str) -> int:
    return _count_between(text, 16, 1 << 24)


def _small_count(text: str) -> int:
    return _count_between(text, 0, 1000)


def _sample_count(text: str) -> int:
    return _count_between(text, 2, 1000)


def _seconds(text: str) -> float:
    """A time between runs; argparse names the option. Raises ArgumentTypeError."""
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds <= 1e6:
        raise argparse.ArgumentTypeError(f"{text!r} will not do; give seconds above 0, at most 1000000")
    return seconds


def _thread_count(text: str) -> int:
    """A number of threads; argparse names the option. Raises ArgumentTypeError."""
    if not text.isdecimal() or not 1 <= int(text) <= 1024:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of threads; give 1 to 1024")
    return int(text)


def _add_settings(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config", type=Path, metavar="FILE", help="settings as TOML")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        dest="sets",
        help="one setting, such as pools.host.slots=1024; may be given several times. `kvbm settings` lists them. It wins over the "
        "environment (KVBM_POOLS__HOST__SLOTS=1024), and that over the file",
    )


def _run(work: Callable[[argparse.Namespace], int], arguments: argparse.Namespace, name: str) -> int:
    _end_as_interrupted()
    _configure_logs(
        logging.WARNING if arguments.command in ("demo", "simulate", "bench", "doctor", "probe") else logging.INFO
    )
    try:
        code = work(arguments)
        sys.stdout.flush()
    except KvbmError as error:
        print(f"{name}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"{name}: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # a pager or head has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    return code


def _end_as_interrupted() -> None:
    """SIGTERM and SIGHUP unwind as Ctrl-C does, so that what is open is closed: leases, pools, children."""
    if threading.current_thread() is not threading.main_thread():
        return
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) == signal.SIG_DFL:  # not under nohup, and not where a caller has its own
            signal.signal(number, signal.default_int_handler)


def _add_permissions(commands: _Commands) -> None:
    permissions = _add_command(
        commands,
        "nats-permissions",
        "print the accounts of the catalog and everybody named for nats-server's configuration; makes keys where there are none",
        "kvbm nats-permissions --cluster prod --keys keys --instance gpu-0 --instance gpu-1 --janitor gc-0 > accounts.conf",
    )
    permissions.add_argument(
        "--cluster", default="local", metavar="NAME", help="its name, as instance.cluster (default local)"
    )
    permissions.add_argument(
        "--keys",
        type=Path,
        required=True,
        metavar="FOLDER",
        help="folder of the seeds, each the nats.nkey_seed of its owner: catalog.nk, instance-NAME.nk, janitor-NAME.nk and so on. "
        "Keep it: it says which account is whose",
    )
    for role, words in (
        ("instance", "an instance's name, as instance.id"),
        ("janitor", "the name of a `kvbm-catalog gc`, as gc.id"),
        ("replay", "a name for somebody who reads with kvbm-replay"),
        ("operator", "a name for somebody who erases"),
    ):
        permissions.add_argument(
            f"--{role}", action="append", default=[], metavar="NAME", help=f"{words}; may be given several times"
        )
    permissions.add_argument(
        "--spare",
        type=_small_count,
        default=8,
        metavar="N",
        help="accounts for users to come: nats-server lends nothing to an account that a reload makes (default 8)",
    )
    permissions.add_argument(
        "--renew",
        action="append",
        default=[],
        metavar="USER",
        help="make a second key, such as instance-gpu-0.next.nk for instance-gpu-0; the server permits both",
    )
    permissions.add_argument(
        "--retire", action="append", default=[], metavar="USER", help="the second key replaces the first one"
    )
    permissions.add_argument(
        "--overlap",
        type=_seconds,
        default=86400.0,
        metavar="S",
        help="for how long a user is meant to have two keys; it is said until when (default 86400)",
    )


def _add_keys(commands: _Commands) -> None:
    keys = _add_command(
        commands,
        "keys",
        "give a tenant a new current key in a file of keys, as pools.object.keys; the file is made if it is not there",
        "kvbm keys keys.toml --tenant acme --name 2026-11",
    )
    keys.add_argument(
        "file", type=Path, metavar="FILE", help="readable to its owner alone; keep a copy where keys are kept"
    )
    keys.add_argument(
        "--tenant", default="", metavar="NAME", help="whose objects; without it, those of namespaces without a tenant"
    )
    keys.add_argument(
        "--name",
        default="1",
        metavar="NAME",
        help="of the new key; older ones stay, and open what they sealed (default 1)",
    )


def _add_token(commands: _Commands) -> None:
    token = _add_command(
        commands,
        "token",
        "make a token that may ask the catalog: print it, and put its hash into the file of catalog.access",
        "kvbm-catalog token --access access.toml --name router-acme --role router --tenant acme > router-acme.token",
    )
    token.add_argument(
        "--access", type=Path, metavar="FILE", help="as catalog.access; made if it is not there, for its owner alone"
    )
    token.add_argument("--name", required=True, metavar="NAME", help="of who will ask, as metrics and limits call it")
    token.add_argument(
        "--role",
        required=True,
        choices=("router", "operator", "metrics"),
        help="router: lookups and routes of its tenants; operator: everything; metrics: /metrics alone",
    )
    token.add_argument(
        "--tenant",
        action="append",
        default=[],
        metavar="T",
        help='of a router; several times for several; "" for no tenant',
    )
    token.add_argument("--all-tenants", action="store_true", help="a router of all tenants")
    token.add_argument("--expires", type=float, metavar="S", help="it is good for so many seconds (default: for ever)")
    token.add_argument(
        "--replace", type=float, metavar="S", help="the name's older tokens are good for so many seconds yet"
    )
    _add_settings(token)


def _make_token(arguments: argparse.Namespace) -> int:
    import time

    from kvbm.catalog.access_file import NewToken, add_token

    path = arguments.access or Path(_settings(arguments).catalog.access)
    if not path.name:
        raise ConfigError("there is no file of callers; give --access FILE, or set catalog.access")
    if arguments.role == "router" and bool(arguments.tenant) == arguments.all_tenants:
        raise ConfigError("a router is of some tenants or of all; give --tenant T, or --all-tenants")
    wanted = NewToken(arguments.name, arguments.role, arguments.tenant or None, arguments.expires, arguments.replace)
    print(add_token(path, wanted, time.time()))
    print(f"kvbm-catalog: {path} has its hash; the token is not kept and not shown again", file=sys.stderr)
    return 0


def _dispatch(arguments: argparse.Namespace) -> int:
    match arguments.command:
        case "demo":
            from kvbm.workload.processes import CATALOG_MODULES, STORE_MODULES, require_modules

            require_modules("kvbm demo", ("torch", "boto3", *CATALOG_MODULES, *STORE_MODULES), "demo")
            from kvbm.workload import demo

            return demo.main(arguments.json, arguments.keep)
        case "simulate":
            from kvbm.workload import simulate

            return simulate.main(
                arguments.trace,
                arguments.requests,
                arguments.seed,
                arguments.instances,
                arguments.pools,
                arguments.json,
            )
        case "keys":
            from kvbm.pools.object.keys import add_key

            add_key(arguments.file, arguments.tenant, arguments.name)
            print(f"tenant {arguments.tenant!r} has a new current key {arguments.name!r} in {arguments.file}")
            return 0
        case "bench":
            from kvbm.bench import BenchOptions, ObjectsOptions, PoolsOptions, run_bench

            live = tuple(arguments.live or (1_000_000,))
            samples = arguments.samples or (5 if arguments.what == "pools" else 7)
            objects = ObjectsOptions(arguments.s3, arguments.endpoint) if arguments.s3 else None
            pools = PoolsOptions(arguments.dir, arguments.file_mib << 20, objects=objects)
            options = BenchOptions(arguments.what, live, arguments.replacements, samples, arguments.seed, pools)
            return run_bench(options, arguments.json)
        case "doctor":
            settings = _settings(arguments)
            from kvbm import doctor

            wanted = doctor.DoctorOptions(arguments.block_bytes, arguments.quick, arguments.json)
            return doctor.main(settings, wanted)
        case "probe":
            from kvbm.workload import probe

            return probe.main(arguments.url, arguments.wait, _settings(arguments))
        case "nats-permissions":
            return _print_permissions(arguments)
        case "engine":
            settings = _settings(arguments)  # first, because torch takes seconds to load
            from kvbm.engines.reference.worker import WorkerSettings
            from kvbm.engines.reference.worker import main as serve

            worker = WorkerSettings(threads=arguments.threads, weights_path=arguments.weights)
            return serve(settings, worker)
        case _:
            print("\n".join(default_lines()))
            return 0


def _print_permissions(arguments: argparse.Namespace) -> int:
    from kvbm.streams.nats.key_folder import Change, print_accounts
    from kvbm.streams.nats.permissions import Role

    named = (Role.INSTANCE, Role.JANITOR, Role.REPLAY, Role.OPERATOR)
    wanted = [(role, name) for role in named for name in getattr(arguments, str(role))]
    change = Change(arguments.renew, arguments.retire, arguments.overlap, arguments.spare)
    printed = print_accounts(arguments.keys, arguments.cluster, wanted, change, time.time())
    print(printed.text, end="")
    for remark in printed.remarks:
        print(f"kvbm: {remark}", file=sys.stderr)
    return 0


def _erase(arguments: argparse.Namespace) -> int:
    from kvbm.assembly.erasure import EraseOptions, read_hashes, run_erase
    from kvbm.erasure.report import Line, as_json, as_words

    if arguments.hashes and arguments.namespace is None:
        raise ConfigError("--hashes needs --namespace: a hash is of one namespace")
    hashes = read_hashes(arguments.hashes) if arguments.hashes else b""
    options = EraseOptions(
        arguments.tenant, arguments.namespace, hashes, arguments.status, arguments.lift, arguments.wait
    )

    def tell(number: int, lines: Sequence[Line]) -> None:
        if options.lift is not None:
            print(f"erasure {number} is lifted")
        else:
            print((as_json if arguments.json else as_words)(number, lines), flush=True)

    return run_erase(_settings(arguments), options, tell)


def _serve_catalog(arguments: argparse.Namespace) -> int:
    from kvbm.assembly import run_catalog
    from kvbm.assembly.erasure import catalog_companion

    if arguments.archive is not None:
        arguments.sets.append(f"catalog.archive={arguments.archive}")
    return run_catalog(_settings(arguments), catalog_companion)


def _collect_garbage(arguments: argparse.Namespace) -> int:
    from kvbm.assembly import run_gc
    from kvbm.janitor.report import as_json, as_words

    if arguments.every is not None:
        arguments.sets.append(f"gc.every_s={arguments.every}")
    settings = _settings(arguments)
    words = as_json if arguments.json else as_words
    try:
        return run_gc(settings, arguments.dry_run, lambda report: print(words(report), flush=True))
    except JanitorBusyError as error:
        print(f"kvbm-catalog: {error}", file=sys.stderr)
        return 0


def _replay_catalog(url: str, config: Path | None, sets: Sequence[str]) -> CatalogClient:
    return catalog_client(url, catalog_credentials(_read_settings(config, sets)))


def _replay_credentials(config: Path | None, sets: Sequence[str]) -> Credentials:
    from kvbm.assembly import stream_credentials
    from kvbm.streams.nats.permissions import Role

    return stream_credentials(_read_settings(config, sets), Role.REPLAY)


def _forget_instance(arguments: argparse.Namespace) -> int:
    settings = _settings(arguments)
    if not settings.catalog.url:
        raise ConfigError("catalog.url is empty; name the running catalog, as --set catalog.url=http://127.0.0.1:7700")
    client = catalog_client(settings.catalog.url, catalog_credentials(settings))
    try:
        client.forget(InstanceId(arguments.instance))
    finally:
        client.close()
    print(f"instance {arguments.instance} is forgotten")
    return 0


def _settings(arguments: argparse.Namespace) -> Settings:
    return _read_settings(arguments.config, arguments.sets)


def _read_settings(config: Path | None, sets: Sequence[str]) -> Settings:
    flags = {}
    for pair in sets:
        key, equals, value = pair.partition("=")
        if not equals or not key:
            raise ConfigError(f"--set {pair!r} has no {'value' if key else 'key'}; write KEY=VALUE")
        flags[key] = value
    return load_settings(config, os.environ, flags)


class _Remarks:
    """Standard error, as it is when something is written. Where the disk behind it is full, or it is closed, remarks are lost and
    nothing else: no loop ends for want of a word."""

    def write(self, text: str) -> None:
        """Write, if it can be done."""
        with suppress(OSError, ValueError):
            sys.stderr.write(text)

    def flush(self) -> None:
        """Flush, if it can be done."""
        with suppress(OSError, ValueError):
            sys.stderr.flush()


def _configure_logs(level: int = logging.INFO) -> None:
    """Remarks for people go to standard error; standard output carries answers only."""
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty()),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=structlog.PrintLoggerFactory(cast(TextIO, _Remarks())),
        cache_logger_on_first_use=True,
    )


if __name__ == "__main__":
    raise SystemExit(main())
