"""What an embedding program has: public names that suffice and are described, and words where it gets no slots or keeps
them too long.
"""

from __future__ import annotations

import ast
import inspect
import re
from pathlib import Path

import pytest
from structlog.testing import capture_logs

import kvbm
from tools.python_page import python_page

EXAMPLES = Path(__file__).parents[2] / "examples"
SPACE = kvbm.Namespace(model="one", revision="1", block_tokens=16)
HASHES = bytes(range(64))


@pytest.fixture
def settings(tmp_path: Path) -> kvbm.Settings:
    flags = {
        "instance.data_dir": str(tmp_path),
        "nats.enabled": False,
        "pools.hbm.slots": 4,
        "pools.hbm.device": "memory",
    }
    return kvbm.load_settings(flags=flags)


@pytest.mark.parametrize("name", ["embed.py", "embed_engine_tensors.py"])
def test_an_example_of_an_engine_needs_nothing_but_the_public_names(name: str) -> None:
    tree = ast.parse((EXAMPLES / name).read_text())
    inside = [one for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) for one in [node.module or ""]]
    assert not [one for one in inside if one.partition(".")[0] == "kvbm"]
    used = {
        node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "kvbm"
    }
    assert used <= set(kvbm.__all__)


def test_every_public_name_and_call_is_on_the_page_of_the_python_api() -> None:
    page = python_page()
    heads = re.findall(r"^### `(\w+)`$", page, re.M)
    assert sorted(heads) == sorted(kvbm.__all__) and len(set(heads)) == len(heads)
    for name in ("acquire", "allocate", "create", "begin_store", "lookup", "route_tokens", "map_host", "engine_stored"):
        assert re.search(rf"^#+ `{name}`$\n\n```python\n{name}\(", page, re.M), name
    lost = [name for name in kvbm.__all__ if inspect.isclass(one := getattr(kvbm, name)) and not inspect.getdoc(one)]
    assert not lost, f"these have no docstring: {lost}"
    assert "<function" not in page and " object at 0x" not in page


def test_slots_that_are_short_are_counted_and_told_in_numbers_once_in_a_while(settings: kvbm.Settings) -> None:
    with kvbm.open_manager(settings, [SPACE], 64) as manager, capture_logs() as logs:
        taken = manager.allocate(3)
        assert taken is not None
        held = manager.create(SPACE.id, kvbm.NO_PARENT, 0, HASHES[:32], taken[:2])
        assert manager.allocate(2) is None and manager.allocate(2) is None
        (said,) = [one for one in logs if one["event"] == "hbm.short"]
        numbers = [said[key] for key in ("wanted", "slots", "free", "evictable", "allocated", "pinned_or_kept")]
        assert numbers == [2, 4, 1, 0, 1, 2]
        assert manager.stats().short_allocations == 2
        manager.unpin(held)
        assert manager.allocate(2) is not None


def test_slots_that_requests_still_have_at_the_close_are_told(settings: kvbm.Settings) -> None:
    with capture_logs() as logs, kvbm.open_manager(settings, [SPACE], 64) as manager:
        taken = manager.allocate(3)
        assert taken is not None
        manager.create(SPACE.id, kvbm.NO_PARENT, 0, HASHES[:32], taken[:2])
    (said,) = [one for one in logs if one["event"] == "manager.closed_in_use"]
    assert (said["tier"], said["allocated_slots"], said["pinned_or_kept_blocks"]) == ("HBM", 1, 2)


def test_a_close_after_every_request_has_ended_tells_nothing(settings: kvbm.Settings) -> None:
    with capture_logs() as logs, kvbm.open_manager(settings, [SPACE], 64) as manager:
        taken = manager.allocate(2)
        assert taken is not None
        manager.unpin(manager.create(SPACE.id, kvbm.NO_PARENT, 0, HASHES[:32], taken))
    assert not [one for one in logs if one["event"] == "manager.closed_in_use"]
