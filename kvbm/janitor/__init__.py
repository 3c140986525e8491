"""The janitor of a pool of cluster reach: it alone withdraws claims and deletes objects, and claims what nobody claims."""

from __future__ import annotations

from kvbm.janitor.driver import Driver, run_once
from kvbm.janitor.janitor import Janitor, Rules
from kvbm.janitor.report import Report, as_json, as_words

__all__ = ["Driver", "Janitor", "Report", "Rules", "as_json", "as_words", "run_once"]
