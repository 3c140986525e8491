"""What Kubernetes puts into the environment of pods beside a Service whose name begins with "kvbm" is no setting; what
we mistype is.
"""

from __future__ import annotations

import pytest
import structlog

from kvbm.config import load, load_settings
from kvbm.core.errors import ConfigError
from kvbm.engines.vllm.settings import settings_of


def links(service: str, port: int, host: str = "10.0.0.7") -> dict[str, str]:
    """As the kubelet makes them (kubernetes/pkg/kubelet/envvars)."""
    name = service.upper().replace("-", "_")
    at = f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"
    return {
        f"{name}_SERVICE_HOST": host,
        f"{name}_SERVICE_PORT": str(port),
        f"{name}_SERVICE_PORT_HTTP_API": str(port),
        f"{name}_PORT": at,
        f"{name}_PORT_{port}_TCP": at,
        f"{name}_PORT_{port}_TCP_PROTO": "tcp",
        f"{name}_PORT_{port}_TCP_PORT": str(port),
        f"{name}_PORT_{port}_TCP_ADDR": host,
    }


@pytest.fixture(autouse=True)
def _nothing_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load, "_told_links", set())


@pytest.mark.parametrize("service", ["kvbm", "kvbm-catalog", "kvbm-nats", "kvbm-pools-host", "kvbm-2"])
@pytest.mark.parametrize("host", ["10.0.0.7", "fd00::7"])
def test_variables_of_a_service_are_no_settings_and_said_once(service: str, host: str) -> None:
    environment = links(service, 7700, host) | {"KVBM_CATALOG__LISTEN": "127.0.0.1:7701"}
    with structlog.testing.capture_logs() as logs:
        settings = load_settings(environment=environment)
        engine = settings_of({"pools.host.slots": 8}, environment=environment, hbm_slots=8)
    assert settings.catalog.listen == engine.catalog.listen == "127.0.0.1:7701"
    assert settings == load_settings(flags={"catalog.listen": "127.0.0.1:7701"})
    (said,) = [log for log in logs if log["event"] == "environment.links_ignored"]
    assert said["variables"] == 8
    assert said["first"] in links(service, 7700)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("KVBM_CATALOG_LISTEN", "127.0.0.1:7700"),
        ("KVBM_CATALOG_PORT", "7700"),
        ("KVBM_CATALOG__PORT", "tcp://10.0.0.7:7700"),
        ("KVBM_PORT", "7700"),
        ("KVBM_CATALOG__SERVICE_PORT", "7700"),
        ("KVBM_CATALOG_SERVICE_HOST", "catalog"),
        ("KVBM_NATS_URL", "nats://10.0.0.7:4222"),
        ("KVBM_TRANSPORT_LISTEN", "tcp://10.0.0.7:7711"),
        ("KVBM_SERVICE_PORT", "seven"),
        ("KVBM_CATALOG_PORT", "http://10.0.0.7:7700"),
    ],
)
def test_a_setting_that_is_mistyped_is_refused_beside_them(name: str, value: str) -> None:
    with pytest.raises(ConfigError, match=f"environment {name}: "):
        load_settings(environment=links("kvbm-nats", 4222) | {name: value})
