"""The whole way once, as an operator runs it: `kvbm bridge` with a file, engines of three kinds, a catalog's answer by
tokens.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.bridge_site import Bridge, Site, site
from tests.foreign_engines import MODEL, Prompt, removed_event, stored_event
from tests.nats_fixture import WAIT_S, cluster, nats_url
from tests.trtllm_server import TrtllmServer
from tests.zmq_publisher import Publisher

__all__ = ["cluster", "nats_url", "site"]

PROMPT = Prompt(tuple(range(100, 124)))  # six blocks


def settings(url: str, within: str, **sources: dict[str, object]) -> str:
    lines = [f'[instance]\ncluster = "{within}"', f'[nats]\nurl = "{url}"\nheartbeat_s = 0.2']
    for name, source in sources.items():
        fields = "\n".join(f"{key} = {value!r}" for key, value in ({"model": MODEL} | source).items())
        lines.append(f"[bridge.sources.{name}]\n{fields}")
    return "\n\n".join(lines) + "\n"


def test_the_command_brings_engines_of_every_kind_to_one_answer(
    site: Site, nats_url: str, cluster: str, tmp_path: Path
) -> None:
    vllm, sglang, trtllm = Publisher(), Publisher(), TrtllmServer()
    blocks = [
        {
            "type": "stored_block",
            "block_hash": at + 1,
            "tokens": [{"type": "unique_token", "token_id": token} for token in PROMPT.tokens[4 * at : 4 * at + 4]],
            "cache_level": 0,
        }
        for at in range(3)
    ]
    file = tmp_path / "bridge.toml"
    sources = {"a": vllm.settings, "b": sglang.settings | {"kind": "sglang"}, "c": trtllm.settings}
    file.write_text(settings(nats_url, cluster, **sources))
    command = subprocess.Popen([sys.executable, "-m", "kvbm", "bridge", "--config", str(file)])
    try:
        vllm.publish(stored_event(PROMPT))
        said = {"block_hashes": [-1, -2], "parent_block_hash": None, "token_ids": list(PROMPT.tokens[:8])}
        sglang.publish({"type": "BlockStored", "block_size": 4, "lora_id": None, "medium": "CPU_PINNED"} | said)
        trtllm.publish({"type": "stored", "parent_hash": None, "blocks": blocks})
        bridge = Bridge(site.catalog)
        bridge.agrees(PROMPT, {"a": {"HBM": 6}, "b": {"HOST": 2}, "c": {"HBM": 3}})
        vllm.publish(removed_event(PROMPT.keys()[1:]))
        trtllm.publish({"type": "removed", "block_hashes": [3]})
        bridge.agrees(PROMPT, {"a": {"HBM": 1}, "b": {"HOST": 2}, "c": {"HBM": 2}})
        command.terminate()
        assert command.wait(WAIT_S) == 130
    finally:
        command.kill()
        command.wait(WAIT_S)
        for one in (vllm, sglang, trtllm):
            one.close()
