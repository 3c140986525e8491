"""Engines with a draft model (EAGLE, MTP): a prefix from kvbm's tiers ends where one in vLLM's own cache does.

What a drafter's layer keeps of a token depends on the token after it, so of a prefix that ends with a block the last
token's is another request's: vLLM takes one block less. The engines are `scripted`, and their drafter's layers write
so: one block too many is a wrong byte.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from transformers import DeepseekV3Config, LlamaConfig
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheSpec, MLAAttentionSpec, SlidingWindowSpec
from vllm.v1.kv_cache_layout import KVCacheLayout

from kvbm.core.ids import Tier
from tests.engines.vllm.harness.scripted import GARBAGE, SAMPLED, ScriptedEngine, config_of, model_folder, prompt

TOKENS = 32
SHAPE: dict[str, Any] = {"block_size": TOKENS, "head_size": 16, "dtype": torch.bfloat16}
FULL = FullAttentionSpec(**SHAPE, num_kv_heads=2)
WIDE = FullAttentionSpec(**SHAPE, num_kv_heads=4)
WINDOW = SlidingWindowSpec(**SHAPE, num_kv_heads=2, sliding_window=90)
LATENT = MLAAttentionSpec(block_size=16, num_kv_heads=1, head_size=24, dtype=torch.bfloat16, max_tp_shards=1)
DENSE = {"prefix_cache_retention_interval": None}
GENERATED = 2 * TOKENS  # of a first turn


class Case(NamedTuple):
    """An engine with a draft model.

    Attributes:
        method: vLLM's word for how it drafts.
        layers: the engine's; those of the drafter, which vLLM registers last, are named so.
        flagged: of vLLM's KV groups those that it says have the drafter's layers.
    """

    method: str
    layers: Sequence[tuple[str, KVCacheSpec]]
    flagged: Sequence[bool]
    tokens: int = 1
    more: Mapping[str, Any] = {}  # read alone
    draft: Mapping[str, Any] = {}  # read alone


def layers(*specs: KVCacheSpec, drafts: Sequence[KVCacheSpec]) -> list[tuple[str, KVCacheSpec]]:
    return [
        *((f"layers.{at}", spec) for at, spec in enumerate(specs)),
        *((f"draft.{at}", spec) for at, spec in enumerate(drafts)),
    ]


CASES = {
    "eagle": Case("eagle", layers(FULL, FULL, drafts=[FULL]), [False], 2),
    "eagle3": Case("eagle3", layers(FULL, FULL, drafts=[FULL]), [False], 3),
    "eagle3, packed": Case(
        "eagle3", layers(FULL, FULL, drafts=[FULL]), [False], 3, {"layout": KVCacheLayout.BLNHC, "max_num_seqs": 2}
    ),
    "eagle3, in small steps": Case(
        "eagle3", layers(FULL, FULL, drafts=[FULL]), [False], 3, {"max_num_batched_tokens": 48}
    ),
    "eagle3 with other heads": Case("eagle3", layers(FULL, FULL, drafts=[WIDE]), [False], 3),
    "eagle3 beside windows": Case("eagle3", layers(FULL, WINDOW, drafts=[FULL]), [False, False, False], 2),
    "eagle3 beside windows, dense": Case(
        "eagle3", layers(FULL, WINDOW, drafts=[FULL]), [False, False, False], 2, DENSE
    ),
    "mtp": Case("mtp", layers(LATENT, LATENT, drafts=[LATENT]), [False]),
    "mtp, two ranks": Case("mtp", layers(LATENT, LATENT, drafts=[LATENT]), [False], more={"tensor_parallel_size": 2}),
    "mtp of three modules": Case("mtp", layers(LATENT, LATENT, drafts=[]), [False], 3),
    "mtp of three modules, in small steps": Case(
        "mtp", layers(LATENT, LATENT, drafts=[]), [False], 3, {"max_num_batched_tokens": 48}
    ),
    "mtp beside windows": Case("mtp", layers(FULL, WINDOW, drafts=[WINDOW]), [False, False, True]),
    "mtp beside windows, dense": Case("mtp", layers(FULL, WINDOW, drafts=[WINDOW]), [False, False, True], more=DENSE),
    "mtp of full attention beside windows": Case("mtp", layers(FULL, WINDOW, drafts=[FULL]), [False, True, False]),
}

Opener = Callable[[Case, Path | None], ScriptedEngine]


@pytest.fixture(scope="module")
def opener(tmp_path_factory: pytest.TempPathFactory) -> Opener:
    """Starts the engine of a case: with kvbm's files in a folder, or without kvbm."""
    sizes: dict[str, Any] = {
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "vocab_size": 512,
        "max_position_embeddings": 4096,
    }
    base = tmp_path_factory.mktemp("models")
    llama = LlamaConfig(**sizes, num_key_value_heads=2)
    models = {
        name: model_folder(base / name, llama, architectures=["LlamaForCausalLM"]) for name in ("target", "drafter")
    }
    for modules in (1, 3):
        models[f"mtp-{modules}"] = model_folder(
            base / f"mtp-{modules}",
            DeepseekV3Config(**sizes, num_key_value_heads=4, n_routed_experts=4, num_experts_per_tok=2),
            architectures=["DeepseekV3ForCausalLM"],
            num_nextn_predict_layers=modules,
        )

    def opened(case: Case, kept: Path | None) -> ScriptedEngine:
        draft = {"method": case.method, "num_speculative_tokens": case.tokens} | dict(case.draft)
        if case.method.startswith("eagle"):
            model, draft["model"] = models["target"], models["drafter"]
        else:
            model = models[f"mtp-{case.tokens}"]
        config = config_of(model, kept, {"pools.nvme.slots": 1000}, speculative_config=draft, **case.more)
        engine = ScriptedEngine(config, dict(case.layers), [name for name, _ in case.layers if "draft" in name])
        assert [group.is_eagle_group for group in engine.plan.kv_cache_groups] == list(case.flagged)
        return engine

    return opened


def lengths(tokens: int) -> list[int]:
    """Of prompts: one block, whole blocks, and such as end within one."""
    return [tokens - 1, tokens, tokens + 1, 2 * tokens, 2 * tokens + 1, 5 * tokens, 5 * tokens + 3]


class Begins(NamedTuple):
    """Where an engine goes on with a prompt, and where vLLM's own prefix cache would."""

    at: int
    own: int


def begins(engine: ScriptedEngine, has_kvbm: bool) -> list[Begins]:
    """For prompts of some lengths: with the same again, with one that goes on otherwise, and with the turn after the
    answer. With kvbm, HBM has forgotten each.
    """
    found: list[Begins] = []
    for count in lengths(engine.block_tokens):
        whole = prompt(count, count)
        assert engine.ask(f"{count} cold", whole, GENERATED) == 0
        for name, tokens in (
            ("again", whole),
            ("otherwise", whole + prompt(count + 1, TOKENS)),
            ("turn", whole + [SAMPLED] * GENERATED + prompt(count + 2, TOKENS)),
        ):
            if has_kvbm:
                engine.forget()
                assert engine.own_hit(tokens) == 0
            own = engine.own_hit(tokens)
            found.append(Begins(engine.ask(f"{count} {name}", tokens), own))
    return found


def expected(engine: ScriptedEngine) -> list[int]:
    """Where kvbm goes on, by what vLLM's own cache holds: where vLLM does.

    One case is kvbm's own. Where all layers are of one group, vLLM looks no block behind what may be taken, so a prompt
    of whole blocks that is asked again loses one more than is wrong; kvbm looks behind, as vLLM does of several groups.
    """
    own = begins(engine, has_kvbm=False)
    assert [one.at for one in own] == [one.own for one in own]
    size, wanted = engine.block_tokens, [one.at for one in own]
    if len(engine.plan.kv_cache_groups) == 1 and engine.scheduler.use_eagle_block_drop:
        for at, count in enumerate(lengths(size)):
            if count % size == 0 and count > size:
                assert engine.own_hit(prompt(count, count), most=count) == wanted[3 * at] + size == count - size
                wanted[3 * at] += size
    return wanted


@pytest.mark.bytes
@pytest.mark.parametrize("name", CASES)
def test_a_prefix_ends_where_vllms_own_does_and_the_drafters_kv_is_right(opener, tmp_path, name):
    with opener(CASES[name], None) as plain:
        wanted = expected(plain)
    assert wanted[3] == wanted[6] == 0  # a prompt of one block: nothing of it is taken
    with opener(CASES[name], tmp_path / "a") as engine:
        assert engine.half is not None, "not served"
        assert [one.at for one in begins(engine, has_kvbm=True)] == wanted
        assert engine.half.refusal == ""
        engine.settle()
    with opener(CASES[name], tmp_path / "a") as again:
        count = lengths(again.block_tokens)[-1]
        assert again.ask("restarted", prompt(count, count)) == wanted[-3] > 0
        assert again.hit_blocks(Tier.NVME) > 0


@pytest.mark.bytes
@pytest.mark.parametrize("name", ["eagle3", "eagle3 with other heads", "mtp", "mtp beside windows, dense"])
def test_what_hbm_has_goes_on_with_what_host_has(opener, tmp_path, name):
    """A request takes the beginning from vLLM's cache, which ends a block early, and the rest from HOST."""
    with opener(CASES[name], None) as plain:
        size = plain.block_tokens
        whole = prompt(1, 6 * size + 5)
        first = whole[: 3 * size + 5]
        plain.ask("cold", whole)
        own = plain.own_hit(whole)
    with opener(CASES[name], tmp_path / "a") as engine:
        engine.ask("cold", whole)
        engine.forget()
        assert engine.ask("beginning", first) == 2 * size
        in_hbm = engine.own_hit(whole)
        assert in_hbm == 2 * size
        before = engine.hit_blocks(Tier.HOST)
        assert engine.ask("whole", whole) == own > in_hbm
        assert engine.hit_blocks(Tier.HOST) > before


@pytest.mark.bytes
@pytest.mark.parametrize("name", ["eagle3", "eagle3 with other heads", "mtp", "mtp beside windows"])
def test_the_drafters_layers_are_kept_with_the_others(opener, tmp_path, name):
    with opener(CASES[name], tmp_path / "a") as engine:
        rank, tokens = engine.ranks[0], prompt(2, 5 * engine.block_tokens + 1)
        draft = {layer: view for layer, view in rank.bytes.items() if layer.startswith("draft")}
        assert draft
        engine.ask("cold", tokens)
        engine.forget()
        assert all((view == GARBAGE).all() for view in draft.values())
        assert engine.ask("warm", tokens) == 4 * engine.block_tokens
        assert not any((view == GARBAGE).all() for view in draft.values())  # `ask` has compared each byte of it


def test_where_vllm_is_told_to_drop_nothing_nothing_is_dropped(opener, tmp_path):
    case = Case("eagle3", layers(FULL, FULL, drafts=[]), [False], 3, draft={"disable_eagle_block_drop": True})
    with opener(case, None) as plain:
        wanted = expected(plain)
    assert wanted[6] == TOKENS  # of a prompt of one block and a token, asked again
    with opener(case, tmp_path / "a") as engine:
        assert [one.at for one in begins(engine, has_kvbm=True)] == wanted
