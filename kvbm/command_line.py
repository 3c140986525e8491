"""What all commands of kvbm share: how arguments and settings are read, how a command ends, where remarks go."""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TextIO, TypeAlias, cast

import structlog

from kvbm.config import Settings, load_settings
from kvbm.core.errors import ConfigError, KvbmError
from kvbm.files import replace_file
from kvbm.telemetry.stderr_log import PlainFormatter, StandardError, for_terminals, stamp
from kvbm.terminal import say_error

Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"


def add_command(commands: Commands, name: str, words: str, example: str = "") -> argparse.ArgumentParser:
    return commands.add_parser(
        name,
        help=words,
        description=words[0].upper() + words[1:] + ".",
        epilog=example and f"example:\n  {example}",
        formatter_class=argparse.RawDescriptionHelpFormatter if example else argparse.HelpFormatter,
    )


def add_settings(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config", type=Path, metavar="FILE", help="settings as TOML")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        dest="sets",
        help="one setting, such as pools.host.slots=1024; may be given several times. `kvbm settings` lists them. It "
        "wins over the "
        "environment (KVBM_POOLS__HOST__SLOTS=1024), and that over the file",
    )


def run_command(work: Callable[[argparse.Namespace], int], arguments: argparse.Namespace, name: str) -> int:
    _end_as_interrupted()
    configure_logs(
        logging.WARNING if arguments.command in ("demo", "simulate", "bench", "doctor", "probe") else logging.INFO
    )
    try:
        code = work(arguments)
        sys.stdout.flush()
    except KvbmError as error:
        say_error(name, error)
        return 2
    except KeyboardInterrupt:
        say_error(name, "interrupted")
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


def settings_of(arguments: argparse.Namespace) -> Settings:
    return read_settings(arguments.config, arguments.sets)


def read_settings(config: Path | None, sets: Sequence[str]) -> Settings:
    flags = {}
    for pair in sets:
        key, equals, value = pair.partition("=")
        if not equals or not key:
            raise ConfigError(f"--set {pair!r} has no {'value' if key else 'key'}; write KEY=VALUE")
        flags[key] = value
    return load_settings(config, os.environ, flags)


def configure_logs(level: int = logging.INFO) -> None:
    """Log lines for people go to standard error; standard output carries answers only."""
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            stamp,
            *for_terminals(),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=structlog.PrintLoggerFactory(cast(TextIO, StandardError())),
        cache_logger_on_first_use=True,
    )
    if logging.lastResort is not None:
        logging.lastResort.setFormatter(PlainFormatter())


def seconds(text: str) -> float:
    """A time between runs; argparse names the option. Raises ArgumentTypeError."""
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds <= 1e6:
        raise argparse.ArgumentTypeError(f"{text!r} will not do; give seconds above 0, at most 1000000")
    return seconds


def check_out(path: Path) -> None:
    """Refuse to put a secret where another user would read it. Raises ConfigError: `--out` is that user's file."""
    with suppress(OSError):
        found = os.lstat(path)
        if (user := found.st_uid) != os.geteuid():
            raise ConfigError(
                f"--out {path} belongs to user {user}, who would read what is put there; run this as that user, or "
                "give a file that is "
                "not there and hand it over afterwards"
            )


def write_out(path: Path, text: str, is_secret: bool = True) -> None:
    """What a command has made, as the whole file `--out`, which belongs to who runs it, and to nobody else.

    Args:
        is_secret: where not, it belongs to whom it belonged, and is readable to whom it was.
    Raises: ConfigError: it is as it was.
    """
    try:
        replace_file(path, text.encode(), keeps_owner=not is_secret, keeps_mode=not is_secret)
    except OSError as error:
        raise ConfigError(f"--out {path} cannot be written ({error.strerror}); choose another place for it") from None


def count_between(text: str, least: int, most: int) -> int:
    if not text.isdecimal() or not least <= int(text) <= most:
        raise argparse.ArgumentTypeError(f"{text!r} will not do; give {least} to {most}")
    return int(text)
