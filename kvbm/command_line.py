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
from types import TracebackType
from typing import NoReturn, TypeAlias

from kvbm.assembly.logs import log_style
from kvbm.config import ENVIRONMENT_PREFIX, LogSettings, Settings, load_settings
from kvbm.core.errors import ConfigError, KvbmError
from kvbm.files import replace_file
from kvbm.progress import allow_bars
from kvbm.reports import STANDARD_OUTPUT
from kvbm.safe_log import SafeLog
from kvbm.shells import SHELLS, completion
from kvbm.telemetry.stderr_log import configure, configure_libraries, is_json
from kvbm.terminal import say_error, say_text

log = SafeLog()

Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"


def add_command(commands: Commands, name: str, words: str, example: str = "") -> argparse.ArgumentParser:
    made = commands.add_parser(
        name,
        help=words,
        description=words[0].upper() + words[1:] + ".",
        epilog=example and f"example:\n  {example}",
        formatter_class=argparse.RawDescriptionHelpFormatter if example else argparse.HelpFormatter,
    )
    made.add_argument("--quiet", "-q", action="store_true", help="no progress bar on the terminal")
    return made


def add_json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print the answer as one line of JSON")


def add_report(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--json",
        type=Path,
        nargs="?",
        const=STANDARD_OUTPUT,
        metavar="FILE",
        help="the report as JSON to a file, or to standard output; words go to standard error then",
    )


def add_completion(commands: Commands, program: str) -> None:
    made = add_command(
        commands,
        "completion",
        "print a script with which a shell completes this program's commands and options",
        f'eval "$({program} completion bash)"',
    )
    made.add_argument("shell", choices=SHELLS, help="the shell that reads it")


def say_completion(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> int:
    """Print the script of `completion`."""
    say_text(completion(parser, arguments.shell))
    return 0


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
    asked = _asked_logs(getattr(arguments, "sets", ()))
    configure_logs(
        logging.WARNING if arguments.command in ("demo", "simulate", "bench", "doctor", "probe") else logging.INFO,
        asked,
    )
    if is_json():
        _tell_bugs_in_json()
    allow_bars(not getattr(arguments, "quiet", False) and not getattr(arguments, "json", None) and not is_json())
    try:
        code = work(arguments)
        sys.stdout.flush()
    except KvbmError as error:
        tell_error(name, error)
        return 2
    except KeyboardInterrupt:
        tell_error(name, "interrupted")
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
    settings = read_settings(arguments.config, arguments.sets)
    if settings.log != LogSettings():
        apply_logs(settings)
        if is_json():
            _tell_bugs_in_json()
            allow_bars(False)
    return settings


def reads(arguments: argparse.Namespace) -> Callable[[], Settings]:
    """Reads the settings again, from the same places. Raises ConfigError."""
    return lambda: read_settings(arguments.config, arguments.sets)


def read_settings(config: Path | None, sets: Sequence[str]) -> Settings:
    flags = {}
    for pair in sets:
        key, equals, value = pair.partition("=")
        if not equals or not key:
            raise ConfigError(f"--set {pair!r} has no {'value' if key else 'key'}; write KEY=VALUE")
        flags[key] = value
    return load_settings(config, os.environ, flags)


def configure_logs(level: int = logging.INFO, settings: LogSettings | None = None) -> None:
    """Log lines go to standard error; standard output carries answers only.

    Args:
        level: where the settings, or their absence, leave it to the command.
    """
    _auto_levels[:] = [level]
    style = log_style(settings or LogSettings(), level)
    configure(style)
    configure_libraries(style)


def apply_logs(settings: Settings) -> None:
    """Write log lines as these settings have it, from now on."""
    configure_logs(_auto_levels[0], settings.log)


def start_logs() -> None:
    """Write log lines as the environment has it. Raises ConfigError."""
    configure_logs(logging.INFO, load_settings(None, _log_variables(), {}).log)


_auto_levels = [logging.INFO]  # the one that counts


def _log_variables() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name.startswith(f"{ENVIRONMENT_PREFIX}LOG__")}


def _asked_logs(sets: Sequence[str]) -> LogSettings:
    """What environment and flags say of logs, before all settings are read: as those would be wrong in the form asked
    for.
    """
    variables = _log_variables()
    flags = dict(pair.partition("=")[::2] for pair in sets if pair.startswith("log."))
    try:
        return load_settings(None, variables, flags).log
    except ConfigError:
        is_json = flags.get("log.format", variables.get(f"{ENVIRONMENT_PREFIX}LOG__FORMAT")) == "json"
        return LogSettings(format="json" if is_json else "text")


def tell_error(name: str, error: object) -> None:
    """Say why a command ends, in the form in which its log is written."""
    if is_json():
        log.error("command.failed", program=name, why=str(error))
    else:
        say_error(name, error)


def _tell_bugs_in_json() -> None:
    """What ends a thread or the process is a line too."""

    def told(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        log.error("command.crashed", why=str(error), exc_info=(kind, error, trace))

    sys.excepthook = told
    threading.excepthook = lambda found: told(found.exc_type, found.exc_value or found.exc_type(), found.exc_traceback)


class CommandParser(argparse.ArgumentParser):
    """Says what is wrong with arguments in the form in which the log is asked for."""

    def error(self, message: str) -> NoReturn:
        """See `argparse.ArgumentParser`."""
        sets = [
            after if word == "--set" else word.removeprefix("--set=")
            for word, after in zip(sys.argv, [*sys.argv[1:], ""], strict=True)
            if word.startswith("--set")
        ]
        asked = _asked_logs(sets)
        if asked.format == "json":
            configure_logs(logging.INFO, asked)
            log.error("command.misused", program=self.prog, why=message, usage=" ".join(self.format_usage().split()))
            self.exit(2)
        super().error(message)


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
