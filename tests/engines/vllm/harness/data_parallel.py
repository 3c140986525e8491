"""An engine with data-parallel ranks: each is a core in processes of its own, as in vLLM's server.

It obeys fewer commands than `child.Served`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from tests.engines.vllm.harness.words import BLOCK_TOKENS, Setup


class ServedByCores:
    """All of them behind one client."""

    def __init__(self, setup: Setup) -> None:
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        self._number = 0
        self._loop = asyncio.new_event_loop()
        arguments = AsyncEngineArgs(
            model=setup.model,
            kv_transfer_config=setup.connector,
            data_parallel_size=setup.cores,
            skip_tokenizer_init=True,
            enforce_eager=True,
            kv_cache_memory_bytes=64 << 20,
            num_gpu_blocks_override=setup.hbm_blocks,
            max_model_len=setup.context_tokens,
            max_num_seqs=setup.requests,
            **{"dtype": "float32", "block_size": BLOCK_TOKENS, **setup.options},
        )

        async def made() -> Any:
            return AsyncLLM.from_engine_args(arguments)

        self._engine = self._loop.run_until_complete(made())

    def generate_on(self, asks: Sequence[tuple[int, Sequence[int]]], output_tokens: int) -> list[tuple[list[int], int]]:
        """Prompts, one after another, each by its rank: what was generated, and how many of the prompt's tokens were
        cached.
        """
        return [self._loop.run_until_complete(self._one(rank, tokens, output_tokens)) for rank, tokens in asks]

    async def _one(self, rank: int, tokens: Sequence[int], output_tokens: int) -> tuple[list[int], int]:
        from vllm import SamplingParams

        params = SamplingParams(temperature=0.0, max_tokens=output_tokens, ignore_eos=True, detokenize=False)
        self._number += 1
        prompt: Any = {"prompt_token_ids": list(tokens)}
        answers = [
            answer
            async for answer in self._engine.generate(prompt, params, f"ask-{self._number}", data_parallel_rank=rank)
        ]
        return list(answers[-1].outputs[0].token_ids), answers[-1].num_cached_tokens

    def stop(self) -> None:
        """End it as a server would."""
        self._engine.shutdown()
