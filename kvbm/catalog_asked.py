"""What a question on the command line is about: a prompt's tokens or hashes, and the namespace that is meant."""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from kvbm.config import Settings
from kvbm.core.answers import MAX_HASHES, MAX_TOKENS, BlockAnswer, NamespaceSummary
from kvbm.core.errors import HASHABLE_SCHEME, CatalogRefusedError, ConfigError
from kvbm.core.history_answers import HistoryBlock
from kvbm.core.ids import HASH_BYTES, Namespace, NamespaceId
from kvbm.core.prompt_tokens import PromptTokens
from kvbm.files import read_small
from kvbm.locate.base import Catalog
from kvbm.locate.http import CatalogClient
from kvbm.tenant_secrets import TenantSecrets
from kvbm.terminal import plain

PROMPT_HELP = """the prompt: token ids ("1,2,3"), hashes of its full blocks (32 hex digits each), a file with either,
or - for standard input"""
_PROMPT_BYTES = 16 << 20  # of a file with a prompt
_HASHES = re.compile(r"(?:[0-9a-f]{32})+", re.IGNORECASE)
_TOKENS = re.compile(r"\d{1,10}")
_MOST_NAMED = 20  # namespaces in an error
_MOST_SPACES = 50  # that a block is looked for in, and blocks that are looked for


class GivenPrompt(NamedTuple):
    """What was asked about: tokens, or packed hashes."""

    tokens: list[int]
    hashes: bytes


class MeantNamespace(NamedTuple):
    """What was said of the namespace.

    Attributes:
        name: its id or the beginning of it, or its model; "": nothing.
        tenant: whose it is, "" for one of no tenant; None: nothing.
    """

    name: str
    tenant: str | None


def meant_by(arguments: argparse.Namespace) -> MeantNamespace:
    """What a command's --namespace and --tenant say."""
    return MeantNamespace(arguments.namespace, arguments.tenant)


def fitting(known: Sequence[NamespaceSummary], meant: MeantNamespace) -> list[NamespaceSummary]:
    """Those of known namespaces that may be meant."""
    known = [one for one in known if meant.tenant is None or one.fields.tenant == meant.tenant]
    by_model = [one for one in known if not meant.name or one.fields.model == meant.name]
    return by_model or [one for one in known if one.id.startswith(meant.name.lower())]


ANY_NAMESPACE = MeantNamespace("", None)


def read_prompt(given: str) -> GivenPrompt:
    """Raises ConfigError: it is neither."""
    if (found := _parsed(given)) is not None:
        return found
    if given == "-":
        place = "standard input"
        text = sys.stdin.buffer.read(_PROMPT_BYTES + 1).decode(errors="replace")
    else:
        try:
            text, place = read_small(Path(given), _PROMPT_BYTES).decode(errors="replace"), given
        except OSError as error:
            why = error.strerror or str(error)
            raise ConfigError(
                f"{given[:80]!r} is neither token ids nor hashes, and no file that can be read ({why}); give "
                f"{PROMPT_HELP}"
            ) from None
    found = _parsed(text)
    if found is None or len(text) > _PROMPT_BYTES:
        raise ConfigError(
            f'{place} holds neither token ids nor hashes; give ids ("1 2 3" or [1, 2, 3]) or hashes of 32 hex digits, '
            f"at most {_PROMPT_BYTES >> 20} MiB"
        )
    return found


def _parsed(text: str) -> GivenPrompt | None:
    words = text.replace(",", " ").replace("[", " ").replace("]", " ").replace('"', " ").split()
    if words and all(_HASHES.fullmatch(word) for word in words):
        hashes = bytes.fromhex("".join(words))
        if len(hashes) > MAX_HASHES * HASH_BYTES:
            raise ConfigError(f"{len(hashes) // HASH_BYTES} hashes; a question has at most {MAX_HASHES}")
        return GivenPrompt([], hashes)
    if words and all(_TOKENS.fullmatch(word) and int(word) < 1 << 32 for word in words):
        if len(words) > MAX_TOKENS:
            raise ConfigError(f"{len(words)} token ids; a question has at most {MAX_TOKENS}")
        return GivenPrompt([int(word) for word in words], b"")
    return None


def namespace_and_hashes(
    client: Catalog, settings: Settings, meant: MeantNamespace, prompt: GivenPrompt
) -> tuple[Namespace | NamespaceId, bytes]:
    """The namespace that is meant, and the prompt's hashes in it. Raises ConfigError: tokens cannot be hashed here."""
    namespace = namespace_of(client, meant)
    if not prompt.tokens:
        return namespace, prompt.hashes
    if isinstance(namespace, bytes):
        raise ConfigError(
            f"the catalog does not know what namespace {namespace.hex()} is, so tokens cannot be hashed for it; give "
            "hashes"
        )
    secrets = TenantSecrets(settings.catalog.tenant_secrets, settings.catalog.tenant_secrets_file)
    if namespace.tenant and namespace.tenant not in secrets:
        raise ConfigError(_no_secret(namespace.tenant, settings.catalog.tenant_secrets_file))
    secret = secrets[namespace.tenant].encode() if namespace.tenant in secrets else b""
    hashes = client.hashes(namespace, secret, prompt.tokens)
    if not hashes:
        raise ConfigError(
            f"{len(prompt.tokens)} token ids fill no block; a block of this namespace has {namespace.block_tokens}"
        )
    return namespace, hashes


def _no_secret(tenant: str, path: str) -> str:
    """That tokens cannot be hashed for a tenant, and what to give. `path` is that of the file of secrets, or ""."""
    entry = f'[tenants.{_toml_key(tenant)}] and below it secret = "…"'
    if path:
        where, what = f"neither in catalog.tenant_secrets nor in {path}", f"write there {entry}"
    else:
        where = "not in catalog.tenant_secrets, and no catalog.tenant_secrets_file is set"
        what = f"give --set catalog.tenant_secrets_file=FILE, in which stands {entry}"
    return (
        f"tokens of tenant {tenant!r} are hashed with its secret, which is {where}; {what}, the one that its engines "
        "have, or give hashes instead of tokens"
    )


def _toml_key(name: str) -> str:
    """A name as a key of TOML."""
    return name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else json.dumps(name, ensure_ascii=False)


def _list_of(namespaces: Sequence[NamespaceSummary]) -> str:
    lines = [f"\n  {one.id}  {named_in_words(one)}" for one in namespaces[:_MOST_NAMED]]
    more = len(namespaces) - len(lines)
    lines += [f"\n  and {more} more; see `kvbm-catalog instances --namespaces`"] if more else []
    return f":{''.join(lines)}"


def asked_by_tokens(client: Catalog, arguments: argparse.Namespace, prompt: GivenPrompt) -> PromptTokens | None:
    """What the catalog is asked by tokens; None: hashes are given, or are made here."""
    has_keys = bool(arguments.salt or arguments.lora or arguments.lora_path or arguments.media)
    if not prompt.tokens:
        if has_keys:
            raise ConfigError("--salt, --lora, --lora-path and --media go with token ids, and hashes are given")
        return None
    meant = meant_by(arguments)
    by_model = [one for one in fitting(client.namespaces(), meant) if meant.name and one.fields.model == meant.name]
    if by_model and (has_keys or any(one.fields.scheme != HASHABLE_SCHEME for one in by_model)):
        return _prompt_tokens(arguments, prompt, None, meant.name)
    if by_model:
        return None
    namespace = namespace_of(client, meant)
    if not isinstance(namespace, Namespace) or (namespace.scheme == HASHABLE_SCHEME and not has_keys):
        return None
    return _prompt_tokens(arguments, prompt, namespace, "")


def _prompt_tokens(
    arguments: argparse.Namespace, prompt: GivenPrompt, namespace: Namespace | None, model: str
) -> PromptTokens:
    return PromptTokens(
        tokens=prompt.tokens,
        namespace=namespace,
        model=model,
        tenant=(arguments.tenant or "") if model else "",
        salt=arguments.salt,
        lora=arguments.lora,
        lora_path=arguments.lora_path,
        media=arguments.media or (),
    )


def namespace_of(client: Catalog, meant: MeantNamespace) -> Namespace | NamespaceId:
    """The one that is meant. An id that the catalog does not know is asked for as it is. Raises ConfigError."""
    known = client.namespaces()
    found = fitting(known, meant)
    if len(found) == 1:
        return found[0].fields
    if not found and meant.tenant is None and re.fullmatch(r"[0-9a-fA-F]{32}", meant.name):
        return NamespaceId(bytes.fromhex(meant.name))
    of_tenant = "" if meant.tenant is None else f" of tenant {meant.tenant!r}" if meant.tenant else " of no tenant"
    if not found:
        what = f"the catalog knows no namespace {meant.name!r}" if meant.name else "the catalog knows no namespace"
        what += of_tenant or ("" if meant.name else " yet")
    elif meant.name:
        what = f"{meant.name!r} may be any of {len(found)} namespaces{of_tenant}"
    else:
        what = f"the catalog knows {len(found)} namespaces{of_tenant}"
    choices = found or known
    how = f"; give --namespace with an id of these, or its beginning{_list_of(choices)}" if choices else ""
    raise ConfigError(f"{what}{how}")


def named_in_words(one: NamespaceSummary) -> str:
    fields = one.fields
    words = [fields.model, fields.revision, fields.kv_dtype, f"{fields.block_tokens} tokens", fields.ranks]
    words += [f"group {fields.kv_group}"] if fields.kv_group else []
    words += [f"lora {fields.lora}"] if fields.lora else []
    words += [f"tenant {fields.tenant}"] if fields.tenant else []
    return plain(", ".join([word for word in words if word] + [fields.scheme]))


class FoundBlocks(NamedTuple):
    """Who holds a block in several namespaces, or blocks whose hashes begin alike.

    Attributes:
        answers: one for each block that somebody holds; of a single namespace in any case.
        models: of their namespaces, by id.
        namespaces: how many were looked in; 0: the history said in which.
        unread: what was left out, in words; "" where nothing was.
    """

    answers: list[BlockAnswer]
    models: dict[str, str]
    namespaces: int
    unread: str = ""

    def what(self, digits: str) -> str:
        """What was looked for, in words."""
        if not self.namespaces:
            return f"a block whose hash begins with {digits}"
        return f"block {digits} in any of {self.namespaces} namespaces"


def blocks_found(client: Catalog, meant: MeantNamespace, digits: str) -> FoundBlocks:
    """Who holds a block in any namespace that may be meant, or the blocks whose hashes begin so.

    Raises ConfigError: no namespace may be meant, or several catalogs are asked for the beginning of a hash.
    CatalogRefusedError: the catalog keeps no history, or knows no such block.
    """
    known = fitting(client.namespaces(), meant)
    if not known:
        namespace_of(client, meant)  # says so, or it is an id that is not known
    models = {one.id: one.fields.model for one in known}
    if len(digits) == 2 * HASH_BYTES:
        spaces, block = known[:_MOST_SPACES], bytes.fromhex(digits)
        answers = [client.block(one.fields.id, block) for one in spaces]
        left = len(known) - len(spaces)
        unread = f"{left} more namespaces were not looked in; see --namespace and --tenant" if left else ""
        held = answers if len(spaces) == 1 else [one for one in answers if one.holders]
        return FoundBlocks(held, models, len(spaces), unread)
    if not isinstance(client, CatalogClient):
        raise ConfigError("the beginning of a hash is looked up by one catalog; give one --url, or all 32 digits")
    past = [one for one in _past_blocks(client, digits) if meant == ANY_NAMESPACE or one.namespace in models]
    answers = [
        client.block(NamespaceId(bytes.fromhex(one.namespace)), bytes.fromhex(one.block)) for one in past[:_MOST_SPACES]
    ]
    left = max(0, len(past) - _MOST_SPACES)
    unread = f"{left} more blocks begin so; give more digits" if left else ""
    return FoundBlocks([one for one in answers if one.holders], models, 0, unread)


def _past_blocks(client: CatalogClient, digits: str) -> list[HistoryBlock]:
    try:
        return client.past_blocks(digits)
    except CatalogRefusedError as error:
        if error.code != "history_off":
            raise
        raise ConfigError(
            "the beginning of a hash is found in a catalog's history alone, and this one keeps none; give all 32 "
            "digits, or set catalog.archive and catalog.history there"
        ) from None
