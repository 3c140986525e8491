"""`kvbm …`, `kvbm-catalog …` and `kvbm-replay …`: arguments in, words out."""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import structlog

from kvbm.assembly import NATIVE, kvbm_version
from kvbm.config import KNOWN_KEYS, Settings, load_settings
from kvbm.core.errors import ConfigError, KvbmError


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
        epilog="Also: kvbm catalog … (kvbm-catalog), kvbm replay … (kvbm-replay).",
    )
    parser.add_argument("--version", action="version", version=f"kvbm {kvbm_version()}")
    commands = parser.add_subparsers(dest="command", required=True)
    _add_demo(commands)
    _add_simulate(commands)
    _add_engine(commands)
    commands.add_parser("settings", help="print every setting's name")
    return _run(_dispatch, parser.parse_args(arguments))


def catalog_main(argv: Sequence[str] | None = None) -> int:
    """The `kvbm-catalog` command."""
    parser = argparse.ArgumentParser(
        prog="kvbm-catalog", description="The cluster-wide view of which block lies where.",
        epilog="example: kvbm-catalog serve --set nats.url=nats://127.0.0.1:4222 --set catalog.listen=127.0.0.1:7700",
    )  # fmt: skip
    commands = parser.add_subparsers(dest="command", required=True)
    serve = commands.add_parser("serve", help="follow the stream and answer over HTTP until stopped")
    _add_settings(serve)
    return _run(_serve_catalog, parser.parse_args(argv))


def replay_main(argv: Sequence[str] | None = None) -> int:
    """The `kvbm-replay` command."""
    from kvbm.replay.cli import main as replay

    _configure_logs()
    return replay(list(sys.argv[1:] if argv is None else argv), NATIVE)


def _add_demo(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    demo = commands.add_parser("demo", help="the whole line once, on embedded defaults; fails when any check fails")
    demo.add_argument("--json", type=Path, metavar="FILE", help="write the report as JSON")
    demo.add_argument("--keep", type=Path, metavar="FOLDER", help="keep journals, pools and logs in this folder")


def _add_simulate(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    simulate = commands.add_parser(
        "simulate",
        help="drive N managers with a trace: synthetic bytes, real events, a real catalog that routes",
        epilog="example: kvbm simulate --trace conversation_trace.jsonl --instances 4 --pools hbm=12500 --json sim.json",
    )
    simulate.add_argument(
        "--trace", type=Path, metavar="FILE", help="Mooncake's JSONL; without it, a generated workload"
    )
    simulate.add_argument("--requests", type=int, default=2000, help="of the generated workload (default 2000)")
    simulate.add_argument("--seed", type=int, default=1, help="of the generated workload and of random routing")
    simulate.add_argument("--instances", type=int, default=4, help="how many managers (default 4)")
    simulate.add_argument(
        "--pools",
        default="hbm=12500",
        help='slots of each instance, such as "hbm=4000,host=8500", or "unbounded" (default hbm=12500)',
    )
    simulate.add_argument("--json", type=Path, metavar="FILE", help="write the report as JSON")


def _add_engine(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    engine = commands.add_parser("engine", help="the reference engine as a process: JSON lines in and out")
    engine.add_argument("--threads", type=int, default=1, help="torch threads (default 1)")
    engine.add_argument(
        "--weights", default="", metavar="FILE", help="weights to load; without it, random ones from a seed"
    )
    _add_settings(engine)


def _add_settings(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config", type=Path, metavar="FILE", help="settings as TOML")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", dest="sets",
        help="one setting, such as pools.host.slots=1024; `kvbm settings` lists them; KVBM_POOLS__HOST__SLOTS works too",
    )  # fmt: skip


def _run(work: Callable[[argparse.Namespace], int], arguments: argparse.Namespace) -> int:
    _configure_logs(logging.WARNING if arguments.command in ("demo", "simulate") else logging.INFO)
    try:
        return work(arguments)
    except KvbmError as error:
        print(f"kvbm: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("kvbm: interrupted", file=sys.stderr)
        return 130


def _dispatch(arguments: argparse.Namespace) -> int:
    match arguments.command:
        case "demo":
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
        case "engine":
            from kvbm.engines.reference.worker import WorkerSettings
            from kvbm.engines.reference.worker import main as serve

            worker = WorkerSettings(threads=arguments.threads, weights_path=arguments.weights)
            return serve(_settings(arguments), worker)
        case _:
            print("\n".join(KNOWN_KEYS))
            return 0


def _serve_catalog(arguments: argparse.Namespace) -> int:
    from kvbm.assembly import run_catalog

    return run_catalog(_settings(arguments))


def _settings(arguments: argparse.Namespace) -> Settings:
    flags = {}
    for pair in arguments.sets:
        key, equals, value = pair.partition("=")
        if not equals:
            raise ConfigError(f"--set {pair!r} has no value; write KEY=VALUE")
        flags[key] = value
    return load_settings(arguments.config, os.environ, flags)


def _configure_logs(level: int = logging.INFO) -> None:
    """Remarks for people go to standard error; standard output carries answers only."""
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty()),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        cache_logger_on_first_use=True,
    )


if __name__ == "__main__":
    raise SystemExit(main())
