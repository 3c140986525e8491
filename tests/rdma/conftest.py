"""RDMA needs a device, which machines of developers and CI lack: `make test-rdma` runs these in a VM that has one in
software.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

import pytest

# The VM's processor is emulated: without what kvbm/__init__.py imports, which nothing here needs, the run is half a
# minute shorter. Nor is rich needed, with which structlog would show errors.
sys.modules["rich"] = None  # type: ignore[assignment]
if "kvbm" not in sys.modules:
    package = ModuleType("kvbm")
    package.__path__ = [str(Path(__file__).parents[2] / "kvbm")]
    sys.modules["kvbm"] = package

if TYPE_CHECKING:
    from kvbm.verbs.device import Device
    from tests.rdma.instances import OwnerHandle


@pytest.fixture(scope="session")
def reader_device() -> Iterator[Device]:
    """rxe1, joined to the owner's rxe0 by a pair of virtual Ethernet cards."""
    from kvbm.verbs.device import Device

    device = Device("rxe1")
    yield device
    device.close()


@pytest.fixture
def owner(tmp_path: Path, reader_device: Device) -> Iterator[OwnerHandle]:
    """An owner of its own on rxe0."""
    from tests.rdma.instances import owner_process

    with owner_process(tmp_path, "rxe0", reader_device) as running:
        yield running


@pytest.fixture
def far_owner() -> Iterator[OwnerHandle]:
    """The owner in the other VM, and rxe2, by which it is reached."""
    from kvbm.verbs.device import Device
    from tests.rdma.far_owner import PORT
    from tests.rdma.instances import OwnerHandle

    device = Device("rxe2")
    handle = OwnerHandle(f"{os.environ['RXE_IP_BASE']}2:{PORT}", device)
    yield handle
    handle.close()
    device.close()
