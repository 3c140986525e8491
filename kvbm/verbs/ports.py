"""Which RDMA devices there are, as the kernel tells it in sysfs: needs no library and opens nothing."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

SYSFS = Path("/sys/class/infiniband")


class Port(NamedTuple):
    """A port of an RDMA device.

    Attributes:
        state: "ACTIVE" where it can be used.
        link: "Ethernet" (RoCE) or "InfiniBand".
    """

    device: str
    number: int
    state: str
    link: str


def ports(sysfs: Path = SYSFS) -> list[Port]:
    """All ports of all devices, by name; empty where there are none."""
    found = []
    for device in sorted(sysfs.glob("*")):
        for port in sorted(device.glob("ports/*"), key=lambda path: int(path.name)):
            state = _text(port / "state").rpartition(": ")[2]
            found.append(Port(device.name, int(port.name), state or "unknown", _text(port / "link_layer") or "unknown"))
    return found


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii").strip()
    except OSError:
        return ""  # it has gone meanwhile
