"""Settings → how log lines are written."""

from __future__ import annotations

import logging

from kvbm.config import LogSettings
from kvbm.telemetry.stderr_log import LogStyle


def log_style(settings: LogSettings, auto: int = logging.NOTSET) -> LogStyle:
    """How remarks are written.

    Args:
        auto: the level where the settings leave it open.
    """
    numbers = logging.getLevelNamesMapping()
    level = auto if settings.level == "auto" else numbers[settings.level.upper()]
    levels = {noun: numbers[one.upper()] for noun, one in settings.levels.items()}
    return LogStyle(settings.format == "json", level, levels)
