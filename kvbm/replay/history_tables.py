"""A history's rows as Arrow tables: stays, epochs of instances, namespaces, holes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from kvbm.core.columns import NO_CODE, NO_ROW, NO_SLOT
from kvbm.core.events import PoolStated
from kvbm.core.ids import HASH_BYTES, InstanceId, Namespace, NamespaceId, Tier
from kvbm.core.stays import BEGINS, CLAIMED, ENDS, LASTING, STAY_ROW
from kvbm.files import write_new
from kvbm.replay.stays import EventHole, Incarnation

DICTIONARIES = ["instance", "stream", "namespace", "tier", "kind", "begin", "source", "end", "target"]
LIFE_ROW = np.dtype([("stay", STAY_ROW), ("life", "<u4")])  # `life`: its number in `StayWords`
TIERS = tuple(tier.name for tier in Tier)
_MANY_WORDS = 64  # of a dictionary, which each row group has anew: from here on only those it uses
_INT64 = (1 << 63) - 1
_HEX = np.frombuffer("".join(f"{byte:02x}" for byte in range(256)).encode(), dtype=np.uint8).reshape(256, 2)
Life = tuple[InstanceId, str, int]  # instance, stream, life


class StayWords:
    """What numbers in rows stand for."""

    def __init__(self, lives: Sequence[Life], namespaces: list[NamespaceId], names: list[InstanceId]) -> None:
        self.instances = [str(name) for name, _, _ in lives]
        self.streams = [stream for _, stream, _ in lives]
        self.lives = np.array([life for _, _, life in lives] or [0], dtype=np.uint32)
        self.namespaces = [one.hex() for one in namespaces]
        self.sources = [*TIERS, *(str(name) for name in names)]


class Tables:
    """Rows → Arrow tables."""

    def __init__(self, arrow: Any) -> None:
        self._arrow = arrow
        words, time = arrow.dictionary(arrow.int32(), arrow.string()), arrow.timestamp("us")
        self._time = time
        self.stays_schema = arrow.schema(
            [
                arrow.field("block", arrow.string(), nullable=False),
                arrow.field("instance", words, nullable=False),
                arrow.field("stream", words, nullable=False),
                arrow.field("life", arrow.uint32(), nullable=False),
                arrow.field("epoch", arrow.uint64(), nullable=False),
                arrow.field("tier", words, nullable=False),
                arrow.field("kind", words, nullable=False),
                arrow.field("began", time, nullable=False),
                arrow.field("begin", words),
                arrow.field("source", words),
                arrow.field("ended", time),
                arrow.field("end", words),
                arrow.field("target", words),
                arrow.field("namespace", words, nullable=False),
                arrow.field("position", arrow.uint32()),
                arrow.field("slot", arrow.uint32()),
                arrow.field("begin_offset", arrow.uint64(), nullable=False),
                arrow.field("end_epoch", arrow.uint64()),
                arrow.field("end_offset", arrow.uint64()),
            ]
        )

    def stay_writer(self, path: Path) -> Any:
        """A writer of a new file for `stays`. Raises OSError."""
        write_new(path, b"")  # its owner's alone
        return self._arrow.parquet.ParquetWriter(
            path, self.stays_schema, compression="zstd", compression_level=1, use_dictionary=DICTIONARIES
        )

    def stays(self, rows: np.ndarray, words: StayWords) -> Any:
        """Of residencies and claims."""
        arrow, stay = self._arrow, rows["stay"]
        lasts, is_end = stay["end"] == LASTING, stay["begin"] == NO_CODE
        is_claim = stay["end"] == CLAIMED
        kinds = np.where(is_end, 2, np.where(is_claim, 1, 0))
        from_tier = stay["source"] != NO_CODE
        sources = np.where(from_tier, stay["source"], len(TIERS) + stay["from"].astype(np.int64))
        has_source = from_tier | (stay["from"] != NO_ROW)
        columns = [
            self._hex(stay["hash"]),
            self._words(rows["life"], words.instances),
            self._words(rows["life"], words.streams),
            arrow.array(words.lives[rows["life"]]),
            arrow.array(stay["epoch"]),
            self._words(stay["tier"], TIERS),
            self._words(kinds, ("residency", "claim", "claim_end")),
            self._times(stay["begin_ns"]),
            self._words(stay["begin"], BEGINS, ~is_end),
            self._words(sources, words.sources, has_source),
            self._times(stay["end_ns"], ~lasts & ~is_claim),
            self._words(stay["end"], ENDS, ~lasts & ~is_claim),
            self._words(stay["target"], TIERS, stay["target"] != NO_CODE),
            self._words(stay["namespace"], words.namespaces),
            arrow.array(stay["position"], mask=stay["position"] == NO_ROW),
            arrow.array(stay["slot"], mask=stay["slot"] == NO_SLOT),
            arrow.array(stay["begin_offset"]),
            arrow.array(stay["end_epoch"], mask=lasts | is_claim),
            arrow.array(stay["end_offset"], mask=lasts | is_claim),
        ]
        return arrow.Table.from_arrays(columns, schema=self.stays_schema)

    def instances(self, rows: Sequence[Incarnation]) -> Any:
        """Of epochs."""
        arrow = self._arrow
        text, number, time = arrow.string(), arrow.uint64(), self._time
        size = arrow.int64()
        pool = arrow.struct([("tier", text), ("slots", size), ("block_bytes", size), ("name", text)])
        return self._listed(
            rows,
            [
                ("instance", text, lambda one: str(one.instance)),
                ("stream", text, lambda one: one.group),
                ("life", arrow.uint32(), lambda one: one.life),
                ("epoch", number, lambda one: one.epoch),
                ("began", time, lambda one: one.began_ns // 1000),
                ("last_frame", time, lambda one: one.ended_ns // 1000),
                ("stopped", text, lambda one: one.stopped or None),
                ("engine", text, lambda one: one.engine),
                ("version", text, lambda one: one.version),
                ("topology", arrow.list_(text), lambda one: list(one.topology)),
                ("pools", arrow.list_(pool), lambda one: [_pool_row(pool) for pool in one.pools]),
            ],
        )

    def namespaces(self, ids: Sequence[NamespaceId], fields: dict[NamespaceId, Namespace]) -> Any:
        """Of namespaces; fields that no start has told are null."""
        arrow = self._arrow
        text = arrow.string()
        columns: list[tuple[str, Any, Callable[[NamespaceId], object]]] = [("namespace", text, lambda one: one.hex())]
        for name in Namespace.__struct_fields__:
            kind = text if Namespace.__annotations__[name] == "str" else arrow.int64()
            columns.append((name, kind, partial(_field_of, fields, name)))
        return self._listed(ids, columns)

    def holes(self, rows: Sequence[EventHole]) -> Any:
        """Of holes."""
        text, number, time = self._arrow.string(), self._arrow.uint64(), self._time
        return self._listed(
            rows,
            [
                ("instance", text, lambda one: str(one.instance)),
                ("epoch", number, lambda one: one.epoch),
                ("first_offset", number, lambda one: one.first),
                ("next_offset", number, lambda one: one.next),
                ("since", time, lambda one: one.since_ns // 1000 or None),
                ("until", time, lambda one: one.until_ns // 1000),
                ("stream", text, lambda one: one.group),
            ],
        )

    def _listed(self, rows: Sequence[Any], columns: Sequence[tuple[str, Any, Callable[[Any], object]]]) -> Any:
        arrow = self._arrow
        return arrow.table({name: arrow.array([get(row) for row in rows], kind) for name, kind, get in columns})

    def _words(self, codes: np.ndarray, words: Sequence[str], there: np.ndarray | None = None) -> Any:
        arrow = self._arrow
        indices = codes.astype(np.int32) if there is None else np.where(there, codes, 0).astype(np.int32)
        mask = None if there is None else ~there
        if len(words) >= _MANY_WORDS:
            used, places = np.unique(indices, return_inverse=True)
            words, indices = [words[at] for at in used], places.astype(np.int32)
        return arrow.DictionaryArray.from_arrays(
            arrow.array(indices, mask=mask), arrow.array(list(words), arrow.string())
        )

    def _times(self, wall_time_ns: np.ndarray, there: np.ndarray | None = None) -> Any:
        arrow = self._arrow
        micros = (wall_time_ns // 1000).astype(np.int64)
        return arrow.array(micros, mask=None if there is None else ~there).cast(self._time)

    def _hex(self, hashes: np.ndarray) -> Any:
        """(n, 16) uint8 → n texts of 32 digits."""
        arrow, width = self._arrow, 2 * HASH_BYTES
        text = np.ascontiguousarray(_HEX[hashes]).reshape(-1)
        ends = np.arange(len(hashes) + 1, dtype=np.int32) * width
        return arrow.StringArray.from_buffers(len(hashes), arrow.py_buffer(ends), arrow.py_buffer(text))


def _pool_row(pool: PoolStated) -> dict[str, object]:
    """A start may say anything at all of its sizes."""
    slots, block_bytes = (max(-_INT64, min(size, _INT64)) for size in (pool.slots, pool.block_bytes))
    return {"tier": pool.tier.name, "slots": slots, "block_bytes": block_bytes, "name": pool.name}


def _field_of(fields: dict[NamespaceId, Namespace], name: str, namespace: NamespaceId) -> object:
    value = getattr(fields.get(namespace), name, None)
    return max(-_INT64, min(value, _INT64)) if isinstance(value, int) else value
