"""What a GPU machine without a network needs: kvbm's wheel and those of what it and its tests want, in one folder."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MOST_BYTES = 60 << 20
PYTHON = (3, 12)  # of the GPU machine
TESTED_WITH = ("pytest", "pytest-timeout", "hypothesis")
GLIBC = range(17, 40)  # 2.N; pip takes a wheel for exactly the platforms that are named
COMMIT = "commit.txt"


class PackError(Exception):
    """What could not be packed; the message is the sentence to print."""


def pack(wheels: Path) -> int:
    """Fill the folder anew, and return its bytes. Raises PackError."""
    mine = sorted((ROOT / "dist").glob("kvbm_ledger-*-cp312-abi3-*.whl"))
    if len(mine) != 1:
        raise PackError(
            f"dist holds {len(mine)} wheels of kvbm for Python 3.12, where there should be one; run: make wheels"
        )
    shutil.rmtree(wheels, ignore_errors=True)
    wheels.mkdir(parents=True)
    platforms = [f"--platform=manylinux_2_{minor}_x86_64" for minor in GLIBC] + ["--platform=manylinux2014_x86_64"]
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--quiet", "--only-binary=:all:"]
    command += ["--python-version", f"{PYTHON[0]}.{PYTHON[1]}", "--implementation", "cp", *platforms]
    command += ["-c", str(ROOT / "constraints.txt"), "-d", str(wheels), str(mine[0]), *TESTED_WITH]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    if ran.returncode:
        raise PackError(f"pip download returned {ran.returncode}: {ran.stderr.strip()[-2000:]}")
    asked = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False)
    (wheels / COMMIT).write_text(asked.stdout)
    size = sum(file.stat().st_size for file in wheels.iterdir())
    if size > MOST_BYTES:
        raise PackError(f"{wheels} has {size / (1 << 20):.0f} MiB, more than {MOST_BYTES >> 20}")
    return size
