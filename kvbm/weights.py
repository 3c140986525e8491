"""A digest of a model's weights: a revision for weights that have no name of their own.

And which files of a folder are the model.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from kvbm.core.checks import kind_of
from kvbm.core.errors import ArgumentTypeError, ConfigError

_READ_BYTES = 4 << 20
_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".tensors", ".npz", ".ckpt")
_ORDERS = {  # of a load format: of the first that there is, all are loaded
    **dict.fromkeys(
        ("auto", "hf", "safetensors", "fastsafetensors", "instanttensor", "mistral", "bitsandbytes"),
        (".safetensors", ".bin", ".pt"),
    ),
    "npcache": (".bin", ".pt"),
    "pt": (".pt",),
}
_INDEXES = ("model.safetensors.index.json", "consolidated.safetensors.index.json")
_CONSOLIDATED = "consolidated*.safetensors"
# What a training leaves beside weights, and what is another form of them; no engine loads it.
_NOT_LOADED = (
    ".*",
    "training_args.bin",
    "optimizer*",
    "*optim_states.pt",
    "scheduler.*",
    "scaler.*",
    "rng_state*",
    "random_states*",
)
_NOT_LOADED_FOLDERS = (
    ".*",
    "original",
    "metal",
    "onnx",
    "openvino",
    "coreml",
    "tflite",
    "checkpoint-*",
    "global_step*",
    "runs",
    "logs",
    "wandb",
    "__pycache__",
)
_NOT_OF_THE_MODEL = frozenset(
    ("_name_or_path", "transformers_version", "_commit_hash")
)  # whence a config came, and who wrote it


def weights_digest(path: str | Path) -> str:
    """A digest of every byte of a file, or of all files in a folder, for `Namespace(revision=…)`.

    Take it of what the engine loads, before it loads it, and do not change the files meanwhile. It reads as fast as one
    core hashes, 1 to 2 GB/s. Of a model's folder, which has a config.json beside its weights, those count that
    `model_files` names, and what config.json says, however it is laid out. Of any other, all files count, but hidden
    ones (`.cache`, `.git`).

    Returns: 32 hex digits; the same wherever the same files lie.
    Raises: ConfigError: there is nothing there, or it cannot be read. ArgumentTypeError: no path.
    """
    if not isinstance(path, str | os.PathLike):
        raise ArgumentTypeError("path", f"is {kind_of(path)}; give the file or folder that the engine loads")
    root = Path(path)
    if not root.exists():
        raise ConfigError(f"weights file {root} does not exist; give the file or folder that the engine loads")
    digest = hashlib.sha256(b"kvbm.weights.v2\0")
    try:
        is_model = (root / "config.json").is_file()
        if root.is_file():
            files = [root]
        else:
            files = model_files(root) if is_model else _sorted(root, _all_files(root))
        if not files:
            raise ConfigError(f"{root} has no weights: there is no file; give the file or folder that the engine loads")
        if is_model:
            digest.update(config_words(root))
        for file in files:
            name = b"" if file is root else file.relative_to(root).as_posix().encode()
            with file.open("rb") as opened:
                digest.update(b"%d %s %d;" % (len(name), name, os.fstat(opened.fileno()).st_size))
                while piece := opened.read(_READ_BYTES):
                    digest.update(piece)
    except OSError as error:
        raise ConfigError(
            f"weights in {root} cannot be read ({error.strerror}); give the file or folder they lie in"
        ) from None
    return digest.hexdigest()[:32]


def model_files(folder: Path, load_format: str = "auto") -> list[Path]:
    """The files of weights in a folder that an engine loads, sorted.

    In each folder those of one kind are loaded, safetensors where there are any, and of these the ones that the index
    beside them names. What a training leaves there (`optimizer.pt`, `training_args.bin`, `checkpoint-500/`), other
    forms of the same weights (`original/`, `onnx/`) and hidden folders (`.cache`) are no part of it. Of a load format
    that is not known here, weights of every kind count; where there are no weights of a kind that is known, all files
    do.

    Args:
        load_format: vLLM's.
    Raises: OSError: it cannot be read.
    """
    order = _ORDERS.get(load_format.rpartition(".")[2].lower(), ())
    found: dict[Path, None] = {}
    for parent, names in _walk(folder, _NOT_LOADED_FOLDERS):
        files = [name for name in names if name.endswith(_SUFFIXES) and not _is_any(name, _NOT_LOADED)]
        files = [name for name in files if (parent / name).is_file()]  # no broken link, pipe or socket
        found.update(dict.fromkeys(parent / name for name in _loaded(parent, files, order)))
    return _sorted(folder, found or dict.fromkeys(_all_files(folder)))


def config_words(folder: Path) -> bytes:
    """What a folder's config.json says, the same however it is laid out and whoever wrote it; b"" without one.

    Raises OSError.
    """
    for name in ("config.json", "params.json"):
        if (folder / name).is_file():
            raw = (folder / name).read_bytes()
            try:
                return json.dumps(_of_the_model(json.loads(raw)), sort_keys=True).encode()
            except (ValueError, RecursionError):
                return raw  # the engine will say what is wrong with it
    return b""


def _loaded(parent: Path, names: list[str], order: tuple[str, ...]) -> list[str]:
    for suffix in order:
        kind = [name for name in names if name.endswith(suffix)]
        if suffix == ".safetensors" and (indexed := _indexed(parent)):
            kind = [name for name in kind if name in indexed or fnmatch(name, _CONSOLIDATED)]
            kind += [name for name in indexed if "/" in name and (parent / name).is_file()]
        if kind:
            return kind
    return names


def _indexed(folder: Path) -> set[str]:
    """The files that indexes of safetensors name."""
    found: set[str] = set()
    for index in _INDEXES:
        try:
            names = set(json.loads((folder / index).read_bytes())["weight_map"].values())
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
            continue  # there is none, or the engine will say what is wrong with it
        found |= {
            name for name in names if isinstance(name, str) and not name.startswith("/") and ".." not in name.split("/")
        }
    return found


def _of_the_model(said: Any) -> Any:
    if isinstance(said, dict):
        return {key: _of_the_model(value) for key, value in said.items() if key not in _NOT_OF_THE_MODEL}
    return [_of_the_model(one) for one in said] if isinstance(said, list) else said


def _all_files(folder: Path) -> Iterator[Path]:
    for parent, names in _walk(folder, (".*",)):
        yield from (parent / name for name in names if not name.startswith(".") and (parent / name).is_file())


def _walk(folder: Path, without: tuple[str, ...]) -> Iterator[tuple[Path, list[str]]]:
    """Each folder in a folder with the names of its files.

    Links are followed, each folder is visited once: links may lead back.
    """
    seen: set[tuple[int, int]] = set()
    for parent, folders, names in os.walk(
        folder, followlinks=True
    ):  # one that may not be read (lost+found) is none of the model's
        folders.sort()  # so that of two ways to a folder every host takes the same
        state = os.stat(parent)
        if (state.st_dev, state.st_ino) in seen:
            folders.clear()
            continue
        seen.add((state.st_dev, state.st_ino))
        folders[:] = [name for name in folders if not _is_any(name, without)]
        yield Path(parent), names


def _is_any(name: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatch(name, pattern) for pattern in patterns)


def _sorted(folder: Path, files: Iterator[Path] | dict[Path, None]) -> list[Path]:
    return sorted(files, key=lambda file: file.relative_to(folder).as_posix())
