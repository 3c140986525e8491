"""Another process that opens a storage as a first one has it: python -m tests.engines.sglang.harness.second EXTRA …

With each extra config, one after another, it stores and reads a few pages, and prints in JSON what came of it:
{"refused": why}, or {"read": pages that came back as they were, "held": those of the first one's that it finds}.

Args:
    EXTRA: an extra config, in JSON.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from tests.engines.sglang.harness.cpu import prepare

prepare()

from kvbm.core.errors import KvbmError  # noqa: E402  SGLang can be imported now
from tests.engines.sglang.harness import pools  # noqa: E402

PAGES = 8


def main() -> None:
    for extra in sys.argv[1:]:
        print(json.dumps(used(json.loads(extra))))


def used(extra: dict[str, Any]) -> dict[str, Any]:
    """What comes of a storage with this extra config."""
    pool = pools.mha_pool("page_first", PAGES)
    try:
        backend = pools.backend_of(pool, extra)
    except KvbmError as error:
        return {"refused": str(error)}
    keys = pools.chain(99, PAGES)
    wanted = pools.fill(pool, range(PAGES), keys)
    backend.batch_set_v1(keys, pools.indices_of(range(PAGES)))
    pools.wipe(pool)
    got = backend.batch_get_v1(keys, pools.indices_of(range(PAGES)))
    read = sum(ok and pools.page_bytes(pool, at) == wanted[at] for at, ok in enumerate(got))
    held = backend.batch_exists(pools.chain(1, PAGES))
    backend.close()
    return {"read": read, "held": held}


if __name__ == "__main__":
    main()
