"""What lets vLLM's models be made, without weights, where there is no GPU: stand-ins for packages, kernels, processors
of images and tokenizers. For a process of its own: they replace parts of vLLM and of transformers.

None of them says anything of KV: that is left to vLLM's own code.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import inspect
import sys
import types
from collections.abc import Sequence
from typing import Any

# Packages that models import, and that are not where the page is made.
_PACKAGES = frozenset({"torchvision", "torchaudio", "timm", "terratorch", "cutlass", "cuda"})
_FLASH = "vllm.vllm_flash_attn"
_SPARSE = "vllm.v1.attention.backends.mla.flashmla_sparse.FlashMLASparseBackend"
_TOKEN = 5  # any


def install() -> None:
    """Before the models are imported."""
    _ask_what_is_installed()
    sys.meta_path.insert(0, _Finder())
    _platform()
    _processors()


def after_imports() -> None:
    """Once they are: they have names of their own for what is replaced."""
    import torch
    import torchaudio
    from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig
    from vllm.model_executor.layers.fused_moe.oracle import unquantized
    from vllm.v1.attention.backends import fa_utils
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend, CPUAttentionBackendImpl

    first = CPUAttentionBackendImpl.__init__
    known = set(inspect.signature(first).parameters)
    CPUAttentionBackendImpl.__init__ = lambda self, *args, **options: first(
        self, *args, **{key: value for key, value in options.items() if key in known}
    )
    CPUAttentionBackend.supports_alibi_sqrt = classmethod(lambda cls: True)
    _passing(FusedMoEConfig, "__post_init__", NotImplementedError)
    torchaudio.functional.melscale_fbanks = lambda *args, **options: torch.zeros(201, 80)
    fa_utils.__getattr__ = _stand_in_named
    selects = unquantized.select_unquantized_moe_backend

    def selected(*args: Any, **options: Any) -> Any:
        try:
            return selects(*args, **options)
        except NotImplementedError:
            return unquantized.UnquantizedMoeBackend.CPU, None

    for module in list(sys.modules.values()):
        if vars(module).get("select_unquantized_moe_backend") is selects:
            module.select_unquantized_moe_backend = selected  # type: ignore[attr-defined]
        if "cached_tokenizer_from_config" in vars(module):
            module.cached_tokenizer_from_config = lambda *args, **options: _Tokenizer()  # type: ignore[attr-defined]


def _ask_what_is_installed() -> None:
    """transformers keeps the answers, so what stands in for a package does not count as one."""
    from transformers.utils import import_utils

    for name, asks in vars(import_utils).items():
        if not (name.startswith("is_") and name.endswith("_available") and callable(asks)):
            continue
        if not any(one.default is one.empty for one in inspect.signature(asks).parameters.values()):
            asks()


def _platform() -> None:
    """A CPU with the instructions for latent attention, Triton, and sparse attention."""
    import torch
    import vllm.config.vllm
    import vllm.triton_utils
    from vllm.platforms.cpu import CpuPlatform

    torch.cpu._is_amx_tile_supported = lambda: True
    vllm.config.vllm.HAS_TRITON = True
    vllm.triton_utils.triton.set_allocator = lambda *args: None
    its_own = CpuPlatform.get_attn_backend_cls.__func__

    def backend(cls: Any, selected_backend: Any, attn_selector_config: Any, num_heads: int | None = None) -> Any:
        if attn_selector_config.use_sparse:
            return _SPARSE
        return its_own(cls, selected_backend, attn_selector_config, num_heads)

    CpuPlatform.get_attn_backend_cls = classmethod(backend)


def _processors() -> None:
    """Processors without their files, and towers whose class is code beside the weights."""
    import torch
    from transformers import AutoImageProcessor, AutoModel, AutoProcessor, ProcessorMixin
    from transformers.image_processing_utils import BaseImageProcessor

    def lenient(owner: Any, kind: Any) -> None:
        loads = owner.from_pretrained.__func__

        def from_pretrained(cls: Any, *args: Any, **options: Any) -> Any:
            try:
                return loads(cls, *args, **options)
            except Exception:  # noqa: BLE001 - files that are not there
                base = cls if issubclass(cls, kind) else kind
                return object.__new__(type(base.__name__, (base,), dict(vars(_Processor))))

        owner.from_pretrained = classmethod(from_pretrained)

    lenient(ProcessorMixin, ProcessorMixin)
    lenient(AutoProcessor, ProcessorMixin)
    lenient(AutoImageProcessor, BaseImageProcessor)
    lenient(BaseImageProcessor, BaseImageProcessor)
    makes = AutoModel.from_config.__func__

    def from_config(cls: Any, /, config: Any, **options: Any) -> Any:
        try:
            return makes(cls, config, **options)
        except ImportError:
            return torch.nn.Identity()
        except ValueError as error:
            if "Unrecognized configuration" not in str(error):
                raise
            return torch.nn.Identity()

    AutoModel.from_config = classmethod(from_config)


def _passing(owner: Any, name: str, error: type[Exception]) -> None:
    does = getattr(owner, name)

    def passes(self: Any) -> None:
        try:
            does(self)
        except error:
            pass

    setattr(owner, name, passes)


class _Kind(type):
    """The class of anything: it has every attribute."""

    def __getattr__(cls, name: str) -> Any:
        return _stand_in_named(name)

    def __or__(cls, other: Any) -> Any:
        return object

    def __ror__(cls, other: Any) -> Any:
        return object


class _Anything(metaclass=_Kind):
    def __init__(self, *args: Any, **options: Any) -> None: ...

    def __call__(self, *args: Any, **options: Any) -> Any:
        return args[0] if args and callable(args[0]) else self  # as a decorator does

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Anything()

    def __getitem__(self, key: Any) -> int:
        return _TOKEN


def _stand_in_named(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    return _Kind(name, (_Anything,), {})


class _Module(types.ModuleType):
    def __getattr__(self, name: str) -> Any:
        return _stand_in_named(name)


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(
        self, name: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name.partition(".")[0] in _PACKAGES or name.startswith(_FLASH):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _Module(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        vars(module).update(__version__="0.0.0", __path__=[])


class _Processor:
    """The attributes of a processor without files."""

    def __init__(self) -> None: ...

    def __getattr__(self, name: str) -> Any:
        return _TOKEN if name.endswith(("id", "size")) else _Anything()

    def _get_num_multimodal_tokens(self, **sizes: Any) -> dict[str, list[int] | None]:
        images = {"num_image_tokens": [4], "num_image_patches": [4]}
        return images | {"num_video_tokens": None, "num_audio_tokens": None}


class _Tokenizer:
    """One that has a token for everything."""

    def __init__(self) -> None:
        self.vocab = self

    def __getitem__(self, key: Any) -> int:
        return _TOKEN

    def __contains__(self, key: Any) -> bool:
        return True

    def __len__(self) -> int:
        return 1024

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _TOKEN if name.endswith("id") else _Anything()

    def get_vocab(self) -> _Tokenizer:
        return self

    def get(self, *args: Any) -> int:
        return _TOKEN

    def convert_tokens_to_ids(self, tokens: Any) -> int:
        return _TOKEN

    def encode(self, *args: Any, **options: Any) -> list[int]:
        return [_TOKEN]
