"""A real Ceph of one machine: a monitor, a manager, an OSD in memory, and radosgw, which speaks S3.

It checks signatures, ranges and conditions as Amazon does, which the S3 server of the quick tests does not.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from tests.servers import ServerMissingError, free_port, start_process, stop_process

PACKAGES = "radosgw ceph-mon ceph-osd ceph-mgr ceph-common"
ACCESS_KEY_ID = "kvbm-test"
SECRET_ACCESS_KEY = "kvbm-test-secret"
_START_WAIT_S = 90.0
_MEMORY_BYTES = 4 << 30  # of the OSD, taken as it fills

_CONF = """
[global]
fsid = {fsid}
mon_host = [v2:127.0.0.1:{mon_v2},v1:127.0.0.1:{mon_v1}]
public_addr = 127.0.0.1
cluster_addr = 127.0.0.1
auth_cluster_required = none
auth_service_required = none
auth_client_required = none
auth_allow_insecure_global_id_reclaim = true
osd_pool_default_size = 1
osd_pool_default_min_size = 1
osd_pool_default_pg_num = 8
osd_crush_chooseleaf_type = 0
mon_allow_pool_size_one = true
mon_data = {folder}/mon
mgr_data = {folder}/mgr
osd_data = {folder}/osd
run_dir = {folder}/run
log_file = {folder}/log/$name.log
admin_socket = {folder}/run/$name.asok
keyring = {folder}/keyring
mgr_initial_modules =
ms_bind_ipv6 = false
osd_objectstore = memstore
memstore_device_bytes = {memory_bytes}
osd_max_object_name_len = 256
osd_max_object_namespace_len = 64

[client.rgw]
ms_mon_client_mode = crc secure
rgw_frontends = beast endpoint=127.0.0.1:{port}
rgw_data = {folder}/rgw
rgw_thread_pool_size = 32
rgw_enable_usage_log = false
rgw_enable_ops_log = false
"""


class Radosgw(NamedTuple):
    """A running one."""

    endpoint: str


@contextmanager
def radosgw() -> Iterator[Radosgw]:
    """A radosgw without buckets, with one user (`ACCESS_KEY_ID`, `SECRET_ACCESS_KEY`). It takes some 15 s to start."""
    for program in ("ceph-mon", "ceph-mgr", "ceph-osd", "radosgw", "radosgw-admin", "ceph", "monmaptool"):
        if shutil.which(program) is None:
            raise ServerMissingError(f"Ceph's {program}", PACKAGES, "apt-get install --no-install-recommends")
    folder = Path(tempfile.mkdtemp(prefix="kvbm-ceph-"))
    cluster = _Cluster(folder)
    try:
        cluster.start()
        yield Radosgw(f"http://127.0.0.1:{cluster.port}")
    finally:
        cluster.stop()
        shutil.rmtree(folder, ignore_errors=True)


class _Cluster:
    """Daemons in the foreground, children of this process, last one first in the grave."""

    def __init__(self, folder: Path) -> None:
        self.port = free_port()
        self._folder = folder
        self._daemons: list[subprocess.Popen[bytes]] = []
        self._deadline = time.monotonic() + _START_WAIT_S
        for name in ("mon", "mgr", "osd", "run", "log", "rgw"):
            (folder / name).mkdir()
        self._ports = (free_port(), free_port())
        self._fsid = str(uuid.uuid4())
        conf = folder / "ceph.conf"
        conf.write_text(
            _CONF.format(
                fsid=self._fsid,
                folder=folder,
                port=self.port,
                mon_v2=self._ports[0],
                mon_v1=self._ports[1],
                memory_bytes=_MEMORY_BYTES,
            )
        )
        (folder / "keyring").touch()
        self._environment = os.environ | {"CEPH_CONF": str(conf)}

    def start(self) -> None:
        """Monitor, manager, OSD, gateway, user."""
        monmap = self._folder / "monmap"
        at = f"[v2:127.0.0.1:{self._ports[0]},v1:127.0.0.1:{self._ports[1]}]"
        self._do("monmaptool", "--create", "--fsid", self._fsid, "--addv", "a", at, str(monmap))
        self._do("ceph-mon", "--mkfs", "-i", "a", "--monmap", str(monmap))
        self._run("ceph-mon", "-f", "-i", "a")
        self._run("ceph-mgr", "-f", "-i", "x")
        osd = self._do("ceph", "osd", "new", str(uuid.uuid4())).strip()
        [described] = json.loads(self._do("ceph", "osd", "dump", "-f", "json"))["osds"]
        self._do("ceph-osd", "-i", osd, "--mkfs", "--osd-uuid", described["uuid"])
        self._run("ceph-osd", "-f", "-i", osd)
        self._do("ceph", "osd", "crush", "add-bucket", "node", "host")
        self._do("ceph", "osd", "crush", "move", "node", "root=default")
        self._do("ceph", "osd", "crush", "add", f"osd.{osd}", "1.0", "host=node")
        self._run("radosgw", "-f", "-n", "client.rgw")
        self._do(
            "radosgw-admin",
            "user",
            "create",
            "--uid=kvbm",
            "--display-name=kvbm",
            f"--access-key={ACCESS_KEY_ID}",
            f"--secret={SECRET_ACCESS_KEY}",
        )
        self._wait_until_it_answers()

    def stop(self) -> None:
        """Kill what runs: it keeps nothing."""
        for daemon in reversed(self._daemons):
            stop_process(daemon, signal.SIGKILL)

    def _run(self, *command: str) -> None:
        log = self._folder / "log" / f"{command[0]}.out"
        self._daemons.append(start_process(list(command), log, env=self._environment))

    def _do(self, *command: str) -> str:
        """One command to its end; what it printed."""
        left_s = max(1.0, self._deadline - time.monotonic())
        try:
            done = subprocess.run(
                command, env=self._environment, capture_output=True, text=True, timeout=left_s, check=False
            )
        except subprocess.TimeoutExpired:
            raise AssertionError(f"{command} did not end within {left_s:.0f} s\n{self._logs()}") from None
        if done.returncode:
            raise AssertionError(f"{command} ended with {done.returncode}: {done.stderr[-2000:]}\n{self._logs()}")
        return done.stdout

    def _wait_until_it_answers(self) -> None:
        while time.monotonic() < self._deadline and all(daemon.poll() is None for daemon in self._daemons):
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/", timeout=2):
                    return
            except (urllib.error.URLError, OSError):
                time.sleep(0.1)
        raise AssertionError(f"radosgw did not start\n{self._logs()}")

    def _logs(self) -> str:
        return "\n".join(f"{log.name}: {log.read_text()[-500:]}" for log in sorted(self._folder.glob("log/*")))
