"""compose.yaml and the Dockerfile without a container engine: commands, environments and probes run as processes."""

from __future__ import annotations

import fnmatch
import os
import shutil
import subprocess
import tomllib
import venv
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvbm.assembly import open_manager
from kvbm.catalog_cli import catalog_main
from kvbm.config import load_settings
from kvbm.locate.http import CatalogClient
from tests.composed import ROOT, WAIT_S, Cluster, composed, read_services
from tests.eventually import eventually
from tests.managers import BLOCK_BYTES, NAMESPACE, hashes_of, serve

OURS = ("nats", "bucket", "catalog", "gc")


@pytest.fixture(scope="module")
def services() -> dict[str, Any]:
    return read_services()


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    with composed(tmp_path) as cluster:
        yield cluster


def test_every_part_that_is_depended_on_exists_and_can_tell_its_health(services: dict[str, Any]) -> None:
    for service in services.values():
        wanted = service.get("depends_on", {})
        for name in wanted:
            assert name in services
            if isinstance(wanted, dict) and wanted[name]["condition"] == "service_healthy":
                assert "healthcheck" in services[name]
    assert all("127.0.0.1:" in port for service in services.values() for port in service.get("ports", []))


def test_everything_is_started_again_when_it_ends_and_ours_is_one_image(services: dict[str, Any]) -> None:
    for name, service in services.items():
        assert service["restart"] == ("on-failure" if name == "bucket" else "unless-stopped")
        assert ("build" in service) == (name in OURS)
    assert {services[name]["image"] for name in OURS} == {"kvbm-ledger"}


@pytest.mark.slow
def test_the_file_comes_up_and_an_engine_uses_all_of_it(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the order of its dependencies; each probe fails before its service runs and succeeds after."""
    for name in ("nats", "catalog", "postgres"):
        assert not cluster.is_well(name)
    for name in ("nats", "postgres"):
        cluster.start(name)
        cluster.wait_well(name)
    bucket = cluster.start("bucket")  # before the S3 server: it waits
    cluster.start("s3")
    assert bucket is not None
    assert bucket.wait(WAIT_S) == 0, cluster.log("bucket")
    assert not cluster.is_well("catalog")
    cluster.start("catalog")
    cluster.wait_well("catalog")
    for key, value in cluster.services["gc"]["environment"].items():
        monkeypatch.setenv(key, value)
    _use(cluster, "engine-a", restored=0)
    _use(cluster, "engine-b", restored=8)
    janitor = cluster.start("gc")
    assert janitor is not None
    eventually(lambda: "kvbm/blocks" in cluster.log("gc") or janitor.poll() is not None)
    assert janitor.poll() is None, cluster.log("gc")  # it goes on until the next run
    cluster.stop("nats")
    assert not cluster.is_well("nats")


def _use(cluster: Cluster, name: str, restored: int) -> None:
    """Serve a prompt of 8 blocks as an engine with the settings compose.yaml tells;

    `restored` of them are there already.
    """
    flags: dict[str, object] = {
        "instance.id": name,
        "journal.in_memory": True,
        "onboard.wait_s": 60.0,
        "onboard.locate_s": 60.0,
        "pools.object.timeout_s": 60.0,
        "pools.hbm.slots": 16,
        "pools.hbm.device": "memory",
        "pools.host.slots": 16,
        "nats.url": cluster.here("nats://localhost:4222"),
        "catalog.url": cluster.here("http://localhost:7700"),
        "pools.object.url": "s3://kvbm/blocks",
        "pools.object.endpoint": cluster.here("http://localhost:9000"),
    }
    with open_manager(load_settings(flags=flags), [NAMESPACE], BLOCK_BYTES) as manager:
        assert serve(manager, 1, 8).prefix.depth == restored, cluster.log("catalog")
        assert manager.settle(WAIT_S)
    client = CatalogClient(str(flags["catalog.url"]))
    try:
        eventually(lambda: [pool.depth for pool in client.lookup(NAMESPACE.id, hashes_of(1, 8)).pools] == [8])
    finally:
        client.close()


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_the_images_pip_commands_work_on_the_files_it_is_given(tmp_path: Path) -> None:
    """Each RUN's pip, in a fresh environment for each stage; /src has what .dockerignore lets through, and the last CMD
    runs.
    """
    source, wheels = tmp_path / "src", tmp_path / "wheels"
    _copy_context(source)
    programs = tmp_path
    for line in (ROOT / "Dockerfile").read_text().splitlines():
        word, _, rest = line.partition(" ")
        if word == "FROM":
            venv.create(tmp_path / f"stage{len(list(tmp_path.glob('stage*')))}", with_pip=True)
            programs = sorted(tmp_path.glob("stage*"))[-1] / "bin"
        elif word == "RUN" and "pip " in rest:
            _run(rest.replace("/wheels", str(wheels)), programs, source if source.exists() else tmp_path)
        elif word == "COPY" and rest.startswith("--from=build"):
            shutil.rmtree(source)  # another stage has only what is copied to it
    _run(
        "kvbm --version && kvbm-catalog serve --help && kvbm-catalog gc --help && nats-server --version",
        programs,
        tmp_path,
    )
    _run(
        "python -c 'import boto3, obstore, azure.storage.blob, redis, cryptography, nkeys, pyarrow'", programs, tmp_path
    )


def _run(command: str, programs: Path, folder: Path) -> None:
    kept = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "VIRTUAL_ENV")}
    quick = "-DCMAKE_CXX_FLAGS_RELEASE=-O0"  # the core is only imported
    environment = kept | {"PATH": f"{programs}{os.pathsep}{os.environ['PATH']}", "CMAKE_ARGS": quick}
    ran = subprocess.run(
        ["sh", "-c", command],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=600,
        check=False,
    )
    assert ran.returncode == 0, f"{command}\n{ran.stdout.decode(errors='replace')[-3000:]}"


def _copy_context(target: Path) -> None:
    """The files of the checkout that .dockerignore lets through, by the rules of its file: the last pattern that fits
    decides.
    """
    rules = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if line and not line.startswith("#")]
    listed = subprocess.run(
        ["git", "-c", "safe.directory=*", "ls-files", "-co", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.splitlines()
    for name in listed:
        if not _is_ignored(name, rules) and (ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target / name)


def _is_ignored(name: str, rules: list[str]) -> bool:
    parts = name.split("/")
    names = ["/".join(parts[: count + 1]) for count in range(len(parts))]  # a folder's rule is its files'
    is_ignored = False
    for rule in rules:
        pattern = rule.removeprefix("!")
        if any(
            fnmatch.fnmatchcase(one, pattern) or fnmatch.fnmatchcase(f"/{one}", pattern.removeprefix("**"))
            for one in names
        ):
            is_ignored = not rule.startswith("!")
    return is_ignored


def test_the_context_is_the_sources_alone() -> None:
    rules = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if line and not line.startswith("#")]
    for kept in ("pyproject.toml", "kvbm/cli.py", "native/src/ledger.cpp", "migrations/env.py", "constraints.txt"):
        assert not _is_ignored(kept, rules), kept
    for left in (
        ".git/config",
        ".venv/bin/python",
        "build/x",
        "tests/servers.py",
        "native/tests/check.hpp",
        "kvbm/_native.so",
        "shared/x",
    ):
        assert _is_ignored(left, rules), left
    readme = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["readme"]
    assert not _is_ignored(readme, rules)


def test_the_image_runs_a_command_that_exists(capsys: pytest.CaptureFixture[str]) -> None:
    lines = (ROOT / "Dockerfile").read_text().splitlines()
    command = next(line.removeprefix("CMD ") for line in lines if line.startswith("CMD "))
    program, action, *_ = yaml.safe_load(command)
    assert program == "kvbm-catalog"
    with pytest.raises(SystemExit) as ended:
        catalog_main([action, "--help"])
    assert ended.value.code == 0
    assert "usage" in capsys.readouterr().out
