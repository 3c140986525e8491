"""The ledger without slots: every frame it cuts is legal for the strict reference fold, also through snapshots and
epochs.
"""

from __future__ import annotations

import random
from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from kvbm.assembly import NATIVE, NATIVE_FOLD
from kvbm.core.codec import decode_frame
from kvbm.core.events import EvictReason, InstanceStarted, PoolStated
from kvbm.core.fold import Residencies
from kvbm.core.ids import NO_PARENT, Epoch, InstanceId, Namespace, Reach, Tier
from kvbm.reference.foreign_ledger import HeldLedger
from kvbm.streams.foreign.declared import Said
from tests.examples import examples

SPACES = [Namespace(model="m", block_tokens=4, lora=lora) for lora in ("", "l")]
OWN = (Tier.HBM, Tier.HOST)
POOLS = [*(PoolStated(tier, 0, 0) for tier in OWN), PoolStated(Tier.OBJECT, 0, 0, Reach.CLUSTER, "p")]


class Reader:
    """Folds what the ledger gives out, strictly."""

    def __init__(self, ledger: HeldLedger) -> None:
        self.ledger, self.fold = ledger, Residencies(strict=True)
        self.started: InstanceStarted | None = None

    def read(self) -> None:
        for frame in self.ledger.take_frames(InstanceId("a"), 1):
            decoded, _ = decode_frame(frame.data)
            for event in decoded.events:
                self.fold.evolve(event)
                if isinstance(event, InstanceStarted):
                    self.started = event
            assert decoded.digest == self.fold.digest


def block(number: int) -> bytes:
    return number.to_bytes(16, "big")


class Model:
    """Does something to the ledger, and knows what it holds then."""

    def __init__(self, choose: random.Random) -> None:
        self.choose = choose
        self.ledger = HeldLedger(InstanceId("a"), POOLS, NATIVE_FOLD, NATIVE.encode_frame, Said(engine="vllm"))
        for namespace in SPACES:
            self.ledger.declare(namespace)
        self.epoch = 3
        self.ledger.start(Epoch(self.epoch))
        self.held: dict[Tier, Counter[bytes]] = {tier: Counter() for tier in OWN}  # how often each was gained

    def do(self) -> None:
        choose, ledger = self.choose, self.ledger
        tier, space = choose.choice(OWN), choose.randrange(2)
        match choose.choice(("gain", "gain", "lose", "empty", "snapshot", "step", "step", "restart", "claim")):
            case "gain" | "claim" as how:
                self._gain(tier if how == "gain" else Tier.OBJECT, space)
            case "lose":
                mine = [one for one in self.held[tier] if one[0] == space]
                gone = choose.sample(mine, choose.randint(0, len(mine)))
                ledger.lose(SPACES[space].id, tier, EvictReason.CAPACITY, b"".join(gone))
                self.held[tier] = +(self.held[tier] - Counter(gone))
            case "empty" if choose.random() < 0.3:
                ledger.empty(tier)
                self.held[tier].clear()
            case "snapshot":
                ledger.begin_snapshot()
            case "step":
                ledger.step_snapshot(choose.randint(1, 3))
            case "restart" if choose.random() < 0.5:
                self._restart()

    def _gain(self, tier: Tier, space: int) -> None:
        some = [bytes([space]) + block(self.choose.randrange(40))[1:] for _ in range(self.choose.randint(1, 5))]
        id_ = SPACES[space].id
        if tier is Tier.OBJECT:
            self.ledger.gain(id_, tier, NO_PARENT, 0, b"".join(dict.fromkeys(some)))
            return
        if self.choose.random() < 0.5:
            self.ledger.gain(id_, tier, NO_PARENT, 0, b"".join(some))
        else:
            self.ledger.arrive(id_, tier, b"".join(some))
        self.held[tier].update(some)

    def _restart(self) -> None:
        if self.choose.random() < 0.5:
            self.ledger.forget()
            self.held = {tier: Counter() for tier in OWN}
        self.epoch += self.choose.randint(1, 2)
        assert self.ledger.restart(Epoch(self.epoch)) == self.ledger.applied


@settings(max_examples=examples(100), deadline=None)
@given(st.integers(0, 2**32), st.integers(0, 80))
def test_frames_are_legal_and_say_what_is_held(seed: int, steps: int):
    choose = random.Random(seed)
    model = Model(choose)
    ledger, reader = model.ledger, Reader(model.ledger)
    for _ in range(steps):
        model.do()
        if choose.random() < 0.3:
            reader.read()
    while ledger.step_snapshot():
        pass
    ledger.stop()
    reader.read()
    assert reader.fold.stopped
    assert reader.fold.epoch == model.epoch
    for tier in OWN:
        assert set(reader.fold.held[tier]) == set(model.held[tier])
        assert reader.fold.is_whole(tier)
        assert ledger.counts(tier).held == len(model.held[tier])
    assert reader.started is not None
    assert [one.id for one in reader.started.namespaces] == [one.id for one in SPACES]
