"""Managers that publish to a nats-server."""

from __future__ import annotations

from pathlib import Path

from kvbm.assembly import open_manager
from kvbm.config import Settings, load_settings
from kvbm.manager.owned_hbm import Manager
from kvbm.streams.base import Position
from tests.cores import CORES
from tests.eventually import WAIT_S
from tests.managers import BLOCK_BYTES, NAMESPACE


def settings_of(folder: Path, url: str, cluster: str, **flags: object) -> Settings:
    named: dict[str, object] = {key.replace("__", "."): value for key, value in flags.items()}
    return load_settings(
        flags={
            "instance.data_dir": str(folder),
            "instance.cluster": cluster,
            "pools.hbm.slots": 64,
            "pools.hbm.device": "memory",
            "nats.url": url,
            "nats.timeout_s": WAIT_S,
            "nats.heartbeat_s": 0.2,
            "snapshots.least_s": 0.1,
            "onboard.wait_s": WAIT_S,
            **named,
        }
    )


def opened(settings: Settings, core: str = "native") -> Manager:
    return open_manager(settings, [NAMESPACE], BLOCK_BYTES, core=CORES[core])


def is_published(manager: Manager) -> bool:
    return manager.published() >= Position(manager.epoch, manager.applied())
