"""docs/vllm-models.md says of every architecture of vLLM's registry what kvbm makes of its KV groups, which vLLM's own
code has made.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.engines.vllm.harness.registry import NOT_BUILT, PAGE, REFUSED, SERVED, verdicts_on

# One of each kind, and what would be noticed first if its row were wrong.
HANDFUL = {
    "LlamaForCausalLM": SERVED,
    "Gemma3ForConditionalGeneration": SERVED,  # windows, and images
    "DeepseekV3ForCausalLM": SERVED,  # latent attention
    "MambaForCausalLM": SERVED,  # states alone
    "Qwen3_5ForCausalLM": SERVED,
    "KimiLinearForCausalLM": SERVED,
    "Qwen3VLForConditionalGeneration": SERVED,
    "LlamaModel": SERVED,  # pooling of the last token
    "WhisperForConditionalGeneration": REFUSED,
    "UnlimitedOCRForCausalLM": REFUSED,  # R-SWA
    "BertModel": REFUSED,
    "Qwen2ForProcessRewardModel": REFUSED,  # pooling over all tokens
}


def written(to: Path, *names: str) -> str:
    """The page of architectures, or of all, built in a process of its own."""
    command = [sys.executable, "-m", "tests.engines.vllm.harness.registry", str(to), *names]
    ended = subprocess.run(command, cwd=PAGE.parents[1], env=dict(os.environ), capture_output=True, check=False)
    assert ended.returncode == 0, ended.stderr[-4000:].decode(errors="replace")
    return to.read_text()


@pytest.mark.timeout(180)
def test_a_handful_of_models_are_built_as_the_page_says(tmp_path):
    told, built = verdicts_on(PAGE.read_text()), verdicts_on(written(tmp_path / "page.md", *HANDFUL))
    assert {name: one.verdict for name, one in built.items()} == HANDFUL
    assert {name: told[name] for name in HANDFUL} == built


def test_the_page_says_one_thing_of_each_architecture_in_the_registry():
    from vllm.model_executor.models.registry import ModelRegistry

    assert set(verdicts_on(PAGE.read_text())) == set(ModelRegistry.get_supported_archs())


def test_few_architectures_are_not_built_and_no_reason_is_an_error_of_ours():
    left = [one for one in verdicts_on(PAGE.read_text()).values() if one.verdict == NOT_BUILT]
    assert len(left) < 60
    assert not [one for one in left if "Error:" in one.why or "process ended" in one.why]


@pytest.mark.engines_full
@pytest.mark.timeout(900)
def test_the_page_of_models_is_what_building_them_gives(tmp_path):
    assert written(tmp_path / "page.md") == PAGE.read_text()
