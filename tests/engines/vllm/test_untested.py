"""A vLLM of a minor version that was not tested."""

from __future__ import annotations

import pytest

from kvbm.core.errors import ConfigError
from tests.engines.vllm.harness import scenarios
from tests.engines.vllm.harness.engine import EngineError
from tests.engines.vllm.harness.setups import with_kvbm

OTHER = ("tests.engines.vllm.harness.patches:vllm_is_of_another_version",)


@pytest.mark.parametrize("core", ["inside", "process"])
def test_it_is_refused_at_the_start(engines, llama, tmp_path, core):
    with pytest.raises(EngineError, match=r"vLLM 0\.99\.1 was not tested with this kvbm; 0\.32 was"):
        engines.start(with_kvbm(llama, tmp_path / "a", core=core, patches=OTHER))
    assert not (tmp_path / "a").exists()


def test_where_there_are_cuda_graphs_it_is_refused_before_a_model_is_loaded(monkeypatch):
    from kvbm.engines.vllm import KvbmConnector

    assert KvbmConnector.requires_piecewise_for_cudagraph({}) is False
    monkeypatch.setattr("vllm.__version__", "0.99.1")
    with pytest.raises(ConfigError, match=r"vLLM 0\.99\.1 was not tested"):
        KvbmConnector.requires_piecewise_for_cudagraph({})
    assert KvbmConnector.requires_piecewise_for_cudagraph({"untested_vllm": "0.99"}) is False


def test_it_is_served_where_its_user_has_named_it(engines, llama, truth, tmp_path):
    asks = truth.prompts("untested", 2, 300)
    described = with_kvbm(llama, tmp_path / "a", {"untested_vllm": "0.99"}, patches=OTHER)
    with engines.running(described) as engine:
        scenarios.ask(engine, truth, asks, [0, 0])
        scenarios.ask_after_garbage(engine, truth, asks, [ask.reusable_tokens for ask in asks])
