"""Which weights a model has: the name of their version, or a digest of the files where there is no such name."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from kvbm.weights import config_words, model_files

_PIECE_BYTES = 64 << 10  # from the begin, the middle and the end of each file
_TENSOR_BYTES = 1 << 10  # from the middle of a tensor
_TENSORS = 8192  # of a model that are looked at; of more, evenly spread ones
_MOST_HEADER_BYTES = 128 << 20
_COMMIT = re.compile(r"[0-9a-f]{40}")


def model_name(model: str) -> str:
    """A model's name: as it was given, a folder's last part, or the repository whose snapshot a folder is."""
    path = Path(model)
    snapshot = snapshot_of(path)
    if snapshot is not None:
        return snapshot[0]
    return path.resolve().name if path.exists() else model


def known_revision(model: str, revision: str | None = None, load_format: str = "auto") -> str:
    """The version of weights that says which they are: a commit of the hub, or a digest of a folder's or file's
    contents; "" where nothing tells them apart.

    Args:
        model: as an engine is told it: a path, or a repository's name.
        revision: of the repository, as it was asked for.
        load_format: the engine's word for which files it loads.
    """
    path = Path(model)
    snapshot = snapshot_of(path)
    if snapshot is not None:
        return snapshot[1]
    if path.exists():
        return content_digest(path, load_format)
    return _commit_of(model, revision) or (revision if revision and _COMMIT.fullmatch(revision) else "")


def content_digest(path: Path, load_format: str = "auto") -> str:
    """A digest of the weights that an engine loads of a folder, or of one file, in a fraction of the time it takes to
    read them.

    It covers names and sizes, 64 KiB from the begin, the middle and the end of each file that `model_files` names, 1
    KiB of every tensor of safetensors (of at most 8,192 of them), and what config.json says. What it does not see is a
    change that leaves all of that alone.

    Returns: 32 hex digits; the same on every host that loads the same.
    """
    digest = hashlib.sha256(b"kvbm.weights.v3\0")
    files = [path] if path.is_file() else model_files(path, load_format)
    root = path.parent if path.is_file() else path
    tensors = {file: list(_tensors(file)) for file in files if file.suffix == ".safetensors"}
    stride = max(1, -(-sum(len(spans) for spans in tensors.values()) // _TENSORS))
    for file in files:
        with file.open("rb") as opened:
            size = os.fstat(opened.fileno()).st_size
            digest.update(json.dumps([file.relative_to(root).as_posix(), size]).encode())
            for at in sorted({0, max(0, (size - _PIECE_BYTES) // 2), max(0, size - _PIECE_BYTES)}):
                _take(digest, opened, at, _PIECE_BYTES)
            for begin, end in tensors.get(file, [])[::stride]:
                _take(digest, opened, max(begin, (begin + end - _TENSOR_BYTES) // 2), min(_TENSOR_BYTES, end - begin))
    if path.is_dir():
        digest.update(config_words(path))
    return digest.hexdigest()[:32]


def _take(digest: Any, file: BinaryIO, at: int, size: int) -> None:
    file.seek(at)
    digest.update(file.read(size))


def _tensors(file: Path) -> Iterator[tuple[int, int]]:
    """Where each tensor of a safetensors file begins and ends in it; nothing of a file that is none."""
    with file.open("rb") as opened:
        size = int.from_bytes(opened.read(8), "little")
        if size > _MOST_HEADER_BYTES:
            return
        try:
            header = json.loads(opened.read(size))
            spans = sorted(tuple(entry["data_offsets"]) for name, entry in header.items() if name != "__metadata__")
            yield from ((8 + size + begin, 8 + size + end) for begin, end in spans)
        except (ValueError, KeyError, TypeError, AttributeError):
            return  # the engine will say what is wrong with it


def snapshot_of(path: Path) -> tuple[str, str] | None:
    """Repository and commit, when a path is a snapshot in the hub's cache."""
    parts = path.parts
    if len(parts) < 3 or parts[-2] != "snapshots" or not _COMMIT.fullmatch(parts[-1]):
        return None
    return parts[-3].removeprefix("models--").replace("--", "/"), parts[-1]


def _commit_of(model: str, revision: str | None) -> str:
    """The commit that the hub's cache has of a model, "" when it has none."""
    try:
        from huggingface_hub import try_to_load_from_cache

        cached = try_to_load_from_cache(model, "config.json", revision=revision)
    except (ImportError, ValueError, OSError):
        return ""
    snapshot = snapshot_of(Path(cached).parent) if isinstance(cached, str) else None
    return snapshot[1] if snapshot else ""
