"""kvbm's use of vLLM against the one that is installed, and against those whose folders KVBM_TEST_VLLM_FOLDERS names,
with colons between.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tools.vllm_uses import compare, installed

FOLDERS = [*filter(None, os.environ.get("KVBM_TEST_VLLM_FOLDERS", "").split(":"))]


@pytest.mark.smoke
@pytest.mark.parametrize("folder", [None, *FOLDERS])
def test_this_vllm_has_all_that_is_used_as_it_is_used_and_no_hook_that_nobody_knows(folder: str | None) -> None:
    report = compare(installed() if folder is None else Path(folder))
    assert report.lacking == []
    assert report.new == []
