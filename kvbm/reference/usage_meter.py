"""What namespaces use of one instance: how long their blocks are held and how many are put, by tier.

A fold over the frames that the instance itself cuts, which are legal: so runs are counted, and no block is looked at.
All events of a frame happen at its wall time. Time passes by milliseconds and never backwards: a clock that goes back,
or on by more than a day, was set, and nothing passed.
"""

from __future__ import annotations

from kvbm.core.codec import decode_frame
from kvbm.core.events import (
    BlocksCreated,
    BlocksEvicted,
    BlocksMigrated,
    Event,
    InstanceStarted,
    MigrateCause,
    ResidenciesListed,
)
from kvbm.core.ids import HASH_BYTES, NamespaceId, Tier
from kvbm.core.usage import LONGEST_STEP_MS, Numbers

_FIRST_SNAPSHOT = 1  # with which an epoch begins: what it lists is gained; later ones list what is held


class _Used:
    """Of one namespace: blocks held now, and since the last cut blocks times milliseconds, and blocks put."""

    def __init__(self) -> None:
        self.held = dict.fromkeys(Tier, 0)
        self.block_ms = dict.fromkeys(Tier, 0)
        self.put_blocks = dict.fromkeys(Tier, 0)


class ReadableMeter:
    """See `core.usage.UsageMeter`; what the native one must do.

    Args:
        clusters: the tiers whose pool is the cluster's, bit t for tier t: nothing there is held by an instance.
    """

    def __init__(self, clusters: int) -> None:
        self._clusters = {tier for tier in Tier if clusters >> tier & 1}
        self._used: dict[NamespaceId, _Used] = {}
        self._last_ms = 0

    def take(self, data: bytes, at: int = 0) -> None:
        """See `UsageMeter.take`."""
        frame, _ = decode_frame(data, at)
        self._advance(frame.wall_time_ns // 1_000_000)
        for event in frame.events:
            self._fold(event)

    def cut(self, until_ms: int) -> list[tuple[NamespaceId, Numbers, Numbers]]:
        """See `UsageMeter.cut`."""
        self._advance(until_ms)
        made = []
        for namespace, used in sorted(self._used.items()):
            block_ms, put_blocks = _numbers(used.block_ms), _numbers(used.put_blocks)
            if any(block_ms) or any(put_blocks):
                made.append((namespace, block_ms, put_blocks))
            used.block_ms, used.put_blocks = dict.fromkeys(Tier, 0), dict.fromkeys(Tier, 0)
        return made

    def _advance(self, now_ms: int) -> None:
        passed = now_ms - self._last_ms
        if self._last_ms and 0 < passed <= LONGEST_STEP_MS:
            for used in self._used.values():
                for tier in Tier:
                    used.block_ms[tier] += used.held[tier] * passed
        self._last_ms = now_ms

    def _fold(self, event: Event) -> None:
        match event:
            case InstanceStarted():
                for used in self._used.values():
                    used.held = dict.fromkeys(Tier, 0)
            case BlocksCreated(namespace=namespace, tier=tier, hashes=hashes):
                self._gain(namespace, tier, hashes)
                self._put(namespace, tier, hashes)
            case BlocksMigrated(namespace=namespace, source=source, target=target, hashes=hashes):
                self._gain(namespace, target, hashes)
                if isinstance(source, Tier) and not event.kept:
                    self._lose(namespace, source, hashes)
                if event.cause == MigrateCause.OFFLOAD:
                    self._put(namespace, target, hashes)
            case BlocksEvicted(namespace=namespace, tier=tier, hashes=hashes):
                self._lose(namespace, tier, hashes)
            case ResidenciesListed(namespace=namespace, tier=tier, hashes=hashes):
                if event.snapshot == _FIRST_SNAPSHOT:
                    self._gain(namespace, tier, hashes)
            case _:
                pass

    def _of(self, namespace: NamespaceId) -> _Used:
        return self._used.setdefault(namespace, _Used())

    def _put(self, namespace: NamespaceId, tier: Tier, hashes: bytes) -> None:
        self._of(namespace).put_blocks[tier] += len(hashes) // HASH_BYTES

    def _gain(self, namespace: NamespaceId, tier: Tier, hashes: bytes) -> None:
        if tier not in self._clusters:
            self._of(namespace).held[tier] += len(hashes) // HASH_BYTES

    def _lose(self, namespace: NamespaceId, tier: Tier, hashes: bytes) -> None:
        if tier not in self._clusters:
            held = self._of(namespace).held
            held[tier] = max(0, held[tier] - len(hashes) // HASH_BYTES)


def _numbers(by_tier: dict[Tier, int]) -> Numbers:
    return by_tier[Tier.HBM], by_tier[Tier.HOST], by_tier[Tier.NVME], by_tier[Tier.OBJECT]
