"""What a demo or a simulation asks of the catalog beside lookups: how far it has come, and what it has counted."""

from __future__ import annotations

import time
from collections.abc import Sequence

from kvbm.core.answers import MAX_POSITIONS, MAX_WAIT_S, PositionWanted
from kvbm.core.errors import CatalogError, CatalogRefusedError
from kvbm.core.ids import Epoch, InstanceId, NamespaceId, Offset
from kvbm.locate.http import CatalogClient

_ANY = NamespaceId(bytes(16))


def wait_applied(
    client: CatalogClient, positions: Sequence[tuple[InstanceId, Epoch, Offset]], timeout_s: float
) -> None:
    """Wait until the catalog has applied everything before each (instance, epoch, offset).

    Raises CatalogError: not in time.
    """
    wanted = [PositionWanted(instance=name, epoch=epoch, offset=offset) for name, epoch, offset in positions]
    deadline = time.monotonic() + timeout_s
    for first in range(0, len(wanted), MAX_POSITIONS):  # a request takes no more of them
        _wait_for(client, wanted[first : first + MAX_POSITIONS], deadline)


def _wait_for(client: CatalogClient, wanted: Sequence[PositionWanted], deadline: float) -> None:
    while True:
        left_s = deadline - time.monotonic()
        try:
            client.lookup(_ANY, b"", at_least=wanted, wait_s=max(0.0, min(left_s, MAX_WAIT_S)))
        except CatalogRefusedError as error:
            if left_s <= 0 or error.status != 504:
                raise
        else:
            return


def wait_live(client: CatalogClient, names: Sequence[str], timeout_s: float) -> None:
    """Wait until the catalog has heard of these instances and would route to them. Raises CatalogError: not in time."""
    deadline = time.monotonic() + timeout_s
    while True:
        live = {entry.instance for entry in client.instances() if entry.state == "live" and entry.epoch}
        missing = sorted(set(names) - live)
        if not missing:
            return
        if time.monotonic() > deadline:
            raise CatalogError(
                f"the catalog at {client.url} has not heard of {', '.join(missing)} within {timeout_s:g} s"
            )
        time.sleep(0.02)


def counter(client: CatalogClient, name: str) -> int:
    """One of the catalog's counters without labels, by its short name.

    Raises CatalogError: there is none of that name.
    """
    line_begin = f"kvbm_catalog_{name}_total "
    for line in client.metrics().splitlines():
        if line.startswith(line_begin):
            return int(float(line.removeprefix(line_begin)))
    raise CatalogError(f"the catalog at {client.url} has no counter {line_begin.strip()}")
