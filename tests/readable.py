"""Replay on the readable specification, where a test does not say otherwise."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvbm.assembly.readable import readable_parts
from kvbm.core.backend import REFERENCE, Backend, NewFold
from kvbm.core.columns import decode_columns
from kvbm.core.fold import Residencies
from kvbm.manager.recovery import journal_recovery
from kvbm.replay import cli, state
from kvbm.replay import diff as differences
from kvbm.replay import export as exporting
from kvbm.replay import serve as serving
from kvbm.replay import verify as verifying
from kvbm.replay.export import DecodeColumns
from kvbm.replay.format import END, At

READABLE = readable_parts()._replace(readable=readable_parts)


def main(argv: Sequence[str], parts: cli.Parts = READABLE) -> int:
    """The `kvbm-replay` command."""
    return cli.main(argv, parts)


def verify(source: Any, backend: Backend = REFERENCE, fold: NewFold = Residencies, **more: Any) -> verifying.Verified:
    """`verify`."""
    return verifying.verify(source, backend, fold, **more)


def states_at(source: Any, at: At = END, **more: Any) -> state.States:
    """`states_at`."""
    return state.states_at(source, at, REFERENCE, Residencies, **more)


def diff(a: Any, b: Any, backend: Backend = REFERENCE, **more: Any) -> differences.Diffed:
    """`diff`."""
    return differences.diff(a, b, backend, **more)


def export(
    source: Any, target: Any, backend: Backend = REFERENCE, decode: DecodeColumns = decode_columns, **more: Any
) -> exporting.Exported:
    """`export`."""
    return exporting.export(source, target, backend, decode, **more)


def serve(source: Any, connect: Any, to: str, cluster: str, **more: Any) -> serving.ServedStream:
    """`serve`."""
    return serving.serve(source, connect, to, cluster, REFERENCE, **more)


def recover(
    journal: Any, tier: Any, slots: int, pool_id: str, fold: NewFold = Residencies, **more: Any
) -> journal_recovery.Kept:
    """`recover`."""
    return journal_recovery.recover(journal, tier, slots, pool_id, fold, **more)
