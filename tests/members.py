"""Instances that do anything an instance may do, at random: for tests that compare what two know of them."""

from __future__ import annotations

import random

from kvbm.core.errors import CatalogRefusedError
from kvbm.core.events import EvictReason, MigrateCause
from kvbm.core.ids import HASH_BYTES, NO_PARENT, Epoch, Tier, split_hashes
from kvbm.locate.http import CatalogClient
from kvbm.reference.ledger import Ledger
from tests.catalog_site import POOLS, SPACE, Instance

UNIVERSE = [bytes([at + 1]) * HASH_BYTES for at in range(40)]
_TIERS = (Tier.HBM, Tier.HOST)


class Member(Instance):
    """An instance whose blocks are any of the universe."""

    def act(self, chance: random.Random) -> None:
        what = chance.choice(["create"] * 4 + ["evict"] * 3 + ["copy"] * 2 + ["claim"] + ["snapshot"])
        held = split_hashes(self.ledger.held(Tier.HBM))
        if what == "create":
            new = [one for one in chance.sample(UNIVERSE, 8) if one not in held]
            allocation = self.ledger.allocate(Tier.HBM, len(new)) if new else None
            if allocation is not None:
                self.ledger.create(SPACE.id, Tier.HBM, NO_PARENT, 0, b"".join(new), allocation.slots)
                self.ledger.unpin(Tier.HBM, allocation.slots)
        elif what == "evict":
            tier = chance.choice(_TIERS)
            gone = [one for one in split_hashes(self.ledger.held(tier)) if chance.random() < 0.4]
            if gone:
                self.ledger.evict(tier, b"".join(gone), EvictReason.CAPACITY)
        elif what in ("copy", "claim") and held:
            target = Tier.HOST if what == "copy" else Tier.OBJECT
            wanted = [one for one in held if not self.ledger.holds(target, one)][:6]
            copy = self.ledger.begin_copy(SPACE.id, Tier.HBM, target, b"".join(wanted)) if wanted else None
            if copy is not None:
                kept = target == Tier.OBJECT or chance.random() < 0.5
                self.ledger.end_copy(copy, [True] * (len(copy.hashes) // HASH_BYTES), MigrateCause.OFFLOAD, kept=kept)
        elif what == "snapshot":
            self.snapshot(chance)

    def hold(self, blocks: list[bytes]) -> None:
        allocation = self.ledger.allocate(Tier.HBM, len(blocks))
        assert allocation is not None
        self.ledger.create(SPACE.id, Tier.HBM, NO_PARENT, 0, b"".join(blocks), allocation.slots)
        self.ledger.unpin(Tier.HBM, allocation.slots)

    def hold_again(self, blocks: list[bytes]) -> None:
        """In a new epoch."""
        self.begin_epoch()
        self.hold(blocks)
        self.publish()

    def snapshot(self, chance: random.Random) -> None:
        self.ledger.begin_snapshot()
        while self.ledger.step_snapshot(chance.choice([3, 10, 1000])):
            if chance.random() < 0.3:
                self.publish()

    def begin_epoch(self) -> None:
        self.epoch = Epoch(self.epoch + 1)
        self.ledger = Ledger(POOLS)
        self.ledger.start(self.epoch, [SPACE], ["rack-1", self.name], "test", "0")


def step(chance: random.Random, members: list[Member], dead: set[str], client: CatalogClient) -> None:
    """Let one of them do something.

    Args:
        dead: names of those that are stopped or silent; kept up to date.
    """
    member = chance.choice(members)
    what = chance.choices(["act", "lose", "restart", "stop", "kill", "forget", "beat"], [26, 5, 3, 1, 1, 1, 4])[0]
    if what == "forget":
        for one in members:
            if one.name in dead:
                try:
                    client.forget(one.name)
                except CatalogRefusedError:
                    pass  # it is not gone yet
    elif what == "stop" or member.ledger.stopped or member.name in dead:
        if member.ledger.stopped or member.name in dead:
            dead.discard(member.name)
            member.begin_epoch()
            member.publish()
        else:
            member.ledger.stop()
            member.publish()
            dead.add(member.name)
    elif what == "restart":
        member.begin_epoch()
        member.publish()
        member.snapshot(chance)
        member.publish()
    elif what == "kill":
        member.beat()  # and never again
        dead.add(member.name)
    else:
        member.act(chance)
        member.publish(lose=what == "lose")
        if what != "act":
            member.beat()
