"""What a rank says of the weights it has loaded, and which loads it refuses for them. vLLM itself:
tests/engines/vllm/test_weights.py.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvbm.engines.vllm.adapters import Loaded
from kvbm.engines.vllm.loaded import LoadedWeights, _signature, digest_of_adapter
from tests.extras import needed

torch = needed("torch", "engine")


class Manager:
    """vLLM's, as far as it says what it holds."""

    def __init__(self) -> None:
        self.held: set[int] = set()

    def list_adapters(self) -> set[int]:
        return self.held


def model(number: int = 1, scale: float = 1.0, **more: Any) -> Any:
    return SimpleNamespace(id=number, rank=2, loras={"q": [torch.arange(4.0) * scale, None]}, **more)


def loaded_from(folder: Path, weights: LoadedWeights, manager: Manager, adapter: Any) -> str:
    manager.held.add(adapter.id)
    weights.adapter_loaded(manager, adapter.id, str(folder), _signature(str(folder)), adapter)
    return digest_of_adapter(adapter)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "adapter_model.safetensors").write_bytes(b"one")
    return tmp_path


def test_the_digest_is_of_the_weights_and_not_of_their_number() -> None:
    assert digest_of_adapter(model(1)) == digest_of_adapter(model(2))
    others = [model(scale=2.0), model(is_3d_lora_weight=True), model(scale=-0.0)]
    others.append(SimpleNamespace(id=1, rank=2, loras={"k": [torch.arange(4.0), None]}))
    others.append(SimpleNamespace(id=1, rank=2, loras={"q": [torch.arange(4.0, dtype=torch.bfloat16), None]}))
    assert len({digest_of_adapter(one) for one in [model(), *others]}) == 6


def test_an_adapter_with_parts_of_an_unknown_kind_has_no_digest(folder: Path) -> None:
    weights, manager = LoadedWeights(None), Manager()
    adapter = model(more=object())
    with pytest.raises(TypeError, match="type object, which is not known here"):
        digest_of_adapter(adapter)
    manager.held.add(1)
    weights.adapter_loaded(manager, 1, str(folder), (), adapter)
    assert weights.take() == [Loaded(1, "")]


def test_a_load_is_refused_for_weights_that_are_not_these(folder: Path) -> None:
    weights, manager = LoadedWeights(None), Manager()
    first = loaded_from(folder, weights, manager, model())
    assert weights.why_not(1, first) == ""
    second = loaded_from(folder, weights, manager, model(scale=2.0))
    assert "other weights are loaded as adapter 1" in weights.why_not(1, first)
    assert weights.why_not(1, second) == ""
    assert weights.take() == [Loaded(1, first), Loaded(1, second)]
    manager.held.clear()
    assert "other weights" in weights.why_not(1, second)
    assert weights.take() == [Loaded(1, None)]


@pytest.mark.parametrize("how", ["written", "replaced", "added", "removed"])
def test_a_load_is_refused_once_the_files_have_changed(folder: Path, how: str) -> None:
    weights, manager = LoadedWeights(None), Manager()
    digest = loaded_from(folder, weights, manager, model())
    weights.take()
    file = folder / "adapter_model.safetensors"
    if how == "written":
        file.write_bytes(b"other")
    elif how == "replaced":
        (folder / "new").write_bytes(b"two")
        (folder / "new").replace(file)
    elif how == "added":
        (folder / "adapter_config.json").write_text("{}")
    else:
        file.unlink()
    assert "have changed since it was loaded" in weights.why_not(1, digest)
    assert weights.has_news
    assert weights.take() == [Loaded(1, None)]
    assert not weights.has_news
