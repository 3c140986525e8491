"""Where an instance lends its blocks to others, as it says in its heartbeats and as the catalog tells it; and whom of
several.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import NamedTuple

from kvbm.core.answers import PeerHolding

MOST_WORD_BYTES = 300  # of each part of an address
_PARTS = ("host", "unix", "tcp", "rdma", "nixl")
UCX = "UCX"  # what NIXL moves bytes by
HOST_ALONE = {"tiers": "HOST"}  # beside an address: what lies in NVME is not lent


class PeerAddress(NamedTuple):
    """Where an instance lends its blocks; a part is empty where it offers none.

    Attributes:
        host_id: names the machine as no other is named: those of one machine can share memory.
        unix: path of its socket there.
        tcp: its host:port.
        rdma: address of its RDMA device, for people: who reads over RDMA connects to `tcp`, and is told there.
        nixl: UCX, what NIXL moves bytes by; likewise.
    """

    host_id: str = ""
    unix: str = ""
    tcp: str = ""
    rdma: str = ""
    nixl: str = ""

    def words(self) -> dict[str, str]:
        """It, as a heartbeat has it; empty parts left out."""
        return {name: word for name, word in zip(_PARTS, self, strict=True) if word}


NO_ADDRESS = PeerAddress()


def address_of(words: Mapping[str, str]) -> PeerAddress | None:
    """The address in a heartbeat's words, which a stranger may have written;

    None: it lends nowhere that we could read from.

    What a later version adds is passed over. A part that no socket could have is left out.
    """
    host_id, unix, tcp, rdma, nixl = (words.get(name, "") for name in _PARTS)
    host_id = host_id if _is_word(host_id) else ""
    tcp = tcp if _is_word(tcp) else ""
    rdma = rdma if tcp and _is_word(rdma) else ""
    nixl = nixl if tcp and nixl == UCX else ""  # another word would be a way that this version does not know
    address = PeerAddress(host_id, unix if host_id and _is_word(unix) else "", tcp, rdma, nixl)
    return address if address.unix or address.tcp else None


def _is_word(text: str) -> bool:
    return 0 < len(text.encode("utf-8", "replace")) <= MOST_WORD_BYTES and text.isprintable()


def nearest_and_deepest(peers: Collection[PeerHolding], limit: int) -> list[PeerHolding]:
    """The nearest, of equals those with the most blocks; the one with the most of all is among them."""
    order = sorted(peers, key=lambda one: (one.distance, -one.depth, one.instance))
    chosen = order[:limit]
    if len(order) > limit:
        deepest = min(order, key=lambda one: (-one.depth, one.distance, one.instance))
        if deepest.depth > max(one.depth for one in chosen):
            chosen[-1] = deepest
    return chosen
