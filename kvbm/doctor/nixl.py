"""NIXL: whether it is installed, and whether UCX gets along here. A process of its own tries, as transfers would."""

from __future__ import annotations

import importlib.metadata
import os
import time
from typing import NamedTuple

from kvbm.core.errors import KvbmError
from kvbm.doctor.deadline import PROBE_S
from kvbm.doctor.finding import DoctorFinding, ok, unused, warning
from kvbm.transport.nixl_agent import NixlProcess, missing_nixl
from kvbm.transport.nixl_process import find_nixl

_TRY_S = PROBE_S - 1.0  # before the doctor itself takes it to hang
_TRIED_BYTES = 4096


class NixlFacts(NamedTuple):
    """What was found.

    Attributes:
        package: with its version; empty: none is installed.
        trouble: why it cannot be used; empty: it can, or it was not tried.
    """

    package: str
    trouble: str
    is_tried: bool = True


def look_at_nixl(process: NixlProcess | None = None, is_tried: bool = True) -> NixlFacts:
    """Look for it, and lend a page by it."""
    if (missing := missing_nixl()) is not None:
        return NixlFacts("", str(missing))
    if not is_tried:
        return NixlFacts(_package(), "", is_tried=False)
    process = process or NixlProcess()
    page = os.memfd_create("kvbm-doctor", os.MFD_CLOEXEC)
    try:
        os.ftruncate(page, _TRIED_BYTES)
        lent, _ = process.lend(page, _TRIED_BYTES, time.monotonic() + _TRY_S)
        lent.close()
    except KvbmError as error:
        return NixlFacts(_package(), str(error))
    finally:
        os.close(page)
        process.close()
    return NixlFacts(_package(), "")


def judge_nixl(facts: NixlFacts) -> DoctorFinding:
    """One line; nothing is wrong without NIXL."""
    if not facts.package:
        return unused("NIXL", facts.trouble)
    if facts.trouble:
        return warning("NIXL", f"{facts.package}; {facts.trouble}", "see UCX_TLS and what UCX needs of this machine")
    return ok("NIXL", f"{facts.package}, {'with UCX' if facts.is_tried else 'not tried'}")


def _package() -> str:
    name = find_nixl()
    distributions = importlib.metadata.packages_distributions().get(name, [name])
    try:
        return f"{distributions[0]} {importlib.metadata.version(distributions[0])}"
    except importlib.metadata.PackageNotFoundError:
        return name
