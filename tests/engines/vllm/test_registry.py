"""docs/vllm-models.md says of every architecture of vLLM's registry what its KV groups, made by vLLM's own
code, say.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.engines.vllm.harness.registry import PAGE


@pytest.mark.engines_full
@pytest.mark.timeout(600)
def test_the_page_of_models_is_what_building_them_gives(tmp_path):
    written = tmp_path / "page.md"
    command = [sys.executable, "-m", "tests.engines.vllm.harness.registry", str(written)]
    ended = subprocess.run(command, cwd=PAGE.parents[1], env=dict(os.environ), capture_output=True, check=False)
    assert ended.returncode == 0, ended.stderr[-4000:].decode(errors="replace")
    assert written.read_text() == PAGE.read_text()
