"""Engines with kvbm, as a user would configure them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.engines.vllm.harness.models import STATES
from tests.engines.vllm.harness.words import Setup

CONNECTOR = "KvbmConnector"
MODULE = "kvbm.engines.vllm"
HOST_BLOCKS = 600
OPTIONS: Mapping[str, Mapping[str, Any]] = {"qwen-next": STATES}  # of vLLM, for kinds of models that need some


def connector(folder: Path, settings: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The `kv_transfer_config` of an instance with its files in a folder; settings as kvbm's, dotted.

    None leaves a key out.
    """
    extra = {
        "instance.data_dir": str(folder),
        "instance.id": folder.name,
        "pools.host.slots": HOST_BLOCKS,
        "pools.host.huge_pages": "off",
        "onboard.wait_s": 60.0,  # on a busy machine, too, nothing is computed that could be read
        "onboard.locate_s": 30.0,
    } | dict(settings or {})
    return {
        "kv_connector": CONNECTOR,
        "kv_connector_module_path": MODULE,
        "kv_role": "kv_both",
        "kv_connector_extra_config": {key: value for key, value in extra.items() if value is not None},
    }


def with_kvbm(model: str, folder: Path, settings: Mapping[str, Any] | None = None, **setup: Any) -> Setup:
    """An engine with it."""
    return Setup(model, connector=connector(folder, settings), **setup)


def with_others(model: str, folder: Path, others: list[dict[str, Any]], **setup: Any) -> Setup:
    """An engine with it inside vLLM's MultiConnector, before others."""
    return Setup(
        model,
        connector={
            "kv_connector": "MultiConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"connectors": [connector(folder), *others]},
        },
        **setup,
    )
