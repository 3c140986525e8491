"""The owner in the second VM of `make test-rdma`: serves until the VM ends."""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path
from types import ModuleType

PORT = 7709


def main() -> None:
    package = ModuleType("kvbm")  # as in conftest.py
    package.__path__ = [str(Path(__file__).parents[2] / "kvbm")]
    sys.modules["kvbm"] = package
    from tests.rdma.instances import Owner

    address = f"{os.environ['RXE_IP_BASE']}{int(os.environ['NODE_RANK']) + 1}"
    Owner("rxe2", socket.create_server((address, PORT))).serve()


if __name__ == "__main__":
    main()
