"""The paged transformer against a dense one written out plainly."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import pytest

from kvbm.core.errors import ConfigError, LayoutError
from kvbm.demo.engine import DecodeInput, Model, ModelShape, Weights
from tests.extras import needed

if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from torch.nn import functional
else:
    torch = needed("torch", "engine")
    Tensor = needed("torch", "engine").Tensor
    functional = needed("torch.nn.functional", "engine")

torch.set_num_threads(1)

BLOCK_TOKENS = 4
SLOTS = 24
TINY = ModelShape(
    vocab=61, layers=2, width=32, heads=4, kv_heads=2, head_dim=8, ffn_width=48, rope_theta=100.0, max_tokens=64
)
PROMPT = [int(token) for token in torch.randint(0, 61, (19,), generator=torch.Generator().manual_seed(1))]
TABLE = [7, 2, 19, 0, 11, 23, 5]


def new_pool(shape: ModelShape = TINY, slots: int = SLOTS) -> Tensor:
    """A pool of NaN: whoever reads what was never written spoils its result."""
    return torch.full((slots, *shape.block_shape(BLOCK_TOKENS)), math.nan, dtype=shape.torch_dtype)


def norm(hidden: Tensor) -> Tensor:
    return hidden / (hidden.square().mean(-1, keepdim=True) + 1e-6).sqrt()


def dense_logits(weights: Weights, tokens: list[int]) -> Tensor:
    """Logits [T, vocab] by full attention over the whole sequence, head by head, without a cache."""
    shape, count = weights.shape, len(tokens)
    half = shape.head_dim // 2
    angle = torch.tensor(
        [[p * shape.rope_theta ** (-2 * i / shape.head_dim) for i in range(half)] for p in range(count)],
        dtype=torch.float64,
    ).float()

    def turned(head: Tensor) -> Tensor:
        as_complex = torch.complex(head[:, :half], head[:, half:]) * torch.polar(torch.ones_like(angle), angle)
        return torch.cat((as_complex.real, as_complex.imag), dim=1)

    past = torch.ones(count, count).tril().bool()
    hidden = weights.embedding[tokens]
    for layer in weights.layers:
        normed = norm(hidden) * layer.attention_norm
        queries, keys, values = normed @ layer.query.T, normed @ layer.key.T, normed @ layer.value.T
        outputs = []
        for head in range(shape.heads):
            kv_head = head // (shape.heads // shape.kv_heads)
            one, kv = (slice(index * shape.head_dim, (index + 1) * shape.head_dim) for index in (head, kv_head))
            scores = turned(queries[:, one]) @ turned(keys[:, kv]).T / math.sqrt(shape.head_dim)
            outputs.append(scores.masked_fill(~past, -math.inf).softmax(-1) @ values[:, kv])
        hidden = hidden + torch.cat(outputs, dim=1) @ layer.output.T
        normed = norm(hidden) * layer.ffn_norm
        gate = normed @ layer.gate.T
        hidden = hidden + (gate * torch.sigmoid(gate) * (normed @ layer.up.T)) @ layer.down.T
    return (norm(hidden) * weights.final_norm) @ weights.head.T


def tiny_with(**changed: object) -> ModelShape:
    return msgspec.structs.replace(TINY, **changed)


def assert_close(found: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-4)


@pytest.fixture
def weights() -> Weights:
    drawn = Weights.random(TINY, seed=3)
    generator = torch.Generator().manual_seed(4)
    for layer in drawn.layers:  # norms of ones would hide a norm that is left out
        layer.attention_norm.uniform_(0.5, 1.5, generator=generator)
        layer.ffn_norm.uniform_(0.5, 1.5, generator=generator)
    drawn.final_norm.uniform_(0.5, 1.5, generator=generator)
    return drawn


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_paged_prefill_equals_dense_attention_for_any_sharing_of_kv_heads(kv_heads: int) -> None:
    weights = Weights.random(tiny_with(kv_heads=kv_heads), seed=5)
    paged = Model(weights).prefill(PROMPT, 0, TABLE, new_pool(weights.shape))
    assert_close(paged, dense_logits(weights, PROMPT)[-1])


@pytest.mark.parametrize("chunk_tokens", [1, 3, 4, 7, 18])
def test_prefill_in_chunks_equals_prefill_at_once(weights: Weights, chunk_tokens: int) -> None:
    pool, model = new_pool(), Model(weights)
    dense = dense_logits(weights, PROMPT)
    for start in range(0, len(PROMPT), chunk_tokens):
        chunk = PROMPT[start : start + chunk_tokens]
        assert_close(model.prefill(chunk, start, TABLE, pool), dense[start + len(chunk) - 1])


def test_decode_of_sequences_of_different_lengths_equals_dense_attention(weights: Weights) -> None:
    pool, model = new_pool(), Model(weights)
    tables = [[0, 1, 2, 3, 4], [9, 8], [20]]
    sequences = [PROMPT, PROMPT[5:12], PROMPT[2:3]]
    for table, tokens in zip(tables, sequences, strict=True):
        if tokens[:-1]:
            model.prefill(tokens[:-1], 0, table, pool)
    batch = [DecodeInput(s[-1], len(s) - 1, table) for s, table in zip(sequences, tables, strict=True)]
    logits = model.decode(batch, pool)
    assert_close(logits, torch.stack([dense_logits(weights, tokens)[-1] for tokens in sequences]))


def test_decode_step_after_step_equals_prefill_of_the_same_tokens(weights: Weights) -> None:
    pool, model = new_pool(), Model(weights)
    model.prefill(PROMPT[:3], 0, TABLE, pool)
    for position in range(3, len(PROMPT)):
        decoded = model.decode([DecodeInput(PROMPT[position], position, TABLE)], pool)[0]
        assert_close(decoded, model.prefill(PROMPT[: position + 1], 0, TABLE, new_pool()))


def test_the_order_of_slots_in_the_pool_changes_nothing(weights: Weights) -> None:
    model = Model(weights)
    first = model.prefill(PROMPT, 0, [0, 1, 2, 3, 4], new_pool())
    permuted = model.prefill(PROMPT, 0, [4, 17, 0, 23, 9], new_pool())
    assert torch.equal(first, permuted)


def test_a_block_copied_to_another_slot_serves_as_prefix(weights: Weights) -> None:
    pool, model = new_pool(), Model(weights)
    whole = model.prefill(PROMPT, 0, TABLE, pool)
    elsewhere = new_pool()
    elsewhere[[3, 1, 6, 2]] = pool[TABLE[:4]]
    assert_close(model.prefill(PROMPT[16:], 16, [3, 1, 6, 2, 8], elsewhere), whole)


def test_only_the_slots_of_the_block_table_are_written(weights: Weights) -> None:
    pool = new_pool()
    Model(weights).prefill(PROMPT, 0, TABLE, pool)
    written = {slot for slot in range(SLOTS) if not pool[slot].isnan().all()}
    assert written == set(TABLE[:5])
    assert not pool[TABLE[:4]].isnan().any()


def test_half_precision_stays_near_full_precision() -> None:
    half = Weights.random(tiny_with(dtype="bfloat16"), seed=3)
    pool, model = new_pool(half.shape), Model(half)
    model.prefill(PROMPT[:-1], 0, TABLE, pool)
    logits = model.decode([DecodeInput(PROMPT[-1], len(PROMPT) - 1, TABLE)], pool)[0]
    full = Weights(TINY, {name: tensor.float() for name, tensor in half.tensors.items()})
    wanted = dense_logits(full, PROMPT)[-1]
    assert logits.dtype == torch.float32
    assert functional.cosine_similarity(logits, wanted, dim=0) > 0.99


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda model: model.prefill(PROMPT, 0, [1, 2], new_pool()), "has 2 slots of 4 tokens, 19 tokens want 5"),
        (lambda model: model.prefill(PROMPT, 0, [0, 1, 2, 3, 24], new_pool()), "slots 0 to 24, the pool has 0 to 23"),
        (lambda model: model.prefill(PROMPT, 0, [0, 1, 2, 3, -1], new_pool()), "slots -1 to 3"),
        (
            lambda model: model.prefill(PROMPT, 0, TABLE, new_pool()[:, :1]),
            "the model wants .slots, 2, 2, block_tokens",
        ),
        (lambda model: model.prefill(PROMPT, 0, TABLE, new_pool().double()), "use one dtype"),
        (lambda model: model.prefill([], 0, TABLE, new_pool()), "give at least 1 token"),
        (lambda model: model.prefill([61], 0, TABLE, new_pool()), "tokens from 61 to 61, the model knows 0 to 60"),
        (lambda model: model.prefill([1], 64, TABLE, new_pool()), "65 tokens, the model takes 64"),
        (lambda model: model.decode([], new_pool()), "0 sequences"),
        (lambda model: model.decode([DecodeInput(1, 4, [3])], new_pool()), "has 1 slots of 4 tokens, 5 tokens want 2"),
        (lambda model: model.decode([DecodeInput(1, -1, [3])], new_pool()), "position -1"),
    ],
)
def test_what_does_not_fit_the_model_is_refused_in_numbers(
    weights: Weights, call: Callable[[Model], object], message: str
) -> None:
    with pytest.raises(LayoutError, match=message):
        call(Model(weights))


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"heads": 4, "kv_heads": 3}, "4 heads cannot share 3 kv_heads"),
        ({"head_dim": 7}, "head_dim is 7"),
        ({"vocab": 1}, "vocab is 1"),
        ({"layers": 0}, "layers is 0"),
        ({"dtype": "int8"}, "'int8' is unknown"),
        ({"rope_theta": 0.0}, "rope_theta is 0.0"),
    ],
)
def test_dimensions_that_make_no_sense_are_refused(changed: dict[str, object], message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        tiny_with(**changed)


def test_the_same_seed_gives_the_same_weights_and_another_seed_others() -> None:
    one, same, other = Weights.random(TINY, 1), Weights.random(TINY, 1), Weights.random(TINY, 2)
    assert all(torch.equal(one.tensors[name], same.tensors[name]) for name in one.tensors)
    assert not torch.equal(one.head, other.head)


def test_saved_weights_are_loaded_unchanged(tmp_path: Path, weights: Weights) -> None:
    path = tmp_path / "weights.pt"
    weights.save(path)
    loaded = Weights.load(path)
    assert loaded.shape == weights.shape
    assert all(torch.equal(loaded.tensors[name], weights.tensors[name]) for name in weights.tensors)


def test_a_file_that_is_no_weights_file_is_refused_by_name(tmp_path: Path, weights: Weights) -> None:
    path = tmp_path / "weights.pt"
    with pytest.raises(ConfigError, match=r"weights.pt does not exist; write one with Weights.save"):
        Weights.load(path)
    for contents in (b"", b"not weights", b"\x80\x02cos\nsystem\n."):
        path.write_bytes(contents)
        with pytest.raises(ConfigError, match=r"weights.pt cannot be read"):
            Weights.load(path)
    weights.save(path)
    path.write_bytes(path.read_bytes()[:-2000])
    with pytest.raises(ConfigError, match=r"weights.pt cannot be read"):
        Weights.load(path)
    torch.save({"something": 1}, path)
    with pytest.raises(ConfigError, match="lacks 'shape' and 'tensors'"):
        Weights.load(path)
    torch.save({"shape": {"vocab": "many"}, "tensors": {}}, path)
    with pytest.raises(ConfigError, match=r"weights.pt: .*write it with Weights.save"):
        Weights.load(path)


def test_weights_of_another_shape_are_refused(weights: Weights) -> None:
    without_head = {name: tensor for name, tensor in weights.tensors.items() if name != "head"}
    with pytest.raises(LayoutError, match=r"absent \['head'\]"):
        Weights(TINY, without_head)
    with pytest.raises(LayoutError, match=r"layers\.0\.key is \[16, 32\] .* wants \[8, 32\]"):
        Weights(tiny_with(kv_heads=1), weights.tensors)


def test_without_torch_the_import_says_what_to_install() -> None:
    program = (
        "import sys; sys.modules['torch'] = None\n"
        "from kvbm.core.errors import MissingExtraError\n"
        "try:\n    import kvbm.demo.engine\n"
        "except MissingExtraError as error:\n    print(error.extra, error, sep='|')\n"
    )
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=180)
    assert (
        found.stdout.strip()
        == "engine|the demo's engine needs torch; install it with: pip install 'kvbm-ledger[engine]'"
    )
