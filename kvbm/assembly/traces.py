"""Settings → who makes spans of requests, if anybody wants them. Nothing of OpenTelemetry is imported before."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from kvbm.config import Settings
from kvbm.core.errors import MissingExtraError

if TYPE_CHECKING:
    from kvbm.telemetry.tracing import Tracing


def open_tracing(settings: Settings, service: str, instance: str, version: str) -> Tracing | None:
    """Spans to `traces.endpoint`, or else by the provider that the embedding program has set by now; None: neither.

    Args:
        service: "kvbm", or "kvbm-catalog". instance: its id; "" for none.
    Raises: MissingExtraError: `traces.endpoint` is set, and OpenTelemetry is not installed.
    """
    traces = settings.traces
    if not traces.sample:
        return None
    if traces.endpoint:
        from kvbm.telemetry.span_export import exporting

        resource = {
            "service.name": service,
            "service.namespace": settings.instance.cluster,
            "service.version": version,
            **({"service.instance.id": instance} if instance else {}),
        }
        return exporting(traces.endpoint, traces.sample, resource, version)
    if "opentelemetry.trace" not in sys.modules:  # who has set a provider has imported it
        return None
    try:
        from kvbm.telemetry.tracing import tracing_of_engine
    except MissingExtraError:  # half of it, which is the engine's own affair
        return None
    return tracing_of_engine(version)
