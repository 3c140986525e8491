"""What may share pages, in SGLang: the namespace of one pool of one rank.

SGLang's keys are SHA-256 over tokens, salted by adapter and `cache_salt`, and nothing else: two engines with other
weights, another type of elements or another layout have equal keys for equal tokens. All of that is in the namespace,
from which our hashes are derived.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any, NamedTuple

from kvbm.core.ids import Namespace
from kvbm.engines.revision import known_revision, model_name
from kvbm.engines.sglang.host_pages import HostPages, SglangPool
from kvbm.safe_log import SafeLog

log = SafeLog()

# Of SGLang's ServerArgs: what changes the KV of equal tokens under equal weights, or how its bytes are to be read.
_FACTS = (
    "dtype",
    "quantization",
    "quantization_param_path",
    "kv_cache_dtype",
    "json_model_override_args",
    "model_impl",
    "context_length",
    "attention_backend",
    "prefill_attention_backend",
    "decode_attention_backend",
    "torchao_config",
    "modelopt_quant",
    "enable_deterministic_inference",
    "speculative_algorithm",
    "speculative_draft_model_path",
    "speculative_draft_model_revision",
    "enable_fp32_lm_head",
)


class Place(NamedTuple):
    """Where a rank stands in its engine.

    Attributes:
        tensor, stage, context: rank and size of each kind of parallelism.
        replica: of data-parallel ones.
        has_copies: whether every tensor rank has the same bytes, as with MLA.
    """

    tensor: tuple[int, int] = (0, 1)
    stage: tuple[int, int] = (0, 1)
    context: tuple[int, int] = (0, 1)
    replica: int = 0
    has_copies: bool = False

    @classmethod
    def of(cls, config: Any, replica: int = 0) -> Place:
        """The place that SGLang's HiCacheStorageConfig tells.

        Args:
            replica: of data parallelism without shared attention, which the config does not tell.
        """
        return cls(
            (config.tp_rank, config.tp_size),
            (config.pp_rank, config.pp_size),
            (config.attn_cp_rank, config.attn_cp_size),
            replica or config.dp_rank,
            bool(config.is_mla_model),
        )

    @property
    def suffix(self) -> str:
        """What tells the instances of an engine apart; "" where there is one."""
        parts = {"tp": self.tensor, "pp": self.stage, "cp": self.context}
        words = "".join(f"-{name}{rank}" for name, (rank, size) in parts.items() if size > 1)
        return words + (f"-dp{self.replica}" if self.replica else "")

    @property
    def words(self) -> str:
        """Whose part of a page it is, as a namespace's `ranks` says it: replicas have the same, and copies too."""
        rank, size = self.tensor
        words = f"tp{size}" if self.has_copies or size == 1 else f"tp{rank}of{size}"
        if self.stage[1] > 1:
            words += f"pp{self.stage[0]}of{self.stage[1]}"
        if self.context[1] > 1:
            words += f"cp{self.context[0]}of{self.context[1]}"
        return words


def namespace_of(
    pool: SglangPool,
    pages: HostPages,
    place: Place,
    *,
    name: str,
    server_args: Any,
    machine: str,
    model: str = "",
    revision: str = "",
    served_name: str = "",
) -> Namespace:
    """The namespace of a pool's pages; weights in a folder are looked at once, here.

    Args:
        name: of the pool, as SGLang calls it, such as "kv".
        server_args: SGLang's ServerArgs; None where there are none.
        machine: SGLang's version and the device it computes on.
        model, revision: as the user names them; "" for what SGLang was started with.
        served_name: what the engine calls its model, where it does not say what it was started with.
    """
    path = str(getattr(server_args, "model_path", "") or served_name)
    facts = {one: _plain(getattr(server_args, one, "absent")) for one in _FACTS}
    layers = [getattr(pool, one, None) for one in ("start_layer", "end_layer")]
    digest = _digest({"machine": machine, "server": facts, "pool": name, "layers": layers})
    return Namespace(
        model=model or model_name(path),
        revision=revision or _revision_of(path, server_args),
        kv_dtype=str(pool.dtype).removeprefix("torch."),
        block_tokens=int(pool.page_size),
        layout=pages.words,
        ranks=place.words,
        scheme=f"sglang-sha256+{digest}",
    )


def _revision_of(path: str, server_args: Any) -> str:
    load_format = str(getattr(server_args, "load_format", "auto"))
    if load_format == "dummy":
        return f"dummy:{getattr(server_args, 'random_seed', 0)}"
    asked = getattr(server_args, "revision", None)
    known = known_revision(path, asked, load_format)
    if not known:
        log.warning(
            "revision.unknown",
            model=path,
            revision=asked or "",
            notice='blocks outlive weights that change under the same name; give "revision" in the extra config, or'
            " start SGLang with --revision and a commit",
        )
    return known or asked or ""


def _digest(facts: Mapping[str, Any]) -> str:
    return hashlib.sha256(b"kvbm.sglang.facts.v1\0" + json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]


def _plain(value: Any) -> Any:
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)
