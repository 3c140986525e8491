"""Upkeep of the index, a little at a time: memory of the dead is freed, and what memory holds is compared with what was
applied.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from kvbm.catalog.follow.sequencer import Sequencer
from kvbm.safe_log import SafeLog

log = SafeLog()

SWEEP_EVERY_S = 1.0
SWEEP_PAGES = 64  # of the index between two other things
AUDIT_PAGES = 16  # every AUDIT_EVERY_S: 10 million residencies take about three minutes
AUDIT_EVERY_S = 0.25
AUDIT_PAUSE_S = 60.0  # between two passes


class IndexUpkeep:
    """Sweeps and audits a sequencer's index. One asyncio loop.

    Args:
        on_damage: called when an audit has found damage; whoever differs is suspect then, until a snapshot.

    Attributes:
        audits: passes over the whole index so far.
    """

    def __init__(self, sequencer: Sequencer, on_damage: Callable[[], None]) -> None:
        self.audits = 0
        self._sequencer, self._on_damage = sequencer, on_damage

    async def sweep(self) -> None:
        """Free what the dead have left, for ever."""
        while True:
            has_more = self._sequencer.index.sweep(SWEEP_PAGES)
            await asyncio.sleep(0 if has_more else SWEEP_EVERY_S)

    async def audit(self) -> None:
        """Compare what memory holds with what was applied, for ever."""
        sequencer = self._sequencer
        while True:
            found = sequencer.index.audit(AUDIT_PAGES)
            self.audits += found.is_whole
            for instance in found.differing:
                sequencer.counters.digest_divergence += 1
                sequencer.suspicion(instance)
            if found.differing or found.damaged:
                self._on_damage()
                log.warning(
                    "index.damaged",
                    instances=sorted(found.differing),
                    entries=found.damaged,
                    blocks=found.blocks,
                    what_to_do="nothing: their snapshots repair it; if it comes back, check the machine's memory",
                )
            await asyncio.sleep(AUDIT_PAUSE_S if found.is_whole else AUDIT_EVERY_S)
