"""A link between two network namespaces, which a test takes away: for machines that vanish.

It takes root and `ip` and `tc`. Nothing of the machine's own network is changed.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

import pytest

OWNER_IP, READER_IP = "10.231.78.2", "10.231.78.1"
_CLONE_NEWNET, _CLONE_NEWNS = 0x40000000, 0x00020000
_MS_REC, _MS_SLAVE, _MNT_DETACH = 0x4000, 0x80000, 2
_COMMAND_S = 60.0
R = TypeVar("R")


class Link:
    """Two namespaces, "owner" and "reader", each with an end of the link. `close` removes them.

    Skips the test where the machine makes none.
    """

    def __init__(self) -> None:
        if os.geteuid() != 0 or not shutil.which("ip") or not shutil.which("tc"):
            pytest.skip("a link between two network namespaces takes root, ip and tc")
        self._names = {side: f"kvbm-test-{os.getpid()}-{side}" for side in ("owner", "reader")}
        owner, reader = self._names["owner"], self._names["reader"]
        try:
            for name in self._names.values():
                _run("ip", "netns", "add", name)
            _run("ip", "-n", owner, "link", "add", "link0", "type", "veth", "peer", "name", "link0", "netns", reader)
            for name, address in ((owner, OWNER_IP), (reader, READER_IP)):
                _run("ip", "-n", name, "addr", "add", f"{address}/30", "dev", "link0")
                _run("ip", "-n", name, "link", "set", "lo", "up")
                _run("ip", "-n", name, "link", "set", "link0", "up")
        except subprocess.CalledProcessError as error:
            self.close()
            pytest.skip(f"no link between two network namespaces: {error}")

    def close(self) -> None:
        for name in self._names.values():
            with suppress(subprocess.CalledProcessError):
                _run("ip", "netns", "del", name)

    def inside(self, side: str, call: Callable[[], R]) -> R:
        """Call it in a thread in a namespace: its sockets, threads and processes are of that one."""
        found: list[R] = []
        failed: list[BaseException] = []

        def enter() -> None:
            try:
                _enter(self._names[side])
                found.append(call())
            except BaseException as error:  # noqa: BLE001 - raised where it was called
                failed.append(error)

        thread = threading.Thread(target=enter)
        thread.start()
        thread.join()
        if failed:
            raise failed[0]
        return found[0]

    def slow(self, rate: str) -> None:
        """What the owner sends takes its time: "80mbit"."""
        how = ["tbf", "rate", rate, "burst", "256kb", "latency", "20ms"]
        _run("tc", "-n", self._names["owner"], "qdisc", "replace", "dev", "link0", "root", *how)

    def set_down(self) -> None:
        """As where the owner's card has lost its cable."""
        _run("ip", "-n", self._names["owner"], "link", "set", "link0", "down")

    def set_up(self) -> None:
        _run("ip", "-n", self._names["owner"], "link", "set", "link0", "up")

    def drop(self) -> None:
        """What either end sends reaches a card that is nobody's, and nobody is told."""
        for side, name in self._names.items():
            other = READER_IP if side == "owner" else OWNER_IP
            how = [other, "lladdr", "02:00:00:00:00:99", "nud", "permanent", "dev", "link0"]
            _run("ip", "-n", name, "neigh", "replace", *how)

    def reset(self) -> None:
        """All connections end with a reset at both ends; the link stays."""
        _run("ip", "netns", "exec", self._names["owner"], "ss", "-K", "dst", READER_IP)

    def heal(self) -> None:
        """As it was in the beginning."""
        self.set_up()
        for side, name in self._names.items():
            other = READER_IP if side == "owner" else OWNER_IP
            for undo in (
                ("tc", "-n", name, "qdisc", "del", "dev", "link0", "root"),
                ("ip", "-n", name, "neigh", "del", other, "dev", "link0"),
            ):
                with suppress(subprocess.CalledProcessError):  # there is none
                    _run(*undo)


def _enter(name: str) -> None:
    """This thread, and what it begins. /sys shows the namespace's own cards, by which UCX chooses."""
    system = ctypes.CDLL(None, use_errno=True)

    def check(what: str, returned: int) -> None:
        if returned != 0:
            raise OSError(ctypes.get_errno(), what)

    with Path(f"/run/netns/{name}").open() as file:
        check("setns", system.setns(file.fileno(), _CLONE_NEWNET))
    check("unshare", system.unshare(_CLONE_NEWNS))
    check("mount", system.mount(b"none", b"/", None, ctypes.c_ulong(_MS_REC | _MS_SLAVE), None))
    system.umount2(b"/sys", _MNT_DETACH)
    check("mount", system.mount(b"sysfs", b"/sys", b"sysfs", ctypes.c_ulong(0), None))


def _run(*words: str) -> None:
    subprocess.run(words, check=True, timeout=_COMMAND_S, stdin=subprocess.DEVNULL, capture_output=True)
