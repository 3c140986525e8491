"""What may share blocks, in vLLM: a namespace for each KV group and tenant of an engine."""

from __future__ import annotations

import hashlib
import secrets as randomness
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from kvbm.core.ids import Namespace, SequenceHash
from kvbm.engines.vllm.facts import digest_of, facts_of
from kvbm.engines.vllm.ranks import Ranks
from kvbm.engines.vllm.regions import specs_of, tokens_of
from kvbm.engines.vllm.resolved import backends_of
from kvbm.engines.vllm.revision import model_of, revision_of
from kvbm.safe_log import SafeLog

log = SafeLog()

TENANT_KEY = "kvbm.tenant"  # in a request's kv_transfer_params
_TENANT_CHARACTERS = 128
_OTHERS = "*"  # what settings call the tenants they do not name
_MOST_KNOWN = 4096  # namespaces kept at hand; a client chooses the names
_KV_DTYPES = {
    "fp8": "float8_e4m3fn",
    "fp8_e4m3": "float8_e4m3fn",
    "fp8_e5m2": "float8_e5m2",
}  # vLLM's words → torch's, which `pools.coding` knows


class HashScheme(NamedTuple):
    """How tokens become vLLM's block hashes.

    Attributes:
        algorithm: as `--prefix-caching-hash-algo` names it.
        seed: of the chain's first hash; random ones are a process's own.
        is_lasting: whether another process comes to the same hashes.
    """

    algorithm: str
    seed: int
    is_lasting: bool

    @classmethod
    def of(cls, algorithm: str, environment: Mapping[str, str]) -> HashScheme:
        """The scheme of an engine. vLLM seeds hashes that are not cryptographic at random, unless PYTHONHASHSEED is
        set.
        """
        seed = environment.get("PYTHONHASHSEED")
        if seed is None and not algorithm.startswith("sha256"):
            return cls(algorithm, randomness.randbits(63), is_lasting=False)
        digest = hashlib.sha256(b"kvbm.vllm.seed.v1\0" + (b"" if seed is None else b"=" + seed.encode())).digest()
        return cls(algorithm, int.from_bytes(digest[:8], "little") >> 1, is_lasting=True)


class EngineIdentity:
    """The namespaces of one engine. Owner thread only.

    Attributes:
        groups: the namespace of each KV group, in vLLM's order, for requests that name no tenant.
        facts: what `groups[…].scheme` has the digest of; engines that should share and do not differ here.
        is_lasting: whether the hashes mean the same to another process, and after a restart.
    """

    def __init__(
        self,
        groups: Iterable[Namespace],
        secrets: Mapping[str, str],
        facts: Mapping[str, Any] | None = None,
        is_lasting: bool = True,
        tenant_in_salt: bool = False,
    ) -> None:
        """Args: secrets: tenant → secret, as `catalog.tenant_secrets` has them; they may change. tenant_in_salt: as in
        HandoffSettings.
        """
        self.groups = tuple(groups)
        self.facts = dict(facts or {})
        self.is_lasting = is_lasting
        self._secrets, self._tenant_in_salt = secrets, tenant_in_salt
        self._known: dict[tuple[str, str], tuple[Namespace, ...]] = {}
        self._has_warned = False

    @classmethod
    def of(
        cls,
        vllm_config: Any,
        kv_cache_config: Any,
        layout: str | Sequence[str],
        *,
        ranks: Ranks,
        layers: Sequence[Any] = (),
        machine: str,
        resolved: Sequence[Any] | None,
        secrets: Mapping[str, str],
        environment: Mapping[str, str],
        tenant_in_salt: bool = False,
    ) -> EngineIdentity:
        """The identity of an engine; weights in a folder are looked at once, here.

        Args:
            vllm_config, kv_cache_config: vLLM's VllmConfig and KVCacheConfig, of an engine that is served.
            layout: what a block's bytes are, in words; of each KV group, or one for all.
            ranks: how a block is spread over them.
            layers: of each pipeline stage the names of its layers, by KV group, where there are several stages.
            machine: as `facts.machine_words` says it.
            resolved: what the ranks' vLLM has resolved, as `resolved.find_resolved` gives it; None: unknown, so nothing
                is shared.
            environment: of the process; PYTHONHASHSEED counts.
            tenant_in_salt: as in HandoffSettings.
        """
        scheme = HashScheme.of(vllm_config.cache_config.prefix_caching_hash_algo, environment)
        if not scheme.is_lasting:
            log.warning(
                "identity.passing",
                algorithm=scheme.algorithm,
                notice="vLLM seeds this hash at random, so blocks are useless to other engines and after a restart;"
                " set PYTHONHASHSEED to the same number everywhere, or use --prefix-caching-hash-algo sha256",
            )
        if resolved is None:
            log.warning(
                "identity.unresolved",
                notice="a rank has not said which attention backend and layout it has, so blocks are useless to other "
                "engines and"
                " after a restart; report it, with what stands before this line",
            )
            resolved = [randomness.token_hex(16)]
        facts = facts_of(vllm_config, kv_cache_config, machine) | {"resolved": resolved}
        if len(ranks.stages) > 1:  # the configuration has the first stage's layers alone
            facts["stages"] = [[list(names) for names in stage] for stage in layers]
        common = Namespace(
            model=model_of(vllm_config.model_config),
            revision=revision_of(vllm_config.model_config, vllm_config.load_config),
            block_tokens=1,
            ranks=_ranks_words(ranks),
            scheme=f"vllm-{scheme.algorithm}+{digest_of(facts)}",
            scheme_seed=scheme.seed,
        )
        count = len(kv_cache_config.kv_cache_groups)
        layouts = [layout] * count if isinstance(layout, str) else layout
        groups = [
            msgspec.structs.replace(
                common,
                layout=layouts[index],
                kv_group=index,
                block_tokens=tokens_of(group.kv_cache_spec, ranks.decode),
                kv_dtype=_kv_dtype(vllm_config.cache_config.cache_dtype, group.kv_cache_spec),
            )
            for index, group in enumerate(kv_cache_config.kv_cache_groups)
        ]
        log.info(
            "identity.made",
            model=common.model,
            revision=common.revision,
            scheme=common.scheme,
            groups=count,
            backends=backends_of(resolved),
        )
        return cls(groups, secrets, facts, scheme.is_lasting, tenant_in_salt)

    def namespaces(self, tenant: str = "", lora: str = "") -> tuple[Namespace, ...]:
        """A tenant's namespaces, one for each KV group."""
        known = self._known.get((tenant, lora))
        if known is None:
            known = tuple(msgspec.structs.replace(group, tenant=tenant, lora=lora) for group in self.groups)
            if len(self._known) >= _MOST_KNOWN:
                self._known.clear()
            self._known[tenant, lora] = known
        return known

    def named(self, tenants: Iterable[str]) -> list[Namespace]:
        """The namespaces to open a manager with: those without a tenant first, then those of the tenants
        settings name.
        """
        names = dict.fromkeys(["", *tenants, *self._secrets])
        names.pop(_OTHERS, None)
        return [namespace for tenant in names for namespace in self.namespaces(tenant)]

    def secret_of(self, tenant: str) -> str:
        """A tenant's secret as it is now, "" for none."""
        return self._secrets.get(tenant, "")

    def root(self, namespace: Namespace) -> SequenceHash:
        """What the hashes of a namespace are derived from, under its tenant's secret."""
        return namespace.root(self.secret_of(namespace.tenant).encode())

    def tenant_of(self, request: Any) -> str:
        """Whose a request is: `kv_transfer_params["kvbm.tenant"]`, "" when it says nothing that can be a name.

        Where the salt has it, and the former says nothing: what stands there before the first "/". The first request
        with what is no name brings a warning.
        """
        params = request.kv_transfer_params
        named, where = params.get(TENANT_KEY) if params else None, f'kv_transfer_params["{TENANT_KEY}"]'
        if named is None and self._tenant_in_salt and "/" in (salt := request.cache_salt or ""):
            named, where = salt.partition("/")[0], 'the beginning of cache_salt, up to "/",'
        if named is None:
            return ""
        if (
            isinstance(named, str)
            and 1 <= len(named) <= _TENANT_CHARACTERS
            and named.isprintable()
            and named != _OTHERS
        ):
            return named
        if not self._has_warned:
            self._has_warned = True
            log.warning(
                "tenant.refused",
                request=request.request_id,
                given=repr(named)[:_TENANT_CHARACTERS],
                notice=f"{where} is no text of 1 to {_TENANT_CHARACTERS} printable characters; such requests count as "
                "of no tenant",
            )
        return ""

    def lora_of(self, request: Any, weights: str = "") -> str:
        """The adapter a request is computed with, "" for none: its name, and the digest of its weights as the engine
        has them.

        vLLM's hashes have the adapter's name and path in them; this keeps apart what other hosts, other days or another
        load have there.
        """
        adapter = request.lora_request
        return "" if adapter is None else f"{adapter.lora_name}:{weights}"


def _ranks_words(ranks: Ranks) -> str:
    """How an engine is parallel, as a namespace's `ranks` says it: what is not used is not named."""
    words = f"tp{ranks.tensor}"
    if len(ranks.stages) > 1:
        words += f"pp{len(ranks.stages)}"
    if ranks.prefill > 1:
        words += f"pcp{ranks.prefill}"
    if ranks.decode > 1:
        words += f"dcp{ranks.decode}i{ranks.interleave}"
    if ranks.hosts > 1:
        words += f"on{ranks.hosts}"
    return words


def _kv_dtype(cache_dtype: str, spec: Any) -> str:
    """The type of a group's elements, in torch's words where `core.layout` has them."""
    dtypes = [
        dtype
        for one in specs_of(spec)
        for dtype in ([one.dtype] if hasattr(one, "dtype") else getattr(one, "dtypes", ()))
    ]
    kinds = {str(dtype).removeprefix("torch.") for dtype in dtypes}
    kind = kinds.pop() if len(kinds) == 1 else "mixed"
    if kind in ("uint8", "int8") and cache_dtype != "auto":
        return _KV_DTYPES.get(cache_dtype, cache_dtype)
    return kind
