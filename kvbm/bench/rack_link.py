"""Two racks on one machine: two network namespaces with a link between them that is no quicker than told.

It takes root, `ip` and `tc`. Nothing of the machine's own network is changed: the link lies between the two namespaces,
which go afterwards.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from typing import NamedTuple

from kvbm.workload.processes import ProcessError

NEAR, FAR = "10.231.77.1", "10.231.77.2"  # the addresses of the two
_COMMAND_S = 10.0


class _Tools(NamedTuple):
    ip: str
    tc: str


class RackLink(NamedTuple):
    """The link.

    Attributes:
        near, far: what a command is given to as its last arguments, to be run in one of the two.
        ends: names of the namespaces.
    """

    near: tuple[str, ...]
    far: tuple[str, ...]
    ends: tuple[str, str]
    tools: _Tools

    def limit(self, rate_bits: int) -> None:
        """Let so many bits a second through, each way. Raises ProcessError."""
        rate = ["rate", f"{rate_bits}bit", "burst", "256kb", "latency", "50ms"]
        for end in self.ends:
            said_by([self.tools.tc, "-n", end, "qdisc", "replace", "dev", "link0", "root", "tbf", *rate])


def link_racks(rate_bits: int, opened: ExitStack) -> RackLink | None:
    """Two network namespaces with a link between them; `opened` removes them.

    Returns: None: it takes root, `ip` and `tc`.
    Raises: ProcessError: the system makes none.
    """
    if (tools := _tools()) is None:
        return None
    ends = f"kvbm-bench-{os.getpid()}-reader", f"kvbm-bench-{os.getpid()}-lender"
    for end in ends:
        opened.callback(_removed, tools, end)
        said_by([tools.ip, "netns", "add", end])
    veth = ["type", "veth", "peer", "name", "link0", "netns", ends[1]]
    said_by([tools.ip, "link", "add", "link0", "netns", ends[0], *veth])
    for end, address in zip(ends, (NEAR, FAR), strict=True):
        said_by([tools.ip, "-n", end, "address", "add", f"{address}/30", "dev", "link0"])
        for device in ("lo", "link0"):
            said_by([tools.ip, "-n", end, "link", "set", device, "up"])
        said_by([tools.ip, "netns", "exec", end, sys.executable, "-I", "-S", "-c", ""])
    near, far = ((tools.ip, "netns", "exec", end) for end in ends)
    link = RackLink(near, far, ends, tools)
    link.limit(rate_bits)
    return link


def said_by(command: Sequence[str], within_s: float = _COMMAND_S) -> bytes:
    """What a program prints. Raises ProcessError: it failed, or took longer."""
    try:
        return subprocess.run(command, check=True, capture_output=True, timeout=within_s).stdout
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ProcessError(f"{' '.join(command[:4])} … did not run: {error}") from None
    except subprocess.CalledProcessError as error:
        words = error.stderr.decode(errors="replace").strip().splitlines()[-3:]
        raise ProcessError(f"{' '.join(command[:4])} … ended with {error.returncode}: {' / '.join(words)}") from None


def _tools() -> _Tools | None:
    ip, tc = shutil.which("ip"), shutil.which("tc")
    return _Tools(ip, tc) if ip and tc and os.geteuid() == 0 else None


def _removed(tools: _Tools, end: str) -> None:
    """Remove a network namespace, where there is one."""
    with suppress(ProcessError):
        said_by([tools.ip, "netns", "del", end])
