"""A run's report as a JSON file."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import TextIO

import msgspec

from kvbm.core.errors import ConfigError

STANDARD_OUTPUT = Path("-")
_BEGINNING = b'{\n  "'


_outputs: list[TextIO] = []  # what standard output was before words went elsewhere


@contextmanager
def words_aside(path: Path | None) -> Iterator[None]:
    """While this is held, words go to standard error where standard output is for the report."""
    if path != STANDARD_OUTPUT:
        yield
        return
    _outputs.append(sys.stdout)
    try:
        with redirect_stdout(sys.stderr):
            yield
    finally:
        _outputs.pop()


def check_report_path(path: Path | None) -> None:
    """Refuse before a long run what could not be written after it.

    Raises ConfigError: the folder is not there, or the file is another.
    """
    if path is None or path == STANDARD_OUTPUT:
        return
    if path.is_dir() or not path.parent.is_dir():
        why = "it is a folder" if path.is_dir() else f"{path.parent} is no folder"
        raise ConfigError(f"--json {path} cannot be written ({why}); give a file in a folder that is there")
    if path.is_file() and not _is_report(path):
        raise ConfigError(
            f"--json {path} is there already and is no report: it stays as it is; give another file, or remove it"
        )


def _is_report(path: Path) -> bool:
    """Whether a file is empty, or begins as our reports do. Raises ConfigError: it cannot be read."""
    try:
        with path.open("rb") as file:
            head = file.read(len(_BEGINNING))
    except OSError as error:
        raise ConfigError(
            f"--json {path} cannot be read ({error.strerror}), and is there already; give another file"
        ) from None
    return head in (b"", _BEGINNING)


def write_report(path: Path | None, report: msgspec.Struct) -> None:
    """Write the report, indented; without a path, nothing. Raises ConfigError: the device refuses it."""
    if path is None:
        return
    data = msgspec.json.format(msgspec.json.encode(report), indent=2) + b"\n"
    if path == STANDARD_OUTPUT:
        out = _outputs[-1] if _outputs else sys.stdout
        out.write(data.decode())
        out.flush()
        return
    try:
        path.write_bytes(data)
    except OSError as error:
        raise ConfigError(f"--json {path} cannot be written ({error.strerror}); choose another file") from None
