"""Identity of an engine: equal where blocks may be shared, and only there; and which engines are not served."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import structlog

from kvbm.core.ids import Namespace
from kvbm.engines.revision import content_digest
from kvbm.engines.vllm.identity import TENANT_KEY, EngineIdentity, HashScheme
from kvbm.engines.vllm.ranks import Ranks, Stage
from kvbm.engines.vllm.revision import model_of, revision_of
from kvbm.engines.vllm.served import why_not_served


@dataclass
class FullAttentionSpec:
    """As vLLM's, as far as identity looks at it."""

    block_size: int = 16
    dtype: str = "torch.bfloat16"
    num_kv_heads: int = 2
    prefix_cacheable: bool = True


@dataclass
class CrossAttentionSpec(FullAttentionSpec):
    pass


class StrangeSpec(FullAttentionSpec):
    """Of a kind that is not served."""


@dataclass
class AttentionConfig:
    backend: str | None = None


@dataclass
class MultiModalConfig:
    mm_processor_kwargs: dict[str, Any] | None = None
    mm_processor_cache_gb: float = 4.0


@dataclass
class Engine:
    """The two configurations of one engine, as vLLM shapes them."""

    hf: dict[str, Any] = field(default_factory=lambda: {"hidden_size": 64, "rope_parameters": {"rope_type": "default"}})
    specs: list[Any] = field(default_factory=lambda: [FullAttentionSpec()])
    resolved: list[Any] | None = field(default_factory=list)

    def __post_init__(self) -> None:
        self.vllm_config = SimpleNamespace(
            model_config=SimpleNamespace(
                model="org/model",
                revision="0" * 40,
                seed=0,
                max_model_len=4096,
                runner_type="generate",
                attn_type="decoder",
                is_prefix_caching_supported=True,
                multimodal_config=MultiModalConfig(),
                hf_config=SimpleNamespace(to_dict=lambda: self.hf),
                dtype="torch.bfloat16",
                quantization=None,
                hf_overrides={},
            ),
            cache_config=SimpleNamespace(
                cache_dtype="auto",
                prefix_caching_hash_algo="sha256",
                enable_prefix_caching=True,
                kv_cache_dtype_skip_layers=[],
            ),
            parallel_config=SimpleNamespace(
                tensor_parallel_size=1,
                pipeline_parallel_size=1,
                prefill_context_parallel_size=1,
                world_size=1,
                decode_context_parallel_size=1,
                nnodes_within_dp=1,
                distributed_executor_backend="mp",
            ),
            load_config=SimpleNamespace(load_format="auto"),
            attention_config=AttentionConfig(),
            lora_config=None,
            speculative_config=None,
            additional_config={},
            weight_transfer_config=None,
        )
        self.kv_cache_config = SimpleNamespace(
            kv_cache_groups=[
                SimpleNamespace(
                    kv_cache_spec=spec, layer_names=[f"layer.{at}"], host_resident=False, enable_kv_transfer=True
                )
                for at, spec in enumerate(self.specs)
            ]
        )

    def set(self, path: str, value: Any) -> Engine:
        *parents, name = path.split(".")
        at: Any = self.vllm_config
        for parent in parents:
            at = getattr(at, parent)
        setattr(at, name, value)
        return self

    def identity(
        self,
        machine: str = "vllm 0.32 on gpu",
        secrets: dict[str, str] | None = None,
        layout: str = "words",
        seed: str = "",
    ) -> EngineIdentity:
        environment = {"PYTHONHASHSEED": seed} if seed else {}
        return EngineIdentity.of(
            self.vllm_config,
            self.kv_cache_config,
            layout,
            ranks=Ranks((Stage(1),), self.vllm_config.parallel_config.tensor_parallel_size),
            machine=machine,
            resolved=self.resolved,
            secrets=secrets or {},
            environment=environment,
        )

    def why(self) -> str:
        return why_not_served(self.vllm_config, self.kv_cache_config)


def ids(identity: EngineIdentity) -> list[bytes]:
    return [namespace.id for namespace in identity.groups]


def test_equal_engines_have_equal_namespaces() -> None:
    assert Engine().identity().groups == Engine().identity().groups
    (group,) = Engine().identity().groups
    assert (group.model, group.revision, group.kv_dtype, group.block_tokens) == ("org/model", "0" * 40, "bfloat16", 16)
    assert (group.layout, group.ranks, group.lora, group.tenant) == ("words", "tp1", "", "")
    assert group.scheme.startswith("vllm-sha256+")


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("model_config.model", "org/other"),
        ("model_config.revision", "1" * 40),
        ("model_config.dtype", "torch.float16"),
        ("model_config.quantization", "fp8"),
        ("model_config.hf_overrides", {"rope_theta": 1.0}),
        ("model_config.multimodal_config.mm_processor_kwargs", {"num_crops": 4}),
        ("cache_config.cache_dtype", "fp8"),
        ("cache_config.kv_cache_dtype_skip_layers", ["0"]),
        ("cache_config.prefix_caching_hash_algo", "sha256_cbor"),
        ("parallel_config.tensor_parallel_size", 2),
        ("load_config.load_format", "dummy"),
        ("attention_config.backend", "FLASHINFER"),
        ("additional_config", {"plugin": 1}),
        ("lora_config", SimpleNamespace(lora_dtype="float16", target_modules=None, enable_tower_connector_lora=False)),
    ],
)
def test_what_changes_the_bytes_changes_the_namespace(path: str, value: Any) -> None:
    assert ids(Engine().set(path, value).identity()) != ids(Engine().identity())


@pytest.mark.parametrize(
    ("path", "value"),
    [("model_config.max_model_len", 8192), ("model_config.multimodal_config.mm_processor_cache_gb", 1.0)],
)
def test_what_only_says_how_much_room_there_is_does_not(path: str, value: Any) -> None:
    assert ids(Engine().set(path, value).identity()) == ids(Engine().identity())


def test_the_models_configuration_counts_and_where_it_was_read_does_not() -> None:
    plain = ids(Engine().identity())
    assert ids(Engine(hf=Engine().hf | {"rope_scaling": {"factor": 2.0}}).identity()) != plain
    assert ids(Engine(hf=Engine().hf | {"_name_or_path": "/tmp/x", "transformers_version": "9"}).identity()) == plain


def test_the_longest_sequence_counts_where_rope_looks_at_it() -> None:
    def engine(max_model_len: int) -> Engine:
        hf = {"text_config": {"rope_parameters": {"full_attention": {"rope_type": "longrope"}}}}
        return Engine(hf=hf).set("model_config.max_model_len", max_model_len)

    assert ids(engine(4096).identity()) != ids(engine(8192).identity())


def test_machine_layout_and_hash_seed_count() -> None:
    plain = ids(Engine().identity())
    assert ids(Engine().identity(machine="vllm 0.33 on gpu")) != plain
    assert ids(Engine().identity(layout="others")) != plain
    assert ids(Engine().identity(seed="1")) != plain
    assert ids(Engine().identity(seed="1")) == ids(Engine().identity(seed="1"))


def test_an_engine_that_does_not_know_what_it_has_resolved_shares_with_nobody() -> None:
    with structlog.testing.capture_logs() as logs:
        one, other = Engine(resolved=None).identity(), Engine(resolved=None).identity()
    assert ids(one) != ids(other)
    warnings = [log["event"] for log in logs if log["log_level"] == "warning"]
    assert warnings == ["identity.unresolved"] * 2


def test_things_without_a_name_of_their_own_do_not_bring_an_address_into_the_digest() -> None:
    def engine() -> Engine:
        return (
            Engine().set("model_config.hf_overrides", lambda config: config).set("additional_config", {"a": object()})
        )

    assert ids(engine().identity()) == ids(engine().identity())


def test_kv_groups_may_have_layouts_of_their_own() -> None:
    engine = Engine(specs=[FullAttentionSpec(), FullAttentionSpec()])
    groups = EngineIdentity.of(
        engine.vllm_config,
        engine.kv_cache_config,
        ["one", "other"],
        ranks=Ranks((Stage(1),)),
        machine="",
        resolved=[],
        secrets={},
        environment={},
    ).groups
    assert [group.layout for group in groups] == ["one", "other"]


def test_each_kv_group_has_a_namespace() -> None:
    groups = Engine(specs=[FullAttentionSpec(32), FullAttentionSpec(64, dtype="torch.uint8")]).identity().groups
    assert [(one.kv_group, one.block_tokens, one.kv_dtype) for one in groups] == [(0, 32, "bfloat16"), (1, 64, "uint8")]


@pytest.mark.parametrize(
    ("cache_dtype", "kv_dtype"), [("fp8", "float8_e4m3fn"), ("fp8_e5m2", "float8_e5m2"), ("nvfp4", "nvfp4")]
)
def test_elements_that_vllm_keeps_as_bytes_are_named_by_what_they_are(cache_dtype: str, kv_dtype: str) -> None:
    engine = Engine(specs=[FullAttentionSpec(dtype="torch.uint8")]).set("cache_config.cache_dtype", cache_dtype)
    assert engine.identity().groups[0].kv_dtype == kv_dtype


def test_a_random_hash_seed_is_shared_with_nobody_and_said_once() -> None:
    engine = Engine().set("cache_config.prefix_caching_hash_algo", "xxhash")
    with structlog.testing.capture_logs() as logs:
        one, other = engine.identity(), engine.identity()
        seeded = engine.identity(seed="7")
    assert ids(one) != ids(other)
    assert not one.is_lasting
    assert seeded.is_lasting
    warnings = [log for log in logs if log["log_level"] == "warning"]
    assert [log["event"] for log in warnings] == ["identity.passing"] * 2
    assert "PYTHONHASHSEED" in warnings[0]["notice"]
    assert HashScheme.of("sha256", {}) == HashScheme.of("sha256", {})


def request(**given: Any) -> Any:
    return SimpleNamespace(**({"request_id": "r1", "kv_transfer_params": None, "lora_request": None} | given))


def test_a_request_names_its_tenant() -> None:
    identity = Engine().identity()
    with structlog.testing.capture_logs() as logs:
        for params, tenant in (
            (None, ""),
            ({}, ""),
            ({"kvbm.tenant": None}, ""),
            ({"kvbm.tenant": "team a"}, "team a"),
            ({"other": 1}, ""),
        ):
            assert identity.tenant_of(request(kv_transfer_params=params)) == tenant
    assert not logs


@pytest.mark.parametrize("named", ["", "x" * 129, 5, ["a"], "a\nb", "\ud800", "*"])
def test_what_is_no_name_of_a_tenant_brings_one_warning(named: Any) -> None:
    identity = Engine().identity()
    with structlog.testing.capture_logs() as logs:
        for _ in range(3):
            assert identity.tenant_of(request(kv_transfer_params={"kvbm.tenant": named})) == ""
    assert [(log["event"], log["log_level"]) for log in logs] == [("tenant.refused", "warning")]


def test_tenants_have_namespaces_and_roots_of_their_own() -> None:
    identity = Engine(specs=[FullAttentionSpec(), FullAttentionSpec(32)]).identity(secrets={"a": "secret"})
    assert [(one.tenant, one.kv_group) for one in identity.named(["b", "*"])] == [
        ("", 0),
        ("", 1),
        ("b", 0),
        ("b", 1),
        ("a", 0),
        ("a", 1),
    ]
    (one, _), (default, _) = identity.namespaces("a"), identity.namespaces()
    assert one.id != default.id
    assert identity.root(one) == one.root(b"secret")
    assert identity.root(default) == default.root()
    assert identity.namespaces("a") is identity.namespaces("a")


def test_clients_cannot_make_the_engine_keep_ever_more_names() -> None:
    identity = EngineIdentity([Namespace(model="m", block_tokens=16)], {})
    for at in range(10_000):
        identity.namespaces(f"tenant {at}")
    assert len(identity._known) <= 4096


@pytest.mark.parametrize(
    ("salt", "params", "tenant"),
    [
        ("acme/9f", None, "acme"),
        ("acme/9f/more", {"kvbm": {}}, "acme"),
        ("acme/9f", {TENANT_KEY: "other"}, "other"),
        ("acme", None, ""),
        ("", None, ""),
        (None, None, ""),
        ("/9f", None, ""),
        ("a" * 129 + "/", None, ""),
    ],
)
def test_a_salt_may_begin_with_the_tenant(salt: str | None, params: dict[str, Any] | None, tenant: str) -> None:
    request = SimpleNamespace(request_id="r", kv_transfer_params=params, cache_salt=salt)
    group = Namespace(model="m", block_tokens=16)
    assert EngineIdentity([group], {}, tenant_in_salt=True).tenant_of(request) == tenant
    assert EngineIdentity([group], {}).tenant_of(request) == ((params or {}).get(TENANT_KEY) or "")


def weights(folder: Path, tensors: dict[str, bytes]) -> Path:
    """A model in a folder: one safetensors file, one configuration."""
    folder.mkdir(exist_ok=True)
    header, data = {}, b""
    for name, content in tensors.items():
        header[name] = {"dtype": "U8", "shape": [len(content)], "data_offsets": [len(data), len(data) + len(content)]}
        data += content
    words = json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(words)) + words + data)
    (folder / "config.json").write_text("{}")
    return folder


def test_weights_in_a_folder_are_known_by_what_is_in_them(tmp_path: Path) -> None:
    big = {f"layer.{at}": bytes([at]) * 100_000 for at in range(10)}
    one = content_digest(weights(tmp_path / "one", big))
    assert content_digest(weights(tmp_path / "other", big)) == one
    for at in range(10):  # one layer was trained further, all others are as they were
        changed = big | {f"layer.{at}": bytes([at]) * 40_000 + b"\xff" * 60_000}
        assert content_digest(weights(tmp_path / "changed", changed)) != one
    weights(tmp_path / "changed", big)
    (tmp_path / "changed" / "config.json").write_text('{"rope_theta": 1}')
    assert content_digest(tmp_path / "changed") != one


@pytest.mark.parametrize("content", [b"", b"\xff" * 9, b"\x02" + bytes(7) + b"[]", b"\x02" + bytes(7) + b"{}"])
def test_a_damaged_weight_file_has_a_digest_too(tmp_path: Path, content: bytes) -> None:
    folder = weights(tmp_path, {})
    before = content_digest(folder)
    (folder / "model.safetensors").write_bytes(content + b"more")
    assert content_digest(folder) != before


def config(model: str, revision: str | None = None) -> Any:
    return SimpleNamespace(model=model, revision=revision, seed=7, model_weights="")


def test_the_revision_is_a_commit_a_digest_or_a_seed(tmp_path: Path) -> None:
    auto, dummy = SimpleNamespace(load_format="auto"), SimpleNamespace(load_format="dummy")
    folder = weights(tmp_path / "tiny", {"a": b"1"})
    snapshot = tmp_path / "models--org--name" / "snapshots" / ("c" * 40)
    snapshot.mkdir(parents=True)
    assert revision_of(config(str(folder)), auto) == content_digest(folder)
    assert revision_of(config(str(folder)), dummy) == "dummy:7"
    assert revision_of(config("org/name", "d" * 40), auto) == "d" * 40
    assert (model_of(config(str(snapshot))), revision_of(config(str(snapshot)), auto)) == ("org/name", "c" * 40)
    assert model_of(config(str(folder))) == "tiny"
    assert model_of(config("org/name")) == "org/name"


def test_a_name_that_may_move_is_said(tmp_path: Path) -> None:
    with structlog.testing.capture_logs() as logs:
        assert revision_of(config("no-such-org/no-such-model", "v1"), SimpleNamespace(load_format="auto")) == "v1"
    assert [log["event"] for log in logs] == ["revision.unknown"]


def test_an_adapter_is_known_by_its_name_and_by_what_the_ranks_have_loaded() -> None:
    identity, asked = Engine().identity(), request(lora_request=SimpleNamespace(lora_name="sql", lora_path="/sql"))
    assert identity.lora_of(asked, "one") == "sql:one"
    assert identity.lora_of(asked, "two") == "sql:two"
    assert identity.lora_of(request()) == ""


class MultiprocExecutor:
    """vLLM's, by name."""


class OwnExecutor(MultiprocExecutor):
    """A user's, whose ranks are on this host too."""


@pytest.mark.parametrize(
    "executor", ["mp", "uni", "vllm.v1.executor.uniproc_executor.UniProcExecutor", MultiprocExecutor, OwnExecutor]
)
def test_an_engine_is_served_whose_ranks_are_on_one_host(executor: str | type) -> None:
    assert Engine().set("parallel_config.distributed_executor_backend", executor).why() == ""


@pytest.mark.parametrize(
    ("executor", "named"),
    [
        ("ray", "'ray'"),
        ("external_launcher.mp", "'external_launcher.mp'"),
        ("mine.MultiprocExecutor", "'mine.MultiprocExecutor'"),
        ("vllm.v1.executor.ray_executor.RayDistributedExecutor", "RayDistributedExecutor"),
        (Engine, "'Engine'"),
    ],
)
def test_an_engine_is_not_served_whose_ranks_may_be_on_several(executor: str | type, named: str) -> None:
    why = Engine().set("parallel_config.distributed_executor_backend", executor).why()
    assert named in why
    assert "--distributed-executor-backend mp" in why


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda engine: engine.set("cache_config.enable_prefix_caching", False), "--enable-prefix-caching"),
        (lambda engine: engine.set("weight_transfer_config", object()), "--weight-transfer-config"),
        (lambda engine: engine.set("model_config.attn_type", "encoder_decoder"), "an encoder with a decoder"),
        (
            lambda engine: engine.set("model_config.runner_type", "pooling").set(
                "model_config.is_prefix_caching_supported", False
            ),
            "this pooling model",
        ),
        (lambda engine: setattr(engine.kv_cache_config, "kv_cache_groups", []), "no KV cache"),
        (lambda engine: setattr(engine.kv_cache_config.kv_cache_groups[0], "host_resident", True), "KV group 0"),
    ],
)
def test_an_engine_that_is_not_served_is_told_why(change: Callable[[Engine], Any], words: str) -> None:
    engine = Engine()
    change(engine)
    assert words in engine.why()


def test_kinds_of_layers_that_are_not_ours_to_keep_are_named() -> None:
    strange, cross = StrangeSpec(), CrossAttentionSpec()
    assert "KV group 1 has layers of kind StrangeSpec; served are" in Engine(specs=[FullAttentionSpec(), strange]).why()
    assert "CrossAttentionSpec; its blocks are of the encoder" in Engine(specs=[cross]).why()
    uniform = SimpleNamespace(kv_cache_specs={"a": FullAttentionSpec(), "b": strange}, prefix_cacheable=True)
    assert "StrangeSpec" in Engine(specs=[uniform]).why()
    assert "no KV group takes part" in Engine(specs=[FullAttentionSpec(prefix_cacheable=False)]).why()
    assert not Engine(specs=[FullAttentionSpec(), StrangeSpec(prefix_cacheable=False)]).why()
