"""Published models whose KV is moved and whose prompts are computed: what one GPU of them holds and does."""

from __future__ import annotations

from typing import NamedTuple

ELEMENT_BYTES = 2  # of bfloat16, in which all of them are published


class Attention(NamedTuple):
    """Attention of one layer on one rank.

    Attributes:
        heads, kv_heads: of queries; of keys and values. dim: of a key.
        latent: 0, or how many numbers of a token's latent vector are its value (MLA): prompts are computed with keys
            and values made of it, a single step on the latent vectors themselves.
    """

    heads: int
    kv_heads: int
    dim: int
    latent: int = 0


class Layer(NamedTuple):
    """One kind of layer, on one rank.

    Attributes:
        alike: how many of the model's layers are of this kind.
        products: (in, out) of its matrix products, of the experts that a token uses as one.
        attention: None in a recurrent layer, whose recurrence is left out.
    """

    alike: int
    products: tuple[tuple[int, int], ...]
    attention: Attention | None


class Shape(NamedTuple):
    """What one rank keeps of a model's prompts, and computes.

    Attributes:
        source: where its numbers are published.
        ranks: GPUs that share the model; everything below is of one.
        kv_layers: layers that keep KV. parts: tensors' worth of it a token and layer, 2 of keys and values, 1 of a
            latent vector.
        kv_heads, dim: of a part.
        block_tokens: of a block, as vLLM chooses it.
        state_layers, state_bytes: recurrent layers, and bytes of one's state at a block boundary.
    """

    name: str
    title: str
    source: str
    ranks: int
    kv_layers: int
    parts: int
    kv_heads: int
    dim: int
    block_tokens: int
    layers: tuple[Layer, ...]
    state_layers: int = 0
    state_bytes: int = 0

    @property
    def token_bytes(self) -> int:
        """KV of one token in one layer."""
        return self.parts * self.kv_heads * self.dim * ELEMENT_BYTES

    @property
    def block_bytes(self) -> int:
        """KV of one block in all layers."""
        return self.kv_layers * self.block_tokens * self.token_bytes

    @property
    def states_bytes(self) -> int:
        """All recurrent layers' states at one boundary; 0 where there are none."""
        return self.state_layers * self.state_bytes

    def blocks(self, tokens: int) -> int:
        """Whole blocks of a prompt."""
        return tokens // self.block_tokens

    def small(self) -> Shape:
        """The same on a CPU in moments: two layers of each kind, and narrow ones. Its numbers are nobody's."""
        layers = tuple(
            Layer(
                min(2, layer.alike),
                tuple((max(8, wide // 256), max(8, out // 256)) for wide, out in layer.products),
                layer.attention and _small_attention(layer.attention),
            )
            for layer in self.layers
        )
        return self._replace(
            kv_layers=2,
            dim=max(8, self.dim // 16),
            block_tokens=min(16, self.block_tokens),
            layers=layers,
            state_layers=min(2, self.state_layers),
            state_bytes=self.state_bytes and 4096,
        )


def _small_attention(attention: Attention) -> Attention:
    shared = attention.heads // attention.kv_heads
    return Attention(
        2 * shared if attention.kv_heads > 1 else shared, min(2, attention.kv_heads), 16, min(8, attention.latent)
    )


def _dense(alike: int, width: int, ffn: int, attention: Attention) -> Layer:
    """Attention with its projections, and a gated FFN."""
    heads, kv_heads, dim, _ = attention
    products = ((width, (heads + 2 * kv_heads) * dim), (heads * dim, width), (width, 2 * ffn), (ffn, width))
    return Layer(alike, products, attention)


_LLAMA_8B = Shape(
    "llama-3-8b",
    "Llama-3-8B",
    "https://huggingface.co/meta-llama/Meta-Llama-3-8B/blob/main/config.json",
    ranks=1,
    kv_layers=32,
    parts=2,
    kv_heads=8,
    dim=128,
    block_tokens=16,
    layers=(_dense(32, 4096, 14336, Attention(32, 8, 128)),),
)
_LLAMA_70B = Shape(
    "llama-3-70b-tp8",
    "Llama-3-70B, TP 8",
    "https://huggingface.co/meta-llama/Meta-Llama-3-70B/blob/main/config.json",
    ranks=8,
    kv_layers=80,
    parts=2,
    kv_heads=1,
    dim=128,
    block_tokens=16,
    layers=(_dense(80, 8192, 28672 // 8, Attention(8, 1, 128)),),
)
_QWEN3_32B = Shape(
    "qwen3-32b",
    "Qwen3-32B",
    "https://huggingface.co/Qwen/Qwen3-32B/blob/main/config.json",
    ranks=1,
    kv_layers=64,
    parts=2,
    kv_heads=8,
    dim=128,
    block_tokens=16,
    layers=(_dense(64, 5120, 25600, Attention(64, 8, 128)),),
)
# 128 heads, keys of 128 + 64, values of 128, latent vectors of 512 + 64, which every rank keeps whole. Of 256 experts
# of 2,048 a token uses 8 and a shared one: as many products as the dense FFN of 18,432 of its first three layers.
_DEEPSEEK_V3 = Shape(
    "deepseek-v3-tp8",
    "DeepSeek-V3 (MLA), TP 8",
    "https://huggingface.co/deepseek-ai/DeepSeek-V3/blob/main/config.json",
    ranks=8,
    kv_layers=61,
    parts=1,
    kv_heads=1,
    dim=512 + 64,
    block_tokens=64,
    layers=(
        Layer(
            61,
            (
                (7168, 1536),
                (1536, 16 * (128 + 64)),
                (7168, 512 + 64),
                (512, 16 * (128 + 128)),
                (16 * 128, 7168),
                (7168, 2 * 18432 // 8),
                (18432 // 8, 7168),
            ),
            Attention(16, 16, 128 + 64, 512),
        ),
    ),
)
# 12 of 48 layers are attention, with a gate as wide as its queries; 36 are gated delta nets. Of 512 experts of 512 a
# token uses 10 and a shared one. A state: 32 heads of 128 × 128, and 3 steps of a convolution over 2 × 16 × 128 + 32 ×
# 128; vLLM makes attention's blocks as large as that (mamba_utils.py, gated_delta_net_state_shape): 544 tokens.
_EXPERTS = ((2048, 2 * 11 * 512), (11 * 512, 2048))
_QWEN3_NEXT = Shape(
    "qwen3-next-80b",
    "Qwen3-Next-80B-A3B, with states",
    "https://huggingface.co/Qwen/Qwen3-Next-80B-A3B-Instruct/blob/main/config.json",
    ranks=1,
    kv_layers=12,
    parts=2,
    kv_heads=2,
    dim=256,
    block_tokens=544,
    layers=(
        Layer(12, ((2048, (2 * 16 + 2 * 2) * 256), (16 * 256, 2048), *_EXPERTS), Attention(16, 2, 256)),
        Layer(36, ((2048, 2 * 16 * 128 + 2 * 32 * 128), (2048, 2 * 32), (32 * 128, 2048), *_EXPERTS), None),
    ),
    state_layers=36,
    state_bytes=(32 * 128 * 128 + 3 * (2 * 16 * 128 + 32 * 128)) * ELEMENT_BYTES,
)

SHAPES = (_LLAMA_8B, _LLAMA_70B, _QWEN3_32B, _DEEPSEEK_V3, _QWEN3_NEXT)


def shape_of(name: str) -> Shape:
    """The shape of a name. Raises KeyError."""
    return {shape.name: shape for shape in SHAPES}[name]
