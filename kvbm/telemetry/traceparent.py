"""The `traceparent` header of questions to the catalog: whose part of which trace they are.

Nothing is imported here: who has a current span has imported OpenTelemetry.
"""

from __future__ import annotations

import sys
from typing import Any

NAME = "traceparent"


def traceparent() -> str:
    """The header of the caller's current span, as W3C's Trace Context has it; "" where there is none."""
    trace: Any = sys.modules.get("opentelemetry.trace")
    if trace is None:
        return ""
    try:
        context = trace.get_current_span().get_span_context()
        if not context.is_valid:
            return ""
        return f"00-{context.trace_id:032x}-{context.span_id:016x}-{int(context.trace_flags) & 1:02x}"
    except Exception:  # noqa: BLE001 - an engine's own span, or a library that is being imported
        return ""
