"""What `make test-rdma` says on a machine that lacks what it needs: everything at once, with the line that installs it.

The VM itself is `tests/rdma`'s.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def test_all_that_is_missing_is_named_at_once(tmp_path: Path) -> None:
    tools = tmp_path / "bin"
    tools.mkdir()
    for tool in ("bash", "realpath", "awk"):
        found = shutil.which(tool)
        assert found is not None
        (tools / tool).symlink_to(found)
    python = tmp_path / "python"  # one that cannot load it
    python.write_text("#!/bin/sh\necho 'RDMA needs pyverbs: it is not installed'\nexit 1\n")
    python.chmod(0o755)
    ended = subprocess.run(
        [tools / "bash", ROOT / "tools" / "rxe_vm.sh", "--pyverbs", python, "--", "true"],
        env={"PATH": str(tools), "HOME": str(tmp_path)},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ended.returncode == 3, ended.stderr
    *_, why, missing, install = ended.stderr.splitlines()
    assert "RDMA needs pyverbs: it is not installed" in why
    assert {"qemu-system-x86_64", "busybox", "cpio", "apt-get", "pyverbs"} <= set(missing.replace(";", "").split())
    assert {"qemu-system-x86", "python3-pyverbs", "ibverbs-providers"} <= set(install.split())


@pytest.mark.parametrize("name", ["test-rdma", "smoke-rdma"])
def test_a_target_asks_for_what_its_tests_load(name: str) -> None:
    target = (ROOT / "Makefile").read_text().split(f"\n{name}:")[1].split("\n\n")[0]
    assert "--pyverbs $(BIN)/python" in target
