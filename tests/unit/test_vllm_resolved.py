"""What vLLM has resolved on a rank, and that two hosts which have resolved it differently never share."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvbm.core.errors import LayoutError
from kvbm.core.ids import Namespace
from kvbm.engines.vllm import facts
from kvbm.engines.vllm.meeting import Meeting
from kvbm.engines.vllm.resolved import backends_of, find_resolved, forget_resolved, leave_resolved, resolved_of
from tests.extras import needed
from tests.vllm_configs import Config, FullAttentionSpec, config_of, tensors_of

torch = needed("torch", "engine")


def backend(name: str, sizes: tuple[Any, ...] = (16,)) -> Any:
    return type(
        name,
        (),
        {
            "get_name": staticmethod(lambda: name),
            "get_supported_kernel_block_sizes": staticmethod(lambda spec=None: list(sizes)),
        },
    )


class Attention:
    """A layer of vLLM's, as far as it is looked at."""

    kv_cache_dtype = "auto"

    def __init__(self, kind: Any) -> None:
        self._kind = kind
        self._k_scale = torch.tensor(1.0)
        self._v_scale = torch.tensor([1.0, 2.0])

    def get_attn_backend(self) -> Any:
        return self._kind


class Host:
    """A rank of an engine on some host, with what can be different there."""

    def __init__(self) -> None:
        self.config: Config = config_of("LBNHC", [[FullAttentionSpec()] * 3])
        self.layers = {name: Attention(backend("FLASH_ATTN")) for name in tensors_of(self.config)}

    def resolved(self) -> dict[str, Any]:
        vllm_config = SimpleNamespace(compilation_config=SimpleNamespace(static_forward_context=self.layers))
        return resolved_of(vllm_config, self.config, tensors_of(self.config))

    def namespace(self, below: Path) -> bytes:
        """The id of a namespace that differs in nothing else, by way of the words between the processes."""
        meeting = Meeting("engine", below)
        leave_resolved(meeting, 0, self.resolved())
        said = {"resolved": find_resolved(meeting, 1)}
        meeting.close()
        return Namespace(model="m", block_tokens=16, scheme=facts.digest_of(said)).id


def _other_backend(host: Host) -> None:
    for layer in host.layers.values():
        layer._kind = backend("FLASHINFER")


def _one_layers_backend(host: Host) -> None:
    next(iter(host.layers.values()))._kind = backend("FLASHINFER")


def _other_kernel_blocks(host: Host) -> None:
    host.config = config_of("LBNHC", [[FullAttentionSpec()] * 3], kernel_blocks=2)


def _other_sizes_of_kernel_blocks(host: Host) -> None:
    for layer in host.layers.values():
        layer._kind = backend("FLASH_ATTN", (SimpleNamespace(base=32),))


def _heads_before_tokens(host: Host) -> None:
    host.config = config_of("LBHNC", [[FullAttentionSpec()] * 3])


def _layers_in_blocks(host: Host) -> None:
    host.config = config_of("BLNHC", [[FullAttentionSpec()] * 3])


def _other_key_scale(host: Host) -> None:
    next(iter(host.layers.values()))._k_scale = torch.tensor(0.5)


def _other_value_scale(host: Host) -> None:
    next(iter(host.layers.values()))._v_scale = torch.tensor([1.0, 2.5])


def _other_cache_dtype(host: Host) -> None:
    for layer in host.layers.values():
        layer.kv_cache_dtype = "fp8"


@pytest.mark.parametrize(
    "change",
    [
        _other_backend,
        _one_layers_backend,
        _other_kernel_blocks,
        _other_sizes_of_kernel_blocks,
        _heads_before_tokens,
        _layers_in_blocks,
        _other_key_scale,
        _other_value_scale,
        _other_cache_dtype,
    ],
)
def test_a_host_that_has_resolved_something_differently_has_another_namespace(change: Any, tmp_path: Path) -> None:
    plain, changed = Host(), Host()
    change(changed)
    assert changed.namespace(tmp_path) != plain.namespace(tmp_path)


def test_hosts_that_have_resolved_the_same_share_whatever_room_they_have(tmp_path: Path) -> None:
    for layout in ("LBNHC", "LHBNC", "BLHNC"):  # where strides depend on how many blocks there are
        plain, larger = Host(), Host()
        plain.config = config_of(layout, [[FullAttentionSpec()] * 3])
        larger.config = config_of(layout, [[FullAttentionSpec()] * 3], blocks=2 * plain.config.num_blocks)
        assert larger.namespace(tmp_path) == plain.namespace(tmp_path)


def test_ranks_that_differ_are_all_in_the_identity_and_a_silent_one_is_seen(tmp_path: Path) -> None:
    one, other = Host(), Host()
    _other_key_scale(other)
    meeting = Meeting("engine", tmp_path)
    leave_resolved(meeting, 0, one.resolved())
    assert find_resolved(meeting, 2) is None
    leave_resolved(meeting, 1, one.resolved())
    assert find_resolved(meeting, 2) == [one.resolved()]
    leave_resolved(meeting, 1, other.resolved())
    assert find_resolved(meeting, 2) == [one.resolved(), other.resolved()]
    forget_resolved(meeting, 0)
    assert find_resolved(meeting, 2) is None
    assert backends_of([one.resolved()]) == ["FLASH_ATTN"]


def test_a_layer_that_does_not_say_what_computes_it_is_named() -> None:
    host = Host()
    name = next(iter(host.layers))
    host.layers[name] = object()  # type: ignore[assignment]
    with pytest.raises(LayoutError, match=f"layer {name}: vLLM does not say"):
        host.resolved()


def test_scales_that_are_no_finite_numbers_are_words() -> None:
    host = Host()
    next(iter(host.layers.values()))._k_scale = torch.tensor(float("nan"))
    found = [run["is"]["scales"]["_k_scale"] for run in host.resolved()["layers"]]
    assert ["nan"] in found and [1.0] in found
