"""Which weights vLLM computes with: the name of their version, or a digest of the files where there is no such name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kvbm.engines.revision import known_revision, model_name, snapshot_of
from kvbm.safe_log import SafeLog

log = SafeLog()


def model_of(model_config: Any) -> str:
    """As `model_name`."""
    return model_name(str(model_config.model))


def revision_of(model_config: Any, load_config: Any) -> str:
    """The version of the weights an engine computes with.

    A commit of the hub is one; weights in a folder or a file get a digest of what is in them; random weights have their
    seed's name. Weights that nothing tells apart have the revision that was asked for, and one warning says so.

    Args:
        model_config, load_config: vLLM's.
    """
    load_format = str(getattr(load_config, "load_format", "auto"))
    if load_format.rpartition(".")[2].lower() == "dummy":
        return f"dummy:{model_config.seed}"
    model, asked = str(model_config.model), model_config.revision
    known = known_revision(model, asked, load_format)
    if not known:
        log.warning(
            "revision.unknown",
            model=model,
            revision=asked or "",
            notice="blocks outlive weights that change under the same name; start vLLM with --revision and a commit",
        )
        return asked or ""
    weights = getattr(model_config, "model_weights", "")
    is_digest = Path(model).exists() and snapshot_of(Path(model)) is None
    return f"{known}@{weights}" if is_digest and weights and weights != model else known
