"""kvbm's remarks among vLLM's own, in its format and by its level (VLLM_LOGGING_LEVEL), unless the process has set
structlog up otherwise.
"""

from __future__ import annotations

import logging
from collections.abc import MutableMapping
from typing import Any

import structlog

_LOGGER = "vllm.kvbm"  # below "vllm", which is the one that vLLM gives a handler


def log_with_vllm() -> None:
    """Send remarks to vLLM's log. Harmless when called again."""
    if structlog.is_configured():
        return
    structlog.configure(
        processors=[structlog.processors.format_exc_info, _line],
        wrapper_class=structlog.stdlib.BoundLogger,
        logger_factory=lambda *_: logging.getLogger(_LOGGER),
        cache_logger_on_first_use=True,
    )


def _line(logger: Any, method: str, event: MutableMapping[str, Any]) -> str:
    """One remark as text: its name, its fields, a traceback below."""
    trace = event.pop("exception", "")
    words = [str(event.pop("event", "")), *(f"{key}={_shown(value)}" for key, value in event.items())]
    return " ".join(words) + (f"\n{trace}" if trace else "")


def _shown(value: Any) -> str:
    return repr(value) if isinstance(value, str) and (" " in value or not value) else str(value)
