"""The janitor of a pool of cluster reach: it alone withdraws claims and deletes objects, and claims what nobody claims."""

from __future__ import annotations

from kvbm.janitor.book import ClaimBook
from kvbm.janitor.driver import Driver, run_once
from kvbm.janitor.holdings import TenantPart
from kvbm.janitor.janitor import Janitor, Rules
from kvbm.janitor.report import Report

__all__ = ["ClaimBook", "Driver", "Janitor", "Report", "Rules", "TenantPart", "run_once"]
