"""A journal smaller than what a snapshot of the pools takes: it is told, and emptied all the same."""

from __future__ import annotations

from pathlib import Path

from structlog.testing import capture_logs

from kvbm.assembly import open_manager
from kvbm.config import load_settings
from kvbm.core.ids import NO_PARENT
from tests.eventually import eventually
from tests.managers import BLOCK_BYTES, NAMESPACE, hashes_of

SLOTS, RUN = 20_000, 500


def test_a_journal_too_small_for_the_slots_is_told_and_goes_on_taking_events(tmp_path: Path) -> None:
    settings = load_settings(
        flags={
            "instance.data_dir": str(tmp_path),
            "nats.enabled": False,
            "pools.hbm.slots": SLOTS,
            "pools.hbm.device": "memory",
            "journal.capacity_bytes": 1 << 18,
            "journal.segment_bytes": 1 << 16,
        }
    )
    with capture_logs() as remarks:
        manager = open_manager(settings, [NAMESPACE], BLOCK_BYTES, "test")
    with manager:
        (told,) = [one for one in remarks if one["event"] == "journal.too_small"]
        assert (told["capacity_bytes"], told["needed_bytes"], told["slots"]) == (1 << 18, 96 * SLOTS, SLOTS)
        for prompt in range(4 * SLOTS // RUN):  # what is held, some times over
            slots = manager.allocate(RUN, NAMESPACE.id)
            assert slots is not None
            manager.create(NAMESPACE.id, NO_PARENT, 0, hashes_of(prompt, RUN), slots)
            manager.unpin(slots)
            eventually(
                lambda: manager.durable() == manager.applied(), "the journal takes nothing", state=manager.trouble
            )
        assert (manager.trouble(), manager.epoch) == ("", 1)
        folder = tmp_path / "instances" / "instance-0" / "journal"
        used = sum(path.stat().st_size for path in folder.glob("*.kvbj"))
        assert used <= 96 * SLOTS  # and what came before snapshots was let go
