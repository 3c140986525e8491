"""A vLLM that publishes KV events: run by the engines' own Python, obeys lines of JSON, answers each with one.

It writes down every batch that it hands to its publisher. Without a connector it imports nothing of this repository.
"""

from __future__ import annotations

import base64
import json
import os
import sys
import time
from typing import Any

SENT: list[bytes] = []


def main() -> None:
    """Start as the arguments say, then obey."""
    setup = json.loads(sys.argv[1])
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what vLLM prints is no answer
    write_down()
    send_little_ahead()
    llm = started(setup)
    print(json.dumps({"ready": "kvbm" in sys.modules}), file=answers, flush=True)
    for line in sys.stdin:
        command = json.loads(line)
        print(json.dumps(obey(llm, command)), file=answers, flush=True)


def write_down() -> None:
    """Keep each batch as its bytes, before it is published."""
    import msgspec
    from vllm.distributed import kv_events

    publish = kv_events.ZmqEventPublisher.publish

    def publish_and_keep(self: Any, batch: Any) -> None:
        SENT.append(msgspec.msgpack.encode(batch))
        publish(self, batch)

    kv_events.ZmqEventPublisher.publish = publish_and_keep


def send_little_ahead() -> None:
    """Let the kernel keep little of what a publisher sends: what a reader does not take is soon beyond the HWM."""
    import zmq

    bind = zmq.Socket.bind

    def bind_narrow(self: Any, address: str) -> Any:
        if self.socket_type == zmq.PUB:
            self.setsockopt(zmq.SNDBUF, 4096)
        return bind(self, address)

    zmq.Socket.bind = bind_narrow


def started(setup: dict[str, Any]) -> Any:
    from vllm import LLM
    from vllm.config import KVTransferConfig
    from vllm.config.kv_events import KVEventsConfig

    connector = setup["connector"]

    events = KVEventsConfig(
        enable_kv_cache_events=True,
        publisher="zmq",
        endpoint=setup["endpoint"],
        replay_endpoint=setup["replay"],
        hwm=setup["hwm"],
        buffer_steps=setup["buffer"],
    )
    return LLM(
        model=setup["model"],
        skip_tokenizer_init=True,
        enforce_eager=True,
        kv_cache_memory_bytes=64 << 20,
        num_gpu_blocks_override=setup["blocks"],
        max_model_len=512,
        max_num_batched_tokens=512,
        max_num_seqs=4,
        dtype="float32",
        block_size=32,
        enable_lora=True,
        max_lora_rank=8,
        max_loras=2,
        kv_events_config=events,
        kv_transfer_config=KVTransferConfig(**connector) if connector else None,
        disable_log_stats=False,
    )


def obey(llm: Any, command: dict[str, Any]) -> Any:
    match command["do"]:
        case "ask":
            return ask(llm, command["asks"])
        case "reset":
            return bool(llm.reset_prefix_cache())
        case "rest":
            return rest(llm)
        case "core":
            from tests.engines.vllm.harness import core_access

            core = llm.llm_engine.engine_core.engine_core
            return getattr(core_access, command["name"])(core, *command["arguments"])
        case _:
            return [base64.b64encode(data).decode() for data in SENT]


def rest(llm: Any) -> bool:
    """Let the engine finish what it does between requests: a connector's copies end in its steps."""
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    until_s = time.monotonic() + 60.0
    while scheduler.has_requests() and time.monotonic() < until_s:
        llm.llm_engine.step()
        time.sleep(0.001)
    return not scheduler.has_requests()


def ask(llm: Any, asks: list[dict[str, Any]]) -> list[int]:
    """Generate a token for each; gives how many tokens of each prompt were cached."""
    from vllm import SamplingParams
    from vllm.lora.request import LoRARequest

    prompts: list[Any] = [
        {"prompt_token_ids": one["tokens"]} | ({"cache_salt": one["salt"]} if one["salt"] else {}) for one in asks
    ]
    loras = [LoRARequest(os.path.basename(one["lora"]), 1, one["lora"]) if one["lora"] else None for one in asks]
    sampling = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, detokenize=False)
    outputs = llm.generate(prompts, sampling, use_tqdm=False, lora_request=loras if any(loras) else None)
    return [output.num_cached_tokens for output in outputs]


if __name__ == "__main__":
    main()
