"""Which files of a folder are the model: what else lies there makes no other revision, and what an engine loads
does.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from kvbm.engines.revision import content_digest
from kvbm.weights import config_words, model_files, weights_digest

CONFIG = {"model_type": "llama", "rope_theta": 1e4, "text_config": {"hidden_size": 8}}
Digest = Callable[[Path], str]
DIGESTS = pytest.mark.parametrize("digest", [content_digest, weights_digest])


def put(folder: Path, *files: str) -> None:
    for name in files:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(name.encode())


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    put(folder, "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors", "tokenizer.json", "README.md")
    weight_map = {f"layer.{at}": f"model-0000{at}-of-00002.safetensors" for at in (1, 2)}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return folder


BESIDE = [
    ".cache/huggingface/download/x.safetensors",
    ".git/lfs/objects/x.bin",
    "original/consolidated.00.pth",
    "optimizer.pt",
    "optimizer.bin",
    "training_args.bin",
    "scheduler.pt",
    "scaler.pt",
    "rng_state_0.pth",
    "pytorch_model.bin",
    "checkpoint-500/model.safetensors",
    "checkpoint-500/config.json",
    "global_step10/mp_rank_00_model_states.pt",
    "onnx/model.bin",
    "consolidated.00.pth",
    "model.gguf",
    "metal/model.bin",
    "left-over.safetensors",
    ".hidden.safetensors",
    "README.txt",
    "runs/events.bin",
]


@DIGESTS
def test_what_no_engine_loads_makes_no_other_revision(model: Path, digest: Digest) -> None:
    before = digest(model)
    for name in BESIDE:
        put(model, name)
        assert digest(model) == before, name
    (model / "config.json").write_text(
        json.dumps({**CONFIG, "transformers_version": "5.0", "_name_or_path": "/home"}, indent=4, sort_keys=True)
    )
    assert digest(model) == before


@DIGESTS
@pytest.mark.parametrize(
    "change",
    [
        "model-00001-of-00002.safetensors",
        "consolidated.safetensors",
        "vision/model.safetensors",
        "whisper/pytorch_model.bin",
    ],
)
def test_what_an_engine_may_load_makes_another_revision(model: Path, digest: Digest, change: str) -> None:
    before = digest(model)
    (model / change).parent.mkdir(exist_ok=True)
    (model / change).write_bytes(b"other")
    assert digest(model) != before
    (model / "config.json").write_text(json.dumps({**CONFIG, "rope_theta": 1e6}))
    assert digest(model) != before


def test_the_load_format_says_which_kind_is_loaded(tmp_path: Path) -> None:
    put(tmp_path, "a.safetensors", "b.bin", "c.pt", "d.gguf", "sub/e.safetensors", "optimizer.bin")

    def names(load_format: str) -> list[str]:
        return [file.relative_to(tmp_path).as_posix() for file in model_files(tmp_path, load_format)]

    assert names("auto") == names("LoadFormat.AUTO") == names("safetensors") == ["a.safetensors", "sub/e.safetensors"]
    assert names("npcache") == ["b.bin", "sub/e.safetensors"]
    assert names("pt") == ["c.pt", "sub/e.safetensors"]
    assert names("runai_streamer") == ["a.safetensors", "b.bin", "c.pt", "d.gguf", "sub/e.safetensors"]
    (tmp_path / "a.safetensors").unlink()
    assert names("auto") == ["b.bin", "sub/e.safetensors"]


def test_shards_lie_where_their_index_says(tmp_path: Path) -> None:
    put(tmp_path, "shards/a.safetensors", "b.safetensors", "shards/left.txt")
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(
        json.dumps({"weight_map": {"x": "shards/a.safetensors", "y": "../../etc/passwd", "z": "/etc/passwd", "w": 3}})
    )
    assert [file.name for file in model_files(tmp_path)] == ["a.safetensors"]
    for damaged in ("{", "[]", '{"weight_map": 1}', "[" * 100_000):
        index.write_text(damaged)
        assert [file.name for file in model_files(tmp_path)] == ["b.safetensors", "a.safetensors"]


@DIGESTS
def test_links_that_lead_back_end(model: Path, digest: Digest) -> None:
    before = digest(model)
    (model / "one").symlink_to(model)
    (model / "two").symlink_to(model.parent)
    (model / "three").mkdir()
    (model / "three" / "up").symlink_to("..")
    (model / "nowhere.safetensors").symlink_to("nothing")
    os.mkfifo(model / "pipe.bin")
    assert digest(model) == before


@DIGESTS
def test_a_folder_of_links_is_the_model_it_links_to(model: Path, tmp_path: Path, digest: Digest) -> None:
    """As the hub's cache has it: each file a link into another folder."""
    linked = tmp_path / "linked"
    linked.mkdir()
    for file in model.iterdir():
        (linked / file.name).symlink_to(file)
    (tmp_path / "whole").symlink_to(model)
    assert digest(linked) == digest(tmp_path / "whole") == digest(model)


def test_a_config_that_is_none_counts_as_it_is(tmp_path: Path) -> None:
    assert config_words(tmp_path) == b""
    for words in (b"{", b"[" * 100_000, b"\xff"):
        (tmp_path / "config.json").write_bytes(words)
        assert config_words(tmp_path) == words


@DIGESTS
def test_a_folder_without_weights_of_a_known_kind_is_known_by_all_its_files(tmp_path: Path, digest: Digest) -> None:
    (tmp_path / "config.json").write_text("{}")
    put(tmp_path, "model.own")
    before = digest(tmp_path)
    (tmp_path / "model.own").write_text("other")
    assert digest(tmp_path) != before
