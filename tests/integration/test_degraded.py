"""What the command line says of a catalog that answers, and of which a part does not work."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvbm.catalog_cli import catalog_main
from kvbm.cli import main
from tests.catalog_site import Running, run_catalog
from tests.eventually import eventually
from tests.nats_fixture import cluster, nats_url  # noqa: F401

WAIT_S = "60"


@pytest.fixture
def running(nats_url: str, cluster: str, tmp_path: Path) -> Iterator[Running]:  # noqa: F811
    yield from run_catalog(nats_url, cluster, f"sqlite:///{tmp_path}/catalog.db", archive=str(tmp_path / "archive"))


def degrade(running: Running, folder: Path) -> None:
    """Have its archive's folder be a file, and something come that belongs there."""
    folder.rename(folder.with_name("aside"))
    folder.write_text("this is no folder\n")
    one = running.instance("one")
    one.create(0, 2)
    one.publish()
    eventually(lambda: running.client.ready().degraded, "the catalog is not degraded")


def test_a_probe_and_a_table_of_instances_say_what_is_degraded(
    running: Running, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    url = f"{running.client.url}/readyz"
    asked = ["instances", "--url", running.client.url]
    assert main(["probe", url, "--strict"]) == 0 and "degraded" not in capsys.readouterr().out
    assert catalog_main(asked) == 0 and "degraded" not in capsys.readouterr().err
    degrade(running, tmp_path / "archive")

    assert main(["probe", url, "--wait", WAIT_S]) == 0
    first, second = capsys.readouterr().out.splitlines()
    assert first == f"{url} answers 200" and second.startswith("degraded: archive") and str(tmp_path) in second
    assert main(["probe", url, "--strict"]) == 1
    told = capsys.readouterr()
    assert told.out == "" and told.err.splitlines() == [first, second]
    assert main(["probe", url, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) | {"degraded": ""} == {"well": True, "said": first, "degraded": ""}

    for more in ([], ["one"], ["--json"]):
        assert catalog_main([*asked, *more]) == 0
        told = capsys.readouterr()
        assert told.err.startswith("the catalog is degraded: archive") and "degraded" not in told.out
    assert catalog_main([*asked, "--namespaces"]) == 0 and capsys.readouterr().err == ""
