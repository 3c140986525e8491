"""A run whose start and parent contradict each other.

No ledger records one, `verify` names one that is in a stream, and what is held does not depend on it. Both folds and
ledgers alike.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from kvbm import _native
from kvbm.assembly import NATIVE, NATIVE_FOLD
from kvbm.core.backend import LedgerProtocol
from kvbm.core.codec import decode_frame, encode_frame
from kvbm.core.errors import LedgerError
from kvbm.core.events import BlocksCreated, Event, InstanceStarted, misplaced
from kvbm.core.fold import MISPLACED, Residencies
from kvbm.core.ids import NO_PARENT, Epoch, InstanceId, SequenceHash, Tier, pack_slots
from kvbm.reference.ledger import Ledger
from kvbm.replay.opening import open_source
from kvbm.replay.verify import Verified
from tests.captures import NAMESPACE, NAMESPACES, POOLS, Capture, Recorded, chain
from tests.readable import main, verify

PARENT = SequenceHash(b"\xab" * 16)
CONTRADICTIONS = [
    (NO_PARENT, 7, "start is 7, and there is no parent"),
    (PARENT, 0, "start is 0, and there is a parent, abababab"),
]
LEDGERS: dict[str, Callable[[], LedgerProtocol]] = {
    "native": lambda: _native.Ledger(POOLS),
    "reference": lambda: Ledger(POOLS),
}


@pytest.mark.parametrize("core", LEDGERS)
@pytest.mark.parametrize(("parent", "start", "why"), CONTRADICTIONS, ids=["no parent", "a parent"])
@pytest.mark.parametrize("blocks", [0, 2])
def test_a_ledger_refuses_it_and_nothing_has_changed(
    core: str, parent: SequenceHash, start: int, why: str, blocks: int
) -> None:
    ledger = LEDGERS[core]()
    ledger.start(Epoch(1), NAMESPACES)
    taken = ledger.allocate(Tier.HBM, blocks)
    assert taken is not None
    before = (ledger.applied, ledger.digest, ledger.counts(Tier.HBM))
    with pytest.raises(LedgerError) as refused:
        ledger.create(NAMESPACE, Tier.HBM, parent, start, chain(0, blocks), taken.slots)
    assert str(refused.value) == (
        f"blocks to create in HBM: {why}; give NO_PARENT with start 0, and the hash of the block before with a later "
        "start"
    )
    assert (ledger.applied, ledger.digest, ledger.counts(Tier.HBM)) == before
    ledger.create(NAMESPACE, Tier.HBM, *((parent, 7) if start == 0 else (parent, 0)), chain(0, blocks), taken.slots)


@pytest.mark.parametrize("core", LEDGERS)
def test_what_a_ledger_records_has_a_parent_if_and_only_if_it_begins_no_chain(core: str) -> None:
    ledger = LEDGERS[core]()
    ledger.start(Epoch(1), NAMESPACES)
    run = chain(0, 6)
    for begin, end in ((2, 4), (0, 6)):  # the second finds two blocks held, so that it becomes two events
        taken = ledger.allocate(Tier.HBM, end - begin)
        assert taken is not None
        parent = SequenceHash(run[16 * begin - 16 : 16 * begin]) if begin else NO_PARENT
        ledger.create(NAMESPACE, Tier.HBM, parent, begin, run[16 * begin : 16 * end], taken.slots)
    frames = [decode_frame(frame.data)[0] for frame in ledger.take_frames(InstanceId("one"), 0)]
    created = [event for frame in frames for event in frame.events if isinstance(event, BlocksCreated)]
    assert [(event.start, misplaced(event.parent, event.start)) for event in created] == [(2, ""), (0, ""), (4, "")]


def placed(parent: SequenceHash, start: int, number: int) -> BlocksCreated:
    return BlocksCreated(
        namespace=NAMESPACE,
        tier=Tier.HBM,
        parent=parent,
        start=start,
        hashes=chain(number, 3)[-16:],
        slots=pack_slots([number]),
    )


def written(path: Path, cuts: list[int]) -> list[Event]:
    """A stream as an engine of before would have left it: the second and fourth run contradict themselves."""
    events: list[Event] = [
        InstanceStarted(epoch=Epoch(1), pools=POOLS, namespaces=NAMESPACES),
        placed(NO_PARENT, 0, 0),
        placed(NO_PARENT, 7, 2),
        placed(PARENT, 3, 4),
        placed(PARENT, 0, 6),
    ]
    fold, made = Residencies(), list[Recorded]()
    for event in events:
        fold.evolve(event)
        made.append(Recorded(Epoch(1), event, fold.digest))
    path.write_bytes(b"".join(encode_frame(frame) for frame in Capture(InstanceId("one"), made, cuts).frames()))
    return events


def verified(path: Path) -> Verified:
    native, reference = verify(open_source(str(path)), NATIVE, NATIVE_FOLD), verify(open_source(str(path)))
    assert native == msgspec.structs.replace(reference, fold="native")
    return native


@pytest.mark.parametrize("cuts", [[5], [1, 5], [1, 2, 3, 4, 5]])
def test_verify_names_each_by_its_offset_and_goes_on_as_if_nothing_were_wrong(tmp_path: Path, cuts: list[int]) -> None:
    written(tmp_path / "a.kvbm", cuts)
    report = verified(tmp_path / "a.kvbm")
    assert [(one.kind, one.rule, one.offset) for one in report.findings] == [
        ("illegal-event", MISPLACED, 2),
        ("illegal-event", MISPLACED, 4),
    ]
    assert report.findings[0].message == (
        "BlocksCreated breaks start-contradicts-parent: HBM: start is 7, and there is no parent"
    )
    assert (report.events, report.blocks) == (5, 4)


def test_kvbm_replay_verify_says_it_in_words_and_ends_with_1(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    written(tmp_path / "a.kvbm", [2, 5])
    assert main(["verify", str(tmp_path / "a.kvbm")]) == 1
    out = capsys.readouterr().out
    assert "FAILED: 2 findings" in out and "HBM: start is 0, and there is a parent, abababab" in out


@pytest.mark.parametrize("is_strict", [True, False])
@pytest.mark.parametrize("new_fold", [_native.Residencies, Residencies])
def test_what_is_held_does_not_depend_on_it(
    tmp_path: Path, new_fold: Callable[[bool], Residencies], is_strict: bool
) -> None:
    """So a journal that has one is recovered as any other."""
    events = written(tmp_path / "a.kvbm", [5])
    fold = new_fold(is_strict)
    folded = fold.evolve_frame((tmp_path / "a.kvbm").read_bytes())
    assert (folded.folded, folded.illegal, fold.count()) == (len(events), None, 4)
    assert folded.anomalies == [(MISPLACED, f"HBM: {why}") for _, _, why in CONTRADICTIONS]
