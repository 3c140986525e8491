"""Holes in a stream, and which of them damage explains: a damaged frame is one defect, not two."""

from __future__ import annotations

from typing import NamedTuple

from kvbm.replay.order import DamagedBytes, Missing, StreamKey


class Hole(NamedTuple):
    """A hole, until it is known whether damage explains it."""

    key: StreamKey
    step: Missing


def explained_by(holes: list[Hole], damage: list[DamagedBytes]) -> set[int]:
    """Which holes damage between the frames on both sides explains: first where its header names them, then the
    others.
    """
    explained: set[int] = set()
    used: set[int] = set()
    for by_name in (True, False):
        for index, hole in enumerate(holes):
            if index in explained:
                continue
            for damaged in damage:
                order = damaged.located.order
                is_free = order not in used or _is_several(damaged)
                if is_free and _is_between(hole, damaged) and (not by_name or _names(hole, damaged)):
                    explained.add(index)
                    used.add(order)
                    break
    return explained


def _is_between(hole: Hole, damaged: DamagedBytes) -> bool:
    located = damaged.located
    return located.group == hole.key.group and hole.step.since < located.order < hole.step.after.order


def _names(hole: Hole, damaged: DamagedBytes) -> bool:
    header = damaged.damage.header
    return (
        header is not None
        and header.instance == hole.key.instance
        and (header.epoch, header.first_offset) == (hole.step.epoch, hole.step.first)
    )


def _is_several(damaged: DamagedBytes) -> bool:
    """Whether the damage is larger than the frame it begins with, so that it may hide frames of several instances."""
    header = damaged.damage.header
    return header is None or damaged.damage.size > header.frame_bytes
