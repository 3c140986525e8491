"""Scripts with which shells complete the words of a command, made of its parser."""

from __future__ import annotations

import argparse
from pathlib import Path

import shtab

from kvbm.core.errors import ConfigError

SHELLS = ("bash", "zsh", "fish")


def completion(parser: argparse.ArgumentParser, shell: str) -> str:
    """The script. Raises ConfigError: there is none for this shell."""
    if shell not in SHELLS or shell not in shtab.SUPPORTED_SHELLS:
        raise ConfigError(f"there is no completion for {shell!r}; give one of {', '.join(SHELLS)}")
    _name_files(parser)
    return str(shtab.complete(parser, shell=shell))


def _name_files(parser: argparse.ArgumentParser) -> None:
    """Options that take files and folders are completed by those there are."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for one in action.choices.values():
                _name_files(one)
        elif action.type is Path or action.metavar in ("FILE", "SOURCE", "DIR", "FOLDER", "PROMPT"):
            what = shtab.DIRECTORY if action.metavar in ("DIR", "FOLDER") else shtab.FILE
            action.complete = what  # type: ignore[attr-defined]
