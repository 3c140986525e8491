"""What a forked child frees of its parent's RDMA: nothing. The device is a stand-in, which says who destroys it."""

from __future__ import annotations

import subprocess
import sys

_PROGRAM = """
import os
from typing import Any
from kvbm.assembly.lending import Exchange

class Held:
    def __init__(self, *held): self.held = held
    def __del__(self): os.write(1, f"{os.getpid()} ".encode())

device: Any = Held()
peers: Any = Held(Held())
lock: Any = None
exchange = Exchange(lock, lock, peers=peers, device=device)
parent = os.getpid()
child = os.fork()
if child:
    assert os.waitpid(child, 0)[1] == 0
    os.write(1, b"| ")
else:
    for disown in exchange.disowners:
        disown()
del exchange, peers, device
if os.getpid() == parent:
    os.write(1, f"| {parent}".encode())
"""


def test_a_child_that_ends_normally_destroys_nothing_of_its_parents() -> None:
    told = subprocess.run([sys.executable, "-c", _PROGRAM], capture_output=True, text=True, timeout=120, check=True)
    childs, parents, parent = told.stdout.split("|")
    assert childs.split() == []
    assert parents.split() == [parent.strip()] * 3, "the program shows nothing"
