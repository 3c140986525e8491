"""An open history → what `/v1/history` answers. `history_reader.py` runs it in a process of its own."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np

from kvbm.core import history_answers as answers
from kvbm.core.errors import ConfigError
from kvbm.core.history_answers import MOST_LISTED, MOST_PROMPT_BLOCKS, MOST_STEPS, HistoryHole
from kvbm.core.ids import HASH_BYTES
from kvbm.replay.format import counted, parse_at
from kvbm.replay.history_moment import HeldCount, Moments
from kvbm.replay.history_prompts import HeldAt, hottest_of, packed_hex, prompt_at, run_of
from kvbm.replay.history_tables import TIERS
from kvbm.replay.questions import HoleRow, block_lives, hole_rows
from kvbm.replay.questions import changes as changes_of
from kvbm.replay.sql import HistoryDatabase

_BEGIN = datetime(1970, 1, 1)  # noqa: DTZ001 - the times of a history are in UTC, without a zone
_MICROSECOND = timedelta(microseconds=1)
_LEAST_DIGITS, _MOST_DIGITS, _MOST_BLOCKS = 8, 2 * HASH_BYTES, 20
_NO_FIELDS = (None, None, None)
_CLUSTERS = "OBJECT"  # pools of this tier are the cluster's: their blocks are claims, and no instance's


class AnswerError(Exception):
    """A question that has no answer: status as of HTTP, and what its body says."""

    def __init__(self, status: int, code: str, message: str, what_to_do: str) -> None:
        super().__init__(message)
        self.status, self.code, self.what_to_do = status, code, what_to_do


class _Epoch(NamedTuple):
    """A row of `instances`, as it is kept: few, and asked at each step of a slider."""

    instance: str
    stream: str
    life: int
    epoch: int
    began: datetime
    last_frame: datetime
    stopped: str | None
    engine: str
    version: str
    topology: list[str]
    pools: dict[str, dict[str, Any]]


class HistoryAnswers:
    """Answers of one history. One thread at a time; another may `cancel`.

    Args:
        folder: of the history.
    Raises: SourceError: it is damaged. MissingExtraError.
    """

    def __init__(self, folder: Path, memory_bytes: int, threads: int | None = None) -> None:
        self.database = HistoryDatabase(folder, memory_bytes, threads)
        self.manifest = self.database.manifest
        try:
            self._moments = Moments(folder, self.manifest)
            self._holes = hole_rows(self.database)
            ask = self.database.ask
            fields = ask("SELECT namespace, model, tenant, block_tokens FROM namespaces").rows
            self._fields = {row[0]: row[1:] for row in fields}
            self._epochs: dict[tuple[str, str], list[_Epoch]] = defaultdict(list)
            for row in ask(
                "SELECT instance, stream, life, epoch, began, last_frame, stopped, engine, version, topology, pools "
                "FROM instances ORDER BY instance, stream, life, epoch"
            ).rows:
                pools = {pool["tier"]: pool for pool in reversed(row[10])}
                self._epochs[row[0], row[1]].append(_Epoch._make([*row[:9], row[9] or [], pools]))
        except BaseException:
            self.database.close()
            raise
        self._until = self.manifest.until or None

    def close(self) -> None:
        """Give back all of it."""
        self.database.close()

    # -- questions ----------------------------------------------------------------------------------------------------

    def status(self) -> answers.HistoryStatus:
        """How far it goes; what is known of the archive is the caller's to add."""
        history = self.manifest
        return answers.HistoryStatus(
            ready=True,
            begin=history.begin or None,
            until=self._until,
            built=history.built or None,
            stays=history.stays,
            lasting=history.lasting,
            epochs=history.instances,
            bytes=history.bytes,
            instances=sorted({instance for instance, _ in self._epochs})[:MOST_LISTED],
            notes=history.notes[:MOST_LISTED],
            holes=self.holes(),
        )

    def overview(self, at: str | None = None) -> answers.HistoryOverview:
        """The cluster at a moment."""
        moment = self._moment("at", at)
        held = list(self._moments.held_at(moment))
        instances = self._instances(moment, held)
        return answers.HistoryOverview(
            at=_text(moment),
            begin=self.manifest.begin or None,
            until=self._until,
            instances=instances,
            tiers=_tier_sums(instances),
            tenants=self._tenants(held),
            holes=self.holes(lambda hole: hole.is_open(moment)),
        )

    def tenants(self, at: str | None = None) -> answers.HistoryTenants:
        """Whose blocks were held."""
        moment = self._moment("at", at)
        return answers.HistoryTenants(
            at=_text(moment),
            until=self._until,
            tenants=self._tenants(list(self._moments.held_at(moment))),
            holes=self.holes(lambda hole: hole.is_open(moment)),
        )

    def instance(self, name: str, at: str | None = None) -> answers.HistoryOfInstance:
        """One instance at a moment, and all its epochs."""
        moment = self._moment("at", at)
        epochs = [one for (instance, _), rows in self._epochs.items() if instance == name for one in rows]
        if not epochs:
            raise AnswerError(
                404, "instance_unknown", f"the history has no frame of instance {name!r}", "see /v1/history for names"
            )
        held = [one for one in self._moments.held_at(moment) if one.instance == name]
        return answers.HistoryOfInstance(
            at=_text(moment),
            until=self._until,
            instances=self._instances(moment, held, name),
            epochs=[
                answers.HistoryEpoch(
                    stream=one.stream,
                    life=one.life,
                    epoch=one.epoch,
                    began=_text(one.began),
                    last_frame=_text(one.last_frame),
                    stopped=one.stopped,
                    engine=one.engine,
                    version=one.version,
                )
                for one in sorted(epochs, key=lambda one: one.began)[-MOST_LISTED:]
            ],
            namespaces=self._namespaces(held),
            holes=self.holes(lambda hole: hole.instance == name),
        )

    def pools(self, at: str | None = None) -> answers.HistoryPools:
        """What pools of the cluster had."""
        moment = self._moment("at", at)
        rows = self.database.ask(
            f"SELECT pool, tier, count(*) AS blocks FROM claimed_objects_at(?) GROUP BY ALL "
            f"ORDER BY blocks DESC, pool, tier LIMIT {MOST_LISTED}",
            [moment],
        ).rows
        sizes = {
            pool["name"]: pool["block_bytes"]
            for epochs in self._epochs.values()
            for one in epochs
            for pool in one.pools.values()
            if one.began <= moment
        }
        return answers.HistoryPools(
            at=_text(moment),
            until=self._until,
            pools=[
                answers.HistoryPool(
                    pool=pool, tier=tier, blocks=blocks, bytes=blocks * sizes[pool] if sizes.get(pool) else None
                )
                for pool, tier, blocks in rows
            ],
            holes=self.holes(lambda hole: hole.is_open(moment)),
        )

    def prompt(self, namespace: str, hashes: str, at: str | None = None, limit: int = 8) -> answers.HistoryPrompt:
        """Who held how much of a prompt.

        Args:
            namespace: its id. hashes: of the prompt's full blocks, as one text.
            limit: name so many instances.
        """
        moment = self._moment("at", at)
        blocks = [hashes[place : place + _MOST_DIGITS].lower() for place in range(0, len(hashes), _MOST_DIGITS)]
        if not 1 <= len(blocks) <= MOST_PROMPT_BLOCKS:
            why = f"the prompt has {counted(len(blocks), 'full block')}"
            raise AnswerError(422, "bad_prompt", why, f"give 1 to {MOST_PROMPT_BLOCKS:,}, from the first on")
        found = prompt_at(self.database, moment, namespace.lower(), blocks, limit)
        block_tokens = self._fields.get(namespace.lower(), _NO_FIELDS)[2]
        return answers.HistoryPrompt(
            at=_text(moment),
            until=self._until,
            namespace=namespace.lower(),
            block_tokens=block_tokens if block_tokens and block_tokens > 0 else None,
            blocks=len(blocks),
            holders=[
                _holder(self._epochs.get((one.instance, one.stream), []), one, moment, found.pools)
                for one in found.holders
            ],
            more=found.all_holders - len(found.holders),
            pools=[_blocks_held(name, bits) for name, bits in found.pools.items()],
            holes=self.holes(lambda hole: hole.is_open(moment)),
        )

    def timeline(self, since: str | None = None, to: str | None = None, steps: int = 100) -> answers.HistoryTimeline:
        """A stretch of time in equal parts, over all of it by default."""
        begin = self._moment("from", since or self.manifest.begin or None)
        end = self._moment("to", to, begin) if to is not None else self._behind_all()
        if not 1 <= steps <= MOST_STEPS:
            raise AnswerError(422, "bad_time", f"steps {steps} will not do", f"give 1 to {MOST_STEPS}")
        self._check_stretch(begin, end)
        length_us = (end - begin) // _MICROSECOND
        moments = [begin + timedelta(microseconds=length_us * (number + 1) // steps) for number in range(steps)]
        gained, lost, by_tier = self._sums(begin, end, moments)
        starts, stops = self._starts(begin, end)
        held = self._moments.by_tier(max(begin, _BEGIN) - _MICROSECOND)  # no frame is older than that
        told = []
        for number, moment in enumerate(moments):
            held = {tier: held[tier] + int(by_tier[place, number]) for place, tier in enumerate(TIERS)}
            told.append(
                answers.HistoryStep(
                    time=_text(moment),
                    gained=int(gained[number]),
                    lost=int(lost[number]),
                    blocks={tier: blocks for tier, blocks in held.items() if blocks},
                )
            )
        return answers.HistoryTimeline(
            begin=_text(begin),
            to=_text(end),
            until=self._until,
            steps=told,
            starts=starts,
            stops=stops,
            holes=self.holes(lambda hole: _meets(hole, begin, end)),
        )

    def changes(
        self, since: str | None = None, to: str | None = None, instance: str | None = None
    ) -> answers.HistoryChanges:
        """What changed in a stretch of time."""
        if since is None:
            raise AnswerError(422, "bad_time", "from is missing", "give from=TIME, and to=TIME for another end")
        begin = self._moment("from", since)
        end = self._moment("to", to, begin) if to is not None else self._behind_all()
        self._check_stretch(begin, end)
        found = changes_of(self.database, begin, end, instance)
        starts, stops = self._starts(begin, end, instance)
        return answers.HistoryChanges(
            since=_text(begin),
            to=_text(end),
            until=self._until,
            changes=[
                answers.HistoryChange(
                    instance=one.instance, tier=one.tier, event=one.event, cause=one.cause, blocks=one.blocks
                )
                for one in found.changes
            ],
            starts=starts,
            stops=stops,
            holes=self.holes(lambda hole: _meets(hole, begin, end) and instance in (None, hole.instance)),
        )

    def block(self, digits: str, at: str | None = None) -> answers.HistoryBlocks:
        """The life of each block whose hash begins so."""
        moment = self._moment("at", at)
        digits = digits.lower()
        if not re.fullmatch(f"[0-9a-f]{{{_LEAST_DIGITS},{_MOST_DIGITS}}}", digits):
            raise AnswerError(
                422, "bad_hash", f"{digits[:80]!r} is no hash", f"give {_LEAST_DIGITS} to {_MOST_DIGITS} hex digits"
            )
        found = block_lives(self.database, digits, _MOST_BLOCKS, latest=MOST_LISTED)
        if not found:
            why = f"no event names a block that begins with {digits}"
            if missing := sum(one.next_offset - one.first_offset for one in self._holes):
                why += f"; missing: {counted(missing, 'event')}, which may"
            raise AnswerError(404, "block_unknown", why, "see whether it is older")
        if len(found) > _MOST_BLOCKS:
            raise AnswerError(422, "too_many_blocks", f"many blocks begin with {digits}", "give more digits")
        blocks, at_instances, is_more = [], set[str](), False
        for life in found:
            at_instances |= {one.instance for one in life.events}
            if len(life.events) > MOST_LISTED:
                is_more = True
                asked = "SELECT DISTINCT instance FROM block_life(?) WHERE namespace = ?"
                at_instances |= {row[0] for row in self.database.ask(asked, [life.block, life.namespace]).rows}
            blocks.append(
                answers.HistoryBlock(
                    block=life.block,
                    namespace=life.namespace,
                    model=life.model,
                    tenant=life.tenant,
                    held=[
                        answers.HistoryHolder(instance=row[0], stream=row[1], tier=row[2], since=_text(row[3]))
                        for row in self.database.ask(
                            "SELECT instance, stream, tier, began FROM residencies_at(?) WHERE block = ? "
                            "AND namespace = ? ORDER BY ALL",
                            [moment, life.block, life.namespace],
                        ).rows
                    ],
                    events=[
                        answers.HistoryEvent(**msgspec.structs.asdict(one), sentence=one.sentence())
                        for one in life.events[-MOST_LISTED:]
                    ],
                )
            )
        return answers.HistoryBlocks(
            at=_text(moment),
            until=self._until,
            blocks=blocks,
            more=is_more,
            holes=self.holes(lambda hole: hole.instance in at_instances),
        )

    def holes(self, touches: Callable[[HoleRow], bool] = lambda hole: True) -> list[HistoryHole]:
        """Those that touch an answer, the latest of them."""
        return [
            HistoryHole(
                instance=one.instance,
                stream=one.stream,
                epoch=one.epoch,
                first_offset=one.first_offset,
                next_offset=one.next_offset,
                events=one.next_offset - one.first_offset,
                since=None if one.since is None else _text(one.since),
                until=_text(one.until),
            )
            for one in [hole for hole in self._holes if touches(hole)][-MOST_LISTED:]
        ]

    # -- inside -------------------------------------------------------------------------------------------------------

    def _moment(self, name: str, text: str | None, after: datetime | None = None) -> datetime:
        """A time, in UTC without a zone; the end of the history for None. A time of day is the last one the history
        reaches, or the first one after another time. Raises AnswerError.
        """
        end = self._behind_all()
        if text is None:
            return end - _MICROSECOND
        try:
            at = parse_at(text, name)
            if after is not None:
                at = at.first_after((after - _BEGIN) // _MICROSECOND)
            at = at.on_last_day((end - _BEGIN) // _MICROSECOND)
            if at.time_us is not None:
                return _BEGIN + timedelta(microseconds=at.time_us)
            why = f"{name} {text[:80]!r} is an offset, which is of one instance"
        except (ConfigError, OverflowError):
            why = f"{name} {text[:80]!r} is no time"
        raise AnswerError(422, "bad_time", why, "give ISO 8601, Unix seconds or a clock time such as 12:00 (UTC)")

    def _behind_all(self) -> datetime:
        last = datetime.fromisoformat(self._until).replace(tzinfo=None) if self._until else _BEGIN
        return last + _MICROSECOND

    def _check_stretch(self, since: datetime, to: datetime) -> None:
        if since >= to:
            raise AnswerError(
                422, "bad_time", f"from {_text(since)} does not lie before to {_text(to)}", "give an earlier from"
            )

    def _instances(
        self, moment: datetime, held: Iterable[HeldCount], only: str | None = None
    ) -> list[answers.HistoryInstance]:
        by_stream: dict[tuple[str, str], dict[str, int]] = defaultdict(lambda: defaultdict(int))
        for one in held:
            by_stream[one.instance, one.stream][one.tier] += one.blocks
        told = []
        for (name, stream), epochs in self._epochs.items():
            if only in (None, name) and (found := _at(epochs, moment)) is not None:
                told.append(_instance(*found, by_stream.get((name, stream), {}), moment))
        return told

    def _tenants(self, held: Iterable[HeldCount]) -> list[answers.HistoryTenant]:
        groups: dict[tuple[str | None, str], list[HeldCount]] = defaultdict(list)
        for one in held:
            groups[self._fields.get(one.namespace, _NO_FIELDS)[1], one.tier].append(one)
        told = [
            answers.HistoryTenant(
                tenant=tenant,
                tier=tier,
                blocks=sum(one.blocks for one in rows),
                bytes=self._bytes(rows),
                instances=len({(one.instance, one.stream) for one in rows}),
            )
            for (tenant, tier), rows in groups.items()
        ]
        return sorted(told, key=lambda one: (-(one.bytes or 0), str(one.tenant), one.tier))

    def _namespaces(self, held: Sequence[HeldCount]) -> list[answers.HistoryNamespace]:
        groups: dict[tuple[str, str], list[HeldCount]] = defaultdict(list)
        for one in held:
            groups[one.tier, one.namespace].append(one)
        told = []
        for (tier, namespace), rows in sorted(groups.items()):
            model, tenant, _ = self._fields.get(namespace, _NO_FIELDS)
            told.append(
                answers.HistoryNamespace(
                    tier=tier,
                    namespace=namespace,
                    model=model,
                    tenant=tenant,
                    blocks=sum(one.blocks for one in rows),
                    bytes=self._bytes(rows),
                )
            )
        return told

    def _bytes(self, rows: Iterable[HeldCount]) -> int | None:
        """Of those whose size a start has told; None where none has."""
        sizes = [
            one.blocks * size
            for one in rows
            if (size := _block_bytes(self._epochs.get((one.instance, one.stream), []), one)) is not None
        ]
        return sum(sizes) if sizes else None

    def _starts(
        self, since: datetime, to: datetime, only: str | None = None
    ) -> tuple[list[answers.HistoryStart], list[answers.HistoryStop]]:
        epochs = [one for (name, _), rows in self._epochs.items() if only in (None, name) for one in rows]
        starts = sorted((one for one in epochs if since <= one.began < to), key=lambda one: one.began)
        stops = sorted(
            (one for one in epochs if one.stopped and since <= one.last_frame < to), key=lambda one: one.last_frame
        )
        return (
            [
                answers.HistoryStart(
                    time=_text(one.began), instance=one.instance, stream=one.stream, life=one.life, epoch=one.epoch
                )
                for one in starts[-MOST_LISTED:]
            ],
            [
                answers.HistoryStop(
                    time=_text(one.last_frame),
                    instance=one.instance,
                    stream=one.stream,
                    life=one.life,
                    epoch=one.epoch,
                    reason=one.stopped or "",
                )
                for one in stops[-MOST_LISTED:]
            ],
        )

    def _sums(
        self, since: datetime, to: datetime, ends: Sequence[datetime]
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Gained and lost in each part, and by tier how much more was held at its end; a part's end is the next one's.

        Args:
            ends: of the parts; the last is `to`.
        """
        steps = len(ends)
        gained, lost = np.zeros(steps, dtype=np.int64), np.zeros(steps, dtype=np.int64)
        by_tier = np.zeros((len(TIERS), steps), dtype=np.int64)
        ends_us = np.array([(one - _BEGIN) // _MICROSECOND for one in ends], dtype=np.int64)
        for rows in self._moments.changed(since, to):
            part = np.searchsorted(ends_us, rows["time"], side="right")
            np.add.at(gained, part, rows["gained"])
            np.add.at(lost, part, rows["lost"])
            np.add.at(by_tier, (rows["tier"], part), rows["gained"] - rows["lost"])
        return gained, lost, by_tier


def _at(epochs: Sequence[_Epoch], moment: datetime) -> tuple[_Epoch, _Epoch | None] | None:
    """The epoch an instance was in at a moment, and the one after it; None: before the first."""
    begun = [number for number, one in enumerate(epochs) if one.began <= moment]
    if not begun:
        return None
    number = begun[-1]
    return epochs[number], epochs[number + 1] if number + 1 < len(epochs) else None


def _instance(
    epoch: _Epoch, following: _Epoch | None, blocks: dict[str, int], moment: datetime
) -> answers.HistoryInstance:
    is_over = moment >= epoch.last_frame
    stopped = epoch.stopped if is_over else None
    ended = "ended" if is_over and following is not None else "running"
    tiers = []
    for tier in TIERS:
        pool = epoch.pools.get(tier, {})
        count, size = blocks.get(tier, 0), pool.get("block_bytes")
        is_clusters = tier == _CLUSTERS and not count
        if pool or count:
            tiers.append(
                answers.HistoryTier(
                    tier=tier,
                    blocks=None if is_clusters else count,
                    slots=pool.get("slots"),
                    block_bytes=size,
                    bytes=None if size is None or is_clusters else count * size,
                    name=pool.get("name"),
                )
            )
    return answers.HistoryInstance(
        instance=epoch.instance,
        stream=epoch.stream,
        life=epoch.life,
        epoch=epoch.epoch,
        state="stopped" if stopped else ended,
        began=_text(epoch.began),
        last_frame=_text(min(epoch.last_frame, moment)),
        stopped=stopped,
        engine=epoch.engine,
        version=epoch.version,
        topology=epoch.topology,
        blocks=sum(one.blocks or 0 for one in tiers),
        bytes=_sum(one.bytes for one in tiers),
        tiers=tiers,
    )


def _block_bytes(epochs: Sequence[_Epoch], held: HeldCount) -> int | None:
    """Of a tier of a life, as its latest start has told."""
    for one in reversed(epochs):
        if one.life == held.life and held.tier in one.pools:
            size: int = one.pools[held.tier]["block_bytes"]
            return size
    return None


def _tier_sums(instances: Sequence[answers.HistoryInstance]) -> list[answers.HistoryTierSum]:
    sums = []
    for tier in TIERS:
        rows = [one for instance in instances for one in instance.tiers if one.tier == tier and one.blocks is not None]
        if rows:
            sums.append(
                answers.HistoryTierSum(
                    tier=tier,
                    blocks=sum(one.blocks or 0 for one in rows),
                    slots=_sum(one.slots for one in rows),
                    bytes=_sum(one.bytes for one in rows),
                )
            )
    return sums


def _holder(
    epochs: Sequence[_Epoch], held: HeldAt, moment: datetime, claimed: dict[str | None, np.ndarray]
) -> answers.HistoryPromptHolder:
    own = np.logical_or.reduce(list(held.tiers.values()))
    depth = run_of(own)
    found = _at(epochs, moment)
    pools = {} if found is None else found[0].pools
    reached = [claimed[pool["name"]] for pool in pools.values() if pool["name"] in claimed]
    told = None if found is None else _instance(*found, {}, moment)
    return answers.HistoryPromptHolder(
        instance=held.instance,
        stream=held.stream,
        state="running" if told is None else told.state,
        epoch=None if told is None else told.epoch,
        last_frame=None if told is None else told.last_frame,
        stopped=None if told is None else told.stopped,
        depth=depth,
        run=hottest_of(held.tiers, depth),
        reach=max([depth, *(depth + run_of(bits[depth:]) for bits in reached)]),
        block_bytes={tier: pool["block_bytes"] for tier, pool in pools.items() if pool["block_bytes"] > 0},
        tiers=[_blocks_held(tier, bits) for tier, bits in held.tiers.items()],
    )


def _blocks_held(name: str | None, bits: np.ndarray) -> answers.HistoryBlocksHeld:
    return answers.HistoryBlocksHeld(name=name, blocks=int(bits.sum()), held=packed_hex(bits))


def _sum(values: Iterable[int | None]) -> int | None:
    known = [value for value in values if value is not None]
    return sum(known) if known else None


def _meets(hole: HoleRow, since: datetime, to: datetime) -> bool:
    return hole.until >= since and (hole.since is None or hole.since < to)


def _text(moment: datetime) -> str:
    return f"{moment.isoformat(timespec='microseconds')}Z"
