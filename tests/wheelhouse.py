"""A folder that pip installs from, and environments to install into. Nothing is fetched and nothing is compiled."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from collections.abc import Mapping
from pathlib import Path

import kvbm._native

ROOT = Path(__file__).parents[1]
_OURS = ("kvbm", "_editable_skbc_kvbm")  # how what this environment has of kvbm begins


def pack_ours(folder: Path) -> Path:
    """kvbm-ledger's wheel for this Python: this checkout's sources, the native module in use, and what pyproject.toml
    says.

    That the real ones have the same in them is what `make wheels-check` is for.
    """
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = [f"Requires-Python: {project['requires-python']}"]
    lines += [f"Requires-Dist: {one}" for one in project["dependencies"]]
    for extra, wanted in project["optional-dependencies"].items():
        lines.append(f"Provides-Extra: {extra}")
        lines += [f'Requires-Dist: {one}{" and" if ";" in one else ";"} extra == "{extra}"' for one in wanted]
    files = {
        str(path.relative_to(ROOT)): path.read_bytes()
        for package in ("kvbm", "kvbm_ledger")
        for path in (ROOT / package).rglob("*.py")
    }
    for path in (ROOT / "migrations").rglob("*.py"):
        files[f"kvbm/{path.relative_to(ROOT)}"] = path.read_bytes()
    native = Path(str(kvbm._native.__file__))
    files[f"kvbm/{native.name}"] = native.read_bytes()
    groups = {"console_scripts": project["scripts"], **project["entry-points"]}
    points = [
        f"[{group}]\n" + "".join(f"{name} = {what}\n" for name, what in of.items()) for group, of in groups.items()
    ]
    return pack(folder, project["name"], project["version"], lines, files, "".join(points))


def pack(
    folder: Path,
    name: str,
    version: str,
    metadata: list[str] | None = None,
    files: Mapping[str, bytes] | None = None,
    entry_points: str = "",
) -> Path:
    """A wheel of these files; without any it is only a name and a version that can be installed."""
    tag = f"cp{sys.version_info[0]}{sys.version_info[1]}"
    platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
    stem = f"{name.replace('-', '_')}-{version}"
    head = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}", *(metadata or ())]
    wheel = ["Wheel-Version: 1.0", "Generator: tests", "Root-Is-Purelib: false", f"Tag: {tag}-{tag}-{platform}"]
    inside = {
        **(files or {}),
        f"{stem}.dist-info/METADATA": "\n".join(head).encode() + b"\n",
        f"{stem}.dist-info/WHEEL": "\n".join(wheel).encode() + b"\n",
        f"{stem}.dist-info/entry_points.txt": entry_points.encode(),
    }
    record = f"{stem}.dist-info/RECORD"
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{stem}-{tag}-{tag}-{platform}.whl"
    with zipfile.ZipFile(path, "w") as made:
        for at, content in inside.items():
            made.writestr(at, content)
        made.writestr(record, "".join(f"{at},,\n" for at in [*inside, record]))
    return path


class Environment:
    """An environment with all that this one has, but for kvbm and its commands.

    Attributes:
        variables: of a shell in it; its pip knows no index.
    """

    def __init__(self, folder: Path) -> None:
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
        self._bin = folder / "bin"
        purelib = Path(sysconfig.get_path("purelib", vars={"base": str(folder), "platbase": str(folder)}))
        shown = folder / "shown"
        shown.mkdir()
        for path in Path(sysconfig.get_path("purelib")).iterdir():
            if not path.name.startswith(_OURS) and path.suffix != ".pth":
                (shown / path.name).symlink_to(path)
        (purelib / "shown.pth").write_text(f"{shown}\n")
        self._write("pip", "from pip._internal.cli.main import main")
        self.variables = {
            **{name: value for name, value in os.environ.items() if not name.startswith(("PIP_", "PYTHON"))},
            "PATH": f"{self._bin}:{os.environ['PATH']}",
            "PIP_CONFIG_FILE": os.devnull,
            "PIP_NO_INDEX": "1",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "PIP_DISABLE_PIP_VERSION_CHECK": "1",
        }

    def run(self, command: str, folder: Path, wait_s: float = 250.0) -> str:
        """What a shell's command prints. Raises AssertionError: it failed."""
        done = subprocess.run(
            ["bash", "-ec", command],
            cwd=folder,
            env=self.variables,
            capture_output=True,
            text=True,
            timeout=wait_s,
            check=False,
        )
        assert done.returncode == 0, f"{command}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
        return done.stdout

    def begin(self, command: str, folder: Path, log: Path) -> subprocess.Popen[bytes]:
        """A shell's command that goes on, in a group of its own, printing into a file."""
        with log.open("ab") as file:
            return subprocess.Popen(
                ["bash", "-ec", f"exec {command}"],
                cwd=folder,
                env=self.variables,
                stdout=file,
                stderr=file,
                start_new_session=True,
            )

    def _write(self, command: str, load: str) -> None:
        """A command as pip makes them."""
        path = self._bin / command
        path.write_text(f"#!{self._bin}/python\nimport sys\n{load}\nsys.exit(main())\n")
        path.chmod(0o755)
