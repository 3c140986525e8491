"""The `kvbm` command with a wall clock that can be stepped: seconds to add are read from a file, at each look.

python -m tests.faults.processes.clocked OFFSET_FILE catalog serve --set …
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

_REAL_NS = time.time_ns


def step_clock(file: Path) -> None:
    """From now on `time.time` and `time.time_ns` of this process follow the file. Monotonic clocks do not."""

    def wall_ns() -> int:
        try:
            return _REAL_NS() + int(float(file.read_text() or 0) * 1e9)
        except (OSError, ValueError):
            return _REAL_NS()

    time.time_ns = wall_ns
    time.time = lambda: wall_ns() / 1e9


if __name__ == "__main__":
    step_clock(Path(sys.argv[1]))
    from kvbm.cli import main

    raise SystemExit(main(sys.argv[2:]))
