"""Erasures: what a record tells and does not tell, an instance's steps one by one, and the table of what waits."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from kvbm.catalog.sql.rows import NamespaceRow
from kvbm.core.errors import ErasureError
from kvbm.core.ids import HASH_BYTES, Epoch, Namespace, NamespaceId, Offset, SequenceHash, Tier
from kvbm.core.names import is_name, kept_name
from kvbm.core.results import Recovered
from kvbm.erasure import record as records
from kvbm.erasure import report
from kvbm.erasure.catalog import CatalogErasures, proven_tenants
from kvbm.erasure.instance import DONE_FILE, DoneErasures, InstanceErasures
from kvbm.erasure.manager import HeldRun, Wiped
from kvbm.erasure.record import Matcher, Record, Subject, with_erasure, without
from kvbm.erasure.report import Answer, ErasedPlace, Known, Progress
from kvbm.erasure.start import StartErasures
from kvbm.streams.base import Position

ACME = Namespace(model="m", revision="r", block_tokens=16, tenant="acme")
ACME_LORA = Namespace(model="m", revision="r", block_tokens=16, tenant="acme", lora="l")
GLOBEX = Namespace(model="m", revision="r", block_tokens=16, tenant="globex")
NOW_NS = 1_700_000_000_000_000_000
FIRST = 1_700_000_000  # the number of the first erasure


def block(number: int) -> SequenceHash:
    return SequenceHash(hashlib.sha256(str(number).encode()).digest()[:HASH_BYTES])


def blocks(*numbers: int) -> bytes:
    return b"".join(map(block, numbers))


def recorded(*wanted: Subject) -> Record:
    record = Record()
    for one in wanted:
        record, _ = with_erasure(record, one, NOW_NS)
    return record


class Instance:
    """As much of a manager as an erasure asks: blocks by tier and namespace, slots that are pinned, a journal."""

    def __init__(
        self, held: dict[Tier, dict[NamespaceId, bytes]], tenants: Iterable[Namespace] = (ACME, GLOBEX)
    ) -> None:
        self.blocks, self.known = held, {one.id: one.tenant for one in tenants}
        self.pinned: set[int] = set()
        self.journal_from = Position(Epoch(1), Offset(0))
        self.at = Position(Epoch(1), Offset(10))
        self.asked = self.dropped = self.salvages_ended = 0
        self.unclaimed = b""
        self.is_over = False
        self.engine_tier: Tier | None = None
        self.unnamed: list[NamespaceId] = []
        self.held_back: list[bool] = []
        self.usage_erased: list[tuple[int, bool, bool]] = []  # whether acme and globex are meant

    @property
    def tiers(self) -> list[Tier]:
        return [tier for tier in self.blocks if tier is not self.engine_tier]

    def slots(self, tier: Tier) -> int:
        return 4

    def end_salvage(self) -> None:
        self.salvages_ended += 1

    def hold_back(self, held_back: bool) -> None:
        self.held_back.append(held_back)

    def tenants(self) -> dict[NamespaceId, str]:
        return self.known

    def held(self, tier: Tier) -> list[HeldRun]:
        return [
            HeldRun(tier, space if space in self.known else None, self.known.get(space), hashes)
            for space, hashes in self.blocks[tier].items()
            if hashes
        ]

    def evict(self, tier: Tier, hashes: bytes) -> int:
        gone = {hashes[at : at + HASH_BYTES] for at in range(0, len(hashes), HASH_BYTES)}
        count = 0
        for space, run in self.blocks[tier].items():
            kept = [run[at : at + HASH_BYTES] for at in range(0, len(run), HASH_BYTES)]
            left = [one for one in kept if one not in gone]
            count += len(kept) - len(left)
            self.blocks[tier][space] = b"".join(left)
        return count

    def drop_samples(self) -> None:
        self.dropped += 1

    def unclaim(self, hashes: bytes) -> None:
        self.unclaimed += hashes

    def unname(self, namespaces: Iterable[NamespaceId]) -> None:
        self.unnamed += namespaces

    def erase_usage(self, number: int, is_meant: Callable[[str], bool]) -> None:
        self.usage_erased.append((number, is_meant("acme"), is_meant("globex")))

    def wipe(self, tier: Tier, dirty: set[int]) -> Wiped:
        clean = sorted(dirty - self.pinned)
        return Wiped(clean, len(clean))

    def mark(self) -> Position:
        return self.at

    def ask_snapshot(self) -> None:
        self.asked += 1

    def is_durable(self, place: Position) -> bool:
        return True

    def forget_before(self, place: Position) -> bool:
        return self.journal_from >= place


def erasures(
    instance: Instance, done: DoneErasures | None = None, started_with: Record | None = None
) -> InstanceErasures:
    return InstanceErasures(instance, done or DoneErasures(None), started_with, lambda: NOW_NS)


def test_a_record_names_nobody_and_means_whom_it_should() -> None:
    record = recorded(Subject("acme", (ACME.id,)), Subject(None, (GLOBEX.id,), blocks(1, 2)))
    data = records.encoded(record)
    for secret in (b"acme", b"globex", ACME.id, GLOBEX.id, block(1), block(2)):
        assert secret not in data
    whole, prompt = map(Matcher, records.decoded(data).erasures)
    assert whole.tenant("acme") and not whole.tenant("globex") and whole.is_whole
    assert (
        whole.namespace(ACME.id) and whole.namespace(ACME_LORA.id, "acme") and not whole.namespace(GLOBEX.id, "globex")
    )
    assert prompt.namespace(GLOBEX.id) and not prompt.namespace(ACME.id, "acme") and not prompt.is_whole
    assert prompt.of(blocks(1, 3, 2)) == blocks(1, 2)
    assert (prompt.any(blocks(3, 2)), prompt.any(blocks(3, 4))) == (True, False)


def test_what_a_tenant_has_used_is_erased_until_all_else_is_and_that_of_a_namespace_is_not() -> None:
    instance = Instance({Tier.HBM: {ACME.id: blocks(1), GLOBEX.id: blocks(2)}})
    instance.pinned = {3}
    erasing = erasures(instance)
    record = recorded(Subject("acme", (ACME.id,)), Subject(None, (GLOBEX.id,)))
    erasing.take(record)
    erasing.step()
    instance.pinned, instance.journal_from = set(), instance.at
    erasing.step()
    assert not erasing.is_busy
    erasing.step()
    assert instance.usage_erased == [(record.erasures[0].number, True, False)] * 2


def test_two_records_of_one_tenant_cannot_be_told_to_mean_the_same() -> None:
    one, two = (recorded(Subject("acme", (ACME.id,))).erasures[0] for _ in range(2))
    assert not {one.tenant, *one.namespaces} & {two.tenant, *two.namespaces}


def test_to_ask_again_is_the_same_erasure_until_anybody_is_done_with_it() -> None:
    record, first = with_erasure(Record(), Subject("acme", (ACME.id,)), NOW_NS)
    same, again = with_erasure(record, Subject("acme", ()), NOW_NS + 1)
    assert same is record and again == first
    # What the tenant used after somebody was done is not meant by the first one.
    grown, anew = with_erasure(record, Subject("acme", (ACME.id, ACME_LORA.id)), NOW_NS + 1, done=[first.number])
    assert grown.erasures == (anew,)  # in its place: it means all that the first one meant
    grown, anew = with_erasure(record, Subject("acme", ()), NOW_NS + 1, done=[first.number])
    assert grown.erasures == (first, anew)  # a namespace is not known any more
    assert (
        with_erasure(record, Subject(None, (ACME.id,)), NOW_NS)[1].number > first.number
    )  # not the tenant: one namespace


def test_numbers_are_never_given_twice_also_when_the_record_was_lost() -> None:
    record, first = with_erasure(Record(), Subject("acme", (ACME.id,)), NOW_NS)
    lifted = without(record, first.number)
    assert lifted.find(first.number) is None
    assert with_erasure(lifted, Subject("globex", ()), NOW_NS)[1].number == first.number + 1
    assert with_erasure(Record(), Subject("globex", ()), NOW_NS + 10**9)[1].number > first.number


def test_an_answer_that_is_damaged_or_in_anothers_name_counts_for_nobody() -> None:
    found = {
        "a": report.encoded(answered("a", report.INSTANCE, 100)),
        "b": report.encoded(answered("c", report.INSTANCE, 100)),
        "c": b"\xc1",
        "d": report.encoded(answered("d", report.OBJECTS, 100)),
        "objects:1": report.encoded(answered("objects:1", report.OBJECTS, 100)),
    }
    answers = report.answers_of(found)
    assert [answer.name for answer in answers] == ["a", "objects:1"]
    assert set(report.unfinished(answers, 7, report.INSTANCE, ["a", "b", "c"])) == {"b", "c"}


def test_an_instance_of_whatever_name_speaks_for_no_catalog_and_no_pool() -> None:
    """A name with a colon can be no instance's; nor has the server an account for one."""
    own = ["catalog-1", "objects-1", "catalog", "objects"]
    kept = {kind: kept_name(kind, "1") for kind in (report.CATALOG, report.OBJECTS)}
    assert all(map(is_name, own)) and not any(map(is_name, [*kept.values(), "_catalog-1"]))
    for kind in (report.INSTANCE, report.CATALOG, report.OBJECTS):
        found = {name: report.encoded(answered(name, kind, 100)) for name in [*own, *kept.values()]}
        said = [answer.name for answer in report.answers_of(found)]
        assert said == (own if kind == report.INSTANCE else [kept[kind]])


def test_too_many_hashes_and_a_record_of_a_newer_kvbm_are_refused_in_words() -> None:
    with pytest.raises(ErasureError, match="erase them in parts"):
        with_erasure(Record(), Subject(None, (ACME.id,), bytes(HASH_BYTES * (records.MOST_HASHES + 1))), NOW_NS)
    with pytest.raises(ErasureError, match="upgrade"):
        records.decoded(records.encoded(Record(version=99)))
    with pytest.raises(ErasureError, match="cannot be read"):
        records.decoded(b"\xc1")


def test_an_instance_withdraws_at_once_waits_for_slots_then_for_the_journal() -> None:
    instance = Instance({Tier.HOST: {ACME.id: blocks(1, 2), GLOBEX.id: blocks(3)}, Tier.NVME: {ACME.id: blocks(1)}})
    instance.pinned = {3}
    mine = erasures(instance)
    mine.take(recorded(Subject("acme", (ACME.id,))))
    assert instance.salvages_ended == 1
    assert instance.blocks == {Tier.HOST: {ACME.id: b"", GLOBEX.id: blocks(3)}, Tier.NVME: {ACME.id: b""}}
    assert (instance.unnamed, instance.dropped, instance.unclaimed) == ([ACME.id], 1, blocks(1, 2))
    mine.step()
    places = {place.name: place for place in mine.progress()[FIRST].places}
    assert places["HOST"].waits == "1 slots that requests or copies use"
    assert places["HOST"].erased == "2 blocks withdrawn, 3 slots zeroed"
    assert places["journal"].waits == "the tiers" and not instance.asked
    instance.pinned.clear()
    mine.step()
    assert instance.asked == 1 and mine.progress()[FIRST].done_ns == 0
    instance.journal_from = instance.at
    mine.step()
    assert mine.progress()[FIRST].done_ns == NOW_NS and not mine.is_busy


def test_what_a_copy_brings_to_another_tier_meanwhile_is_withdrawn_and_the_journal_begins_behind_that() -> None:
    instance = Instance({Tier.HOST: {ACME.id: blocks(1)}, Tier.NVME: {ACME.id: b""}})
    mine = erasures(instance)
    mine.take(recorded(Subject("acme", (ACME.id,))))
    mine.step()
    instance.blocks[Tier.NVME][ACME.id] = blocks(1)
    instance.journal_from = instance.at
    instance.at = Position(Epoch(1), Offset(20))
    mine.step()
    assert instance.blocks[Tier.NVME][ACME.id] == b""
    assert mine.is_busy  # the journal begins at 10, and names it after that
    instance.journal_from = instance.at
    mine.step()
    assert not mine.is_busy


def test_new_use_while_an_erasure_goes_on_stays() -> None:
    instance = Instance({Tier.HOST: {ACME.id: blocks(1)}})
    mine = erasures(instance)
    record = recorded(Subject("acme", (ACME.id,)))
    mine.take(record)
    instance.blocks[Tier.HOST][ACME.id] = blocks(2)
    mine.take(record)
    mine.step()
    assert instance.blocks[Tier.HOST][ACME.id] == blocks(2)


def test_only_the_blocks_of_a_prompt_go_where_hashes_are_named() -> None:
    instance = Instance({Tier.HOST: {ACME.id: blocks(1, 2, 3), GLOBEX.id: blocks(4)}})
    mine = erasures(instance)
    mine.take(recorded(Subject(None, (ACME.id,), blocks(2, 4))))
    assert instance.blocks[Tier.HOST] == {ACME.id: blocks(1, 3), GLOBEX.id: blocks(4)}
    assert instance.unnamed == []


def test_blocks_of_namespaces_that_nobody_has_named_go_with_any_erasure() -> None:
    instance = Instance({Tier.NVME: {ACME.id: blocks(1), GLOBEX.id: blocks(2)}}, tenants=[GLOBEX])
    mine = erasures(instance)
    mine.take(recorded(Subject("somebody", ())))
    assert instance.blocks[Tier.NVME] == {ACME.id: b"", GLOBEX.id: blocks(2)}


def test_the_engines_own_hbm_is_waited_for() -> None:
    instance = Instance({Tier.HBM: {ACME.id: blocks(1)}, Tier.HOST: {ACME.id: blocks(1)}})
    instance.engine_tier = Tier.HBM
    mine = erasures(instance)
    mine.take(recorded(Subject("acme", (ACME.id,))))
    mine.step()
    waits = {place.name: place.waits for place in mine.progress()[FIRST].places}
    assert "1 blocks in its prefix cache" in waits["engine's HBM"] and not waits["HOST"]
    instance.blocks[Tier.HBM][ACME.id] = b""
    instance.journal_from = instance.at
    mine.step()
    assert not mine.is_busy


def test_what_an_instance_says_of_namespaces_that_the_record_does_not_name_is_a_hint_to_the_operator() -> None:
    instance = Instance({Tier.HOST: {}}, tenants=[ACME, ACME_LORA, GLOBEX])
    mine = erasures(instance)
    record = recorded(Subject("acme", (ACME.id,)))
    mine.take(record)
    erasure = record.erasures[0]
    assert mine.progress()[FIRST].namespaces == (erasure.namespace_digest(ACME_LORA.id),)
    answers = [Answer(name="i", kind=report.INSTANCE, at_ns=1, progress=mine.progress())]
    hinted = report.hints(answers, erasure, [ACME_LORA.id, GLOBEX.id])
    assert hinted == {ACME_LORA.id: ["i"], GLOBEX.id: []}
    assert not Matcher(erasure).namespace(ACME_LORA.id)  # what it says has nothing erased
    lines = report.table(FIRST, answers, Known({"i": ""}, None, 3600.0, False, NOW_NS, hinted))
    words = {line.place: line.waits for line in lines if line.who == "SQL"}
    assert set(words) == {f"claims of {one.id.hex()}" for one in (ACME_LORA, GLOBEX)}
    assert "instance i says" in words[f"claims of {ACME_LORA.id.hex()}"]
    assert "instance" not in words[f"claims of {GLOBEX.id.hex()}"]
    assert all(f"--spare {place.split()[-1]}" in said for place, said in words.items())


def test_answers_count_of_instances_that_are_known_and_in_nobody_elses_name() -> None:
    every = [
        answered("a", report.INSTANCE, 100),
        answered("b", report.INSTANCE, 100),  # no instance of this name is known
        answered("catalog-a", report.CATALOG, 100),
        answered("objects-a", report.OBJECTS, 100),  # an instance of this name is
    ]
    found = report.counted(every, ["a", "objects-a"])
    assert [answer.name for answer in found] == ["a", "catalog-a"]


def test_the_fields_of_a_namespace_are_believed_where_they_are_those_of_its_id() -> None:
    rows = [
        NamespaceRow(id=ACME.id, fields=ACME, first_seen_ns=1),
        NamespaceRow(id=GLOBEX.id, fields=ACME_LORA, first_seen_ns=1),
    ]
    assert proven_tenants(rows) == {ACME.id: "acme"}


def test_a_start_leaves_out_what_is_meant_and_what_nobody_names_until_it_is_done(tmp_path: Path) -> None:
    found = [Recovered(block(at), space.id, at) for at, space in enumerate([ACME, GLOBEX, ACME_LORA])]
    record = recorded(Subject("acme", (ACME.id,)))
    tenants = {ACME.id: "acme", GLOBEX.id: "globex"}
    start = StartErasures(record, DoneErasures(None), tenants)
    assert [one.slot for one in found if start.keeps(one)] == [1]
    assert start.left_out == 2
    runs = [start.keeps_run(one.namespace, one.hash * 2).tolist() for one in found]
    assert runs == [[start.keeps(one)] * 2 for one in found]
    assert all(StartErasures(Record(), DoneErasures(None), {}).keeps(one) for one in found)
    done = DoneErasures(tmp_path / DONE_FILE)
    done.add(FIRST, NOW_NS)
    assert all(StartErasures(record, DoneErasures(tmp_path / DONE_FILE), tenants).keeps(one) for one in found)
    (tmp_path / DONE_FILE).write_text("{")
    assert not DoneErasures(tmp_path / DONE_FILE).at_ns  # done once more, which does no harm


def test_what_a_start_has_left_out_is_wiped_and_what_came_since_is_new() -> None:
    record = recorded(Subject("acme", (ACME.id,)))
    instance = Instance({Tier.NVME: {ACME.id: blocks(5)}})
    mine = erasures(instance, started_with=record)
    mine.take(record)
    instance.journal_from = instance.at
    mine.step()
    assert instance.blocks[Tier.NVME][ACME.id] == blocks(5)
    assert mine.progress()[FIRST].done_ns == NOW_NS


def known(instances: dict[str, str], first_ns: int | None = None, has_objects: bool = False) -> Known:
    return Known(instances, first_ns, 3600.0, has_objects, NOW_NS)


def answered(name: str, kind: str, done_ns: int, waits: str = "") -> Answer:
    progress = Progress(places=(ErasedPlace(name="place", erased="x", waits=waits),), done_ns=done_ns)
    return Answer(name=name, kind=kind, at_ns=NOW_NS, progress={7: progress})


def test_the_table_says_who_is_waited_for_and_only_nobody_is_gone() -> None:
    lines = report.table(
        7, [answered("a", report.INSTANCE, 0, "1 slots")], known({"a": "", "b": "it is away"}, 1, True)
    )
    waits = {line.who: line.waits for line in lines}
    assert waits["a"] == "1 slots" and waits["b"] == "it is away"
    assert "pool's settings" in waits["object pool"] and "serves" in waits["catalog"] and "1 h after" in waits["NATS"]
    assert not report.is_gone(lines)
    answers = [
        answered("a", report.INSTANCE, 100),
        answered("c", report.CATALOG, 120),
        answered("o", report.OBJECTS, 150),
    ]
    late = report.table(7, answers, known({"a": ""}, first_ns=140, has_objects=True))
    assert [line.who for line in late if line.waits] == ["NATS"]
    assert "goes by 1970-01-01 01:00:01 UTC" in late[-1].waits
    gone = report.table(7, answers, known({"a": ""}, first_ns=151, has_objects=True))
    assert report.is_gone(gone) and "erasure 7: all is gone" in report.as_words(7, gone)
    assert '"gone":true' in report.as_json(7, gone)


def test_a_catalog_waits_for_everybody_it_knows() -> None:
    answers = [answered("a", report.INSTANCE, 100), answered("b", report.INSTANCE, 0, "2 slots")]
    left = report.unfinished(answers, 7, report.INSTANCE, ["a", "b", "c"])
    assert left == {"b": "place: 2 slots", "c": "has not answered"}
    assert report.unfinished(answers[:1], 7, report.INSTANCE, ["a"]) == {}


def test_a_catalog_reads_on_to_the_streams_end_since_it_last_waited_for_somebody() -> None:
    stream = SimpleNamespace(end=10)
    service = SimpleNamespace(
        sequencer=SimpleNamespace(sequence=5),
        writer=SimpleNamespace(stored=5),
        lag=SimpleNamespace(messages=lambda: 1),
        past=None,
        stream=stream,
        archive=None,
        checkpointer=None,
    )

    async def last_sequence() -> int:
        return stream.end

    stream.last_sequence = last_sequence

    class Side(CatalogErasures):
        waited_for = ""

        async def _meant(self, matcher: Matcher) -> set[NamespaceId]:
            return set()

        async def _waits(self, *_: object) -> str:
            return self.waited_for

        async def _erase(self, *_: object) -> list[ErasedPlace]:
            return []

    side = Side(cast(Any, service), "catalog-1", cast(Any, None), 1.0)
    (erasure,) = recorded(Subject("acme")).erasures

    def waits() -> set[str]:
        """For what the next step waits; nothing once all is erased."""
        return {place.waits for place in asyncio.run(side._go_on(erasure, [])).places}

    assert waits() == {"the stream to be read and stored"}
    side.waited_for, stream.end = "instances late", 20  # it turned up meanwhile, and said more
    assert waits() == {"instances late"}
    side.waited_for, service.sequencer.sequence, service.writer.stored = "", 12, 12
    assert waits() == {"the stream to be read and stored"}
    service.sequencer.sequence = service.writer.stored = 20
    assert waits() == set()


def test_every_catalog_that_ever_answered_is_waited_for_by_name_unless_it_is_gone() -> None:
    done = answered("catalog-a", report.CATALOG, 100)
    silent = Answer(name="catalog-b", kind=report.CATALOG, at_ns=NOW_NS, progress={})
    lines = report.table(7, [done, silent], known({}))
    waits = {line.who: line.waits for line in lines if line.waits}
    assert set(waits) == {"catalog-b"} and "--forget-catalog catalog-b" in waits["catalog-b"]
    gone = msgspec.structs.replace(silent, gone=True)
    assert report.is_gone(report.table(7, [done, gone], known({})))
    assert report.decoded(report.encoded(gone)) == gone
    # What one had done before it went counts; what it had begun does not, and somebody has to do it.
    assert report.is_gone(report.table(7, [msgspec.structs.replace(done, gone=True)], known({})))
    begun = msgspec.structs.replace(answered("catalog-a", report.CATALOG, 0, "c"), gone=True)
    assert [line.waits for line in report.table(7, [begun], known({})) if line.waits] == ["a catalog that serves"]
