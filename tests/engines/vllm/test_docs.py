"""What docs/vllm.md tells a user to paste runs in a real engine until a hit is measured; places, addresses and NVME's
size are this machine's.
"""

from __future__ import annotations

import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from kvbm.engines.vllm.plugin import MODULE, NAME, register
from tests.engines.vllm.harness import scenarios
from tests.engines.vllm.harness.cluster import Cluster
from tests.engines.vllm.harness.engine import Engine, Engines
from tests.engines.vllm.harness.page import as_json, code
from tests.engines.vllm.harness.truth import Truth
from tests.engines.vllm.harness.words import BLOCK_TOKENS, Ask, Setup
from tests.servers import S3_CREDENTIALS

BLOCKS = as_json()
START_S = 280.0
NVME_BYTES = 256 << 20  # taken at the start, and a test's folder outlives it
OBJECT_TOKENS = 128  # of an object, for blocks of this model's size


class Here(NamedTuple):
    """What a block is run with, in place of what the page names."""

    engines: Engines
    truth: Truth
    model: str
    folder: Path
    request: pytest.FixtureRequest

    def setup(self, block: Any, **changes: Any) -> Setup:
        """An engine as the block says, with folders below the test's own and addresses of the test's servers."""
        places = {
            "instance.data_dir": str(self.folder / "kvbm-data"),
            "pools.nvme.folder": str(self.folder / "pod"),
            "pools.nvme.capacity_bytes": NVME_BYTES,
            **changes,
        }
        return Setup(self.model, connector=placed(block, places), environment=self.environment)

    @property
    def other(self) -> dict[str, str]:
        """Changes for a second engine."""
        return {"instance.id": "engine-1", "instance.data_dir": str(self.folder / "other-data")}

    @property
    def environment(self) -> dict[str, str]:
        """Where S3's client looks for credentials; and, whatever a block says of it, kvbm waits for bytes for as long
        as a busy machine takes.
        """
        return {
            "KVBM_ONBOARD__WAIT_S": "60",
            "KVBM_ONBOARD__LOCATE_S": "30",
            "AWS_ACCESS_KEY_ID": S3_CREDENTIALS["access_key_id"],
            "AWS_SECRET_ACCESS_KEY": S3_CREDENTIALS["secret_access_key"],
            "AWS_REGION": S3_CREDENTIALS["region"],
            "AWS_DEFAULT_REGION": S3_CREDENTIALS["region"],
        }

    def asks(self, name: str) -> list[Ask]:
        return self.truth.prompts(f"docs-{name}", 2, 300)


def placed(block: Any, places: Mapping[str, Any]) -> Any:
    """A block with other values under keys that it has; no key is added."""
    if isinstance(block, list):
        return [placed(one, places) for one in block]
    if isinstance(block, dict):
        return {key: places[key] if key in places else placed(value, places) for key, value in block.items()}
    return block


def reusable(asks: list[Ask]) -> list[int]:
    return [ask.reusable_tokens for ask in asks]


def computed(engine: Engine, truth: Truth, asks: list[Ask]) -> None:
    """Have prompts computed, and all of them stored."""
    scenarios.ask(engine, truth, asks, [0] * len(asks))
    engine.offload()


def after_a_restart(here: Here, block: Any) -> None:
    """The page: ask, stop, start again with the same, and ask the same."""
    asks = here.asks("restart")
    with here.engines.running(here.setup(block)) as engine:
        computed(engine, here.truth, asks)
        engine.stop()
    with here.engines.running(here.setup(block)) as engine:
        scenarios.ask(engine, here.truth, asks, reusable(asks))
        assert engine.in_core("counted")["hits_NVME"] > 0


def without_plugins(here: Here, block: Any) -> None:
    """The page: where plugins are limited."""
    asks = here.asks("module")
    setup = here.setup(block)
    limited = Setup(setup.model, setup.connector, environment={**setup.environment, "VLLM_PLUGINS": "none-of-them"})
    with here.engines.running(limited) as engine:
        computed(engine, here.truth, asks)
        scenarios.ask_after_garbage(engine, here.truth, asks, reusable(asks))
        assert engine.in_core("counted")["hits_HOST"] > 0


def in_another_engine(here: Here, block: Any) -> None:
    """The page: engines of a pod; the second has another name and folder, and nothing of its own."""
    asks = here.asks("pod")
    with here.engines.running(here.setup(block)) as engine:
        computed(engine, here.truth, asks)
        with here.engines.running(here.setup(block, **here.other)) as other:
            scenarios.ask(other, here.truth, asks, reusable(asks))
            assert other.in_core("counted")["hits_NVME"] > 0


def in_a_bucket(here: Here, block: Any) -> None:
    """The page: engines of a cluster; the second finds what the catalog knows of, in whole objects."""
    import boto3

    endpoint = str(here.request.getfixturevalue("s3_endpoint"))
    url = block["kv_connector_extra_config"]["pools.object.url"]
    boto3.client(
        "s3",
        endpoint_url=endpoint,
        region_name=S3_CREDENTIALS["region"],
        aws_access_key_id=S3_CREDENTIALS["access_key_id"],
        aws_secret_access_key=S3_CREDENTIALS["secret_access_key"],
    ).create_bucket(Bucket=url.removeprefix("s3://").partition("/")[0])
    asks = here.asks("object")
    with Cluster(here.folder / "cluster") as cluster:
        addresses = {"pools.object.endpoint": endpoint, **cluster.addresses}
        with here.engines.running(here.setup(block, **addresses)) as engine:
            computed(engine, here.truth, asks)
            cluster.agree(engine)
            with here.engines.running(here.setup(block, **addresses, **here.other)) as other:
                whole = [ask.reusable_tokens // OBJECT_TOKENS * OBJECT_TOKENS for ask in asks]
                scenarios.ask(other, here.truth, asks, whole)
                assert other.in_core("counted")["hits_OBJECT"] > 0


def with_a_catalog(here: Here, block: Any) -> None:
    """The page: a catalog sees what the engine holds, HBM included."""
    asks = here.asks("catalog")
    with (
        Cluster(here.folder / "cluster") as cluster,
        here.engines.running(here.setup(block, **cluster.addresses)) as engine,
    ):
        computed(engine, here.truth, asks)
        cluster.agree(engine)
        full = len(asks[0].tokens) // BLOCK_TOKENS
        assert cluster.depths(engine, asks[0]) == {"engine-0": {"HBM": full, "HOST": full}}
        scenarios.ask_after_garbage(engine, here.truth, asks, reusable(asks))


def beside_another(here: Here, block: Any) -> None:
    """The page names NIXL's connector, which needs a GPU. vLLM's example, which keeps whole prompts in files, stands in
    for it.
    """
    connectors = block["kv_connector_extra_config"]["connectors"]
    assert connectors[1]["kv_connector"] == "NixlConnector"
    (here.folder / "files").mkdir()
    example = {
        "kv_connector": "ExampleConnector",
        "kv_role": connectors[1]["kv_role"],
        "kv_connector_extra_config": {"shared_storage_path": str(here.folder / "files")},
    }
    asks = here.asks("multi")
    kvbm = placed(connectors[0], {"instance.data_dir": str(here.folder / "kvbm-data")})
    with here.engines.running(here.setup(block, connectors=[kvbm, example])) as engine:
        computed(engine, here.truth, asks)
        scenarios.ask_after_garbage(engine, here.truth, asks, reusable(asks))
        assert engine.in_core("counted")["hits_HOST"] > 0


RUNS: dict[str, Callable[[Here, Any], None]] = {
    "serve": after_a_restart,
    "module-path": without_plugins,
    "pod": in_another_engine,
    "object": in_a_bucket,
    "catalog": with_a_catalog,
    "multi": beside_another,
}


@pytest.fixture
def here(engines: Engines, truth: Truth, llama: str, tmp_path: Path, request: pytest.FixtureRequest) -> Here:
    return Here(engines, truth, llama, tmp_path, request)


def test_each_block_of_the_page_is_run():
    assert BLOCKS
    assert BLOCKS.keys() == RUNS.keys()


@pytest.mark.parametrize("name", RUNS)
def test_block(here: Here, name: str):
    RUNS[name](here, BLOCKS[name])


@pytest.mark.smoke
def test_vllm_finds_the_connector_by_its_entry_point():
    """It is installed, and nothing but it says where the connector of `test_block[serve]` is."""
    (found,) = importlib.metadata.entry_points(group="vllm.general_plugins", name="kvbm")
    assert found.load() is register
    assert BLOCKS["serve"]["kv_connector"] == NAME
    assert "kv_connector_module_path" not in BLOCKS["serve"]
    assert BLOCKS["module-path"]["kv_connector_module_path"] == MODULE


@pytest.mark.engines_full
def test_the_pages_python_measures_a_hit(engines: Engines, tmp_path: Path):
    """A program of its own, as it stands; the model has a tokenizer there, since its prompt is words."""
    program = tmp_path / "page.py"
    program.write_text(code("python").replace('"MODEL"', repr(engines.model("llama-words"))))
    environment = {**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_LOGGING_LEVEL": "WARNING"}
    done = subprocess.run(
        [sys.executable, str(program)],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=START_S,
        check=False,
    )
    shutil.rmtree(tmp_path / "kvbm-data", ignore_errors=True)  # 4 GiB
    assert done.returncode == 0, done.stderr[-4000:]
    said = [
        tuple(map(int, one))
        for one in re.findall(r"^(\d+) of (\d+) tokens were not computed$", done.stdout, re.MULTILINE)
    ]
    (first, _), (cached, tokens) = said
    assert first == 0
    assert tokens - 256 <= cached < tokens, done.stdout
