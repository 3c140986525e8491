"""What a manager of a test makes of events with: the native functions, or the readable ones that specify them."""

from __future__ import annotations

from kvbm.assembly import NATIVE_CORE, Core
from kvbm.core.backend import REFERENCE
from kvbm.core.fold import Residencies
from kvbm.reference.ledger import Ledger

CORES = {"native": NATIVE_CORE, "reference": Core(REFERENCE, Ledger, Residencies)}
