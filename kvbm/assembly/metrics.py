"""Metrics of managers for programs that embed them: over HTTP, or in a registry of prometheus-client."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvbm.assembly.start import kvbm_version
from kvbm.core.checks import check_text, checked_int, kind_of
from kvbm.core.errors import ArgumentTypeError, ArgumentValueError
from kvbm.manager.base import BlockManager
from kvbm.streams import at_exit as leaving
from kvbm.telemetry.metrics_server import MetricsServer

if TYPE_CHECKING:
    from prometheus_client.registry import Collector


def serve_metrics(*managers: BlockManager, host: str = "127.0.0.1", port: int = 0) -> MetricsServer:
    """Serve the metrics of managers of this process over HTTP, at `/metrics`, in a thread of its own.

    A scrape holds a manager's lock as long as `stats()` does, and happens twice a second at most, however many ask.
    There is neither TLS nor a token: listen on the loopback, or where only Prometheus can reach it. Needs the extra
    `catalog`.

    Args:
        managers: one or several; their instances are told apart by the label `instance`.
        host, port: where to listen; port 0 takes a free one, which `MetricsServer.port` names.
    Returns: what closes it, with `close()` or `with`. It is closed at the end of the process at the latest.
    Raises: ArgumentError: an argument that cannot be used. ConfigError: nobody can listen there. MissingExtraError: the
        metrics library is not installed.
    """
    check_text(host, "host")
    port = checked_int(port, "port", most=65535)
    collector = metrics_collector(*managers)
    from prometheus_client import CollectorRegistry, ProcessCollector
    from prometheus_client.exposition import generate_latest

    from kvbm.telemetry.metrics import CONTENT_TYPE

    registry = CollectorRegistry()
    registry.register(collector)
    ProcessCollector(registry=registry)
    server = MetricsServer(lambda: generate_latest(registry), CONTENT_TYPE, host, port, leaving.forget)
    leaving.keep(server)
    return server


def metrics_collector(*managers: BlockManager) -> Collector:
    """The metrics of managers as a collector: `prometheus_client.REGISTRY.register(kvbm.metrics_collector(manager))`
    adds them to those that a program serves already.

    Args:
        managers: one or several. Register one collector for all of a process: a metric has one place in a registry.
    Raises: ArgumentError: no manager, something else, or one twice. MissingExtraError: the metrics library is not
        installed.
    """
    if not managers:
        raise ArgumentValueError("managers", "is empty; give a manager")
    for one in managers:
        if not isinstance(one, BlockManager):
            raise ArgumentTypeError("managers", f"has {kind_of(one)}; give what open_manager returned")
    names = [one.instance for one in managers]
    if len(set(names)) != len(names):
        raise ArgumentValueError("managers", f"has an instance twice: {', '.join(sorted(names))}")
    from kvbm.manager.metrics import MANAGER_ROWS, read_manager
    from kvbm.telemetry.metrics import MetricRowCollector

    version = kvbm_version()
    return MetricRowCollector(
        MANAGER_ROWS, lambda: {(one.instance,): read_manager(one, version) for one in managers}, ("instance",)
    )
