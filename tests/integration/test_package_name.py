"""Two distributions write the package kvbm: ours, kvbm-ledger, and another one named kvbm.

Real wheels, real pip, fresh environments.
"""

from __future__ import annotations

import base64
import hashlib
import os
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

import kvbm._native
from kvbm_ledger import conflict

ROOT = Path(__file__).parents[2]
OPEN = """
import kvbm
try:
    one = kvbm.Namespace(model="m", block_tokens=16)
    kvbm.open_manager(kvbm.load_settings(flags={"pools.hbm.slots": 8}), [one], 64)
except kvbm.KvbmError as error:
    print(type(error).__name__, error)
"""


def make_wheel(folder: Path, name: str, version: str, files: dict[str, bytes], scripts: dict[str, str]) -> Path:
    """A pure wheel of these files."""
    info = f"{name}-{version}.dist-info"
    files = files | {
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name.replace('_', '-')}\nVersion: {version}\n".encode(),
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/entry_points.txt": "\n".join(
            ["[console_scripts]", *(f"{k} = {v}" for k, v in scripts.items()), ""]
        ).encode(),
    }
    record = "".join(
        f"{path},sha256={base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b'=').decode()},{len(data)}\n"
        for path, data in files.items()
    )
    wheel = folder / f"{name}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for path, data in files.items():
            archive.writestr(path, data)
        archive.writestr(f"{info}/RECORD", f"{record}{info}/RECORD,,\n")
    return wheel


def our_files() -> dict[str, bytes]:
    """What a wheel of this checkout has, the compiled module included."""
    files = {
        str(path.relative_to(ROOT)): path.read_bytes()
        for package in ("kvbm", "kvbm_ledger")
        for path in sorted((ROOT / package).rglob("*.py"))
    }
    native = Path(kvbm._native.__file__)
    return files | {f"kvbm/{native.name}": native.read_bytes()}


class Environment:
    """A fresh environment, and the wheels of both distributions. pip, and what kvbm depends on, come from the tests'
    own.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        venv.create(folder / "env", with_pip=False)
        self.programs = folder / "env" / "bin"
        scripts = {"kvbm": "kvbm_ledger.commands:main", "kvbm-replay": "kvbm_ledger.commands:replay_main"}
        self.ours = make_wheel(folder, "kvbm_ledger", "0.1.0", our_files(), scripts)
        theirs = {"kvbm/__init__.py": b"from kvbm.utils import NAME\n", "kvbm/utils.py": b"NAME = 'another'\n"}
        self.theirs = make_wheel(folder, "kvbm", "1.6.1", theirs, {})

    def pip(self, *arguments: str) -> None:
        """Run pip on this environment, without an index."""
        python = str(self.programs / "python")
        ran = self.run(sys.executable, "-m", "pip", "--python", python, "--disable-pip-version-check", *arguments)
        assert ran.returncode == 0, ran.stdout + ran.stderr

    def install(self, wheel: Path) -> None:
        """Install one wheel alone."""
        self.pip("install", "--quiet", "--no-index", "--no-deps", "--force-reinstall", str(wheel))

    def run(self, *command: str) -> subprocess.CompletedProcess[str]:
        """Run a program outside the checkout."""
        kept = {key: value for key, value in os.environ.items() if key != "VIRTUAL_ENV"}
        return subprocess.run(
            list(command),
            cwd=self.folder,
            env=kept | {"PYTHONPATH": sysconfig.get_path("purelib")},
            capture_output=True,
            text=True,
            timeout=180,
            check=False,
        )

    def kvbm(self, *arguments: str, program: str = "kvbm") -> subprocess.CompletedProcess[str]:
        """Run our command."""
        return self.run(str(self.programs / program), *arguments)


@pytest.fixture
def environment(tmp_path: Path) -> Environment:
    return Environment(tmp_path)


def expect_conflict(ran: subprocess.CompletedProcess[str], *words: str) -> None:
    assert ran.returncode == 2, ran.stdout + ran.stderr
    (line,) = ran.stderr.splitlines()
    for word in (
        "kvbm",
        "kvbm-ledger",
        "pip uninstall kvbm; pip install --force-reinstall --no-deps kvbm-ledger",
        *words,
    ):
        assert word in line


def test_theirs_installed_over_ours_is_named_and_the_remedy_mends_it(environment: Environment) -> None:
    environment.install(environment.ours)
    started = environment.kvbm("--version")
    assert (started.returncode, started.stdout) == (0, "kvbm 0.1.0\n"), started.stderr
    environment.install(environment.theirs)
    expect_conflict(environment.kvbm("--version"), "belongs to the distribution kvbm 1.6.1")
    expect_conflict(environment.kvbm("stat", "x", program="kvbm-replay"), "kvbm-replay: ", "kvbm 1.6.1")
    environment.pip("uninstall", "--quiet", "--yes", "kvbm")  # it takes kvbm/__init__.py along
    expect_conflict(environment.kvbm("--version"), "has lost files of, or is none of, kvbm-ledger")
    environment.install(environment.ours)
    assert environment.kvbm("--version").returncode == 0


def test_ours_installed_over_theirs_is_named_by_commands_and_by_open_manager(environment: Environment) -> None:
    environment.install(environment.theirs)
    environment.install(environment.ours)
    expect_conflict(environment.kvbm("settings"), "the distribution kvbm 1.6.1 both write the Python package kvbm")
    expect_conflict(environment.run(str(environment.programs / "python"), "-m", "kvbm", "settings"), "kvbm 1.6.1")
    opened = environment.run(str(environment.programs / "python"), "-c", OPEN)
    assert opened.stdout.startswith("PackageConflictError kvbm-ledger and the distribution kvbm 1.6.1 both"), (
        opened.stderr
    )


@pytest.mark.nightly
def test_a_distribution_of_any_name_that_has_overwritten_ours_is_named(environment: Environment) -> None:
    environment.install(environment.ours)
    fork = make_wheel(environment.folder, "kv_fork", "2.0", {"kvbm/__init__.py": b""}, {})
    environment.install(fork)
    ran = environment.kvbm("settings")
    assert ran.returncode == 2
    assert "belongs to the distribution kv-fork 2.0" in ran.stderr
    assert "pip uninstall kv-fork;" in ran.stderr


def test_an_environment_with_ours_alone_has_no_conflict() -> None:
    assert conflict() == ""


def test_looking_costs_a_start_next_to_nothing() -> None:
    """It must import neither kvbm nor anything that reads every installed distribution."""
    told = subprocess.run(
        [
            sys.executable,
            "-c",
            (
                "import sys; from kvbm_ledger import conflict; conflict(); print('kvbm' in sys.modules, "
                "'email' in sys.modules)"
            ),
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=180,
        check=True,
    )
    assert told.stdout == "False False\n"
