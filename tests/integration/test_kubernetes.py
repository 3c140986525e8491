"""deploy/kubernetes: what kustomize renders is valid Kubernetes, fits what kvbm has, and serves as processes."""

from __future__ import annotations

import argparse
import json
import re
import shutil
import signal
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

import kvbm.catalog_cli
import kvbm.cli
from kvbm.assembly import open_manager
from kvbm.catalog_cli import catalog_main
from kvbm.cli import main
from kvbm.config import Settings, load_settings
from kvbm.locate.credentials import CatalogCredentials
from kvbm.locate.http import CatalogClient
from tests.catalog_site import Running, run_catalog
from tests.eventually import eventually
from tests.managers import BLOCK_BYTES, NAMESPACE, hashes_of, serve
from tests.manifests import (
    OVERLAYS,
    ROOT,
    WAIT_S,
    LocalCluster,
    Manifest,
    Workload,
    files_of,
    rendered,
    workloads,
)
from tests.nats_fixture import cluster, nats_url  # noqa: F401
from tests.object_stores import s3_place
from tests.pages import Reader, blocks

VERSIONS = ("1.29.0", pytest.param("1.33.0", marks=pytest.mark.nightly), "1.37.0")
NEWEST = "1.37.0"
PAGE = ROOT / "docs" / "deploy.md"
OURS = ("nats", "catalog", "janitor")
PROGRAMS = {"kvbm": main, "kvbm-catalog": catalog_main}


def found(overlay: str, kind: str) -> list[Manifest]:
    return [one for one in rendered(overlay) if one["kind"] == kind]


def configuration(overlay: str, name: str, file: str) -> str:
    (text,) = [files_of(one)[file] for one in found(overlay, "ConfigMap") if file in files_of(one) and name]
    return text


def secrets_of(value: Any) -> set[str]:
    """Names of the Secrets that a manifest refers to."""
    names: set[str] = set()
    if isinstance(value, dict):
        for key in ("secretKeyRef", "secretRef", "secret"):
            if key in value:
                names.add(value[key].get("name") or value[key]["secretName"])
        for part in value.values():
            names |= secrets_of(part)
    elif isinstance(value, list):
        for part in value:
            names |= secrets_of(part)
    return names


@pytest.fixture(scope="module", params=OVERLAYS)
def overlay(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.mark.parametrize("version", VERSIONS)
def test_what_is_rendered_is_valid_kubernetes(version: str) -> None:
    seen = {json.dumps(one, sort_keys=True): one for overlay in OVERLAYS for one in rendered(overlay)}
    for manifest in seen.values():
        kubernetes_validate.validate(manifest, version, strict=True)


def test_a_field_that_does_not_exist_is_found() -> None:
    (manifest,) = [one for one in rendered("small") if one["kind"] == "CronJob"]
    wrong = json.loads(json.dumps(manifest))
    wrong["spec"]["jobTemplate"]["spec"]["template"]["spec"]["containers"][0]["readOnlyRootFilesystem"] = True
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(wrong, NEWEST, strict=True)


def test_no_pod_has_more_rights_than_it_needs(overlay: str) -> None:
    """As Kubernetes' profile `restricted` asks, and a root file system that nobody writes."""
    for workload in workloads(rendered(overlay)).values():
        pod, container = workload.pod["spec"], workload.container
        assert pod["securityContext"]["runAsNonRoot"] is True, workload.name
        assert pod["securityContext"]["runAsUser"] > 0, workload.name
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}, workload.name
        assert (pod["automountServiceAccountToken"], pod["enableServiceLinks"]) == (False, False), workload.name
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }, workload.name
        assert {"cpu", "memory"} <= container["resources"]["requests"].keys(), workload.name
        assert container["resources"]["limits"]["memory"] == container["resources"]["requests"]["memory"], workload.name
        if workload.manifest["kind"] == "StatefulSet":
            assert {"startupProbe", "readinessProbe", "livenessProbe"} <= container.keys(), workload.name
        assert {one["name"] for one in container["volumeMounts"]} == {
            *(one["name"] for one in pod.get("volumes", [])),
            *(one["metadata"]["name"] for one in workload.manifest["spec"].get("volumeClaimTemplates", [])),
        }, workload.name


def test_what_a_cluster_cannot_lose_at_once_stands_apart(overlay: str) -> None:
    budgets = {
        one["spec"]["selector"]["matchLabels"]["app.kubernetes.io/name"]: one["spec"]
        for one in found(overlay, "PodDisruptionBudget")
    }
    known = workloads(rendered(overlay))
    for name, replicas in (("nats", 3), ("catalog", 2)):
        labels = {"app.kubernetes.io/name": name}
        assert known[name].manifest["spec"]["replicas"] == replicas
        assert budgets[name]["maxUnavailable"] == 1
        (rule,) = known[name].pod["spec"]["affinity"]["podAntiAffinity"][
            "requiredDuringSchedulingIgnoredDuringExecution"
        ]
        assert (rule["topologyKey"], rule["labelSelector"]["matchLabels"]) == ("kubernetes.io/hostname", labels)
        assert known[name].pod["metadata"]["labels"].items() >= labels.items()


def test_services_policies_and_probes_name_ports_that_pods_have(overlay: str) -> None:
    known = workloads(rendered(overlay))
    ports = {name: {one["name"] for one in workload.container.get("ports", [])} for name, workload in known.items()}
    for service in found(overlay, "Service"):
        name = service["spec"]["selector"]["app.kubernetes.io/name"]
        assert {one["targetPort"] for one in service["spec"]["ports"]} <= ports[name]
    for policy in found(overlay, "NetworkPolicy"):
        name = policy["spec"]["podSelector"]["matchLabels"].get("app.kubernetes.io/name")
        for rule in policy["spec"].get("ingress", []):
            assert {one["port"] for one in rule["ports"]} <= ports[name]
    for name, workload in known.items():
        for kind in ("startupProbe", "readinessProbe", "livenessProbe"):
            probe = workload.container.get(kind, {})
            assert "httpGet" not in probe or probe["httpGet"]["port"] in ports[name]


def test_whoever_needs_a_part_has_the_label_that_lets_it_in() -> None:
    for workload in workloads(rendered("small")).values():
        labels, said = workload.pod["metadata"]["labels"], json.dumps(workload.pod)
        assert ("kvbm/stream" in labels) == ("NKEY_SEED" in said), workload.name
        assert ("kvbm/sql" in labels) == ("KVBM_CATALOG__DATABASE" in said), workload.name
        assert ("kvbm/catalog" in labels) == ("kvbm-engine-token" in said), workload.name


def test_each_secret_that_is_named_is_made_by_the_page(overlay: str) -> None:
    made = set(re.findall(r"^  secret (\S+)", PAGE.read_text(), re.MULTILINE))
    named = secrets_of(list(rendered(overlay)))
    assert named - made == ({"kvbm-catalog-tls"} if overlay == "production" else set())
    held = {one["metadata"]["name"] for one in found(overlay, "ConfigMap")}
    assert set(re.findall(r"kvbm-(?:nats|settings|engine)-[a-z0-9]{10}\b", json.dumps(rendered(overlay)))) == held


@pytest.fixture
def parsed(monkeypatch: pytest.MonkeyPatch) -> list[argparse.Namespace]:
    """What our commands have parsed, instead of doing it."""
    seen: list[argparse.Namespace] = []

    def keep(work: object, arguments: argparse.Namespace, name: str) -> int:
        seen.append(arguments)
        return 0

    for module in (kvbm.catalog_cli, kvbm.cli):
        monkeypatch.setattr(module, "run_command", keep)
    return seen


def commands_of(workload: Workload) -> Iterator[list[str]]:
    yield workload.command
    for kind in ("startupProbe", "readinessProbe", "livenessProbe"):
        if "exec" in workload.container.get(kind, {}):
            yield workload.container[kind]["exec"]["command"]


def test_our_commands_are_such_as_exist(overlay: str, parsed: list[argparse.Namespace]) -> None:
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    ran = [command for workload in workloads(rendered(overlay)).values() for command in commands_of(workload)]
    for command in ran:
        if command and command[0] in PROGRAMS:
            assert command[0] in scripts
            assert PROGRAMS[command[0]](command[1:]) == 0
    assert {one.command for one in parsed} == {"serve", "gc", "probe"}
    assert all(shutil.which(program, path=str(Path(sys.executable).parent)) for program in (*PROGRAMS, "nats-server"))


def settings_of(overlay: str, workload: Workload, secrets: dict[str, str]) -> Settings:
    """As the container's process reads them: the file, then the environment."""
    text = configuration(overlay, workload.name, "kvbm.toml")
    environment = dict(secrets)
    for one in workload.container["env"]:
        value = one.get("value", "postgresql+asyncpg://kvbm:p@postgres/kvbm")
        environment[one["name"]] = "engine-0" if "fieldRef" in one.get("valueFrom", {}) else value
    extra: dict[str, Any] = tomllib.loads(text)
    if workload.name == "engine":
        extra = json.loads(configuration(overlay, "engine", "kvbm.json"))["kv_connector_extra_config"]
    return load_settings(environment=environment, defaults=extra)


def test_each_setting_exists_and_names_what_the_manifests_have(overlay: str) -> None:
    known = workloads(rendered(overlay))
    secrets = {"KVBM_POOLS__OBJECT__URL": "s3://kvbm/blocks", "KVBM_POOLS__OBJECT__ENDPOINT": ""}
    nats = [f"nats://{pod}.nats:4222" for pod in known["nats"].pods()]
    for name in ("catalog", "janitor", "engine"):
        if name not in known:
            continue
        settings = settings_of(overlay, known[name], secrets)
        assert settings.nats.url.split(",") == nats
        assert (settings.nats.replicas, settings.instance.cluster) == (3, "prod")
        mounts = [one["mountPath"] for one in known[name].container["volumeMounts"]]
        catalog = settings.catalog
        files = [settings.nats.nkey_seed, settings.instance.data_dir, catalog.access, catalog.archive, catalog.token]
        for path in (*files, catalog.tls_cert, catalog.tls_key):
            shared = path == catalog.access and name == "janitor"  # it reads the file of settings, not that of callers
            assert not path or shared or any(f"{path}/".startswith(f"{one}/") for one in mounts), (name, path)
        if name == "catalog":
            assert settings.catalog.listen == f"0.0.0.0:{known[name].container['ports'][0]['containerPort']}"
        if name == "engine":
            urls = [f"http://{pod}.catalogs:7700" for pod in known["catalog"].pods()]
            assert settings.catalog.url.split(",") == urls
            assert settings.instance.id == "engine-0"
    janitor = settings_of(overlay, known["janitor"], secrets)
    assert janitor.nats.nkey_seed.endswith(f"janitor-{janitor.gc.id}.nk")
    assert f"--janitor {janitor.gc.id}" in PAGE.read_text()
    assert f"--cluster {janitor.instance.cluster}" in PAGE.read_text()


@pytest.fixture
def running(nats_url: str, cluster: str, sqlite_url: str) -> Iterator[Running]:  # noqa: F811
    yield from run_catalog(nats_url, cluster, sqlite_url)


def test_the_probes_of_a_catalog_are_answered_by_a_real_one(running: Running) -> None:
    container = workloads(rendered("small"))["catalog"].container
    paths = {container[kind]["httpGet"]["path"] for kind in ("startupProbe", "readinessProbe", "livenessProbe")}
    assert paths == {"/healthz", "/readyz"}
    for path in paths:
        assert main(["probe", f"{running.client.url}{path}"]) == 0
    assert main(["probe", f"{running.client.url}/no-such-path"]) == 1


def test_the_configuration_of_nats_is_one_that_the_server_takes(tmp_path: Path) -> None:
    text = configuration("small", "nats", "nats.conf")
    projected = workloads(rendered("small"))["nats"].pod["spec"]["volumes"][0]["projected"]["sources"]
    files = {item["path"] for one in projected for item in one.get("secret", {}).get("items", [])}
    assert files == set(re.findall(r'^ *include "(.+)"', text, re.MULTILINE))
    (tmp_path / "nats.conf").write_text(text)
    (tmp_path / "routes.conf").write_text('routes: ["nats://nats-1.nats:6222"]\n')
    (tmp_path / "accounts.conf").write_text('accounts { "KVBM": { jetstream: enabled } }\n')
    server = Path(sys.executable).parent / "nats-server"

    def check(config: str) -> int:
        (tmp_path / "nats.conf").write_text(config)
        return subprocess.run(
            [server, "-t", "--config", "nats.conf"],
            cwd=tmp_path,
            env={"POD_NAME": "nats-0"},
            capture_output=True,
            timeout=WAIT_S,
            check=False,
        ).returncode

    assert check(text) == 0
    assert check(text.replace("max_payload", "max_payloads")) != 0


# -- The pods as processes --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def secrets(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Manifest]]:
    """The folder in which the page's commands ran, and the Secrets that they made."""
    folder = tmp_path_factory.mktemp("secrets")
    with Reader(folder) as reader:
        for block in blocks(PAGE):
            if "kubectl create secret" in block.text and block.runs:
                reader.read(block)
    made = [one for one in yaml.safe_load_all((folder / "secrets.yaml").read_text()) if one]
    for one in made:
        kubernetes_validate.validate(one, NEWEST, strict=True)
    return folder, made


@pytest.fixture
def local(secrets: tuple[Path, list[Manifest]], s3_endpoint: str, tmp_path: Path) -> Iterator[LocalCluster]:
    place = s3_place(s3_endpoint)
    with ExitStack() as opened:
        system = LocalCluster("small", secrets[1], tmp_path, opened)
        system.files["Secret", "kvbm-objects"] |= {
            "KVBM_POOLS__OBJECT__URL": place.url,
            "KVBM_POOLS__OBJECT__ENDPOINT": place.endpoint,
            **place.environment,
        }
        yield system


def engine_settings(system: LocalCluster, pod: str) -> Settings:
    """As the engine's pod has them, but for the sizes of its pools and how patient it is."""
    system.mount(pod)
    said = json.loads((system.folder / pod / "settings" / "kvbm.json").read_text())["kv_connector_extra_config"]
    own = {key: value for key, value in said.items() if not key.startswith(("pools.host.", "pools.nvme."))}
    small = {"pools.hbm.slots": 64, "pools.hbm.device": "memory", "pools.host.slots": 64, "nats.timeout_s": 60}
    waits = dict.fromkeys(("onboard.wait_s", "onboard.locate_s", "pools.object.timeout_s"), 60)
    environment = {key: value for key, value in system.environment(pod).items() if key.startswith("KVBM_")}
    return load_settings(environment=environment, flags=own | small | waits)


@pytest.mark.nightly
def test_lookups_and_events_go_on_without_one_catalog_and_one_nats_server(
    local: LocalCluster, secrets: tuple[Path, list[Manifest]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the manifests say, from the page's Secrets: three NATS servers, PostgreSQL, two catalogs, an engine, the
    janitor.
    """
    servers, catalogs = local.workloads["nats"].pods(), local.workloads["catalog"].pods()
    for pod in servers:
        local.start(pod)
    for pod in servers:
        eventually(
            lambda pod=pod: local.probe(pod, "startup"), f"{pod} does not start", state=lambda: local.log("nats-0")
        )
        local.wait_ready(pod)
        assert local.probe(pod, "liveness")
    local.start_postgres()
    for pod in catalogs:
        local.start(pod)
    for pod in catalogs:
        local.wait_ready(pod)
        assert local.probe(pod, "startup") and local.probe(pod, "liveness")
    settings = engine_settings(local, "engine-0")
    for key, value in local.files["Secret", "kvbm-objects"].items():
        if key.startswith("AWS_"):
            monkeypatch.setenv(key, value)
    token = CatalogCredentials(token=str(secrets[0] / "engine.token"))

    def depth(prompt: int, url: str = settings.catalog.url) -> int:
        client = CatalogClient(url, WAIT_S, credentials=token)
        try:
            answer = client.lookup(NAMESPACE.id, hashes_of(prompt, 8))
        finally:
            client.close()
        return max((one.depth for one in answer.instances), default=0)

    with open_manager(settings, [NAMESPACE], BLOCK_BYTES) as manager:
        serve(manager, 1, 8)
        for url in settings.catalog.url.split(","):
            eventually(lambda url=url: depth(1, url) == 8, "a catalog does not know the prompt")
        local.kill("catalog-0")
        assert depth(1) == 8
        local.kill("nats-1")
        assert depth(1) == 8
        serve(manager, 2, 8)
        eventually(lambda: depth(2) == 8, "events do not go on without a NATS server", WAIT_S)
        local.start("catalog-0")
        local.start("nats-1")
        local.wait_ready("catalog-0")
        local.wait_ready("nats-1")
        eventually(lambda: depth(2, settings.catalog.url.split(",")[0]) == 8, "the catalog has not read what it missed")
        assert manager.settle(WAIT_S)
        janitor = local.start("janitor")
        assert janitor.wait(WAIT_S) == 0, local.log("janitor")
        assert settings.pools.object.url.removeprefix("s3://") in local.log("janitor")
        local.kill("catalog-1", signal.SIGTERM)  # as a rolling upgrade does
        assert depth(2) == 8
