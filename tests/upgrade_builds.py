"""The two versions of an upgrade, each a wheel in an environment of its own below build/upgrade.

The old one is built of the commit that the newest release's manifest names, the new one of `tools/next_version.py`. An
environment borrows what both depend on from the one that runs the tests. What was built is kept until its sources
change.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from tests.releases import GOLDEN, MANIFEST

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "build" / "upgrade"
BUILD_S = 3600.0
SOURCES = ("kvbm", "kvbm_ledger", "native", "migrations", "pyproject.toml", "CMakeLists.txt")


class Side(NamedTuple):
    """One version, installed.

    Attributes:
        python: that has it. frame_version: the newest that it reads.
    """

    version: str
    python: Path
    frame_version: int

    def command(self, name: str) -> str:
        """The path of one of its commands."""
        return str(self.python.with_name(name))


def old_side() -> Side:
    """The newest release. Raises AssertionError: its commit is not here, or does not build."""
    manifest = json.loads(max(GOLDEN.glob(f"*/{MANIFEST}"), key=_version_of).read_text())
    commit, folder = manifest["commit"], FOLDER / "old"
    assert _git("cat-file", "-e", f"{commit}^{{commit}}").returncode == 0, (
        f"commit {commit}, which {manifest['version']} was made of, is not here; fetch it, or before the release run "
        "tools/write_release.py --force"
    )
    same = _git("diff", "--quiet", commit, "--", *SOURCES).returncode == 0
    others = _git("ls-files", "--others", "--exclude-standard", "--", *SOURCES).stdout
    if same and not others:  # what `make setup` has compiled need not be compiled again
        wheel = built(ROOT, None, folder, commit)
    else:
        wheel = built(_archived(commit, folder / "src"), folder / "native", folder, commit)
    return installed(wheel, folder / "env", manifest["version"])


def new_side() -> Side:
    """The next version. Raises AssertionError: it does not build."""
    tool = _tool("next_version")
    folder, files = FOLDER / "next", tool.next_version(ROOT)
    tool.write(files, folder / "src")
    digest = hashlib.sha256()
    for name, data in sorted(files.items()):
        digest.update(f"{name}\0{len(data)}\0".encode() + data)
    return installed(
        built(folder / "src", folder / "native", folder, digest.hexdigest()), folder / "env", tool.version_in(files)
    )


def built(source: Path, native: Path | None, folder: Path, key: str) -> Path:
    """The wheel of a source tree; built unless one with this key is there.

    Args:
        native: where C++ is compiled; None: where `make setup` does.
    """
    dist = folder / "dist"
    kept = dist / "KEY"
    if kept.is_file() and kept.read_text() == key and (wheels := list(dist.glob("*.whl"))):
        return wheels[0]
    shutil.rmtree(dist, ignore_errors=True)
    place = [] if native is None else ["-C", f"build-dir={native}"]
    run([*_pip(), "wheel", "--quiet", "--no-build-isolation", "--no-deps", "-w", str(dist), *place, str(source)])
    (wheel,) = dist.glob("kvbm_ledger-*.whl")
    kept.write_text(key)
    return wheel


def installed(wheel: Path, folder: Path, version: str) -> Side:
    """A wheel in a fresh environment. Raises AssertionError: that has another kvbm than the wheel's."""
    shutil.rmtree(folder, ignore_errors=True)
    venv.create(folder, symlinks=True)
    python = folder / "bin" / "python"
    own = Path(sysconfig.get_path("purelib", vars={"base": str(folder), "platbase": str(folder)}))
    (own / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")  # after its own; .pth files there: none
    run([*_pip(), "--python", str(python), "install", "--quiet", "--no-deps", str(wheel)])
    question = (
        "import importlib.metadata, json, kvbm.core.codec; "
        "print(json.dumps([kvbm.__file__, importlib.metadata.version('kvbm-ledger'), kvbm.core.codec.VERSION]))"
    )
    place, found, frames = json.loads(run([str(python), "-P", "-c", question]))
    assert Path(place).is_relative_to(folder) and found == version, f"{python} has kvbm {found} at {place}"
    return Side(version, python, frames)


def run(command: list[str]) -> str:
    """What a command printed. Raises AssertionError: it failed, with its last words."""
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    if shutil.which("ccache"):
        environment.setdefault("CMAKE_CXX_COMPILER_LAUNCHER", "ccache")
        environment.setdefault("CCACHE_SLOPPINESS", "pch_defines,time_macros")
    environment.pop("PYTHONPATH", None)
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=BUILD_S, check=False
    )
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    return done.stdout


def _pip() -> list[str]:
    return [sys.executable, "-m", "pip", "--disable-pip-version-check"]


def _version_of(manifest: Path) -> tuple[int, ...]:
    return tuple(int(part) for part in manifest.parent.name.split("."))


def _archived(commit: str, folder: Path) -> Path:
    """The files of a commit, in a folder of their own."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    archive = folder.with_suffix(".tar")
    run(["git", "archive", "--output", str(archive), commit, "--", *SOURCES, "README.md", "LICENSE"])
    run(["tar", "--extract", "--file", str(archive), "--directory", str(folder)])
    return folder


def _git(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["git", "-C", str(ROOT), *words], capture_output=True, text=True, check=False)


def _tool(name: str) -> ModuleType:
    spec: Any = importlib.util.spec_from_file_location(name, ROOT / "tools" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module
