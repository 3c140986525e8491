"""What a test says to an engine and what it hears back: plain values, because they travel between processes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

BLOCK_TOKENS = 32  # of every engine here; the CPU backend takes multiples of 32
OUTPUT_TOKENS = 8  # what a request generates unless it says otherwise
TOP = 5  # log probabilities compared at each position, besides the chosen token's


class Ask(NamedTuple):
    """One request.

    Attributes:
        tokens: the prompt.
        salt: vLLM's `cache_salt`; "" for none.
        output_tokens: how many to generate; always all of them.
        transfer: the request's `kv_transfer_params`.
        lora: adapter, by number and folder; its name is the folder's.
    """

    tokens: tuple[int, ...]
    salt: str = ""
    output_tokens: int = OUTPUT_TOKENS
    transfer: Mapping[str, Any] | None = None
    lora: tuple[int, str] | None = None

    @property
    def reusable_tokens(self) -> int:
        """How many of the prompt's tokens a cache of whole blocks can answer for: never the last, whose output is
        wanted.
        """
        return (len(self.tokens) - 1) // BLOCK_TOKENS * BLOCK_TOKENS


class Answer(NamedTuple):
    """What came of a request.

    Attributes:
        tokens: the generated ones.
        likely: for each of them, token → log probability, of the chosen one and the `TOP` likeliest.
        cached_tokens: of the prompt, not computed: what vLLM's own prefix cache and the connector had.
        finish: vLLM's reason, "length" when all went well.
    """

    tokens: tuple[int, ...]
    likely: tuple[Mapping[int, float], ...]
    cached_tokens: int
    finish: str


@dataclass(frozen=True)
class Setup:
    """How to start an engine.

    Attributes:
        model: folder of the model.
        connector: vLLM's `kv_transfer_config`; None: no connector.
        prefix_caching: vLLM's own prefix cache.
        hbm_blocks: blocks of device KV.
        context_tokens: the longest prompt and its output.
        step_tokens: at most so many tokens a step; below a prompt's length it is prefilled in chunks.
        requests: at most so many at a time.
        ranks: of tensor parallelism.
        stages: of pipeline parallelism.
        hosts: that the ranks are on, all of them this machine: of each but the first, vLLM's workers have a parent of
            their own, as if on another.
        cores: data-parallel ranks; with several the engine obeys what `data_parallel` says.
        core: "inside" the process that asks, or in a "process" of its own, with another one for each worker.
        start: "fork", which is quick, or "spawn" as vLLM does it by itself, for a core of its own.
        asynchronous: schedule a step ahead of the one that runs.
        patches: functions, as "module:name", that are called before the engine is made, in the process it is made in;
            forked processes inherit what they change.
        environment: further variables.
        options: further arguments of vLLM's `LLM`.
    """

    model: str
    connector: Mapping[str, Any] | None = None
    prefix_caching: bool = True
    hbm_blocks: int = 256
    context_tokens: int = 2048
    step_tokens: int = 2048
    requests: int = 8
    ranks: int = 1
    stages: int = 1
    hosts: int = 1
    cores: int = 1
    core: str = "inside"
    start: str = "fork"
    asynchronous: bool = False
    patches: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)


class Group(NamedTuple):
    """One of the KV cache groups the engine has made.

    Attributes:
        kind: its attention, as vLLM's spec is called.
        block_tokens: tokens of one of its blocks.
        layers: how many share it.
    """

    kind: str
    block_tokens: int
    layers: int
