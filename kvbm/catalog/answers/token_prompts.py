"""Prompts that are asked for by their tokens: which namespaces are meant, and what their blocks' hashes are.

A namespace of our own scheme says by itself how tokens are hashed; of an engine's own the engine states it. Neither
tokens nor salts go any further than from here to hashes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple, TypeAlias

import msgspec

from kvbm.catalog.access.callers import Caller
from kvbm.catalog.answers.prompts import ApiError, bad_tokens, id_of
from kvbm.catalog.answers.queries import Queries
from kvbm.core.answers import MAX_HASHES, MAX_TOKENS, LookupRequest, MediaAsked
from kvbm.core.backend import Backend
from kvbm.core.chain_statement import ChainGroup, ChainStatement
from kvbm.core.engine_chains import SGLANG_SHA256, MediaPlace, block_keys, encoded_keys, sglang_begin
from kvbm.core.errors import HASHABLE_SCHEME, ArgumentError, HashSchemeError, LayoutError
from kvbm.core.extra_keys import Media, extra_key
from kvbm.core.ids import HASH_BYTES, Namespace, NamespaceId

_MOST_DIGESTS = 4 * MAX_HASHES
_MOST_MATCHING = 20  # namespaces that an error names
_MOST_LOOKED_AT = 4096  # namespaces of one model

Secrets: TypeAlias = Callable[[Caller, Namespace], str | None]


class GroupBlocks(NamedTuple):
    """The blocks of a prompt in one KV group's namespace; hashes are packed."""

    namespace: Namespace
    group: ChainGroup
    hashes: bytes


class PromptBlocks(NamedTuple):
    """A prompt as the index is asked for it.

    Attributes:
        namespace, hashes: packed, of its full blocks; depths are told in these.
        groups: of a model with several KV groups, or with windows, those that are answered together; else empty.
        step_tokens: what a prefix of these grows by.
    """

    namespace: Namespace | NamespaceId
    hashes: bytes
    groups: tuple[GroupBlocks, ...] = ()
    step_tokens: int = 1


class TokenPrompts:
    """See the module. Belongs to the loop of what it reads; every method raises ApiError.

    Args:
        secret_of: the secret of a namespace's tenant, as far as it is a caller's business; None: it is not known here.
    """

    def __init__(self, queries: Queries, secret_of: Secrets, backend: Backend) -> None:
        self._queries, self._secret_of, self._backend = queries, secret_of, backend

    def hashing(self, caller: Caller, asked: LookupRequest, tokens: Sequence[int]) -> Callable[[], PromptBlocks]:
        """What makes the hashes of a prompt; it may be called in another thread."""
        if len(tokens) > MAX_TOKENS:
            raise ApiError(
                422, "too_many_tokens", f"{len(tokens)} tokens; at most {MAX_TOKENS} are taken", "give fewer"
            )
        _check_media(asked.media, len(tokens))
        fields = self._meant(caller, asked)
        if fields.scheme == HASHABLE_SCHEME:
            root = fields.root(self._secret(caller, fields))
            return lambda: self._own(fields, root, asked, tokens)
        statement = self._stated(caller, fields)
        if statement is None:
            message, _, remedy = str(HashSchemeError(fields.scheme)).partition("; ")
            raise ApiError(422, "scheme_not_hashable", message, remedy)
        lora, groups = _lora(fields, asked), self._groups(caller, fields, statement)
        roots = [one.root(self._secret(caller, one)) for one in groups]
        return lambda: self._engines(statement, fields, list(zip(groups, roots, strict=True)), asked, tokens, lora)

    # -- which namespaces ---------------------------------------------------------------------------------------------

    def _meant(self, caller: Caller, asked: LookupRequest) -> Namespace:
        if isinstance(asked.namespace, Namespace):
            return asked.namespace
        if asked.namespace is None:
            return self._of_model(caller, asked)
        namespace = NamespaceId(bytes.fromhex(asked.namespace))
        fields = self._queries.visibility.fields(caller, namespace)
        if fields is None:
            raise ApiError(
                422,
                "namespace_unknown",
                f"no instance has told the fields of namespace {id_of(namespace).hex()}",
                "give the namespace's fields instead of its id, or hashes instead of tokens",
            )
        return fields

    def _of_model(self, caller: Caller, asked: LookupRequest) -> Namespace:
        """The one that is meant by a model; of several KV groups the first that keeps all blocks."""
        if not asked.model:
            raise ApiError(
                422, "namespace_missing", "neither namespace nor model is given", "give one of them, see /v1/namespaces"
            )
        known = self._queries.misses.of_model(caller, asked.model, _MOST_LOOKED_AT)
        families: dict[Namespace, list[Namespace]] = {}
        for one in known:
            if one.tenant == asked.tenant and _lora_name(one) == asked.lora and self._is_hashable(caller, one):
                families.setdefault(_family(one), []).append(one)
        if len(families) > 1:
            served = {key: found for key, found in families.items() if any(map(self._queries.is_served, found))}
            families = served or families
        if not families:
            raise ApiError(
                422,
                "namespace_unknown",
                "no namespace of this model, tenant and adapter is known that says how its tokens are hashed",
                "see /v1/namespaces for those that are known; give hashes where an engine does not say it",
            )
        if len(families) > 1:
            raise _several(families)
        ((_, found),) = families.items()
        return min(found, key=lambda one: (not self._keeps_all(caller, one), one.kv_group))

    def _is_hashable(self, caller: Caller, namespace: Namespace) -> bool:
        return namespace.scheme == HASHABLE_SCHEME or bool(self._chains(caller, namespace))

    def _keeps_all(self, caller: Caller, namespace: Namespace) -> bool:
        groups = [one.group_of(namespace) for one in self._chains(caller, namespace)]
        return not groups or any(group is not None and group.keeps_all for group in groups)

    def _chains(self, caller: Caller, namespace: Namespace) -> list[ChainStatement]:
        """What is stated of a namespace, as far as the caller may know of it."""
        if not caller.sees_all and self._queries.visibility.fields(caller, namespace.id) is None:
            return []
        return self._queries.chains.of(namespace)

    def _stated(self, caller: Caller, namespace: Namespace) -> ChainStatement | None:
        found = self._chains(caller, namespace)
        if len(found) > 1:
            raise ApiError(
                422,
                "chains_differ",
                f"instances state {len(found)} different ways in which tokens of namespace {namespace.id.hex()} are "
                "hashed",
                "start its engines with one PYTHONHASHSEED and one configuration, or give hashes instead of tokens",
            )
        return found[0] if found else None

    def _groups(self, caller: Caller, fields: Namespace, statement: ChainStatement) -> list[Namespace]:
        """The namespaces of all groups, in the statement's order."""
        if statement.is_plain:
            return [fields]
        family, by_group = _family(fields), {fields.kv_group: fields}
        for one in self._queries.misses.of_model(caller, fields.model, _MOST_LOOKED_AT):
            if _family(one) == family and statement.group_of(one) is not None:
                by_group.setdefault(one.kv_group, one)
        missing = [group.kv_group for group in statement.groups if group.kv_group not in by_group]
        if missing:
            raise ApiError(
                422,
                "groups_unknown",
                f"KV groups {missing} of this model have no namespace that is known here",
                "ask again once an engine has named them, or give hashes and ask for each group by itself",
            )
        return [by_group[group.kv_group] for group in statement.groups]

    def _secret(self, caller: Caller, namespace: Namespace) -> bytes:
        secret = self._secret_of(caller, namespace)
        if secret is None:
            raise ApiError(
                422,
                "tokens_not_hashable",
                f"tokens cannot be hashed here: the catalog does not know the secret of tenant {namespace.tenant!r}",
                f"hash them where the secret is and give hashes, or have the catalog know the secret of "
                f"{namespace.tenant!r} by its catalog.tenant_secrets_file",
            )
        return secret.encode()

    # -- hashes; in any thread ----------------------------------------------------------------------------------------

    def _own(self, fields: Namespace, root: bytes, asked: LookupRequest, tokens: Sequence[int]) -> PromptBlocks:
        if fields.block_tokens > MAX_TOKENS:  # more than C++ may be able to say
            return PromptBlocks(fields, b"")
        keys: list[bytes] = []
        if asked.salt or asked.media:
            blocks = block_keys(len(tokens) // fields.block_tokens, fields.block_tokens, "", None, _places(asked))
            keys = [
                extra_key(asked.salt if at == 0 else "", [Media(str(one[1]), int(one[2])) for one in found or ()])
                for at, found in enumerate(blocks)
            ]
        try:
            hashes = self._backend.sequence_hashes(tokens, fields.block_tokens, root, keys)
        except (LayoutError, OverflowError) as error:
            raise bad_tokens(error) from None
        _check_count(hashes)
        return PromptBlocks(fields, hashes)

    def _engines(
        self,
        statement: ChainStatement,
        fields: Namespace,
        groups: Sequence[tuple[Namespace, bytes]],
        asked: LookupRequest,
        tokens: Sequence[int],
        lora: tuple[str, str] | None,
    ) -> PromptBlocks:
        digests = self._digests(statement, asked, tokens, lora)
        found = []
        for (namespace, root), group in zip(groups, _stated_groups(statement, groups), strict=True):
            scale = group.block_tokens // statement.hash_tokens
            hashes = self._backend.digest_hashes(root, digests, scale, statement.in_hex)
            _check_count(hashes)
            found.append(GroupBlocks(namespace, group, hashes))
        own = next(one for one in found if one.namespace.id == fields.id)
        if statement.is_plain:
            return PromptBlocks(fields, own.hashes)
        return PromptBlocks(fields, own.hashes, tuple(found), statement.step_tokens)

    def _digests(
        self, statement: ChainStatement, asked: LookupRequest, tokens: Sequence[int], lora: tuple[str, str] | None
    ) -> bytes:
        count = len(tokens) // statement.hash_tokens
        if count > _MOST_DIGESTS:
            raise ApiError(422, "too_many_hashes", f"{count} digests; at most {_MOST_DIGESTS} are taken", "give fewer")
        begin, keys = statement.begin, list[bytes]()
        try:
            if statement.kind == SGLANG_SHA256:
                begin = sglang_begin(asked.salt)
                if lora is not None or asked.media:
                    encoded_keys(SGLANG_SHA256, ())
            elif asked.salt or lora is not None or asked.media:
                blocks = block_keys(count, statement.hash_tokens, asked.salt, lora, _places(asked))
                known = {key: encoded_keys(statement.kind, key) for key in set(blocks)}
                keys = [known[key] for key in blocks]
            return self._backend.engine_digests(statement.kind, tokens, statement.hash_tokens, begin, keys)
        except ArgumentError as error:
            raise ApiError(422, "bad_keys", str(error), "give hashes instead of tokens") from None
        except (LayoutError, OverflowError) as error:
            raise bad_tokens(error) from None


def _stated_groups(statement: ChainStatement, groups: Sequence[tuple[Namespace, bytes]]) -> list[ChainGroup]:
    found = [statement.group_of(namespace) for namespace, _ in groups]
    return [group for group in found if group is not None]


def _family(namespace: Namespace) -> Namespace:
    """What the namespaces of one engine's KV groups have in common; of our own scheme each is by itself."""
    if namespace.scheme == HASHABLE_SCHEME:
        return namespace
    return msgspec.structs.replace(namespace, kv_group=0, block_tokens=1, layout="", kv_dtype="")


def _lora_name(namespace: Namespace) -> str:
    """The adapter's name: engines' own schemes have the digest of its weights behind it."""
    if namespace.scheme == HASHABLE_SCHEME:
        return namespace.lora
    return namespace.lora.rpartition(":")[0]


def _lora(namespace: Namespace, asked: LookupRequest) -> tuple[str, str] | None:
    """Name and path of the adapter, as an engine hashes them."""
    name = _lora_name(namespace)
    if asked.lora and asked.lora != name:
        raise ApiError(
            422,
            "lora_differs",
            f"lora is {asked.lora!r}, and the namespace's is {name!r}",
            "give the namespace of that adapter, or leave lora out",
        )
    if name and not asked.lora_path:
        raise ApiError(
            422,
            "lora_path_missing",
            "lora_path is not given, and the engine hashes it",
            "give the adapter's path as its engine has it, as lora_path",
        )
    if asked.lora_path and not name:
        raise ApiError(422, "lora_differs", "lora_path is given for a namespace of no adapter", "leave lora_path out")
    return (name, asked.lora_path) if name else None


def _several(families: Mapping[Namespace, Sequence[Namespace]]) -> ApiError:
    names = sorted(min(found, key=lambda one: one.kv_group).id.hex() for found in families.values())
    return ApiError(
        422,
        "several_namespaces",
        f"the model has {len(names)} namespaces that do not share blocks: {', '.join(names[:_MOST_MATCHING])}",
        "ask for each by its id, as namespace; /v1/namespaces has their fields",
        names[:_MOST_MATCHING],
    )


def _places(asked: LookupRequest) -> list[MediaPlace]:
    return [MediaPlace(one.identifier, one.offset, one.tokens) for one in asked.media]


def _check_media(media: Sequence[MediaAsked], tokens: int) -> None:
    ends = [one.offset + one.tokens for one in media]
    overlap = any(one.offset < before.offset + before.tokens for before, one in pairwise(media))
    if overlap or (ends and max(ends) > tokens):
        raise ApiError(
            422,
            "bad_media",
            f"media overlap or end behind the prompt's {tokens} tokens",
            "give them in the order of the prompt, with the tokens that stand for them",
        )


def _check_count(hashes: bytes) -> None:
    blocks = len(hashes) // HASH_BYTES
    if blocks > MAX_HASHES:
        raise ApiError(422, "too_many_hashes", f"{blocks} blocks; at most {MAX_HASHES} are taken", "give fewer")
