"""A nats-server and a catalog, a bridge that is a process, and what the catalog says of engines."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from kvbm.core.fold import residency_mix
from kvbm.core.ids import Namespace, NamespaceId, Tier
from kvbm.core.prompt_tokens import PromptTokens
from kvbm.locate.http import CatalogClient
from tests.engines.bridge.harness.engines import Engine, Prompt, held
from tests.eventually import eventually
from tests.servers import start_process


class Site(NamedTuple):
    """See the module.

    Attributes:
        url: of the catalog.
        folder: for files.
    """

    client: CatalogClient
    url: str
    nats_url: str
    cluster: str
    folder: Path

    def bridge(self, sources: Mapping[str, Mapping[str, Any]]) -> subprocess.Popen[bytes]:
        """`kvbm bridge` for these sources."""
        lines = [f'[instance]\ncluster = "{self.cluster}"\n[nats]\nurl = "{self.nats_url}"']
        for name, source in sources.items():
            lines.append(f"[bridge.sources.{name}]")
            lines += [f"{key} = {json.dumps(value)}" for key, value in source.items()]
        config = self.folder / "bridge.toml"
        config.write_text("\n".join(lines))
        command = [sys.executable, "-m", "kvbm", "bridge", "--config", str(config)]
        return start_process(command, self.folder / "bridge.log", cwd=self.folder)

    def depth(self, name: str, prompt: Prompt) -> int:
        """Blocks of a prompt that the catalog says an engine without kvbm has."""
        answer = self.client.lookup(prompt.namespace, prompt.hashes())
        return next((one.depth for one in answer.instances if one.instance == name), 0)

    def depth_by_tokens(self, name: str, model: str, prompt: Prompt) -> int:
        """The same of an engine with kvbm, for which the catalog hashes tokens."""
        asked = PromptTokens(
            tokens=prompt.tokens, model=model, salt=prompt.salt, lora=prompt.lora_name, lora_path=prompt.lora
        )
        return next((one.depth for one in self.client.lookup_prompt(asked).instances if one.instance == name), 0)

    def models(self) -> set[str]:
        """Those of all namespaces."""
        return {one.fields.model for one in self.client.namespaces()}

    def present(self, name: str, space: Namespace | NamespaceId, hashes: bytes) -> dict[str, int]:
        """Tier → a bit for each of these blocks that an instance has there."""
        found = self.client.presence(space, hashes).holders
        return {one.tier: int.from_bytes(one.bits(), "little") for one in found if one.name == name}

    def agrees(self, name: str, engine: Engine) -> None:
        """The catalog has of an engine's GPU, block for block, what a fold of all its events has."""
        expected = held(engine.sent())
        digest = f"{sum(residency_mix(Tier.HBM, block) for block in expected) % 2**64:016x}"

        def found() -> tuple[int, str]:
            one = self.client.instance(name)
            return (0, "") if one is None or one.excluded else (sum(one.held_blocks.values()), one.digest)

        eventually(lambda: found() == (len(expected), digest), f"{len(expected)} blocks were expected", state=found)

    def verify(self) -> None:
        """`kvbm-replay verify` finds nothing."""
        command = [sys.executable, "-m", "kvbm", "replay", "verify", self.nats_url, "--catalog", self.url]
        done = subprocess.run(command, capture_output=True, text=True, timeout=250, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
