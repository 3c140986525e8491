"""What is cleared while a request waits is not given to it, also what was pinned for it before."""

from __future__ import annotations

from pathlib import Path

from kvbm.core.ids import Tier
from tests.managers import NAMESPACE, hashes_of
from tests.owning_engines import WAIT_S, OwningEngine, opened
from tests.wrapped_pools import Gate


def test_a_request_gets_nothing_of_what_was_cleared_while_it_waited_for_the_rest(tmp_path: Path) -> None:
    gate = Gate(Tier.NVME, "read")
    with opened(tmp_path) as manager:
        one = OwningEngine(manager)
        one.store(1, 6)
        one.empty_host()
        assert one.hits(1, 3) == {Tier.NVME: 3}  # these lie in HOST now
        manager.pools.slots[Tier.NVME] = gate(manager.pools.slots[Tier.NVME])
        gate.close()
        try:
            acquiring = manager.begin_acquire(NAMESPACE.id, hashes_of(1, 6))
            assert gate.entered.wait(WAIT_S)
            assert manager.stats().pools[Tier.HOST].evictable == 0  # pinned for it
            manager.clear()
        finally:
            gate.opened.set()
        assert one.awaited(acquiring, 1).slots == []
        assert manager.stats().pools[Tier.HOST].free == 32
        acquiring.release()
