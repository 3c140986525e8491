"""compose.yaml and the Dockerfile, as far as they can be checked without Docker: what they name exists and is accepted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from kvbm.cli import catalog_main
from kvbm.config import load_settings
from kvbm.streams.server import server_binary
from kvbm.workload.processes import free_port, start_http

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def services() -> dict[str, Any]:
    return dict(yaml.safe_load((ROOT / "compose.yaml").read_text())["services"])


def test_the_catalog_is_started_with_settings_that_exist(services: dict[str, Any]) -> None:
    program, *arguments = services["catalog"]["command"]
    assert program == "kvbm-catalog"
    sets = [argument.removeprefix("--set=") for argument in arguments if argument.startswith("--set=")]
    assert len(sets) == len(arguments) - 1
    pairs = dict(pair.split("=", 1) for pair in sets)
    settings = load_settings(flags=pairs)  # refuses a key that does not exist
    postgres = services["postgres"]["environment"]
    assert settings.catalog.database == (
        f"postgresql+asyncpg://{postgres['POSTGRES_USER']}:{postgres['POSTGRES_PASSWORD']}@postgres:5432/{postgres['POSTGRES_DB']}"
    )
    assert settings.nats.url == "nats://nats:4222"
    port = settings.catalog.listen.rpartition(":")[2]
    assert services["catalog"]["ports"] == [f"127.0.0.1:{port}:{port}"]


def test_every_part_that_is_depended_on_exists_and_can_tell_its_health(services: dict[str, Any]) -> None:
    for service in services.values():
        wanted = service.get("depends_on", {})
        for name in wanted:
            assert name in services
            if isinstance(wanted, dict) and wanted[name]["condition"] == "service_healthy":
                assert "healthcheck" in services[name]
    assert all("127.0.0.1:" in port for service in services.values() for port in service.get("ports", []))


def test_nats_server_accepts_its_arguments(services: dict[str, Any], tmp_path: Path) -> None:
    port = free_port()
    own = {"/data": str(tmp_path), "8222": str(port)}
    command = [str(server_binary()), "-p", "-1", *(own.get(part, part) for part in services["nats"]["command"])]
    start_http("nats-server", command, f"http://127.0.0.1:{port}/healthz", tmp_path / "logs", 20.0).stop()


def test_the_image_runs_a_command_that_exists(capsys: pytest.CaptureFixture[str]) -> None:
    lines = (ROOT / "Dockerfile").read_text().splitlines()
    command = next(line.removeprefix("CMD ") for line in lines if line.startswith("CMD "))
    program, action, *_ = yaml.safe_load(command)
    assert program == "kvbm-catalog"
    with pytest.raises(SystemExit) as ended:
        catalog_main([action, "--help"])
    assert ended.value.code == 0
    assert "usage" in capsys.readouterr().out
