"""RDMA: which devices there are, and which pyverbs fits this Python. Nothing is opened."""

from __future__ import annotations

from typing import NamedTuple

from kvbm.core.errors import VerbsError
from kvbm.doctor.finding import DoctorFinding, ok, unused
from kvbm.verbs.library import find_pyverbs, load_pyverbs
from kvbm.verbs.ports import Port, ports


class RdmaFacts(NamedTuple):
    """What was found.

    Attributes:
        pyverbs: the folder of the one that fits and loads, and where it is from; empty: none does.
        trouble: why none does.
    """

    ports: list[Port]
    pyverbs: str
    trouble: str


def look_at_rdma() -> RdmaFacts:
    """Look at sysfs, and load pyverbs where one fits."""
    try:
        load_pyverbs()
    except VerbsError as error:
        return RdmaFacts(ports(), "", str(error))
    fit = find_pyverbs()
    return RdmaFacts(
        ports(), f"pyverbs of {'Debian' if fit.origin == 'Debian' else 'this environment'} ({fit.where})", ""
    )


def judge_rdma(facts: RdmaFacts) -> DoctorFinding:
    """One line; nothing is wrong without RDMA."""
    found = ", ".join(f"{port.device} port {port.number} ({port.link}, {port.state})" for port in facts.ports)
    words = f"{found or 'no device'}; {facts.pyverbs or facts.trouble}"
    is_ready = facts.pyverbs and any(port.state == "ACTIVE" for port in facts.ports)
    return ok("RDMA", words) if is_ready else unused("RDMA", words)
