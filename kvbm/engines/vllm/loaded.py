"""What a rank has loaded: the digest of each adapter's weights as they are in memory, and whether the model's own were
changed.

Files say what might have been loaded, at some moment; only the process that loads knows. So this listens where vLLM
loads: at the one method that reads an adapter, and at those that change the model's weights in place. It runs in each
worker's process.
"""

from __future__ import annotations

import enum
import hashlib
import os
import sys
import weakref
from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any

from kvbm.engines.vllm.adapters import Loaded
from kvbm.safe_log import SafeLog

log = SafeLog()

_MOST_FILES = 1024  # of an adapter's folder that are looked at
_IN_PLACE = (
    "reload_weights",
    "update_weights",
    "start_weight_update",
    "start_draft_weight_update",
    "finish_weight_update",
)
_RUNNERS = ("vllm.v1.worker.gpu_model_runner", "vllm.v1.worker.gpu.model_runner")
_MARK = "_kvbm_listens"

_engines: weakref.WeakSet[LoadedWeights] = weakref.WeakSet()

_Signature = tuple[tuple[str, int, int, int, int], ...]


class LoadedWeights:
    """The weights of one rank of one engine. Owner thread only.

    Attributes:
        changed: why the model's weights are not those it was started with, "" while they are.
    """

    def __init__(self, vllm_config: Any) -> None:
        self.changed = ""
        self._config = vllm_config
        self._news: list[Loaded] = []
        self._digests: dict[int, str] = {}
        self._files: dict[int, tuple[str, _Signature]] = {}  # number → its path, and how it looked before it was read
        self._manager: Any = None

    @classmethod
    def listening(cls, vllm_config: Any) -> LoadedWeights:
        """One that hears of all that this process loads from now on.

        Raises ImportError, AttributeError: a vLLM that loads otherwise.
        """
        loaded = cls(vllm_config)
        _listen()
        _engines.add(loaded)
        return loaded

    def take(self) -> list[Loaded]:
        """What has happened to adapters since the last call, in its order."""
        self._look_for_gone()
        news, self._news = self._news, []
        return news

    @property
    def has_news(self) -> bool:
        """Whether `take` would give something."""
        self._look_for_gone()
        return bool(self._news)

    def why_not(self, number: int, digest: str) -> str:
        """Why blocks computed with an adapter of this digest must not be loaded for it now; "" when they may."""
        if self._digests.get(number) != digest or not self._is_held(number):
            return f"other weights are loaded as adapter {number} by now"
        path, before = self._files[number]
        if _signature(path) != before:  # vLLM may drop it any moment, and would load what lies there now
            self._release(number)
            return f"the files of adapter {number} in {path} have changed since it was loaded"
        return ""

    def is_of(self, config: Any) -> bool:
        """Whether a part of vLLM is this engine's."""
        return config is not None and (config is self._config or config is getattr(self._config, "lora_config", None))

    def adapter_loaded(self, manager: Any, number: int, path: str, signature: _Signature, adapter: Any) -> None:
        """An adapter was read into memory."""
        try:
            digest = digest_of_adapter(adapter)
        except (TypeError, ValueError, RuntimeError) as error:
            log.warning("adapter.unknown", adapter=number, why=str(error), notice="its blocks stay in HBM")
            digest = ""
        self._manager = manager
        self._digests[number], self._files[number] = digest, (path, signature)
        self._news.append(Loaded(number, digest))

    def _look_for_gone(self) -> None:
        if self._digests:
            held = set(self._manager.list_adapters())
            for number in [number for number in self._digests if number not in held]:
                self._release(number)

    def _release(self, number: int) -> None:
        self._digests.pop(number, None)
        self._files.pop(number, None)
        self._news.append(Loaded(number, None))

    def _is_held(self, number: int) -> bool:
        return self._manager is not None and number in self._manager.list_adapters()


def digest_of_adapter(adapter: Any) -> str:
    """A digest of all that an adapter's KV depends on; the number it has in this process is not of that.

    Args:
        adapter: vLLM's LoRAModel, as it was read.
    Returns: 32 hex digits.
    Raises: TypeError: it has parts of a kind that is not known here.
    """
    digest = hashlib.sha256(b"kvbm.vllm.adapter.v1\0")
    _feed(digest, {name: value for name, value in vars(adapter).items() if name != "id"})
    return digest.hexdigest()[:32]


def _feed(digest: Any, value: Any) -> None:
    import torch

    if isinstance(value, torch.Tensor):
        digest.update(f"tensor {value.dtype} {tuple(value.shape)};".encode())
        plain = value.detach().to("cpu").contiguous().reshape(-1)
        digest.update(plain.view(torch.uint8).numpy() if plain.numel() else b"")
    elif isinstance(value, Mapping):
        digest.update(f"map {len(value)};".encode())
        for key in sorted(value, key=str):
            _feed(digest, str(key))
            _feed(digest, value[key])
    elif isinstance(value, list | tuple):
        digest.update(f"list {len(value)};".encode())
        for one in value:
            _feed(digest, one)
    elif isinstance(value, str):
        digest.update(f"text {len(value.encode())};".encode() + value.encode())
    elif value is None or isinstance(value, bool | int | float | enum.Enum | torch.dtype):
        digest.update(f"{type(value).__name__} {value!r};".encode())
    elif type(value).__module__.startswith("vllm.lora."):
        digest.update(f"{type(value).__name__};".encode())
        _feed(digest, vars(value))
    else:
        raise TypeError(f"an adapter has a part of type {type(value).__qualname__}, which is not known here")


def _signature(path: str) -> _Signature:
    """How the files of a folder look, without reading them; it changes when one of them is written or replaced."""
    found: list[tuple[str, int, int, int, int]] = []
    for parent, _, names in os.walk(path, followlinks=True):
        for name in names:
            file = os.path.join(parent, name)
            try:
                stat = os.stat(file)
            except OSError:
                found.append((file, 0, 0, 0, 0))
            else:
                found.append((file, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns))
            if len(found) >= _MOST_FILES:
                return tuple(sorted(found))
    return tuple(sorted(found))


def _listen() -> None:
    """Put ourselves behind vLLM's methods, once a process. Raises ImportError, AttributeError."""
    from vllm.lora.worker_manager import WorkerLoRAManager
    from vllm.v1.worker.gpu_worker import Worker

    _behind(WorkerLoRAManager, "_load_adapter", _loading)
    for name in _IN_PLACE:
        _behind(Worker, name, _changing)
    _behind(Worker, "sleep", _sleeping)
    runners = [
        sys.modules[name].GPUModelRunner for name in _RUNNERS if name in sys.modules
    ]  # this rank's is made by now
    if not runners:
        raise ImportError(f"none of {', '.join(_RUNNERS)} is in use")
    for runner in runners:
        _behind(runner, "reload_weights", _changing)
        _behind(runner, "initialize_kv_cache", _guarding)


def _loading(load: Callable[..., Any]) -> Callable[..., Any]:
    from vllm.lora.utils import get_adapter_absolute_path

    @wraps(load)
    def listened(self: Any, lora_request: Any) -> Any:
        path = str(get_adapter_absolute_path(lora_request.lora_path))
        signature = _signature(path)
        adapter = load(self, lora_request)
        for engine in [one for one in _engines if one.is_of(self.lora_config)]:
            engine.adapter_loaded(self, lora_request.lora_int_id, path, signature, adapter)
        return adapter

    return listened


def _changing(change: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(change)
    def listened(self: Any, *args: Any, **kwargs: Any) -> Any:
        _weights_changed(self.vllm_config, change.__name__)  # before: half a change is one too
        return change(self, *args, **kwargs)

    return listened


def _sleeping(sleep: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(sleep)
    def listened(self: Any, level: int = 1) -> Any:
        if level >= 2:  # the weights are gone; what is there afterwards somebody has loaded anew
            _weights_changed(self.vllm_config, f"sleep(level={level})")
        return sleep(self, level)

    return listened


def _guarding(fill: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(fill)
    def listened(self: Any, *args: Any, **kwargs: Any) -> Any:
        _guard_model(self)
        return fill(self, *args, **kwargs)

    return listened


def _guard_model(runner: Any) -> None:
    """Hear of who loads weights into the model itself, as trainers do by `collective_rpc`."""
    draft = getattr(runner, "get_draft_model", None)
    for model in (getattr(runner, "model", None), draft() if callable(draft) else None):
        load = getattr(model, "load_weights", None)
        if model is None or load is None or getattr(load, _MARK, False):
            continue
        config = getattr(runner, "vllm_config", None)

        def listened(*args: Any, load: Callable[..., Any] = load, config: Any = config, **kwargs: Any) -> Any:
            _weights_changed(config, "model.load_weights")
            return load(*args, **kwargs)

        setattr(listened, _MARK, True)
        model.load_weights = listened


def _behind(kind: type, name: str, decorate: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    plain = getattr(kind, name)
    if not getattr(plain, _MARK, False):
        listened = decorate(plain)
        setattr(listened, _MARK, True)
        setattr(kind, name, listened)


def _weights_changed(config: Any, how: str) -> None:
    concerned = [engine for engine in _engines if engine.is_of(config)] or list(_engines)
    for engine in concerned:
        engine.changed = engine.changed or (
            f"the model's weights were changed in place ({how}), and no name says which they are now; start the engine "
            "again"
        )
