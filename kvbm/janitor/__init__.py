"""The janitor of a pool of cluster reach: it alone withdraws claims and deletes objects, and claims what nobody
claims.
"""

from __future__ import annotations

from kvbm.janitor.claims_reader import ClaimsReader
from kvbm.janitor.driver import Driver, DriverOptions, run_once
from kvbm.janitor.holdings import TenantPart
from kvbm.janitor.janitor import Janitor
from kvbm.janitor.report import Report
from kvbm.janitor.rules import Rules

__all__ = ["ClaimsReader", "Driver", "DriverOptions", "Janitor", "Report", "Rules", "TenantPart", "run_once"]
