"""A container whose root is read-only, whose user has no name and no home: kvbm writes into `instance.data_dir`
alone.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

UID = 12345  # of nobody
ENGINE = """
import os, pwd, sys
import kvbm
assert os.getuid() == 12345
try:
    pwd.getpwuid(os.getuid())
    raise SystemExit("the user has a name")
except KeyError:
    pass
for folder in ("/", "/tmp", "/var/tmp"):
    try:
        open(os.path.join(folder, "of_kvbm"), "w")
        raise SystemExit(f"{folder} can be written")
    except OSError:
        pass
shape = kvbm.KvShape(layers=2, block_tokens=16, kv_heads=2, head_dim=32, dtype="bfloat16")
namespace = kvbm.Namespace(model="m", revision="r", block_tokens=16, kv_dtype=shape.dtype, layout=shape.describe())
flags = {"instance.data_dir": sys.argv[1], "pools.hbm.slots": 8}
flags |= {"pools.host.capacity_bytes": 1 << 20, "pools.nvme.capacity_bytes": 1 << 20}
with kvbm.open_manager(kvbm.load_settings(flags=flags), [namespace], shape.block_bytes) as manager:
    hashes = manager.hash_tokens(list(range(64)), namespace.root(), 16)
    held = manager.acquire(namespace.id, hashes)
    if held.depth:
        manager.unpin(held.slots)
    else:
        manager.unpin(manager.create(namespace.id, kvbm.NO_PARENT, 0, hashes, manager.allocate(4, namespace.id)))
        manager.settle(60)
print("held", held.depth, flush=True)
"""

CATALOG = """
import re, subprocess, sys, time, urllib.error, urllib.request
start = "from kvbm.catalog_cli import catalog_main; raise SystemExit(catalog_main())"
command = [sys.executable, "-c", start, "serve"]
command += ["--set", "instance.data_dir=" + sys.argv[1], "--set", "catalog.listen=127.0.0.1:0"]
with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as catalog:
    url = re.search(r"http://\\S+", next(line for line in catalog.stderr if line.startswith("kvbm-catalog:")))[0]
    while True:
        try:
            urllib.request.urlopen(url + "/readyz", timeout=60)
            break
        except urllib.error.HTTPError:
            time.sleep(0.1)
    print("ready", flush=True)
    catalog.terminate()
    catalog.stderr.read()
"""


def below_a_read_only_root(folder: Path, command: list[str]) -> subprocess.CompletedProcess[str]:
    """Run a command where nothing but a folder can be written, as a user without a name or a home."""
    if shutil.which("unshare") is None or os.geteuid() != 0:
        pytest.fail("a read-only root needs root and unshare; run as root, apt-get install util-linux")
    script = (
        f'mount --bind "{folder}" "{folder}" && mount -o remount,ro,bind / && cd / && '
        f"exec unshare --user --map-user={UID} --map-group={UID} env -i PATH=/usr/bin:/bin HOME=/nonexistent "
        'TMPDIR=/nonexistent "$@"'
    )
    return subprocess.run(
        ["unshare", "--mount", "--propagation", "private", "bash", "-c", script, "bash", *command],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.mark.nightly
def test_an_engine_serves_below_a_read_only_root_and_finds_its_blocks_again(tmp_path: Path) -> None:
    for held in (0, 4):
        ended = below_a_read_only_root(tmp_path, [sys.executable, "-c", ENGINE, str(tmp_path)])
        assert (ended.returncode, ended.stdout) == (0, f"held {held}\n"), ended.stderr


@pytest.mark.nightly
def test_a_catalog_with_its_own_nats_server_serves_below_a_read_only_root(tmp_path: Path) -> None:
    command = [sys.executable, "-c", CATALOG, str(tmp_path)]
    ended = below_a_read_only_root(tmp_path, command)
    assert (ended.returncode, ended.stdout) == (0, "ready\n"), ended.stderr
    assert (tmp_path / "catalog.db").is_file()
