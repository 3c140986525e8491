"""A run's report as a JSON file."""

from __future__ import annotations

from pathlib import Path

import msgspec

from kvbm.core.errors import ConfigError

_BEGINNING = b'{\n  "'


def check_report_path(path: Path | None) -> None:
    """Refuse before a long run what could not be written after it.

    Raises ConfigError: the folder is not there, or the file is another.
    """
    if path is None:
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
    try:
        path.write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=2) + b"\n")
    except OSError as error:
        raise ConfigError(f"--json {path} cannot be written ({error.strerror}); choose another file") from None
