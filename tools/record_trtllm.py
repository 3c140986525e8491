"""Record what TensorRT-LLM's own serializer makes of KV cache events: tests/golden/trtllm_recorded.json.

Real is the class KVCacheEventSerializer of tensorrt_llm/_utils.py. It is taken out of a checkout's file and run alone,
for the module imports CUDA. The events it is given are stand-ins made here: objects with the names and attributes of
those that C++ gives. The array is written as trtllm-serve's JSONResponse writes it.

    python tools/record_trtllm.py CHECKOUT --named "which checkout this is"
"""

from __future__ import annotations

import argparse
import ast
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

OUT = Path(__file__).parents[1] / "tests" / "golden" / "trtllm_recorded.json"
SERIALIZER = "KVCacheEventSerializer"
WINDOW = 4096
TOKENS = list(range(100, 112))
BLOCK_TOKENS = 4
PICTURE = bytes(range(32))
TYPES = {
    name: type(name, (SimpleNamespace,), {})
    for name in ("KVCacheCreatedData", "KVCacheStoredData", "KVCacheRemovedData", "KVCacheUpdatedData")
}


def serializer(checkout: Path) -> Any:
    """The class alone. Raises StopIteration: the file has none."""
    module = ast.parse((checkout / "tensorrt_llm" / "_utils.py").read_text())
    found = next(node for node in module.body if isinstance(node, ast.ClassDef) and node.name == SERIALIZER)
    names: dict[str, Any] = {}
    exec(compile(ast.Module([found], []), SERIALIZER, "exec"), names)
    return names[SERIALIZER]


def block(key: int, at: int, salt: str | None = None, media: list[Any] | None = None, tokens: int = 4) -> Any:
    ids = TOKENS[at * BLOCK_TOKENS : at * BLOCK_TOKENS + tokens]
    return SimpleNamespace(
        block_hash=key,
        tokens=[SimpleNamespace(token_id=one, token_extra_id=0) for one in ids],
        lora_id=None,
        cache_salt=salt,
        cache_level=0,
        priority=35,
        mm_keys=media or [],
    )


def stored(*blocks: Any, parent: int | None = None) -> Any:
    return TYPES["KVCacheStoredData"](parent_hash=parent, blocks=list(blocks))


def removed(*keys: int) -> Any:
    return TYPES["KVCacheRemovedData"](block_hashes=list(keys))


def updated(key: int, levels: tuple[int, int] | None, priorities: tuple[int, int] | None = None) -> Any:
    """Pairs are old, new."""
    level, priority = (pair and SimpleNamespace(old_value=pair[0], new_value=pair[1]) for pair in (levels, priorities))
    return TYPES["KVCacheUpdatedData"](block_hash=key, cache_level=level, priority=priority)


EVENTS = [
    TYPES["KVCacheCreatedData"](num_blocks_per_cache_level=[24, 8]),
    stored(block(924206229973855, 0), block(2**64 - 2, 1), block(13, 2, tokens=2)),
    updated(2**64 - 2, (0, 1)),
    stored(block(14, 2), parent=2**64 - 2),
    updated(924206229973855, None, (35, 50)),
    removed(13, 14),
    stored(block(21, 0, salt="salt"), block(22, 1, salt="salt")),
    stored(block(23, 2, salt="salt"), parent=22),
    stored(block(31, 0, media=[(PICTURE, 2, None)])),
    stored(block(41, 0, media=[(PICTURE, 2, "sku-1")])),
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", type=Path, help="folder with tensorrt_llm/_utils.py")
    parser.add_argument("--named", required=True, help="repository and commit, for the golden file")
    asked = parser.parse_args()
    events = [
        SimpleNamespace(event_id=number, data=data, window_size=WINDOW, attention_dp_rank=None)
        for number, data in enumerate(EVENTS)
    ]
    said = serializer(asked.checkout).serialize(events)
    golden = {
        "source": f"{SERIALIZER} of {asked.named}, run by tools/record_trtllm.py on stand-ins for C++'s events",
        "block_tokens": BLOCK_TOKENS,
        "tokens": TOKENS,
        "picture": PICTURE.hex(),
        "answer": json.dumps(said, ensure_ascii=False, separators=(",", ":")),
    }
    OUT.write_text(json.dumps(golden, indent=1) + "\n")
    print(f"{OUT.name}: {len(said)} events")


if __name__ == "__main__":
    main()
