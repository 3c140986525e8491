"""The command `kvbm-catalog`: the service, its janitor, questions to it, and what an operator has it do."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from kvbm.assembly import catalog_clients, kvbm_version
from kvbm.catalog_questions import QUESTIONS, add_questions, add_timeout, ask
from kvbm.command_line import (
    CommandParser,
    Commands,
    add_command,
    add_completion,
    add_json,
    add_settings,
    apply_logs,
    check_out,
    count_between,
    reads,
    run_command,
    say_completion,
    seconds,
    settings_of,
    tell_error,
    write_out,
)
from kvbm.core.errors import ConfigError, JanitorBusyError
from kvbm.core.ids import InstanceId
from kvbm.terminal import as_json, say
from kvbm_ledger.hang_ups import HANG_UPS


def catalog_main(argv: Sequence[str] | None = None) -> int:
    """The `kvbm-catalog` command."""
    arguments = catalog_parser().parse_args(argv)
    work = {
        "serve": _serve_catalog,
        "gc": _collect_garbage,
        "forget": _forget_instance,
        "token": _make_token,
        "erase": _erase,
        "completion": lambda arguments: say_completion(catalog_parser(), arguments),
        **dict.fromkeys(QUESTIONS, ask),
    }[arguments.command]
    return run_command(work, arguments, "kvbm-catalog")


def catalog_parser() -> argparse.ArgumentParser:
    """What `kvbm-catalog` takes."""
    parser: argparse.ArgumentParser = CommandParser(
        prog="kvbm-catalog",
        description="The cluster-wide view of which block lies where.",
        epilog="`kvbm-catalog COMMAND --help` says more. It returns 0 after a clean stop, 2 when it cannot start.",
    )
    parser.add_argument("--version", action="version", version=f"kvbm-catalog {kvbm_version()}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    serve = add_command(
        commands,
        "serve",
        "follow the stream and answer over HTTP until stopped",
        "kvbm-catalog serve --set nats.url=nats://127.0.0.1:4222 --set catalog.listen=127.0.0.1:7700",
    )
    serve.add_argument(
        "--archive", metavar="DIR", help="as catalog.archive: keep all frames as files there, for kvbm-replay"
    )
    serve.add_argument(
        "--history",
        metavar="DIR",
        help="as catalog.history: keep a history of the archive there, to be asked below /v1/history",
    )
    add_settings(serve)
    add_questions(commands)
    gc = add_command(
        commands,
        "gc",
        "clean up the object pool: claim what nobody claims, delete what is too old or too much",
        "kvbm-catalog gc --dry-run --set pools.object.url=s3://bucket/kv --set gc.ttl_s=604800 --set "
        "gc.quota_bytes=1000000000000",
    )
    gc.description = """Clean up the object pool that pools.object names, as the only janitor of all clusters that
share it.

It claims the objects nobody claims, withdraws claims without an object, and withdraws, waits for gc.grace_s and deletes
what nobody has put or read for gc.ttl_s, and the least recently used above gc.quota_bytes. It runs beside `kvbm-catalog
serve`, on the same database and stream. What is not a block of kvbm's is never touched. While another janitor works it
says so and returns 0. Where the store ignores conditional puts, on which that rests, it does not work unless
gc.alone is set."""
    gc.add_argument(
        "--every",
        type=seconds,
        default=None,
        metavar="S",
        help="go on, with so many seconds between runs (gc.every_s)",
    )
    gc.add_argument("--dry-run", action="store_true", help="tell what would be done, and change nothing")
    gc.add_argument("--json", action="store_true", help="print reports as JSON, one a line")
    add_settings(gc)
    forget = add_command(
        commands,
        "forget",
        "have a running catalog forget an instance that is gone",
        "kvbm-catalog forget gpu-7 --set catalog.url=http://catalog:7700",
    )
    forget.description = """Have the catalog at catalog.url forget an instance that has stopped or is not heard, before
catalog.forget_s is over.

It leaves the catalog's memory, its database, metrics and answers. What it has put in object stores stays there and is
found, and files and the archive have its events. An instance that is alive is not forgotten. One that comes back is
asked for a snapshot."""
    forget.add_argument("instance", metavar="NAME", help="the instance's id")
    add_timeout(forget)
    add_json(forget)
    add_settings(forget)
    _add_token(commands)
    _add_erase(commands)
    add_completion(commands, "kvbm-catalog")
    return parser


def _add_erase(commands: Commands) -> None:
    erase = add_command(
        commands,
        "erase",
        "have everything of a tenant, of a namespace or of a prompt be gone, everywhere",
        "kvbm-catalog erase --tenant acme --set nats.url=nats://127.0.0.1:4222 --set "
        "catalog.database=sqlite:///catalog.db",
    )
    erase.description = """Have everything of a tenant, of a namespace or of a prompt be gone: from the tiers and
journals of all instances, from the object pool and its front, from the catalog's database, index, checkpoints and
archive.

It prints what is gone and what waits for whom, and returns 0 only when all is gone, else 1. Instances that are away
erase before they serve when they return, and so do catalogs: each that ever answered is waited for by its name.
To ask again for the same goes on with the same erasure until anybody is done with it. What is used anew afterwards is
new; take a tenant out of the engines' configuration first."""
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
    what.add_argument(
        "--forget-catalog",
        metavar="NAME",
        help="wait no more for this catalog, which will never run again; its files are yours to destroy",
    )
    erase.add_argument(
        "--hashes", metavar="FILE|HEX", default="", help="with --namespace: only these blocks, 32 hex digits each"
    )
    erase.add_argument(
        "--spare",
        metavar="ID",
        type=_namespace_id,
        action="append",
        default=[],
        help="this namespace, whose fields nobody has told, is another tenant's: do not wait for a word about it",
    )
    erase.add_argument(
        "--wait",
        type=_wait_seconds,
        default=60.0,
        metavar="S",
        help="wait so long for the others; 0: do not (default 60)",
    )
    erase.add_argument("--json", action="store_true", help="print the report as one line of JSON")
    add_settings(erase)


def _namespace_id(text: str) -> bytes:
    try:
        found = bytes.fromhex(text)
    except ValueError:
        found = b""
    if len(found) != 16:
        raise argparse.ArgumentTypeError(f"{text!r} is no namespace id; give its 32 hex digits")
    return found


def _small_number(text: str) -> int:
    return count_between(text, 1, 1 << 31)


def _wait_seconds(text: str) -> float:
    return 0.0 if text == "0" else seconds(text)


def _add_token(commands: Commands) -> None:
    token = add_command(
        commands,
        "token",
        "make a token that may ask the catalog: print it, and put its hash into the file of catalog.access",
        "kvbm-catalog token --access access.toml --name router-acme --role router --tenant acme --out "
        "router-acme.token",
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
    token.add_argument(
        "--out",
        type=Path,
        metavar="FILE",
        help="put the token into this file, its owner's alone and never another user's, instead of printing it",
    )
    add_json(token)
    add_settings(token)


def _make_token(arguments: argparse.Namespace) -> int:

    from kvbm.catalog.access.file import NewToken, add_token

    path = arguments.access or Path(settings_of(arguments).catalog.access)
    if not path.name:
        raise ConfigError("there is no file of callers; give --access FILE, or set catalog.access")
    if arguments.role == "router" and bool(arguments.tenant) == arguments.all_tenants:
        raise ConfigError("a router is of some tenants or of all; give --tenant T, or --all-tenants")
    if arguments.out is not None:
        check_out(arguments.out)
    wanted = NewToken(arguments.name, arguments.role, arguments.tenant or None, arguments.expires, arguments.replace)
    token = add_token(path, wanted, time.time())
    if arguments.out is not None:
        write_out(arguments.out, f"{token}\n")
    if arguments.json:
        made = {"access": str(path), "name": wanted.name} | ({} if arguments.out else {"token": token})
        say(as_json(made))
    elif arguments.out is None:
        say(token)
    say(f"kvbm-catalog: {path} has its hash; the token is not kept and not shown again", to=sys.stderr)
    return 0


def _erase(arguments: argparse.Namespace) -> int:
    from kvbm.assembly.erasure import run_erase
    from kvbm.erasure.command import EraseOptions, read_hashes
    from kvbm.erasure.report import Line, as_words
    from kvbm.erasure.report import as_json as report_as_json

    if arguments.hashes and arguments.namespace is None:
        raise ConfigError("--hashes needs --namespace: a hash is of one namespace")
    hashes = read_hashes(arguments.hashes) if arguments.hashes else b""
    options = EraseOptions(
        arguments.tenant,
        arguments.namespace,
        hashes,
        arguments.status,
        arguments.lift,
        arguments.wait,
        frozenset(arguments.spare),
        arguments.forget_catalog,
    )

    def tell(number: int, lines: Sequence[Line]) -> None:
        if options.lift is not None:
            say(f"erasure {number} is lifted")
        elif options.forget_catalog is not None:
            say(f"catalog {options.forget_catalog} is forgotten")
        else:
            say(*(report_as_json if arguments.json else as_words)(number, lines).split("\n"))

    return run_erase(settings_of(arguments), options, tell)


def _serve_catalog(arguments: argparse.Namespace) -> int:
    from kvbm.assembly import run_catalog
    from kvbm.assembly.catalog import catalog_takes
    from kvbm.assembly.erasure import catalog_companion
    from kvbm.assembly.reload import Reloads

    if arguments.archive is not None:
        arguments.sets.append(f"catalog.archive={arguments.archive}")
    if arguments.history is not None:
        arguments.sets.append(f"catalog.history={arguments.history}")
    HANG_UPS.install()  # as the program has done, where it was started by that
    settings = settings_of(arguments)
    return run_catalog(settings, catalog_companion, Reloads(settings, reads(arguments), catalog_takes, apply_logs))


def _collect_garbage(arguments: argparse.Namespace) -> int:
    from kvbm.assembly import run_gc
    from kvbm.assembly.reload import Reloads
    from kvbm.janitor.report import as_json as report_as_json
    from kvbm.janitor.report import as_words

    if arguments.every is not None:
        arguments.sets.append(f"gc.every_s={arguments.every}")
    HANG_UPS.install()
    settings = settings_of(arguments)
    reloads = None
    if settings.gc.every_s:
        reloads = Reloads(settings, reads(arguments), lambda *_: True, apply_logs)
    else:
        HANG_UPS.end_instead()
    words = report_as_json if arguments.json else as_words
    try:
        return run_gc(settings, arguments.dry_run, lambda report: say(*words(report).split("\n")), reloads=reloads)
    except JanitorBusyError as error:
        tell_error("kvbm-catalog", error)
        return 0


def _forget_instance(arguments: argparse.Namespace) -> int:
    settings = settings_of(arguments)
    if not settings.catalog.url:
        raise ConfigError("catalog.url is empty; name the running catalog, as --set catalog.url=http://127.0.0.1:7700")
    client = catalog_clients(settings, timeout_s=arguments.timeout)
    try:
        client.forget(InstanceId(arguments.instance))
    finally:
        client.close()
    said = as_json({"instance": arguments.instance, "forgotten": True}) if arguments.json else ""
    say(said or f"instance {arguments.instance} is forgotten")
    return 0
