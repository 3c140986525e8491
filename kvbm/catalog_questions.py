"""What people ask a running catalog on the command line: `kvbm-catalog lookup`, `route`, `who`, `instances`,
`usage` and `watch`.
"""

from __future__ import annotations

import argparse
import re
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple, TypeAlias

import msgspec

from kvbm.assembly import catalog_clients
from kvbm.catalog_tables import Listing, print_told
from kvbm.command_line import Commands, add_command, add_settings, count_between, settings_of
from kvbm.config import Settings
from kvbm.core.answers import (
    LIMIT,
    MAX_HASHES,
    MAX_INPUT_TOKENS,
    MAX_LIMIT,
    MAX_TOKENS,
    BlockAnswer,
    InstanceSummary,
    LookupAnswer,
    MediaAsked,
    MissedAnswer,
    NamespaceSummary,
    RouteAnswer,
)
from kvbm.core.clock_times import clock_us
from kvbm.core.errors import HASHABLE_SCHEME, CatalogError, ConfigError
from kvbm.core.ids import HASH_BYTES, Namespace, NamespaceId, Tier
from kvbm.core.prompt_tokens import PromptTokens
from kvbm.core.usage import TIMES_HOW, check_stretch, csv_of, gap_lines, lines_of, parse_time, time_text
from kvbm.core.watch_events import (
    BlockChange,
    BlockChanges,
    InstanceChange,
    KnownInstances,
    Missed,
    PrefixDepths,
    WatchBegun,
    WatchEnded,
    WatchEvent,
)
from kvbm.files import read_small
from kvbm.locate.base import Catalog
from kvbm.locate.http import CatalogClient
from kvbm.tenant_secrets import TenantSecrets
from kvbm.terminal import as_json, plain, say, say_csv

_PROMPT_BYTES = 16 << 20  # of a file with a prompt
_HASHES = re.compile(r"(?:[0-9a-f]{32})+", re.IGNORECASE)
_MEDIA = re.compile(r"(.+)@(\d{1,7})\+(\d{1,7})")
_TOKENS = re.compile(r"\d{1,10}")
_MOST_NAMED = 20  # namespaces in an error
_SUSPECT = "suspect: may hold more or less"
_LEFT_OUT = {
    "silent": "it has the prompt's first block, and no heartbeat of it comes",
    "stopped": "it had the prompt's first block",
    "restarted": "it has the prompt's first block, and its new epoch is not read yet",
    "newer": "it has the prompt's first block, and writes what this catalog cannot read; upgrade the catalog",
    "stopping": "it is about to stop, and is sent nothing new",
}
Ask: TypeAlias = Callable[[argparse.Namespace, Settings, Catalog], None]

_PROMPT_HELP = """the prompt: token ids ("1,2,3"), hashes of its full blocks (32 hex digits each), a file with either,
or - for standard input"""
_NAMESPACE_HELP = """its id or the beginning of it, or its model; may be left out where the catalog knows only one. With
`instances`, ids are in `--namespaces`"""


_FROM_HELP = """hours that begin from here on: ISO 8601, in UTC where it says no zone, Unix seconds or a clock time such
as 13:19 (UTC, the last one there was) (default: 31 days before the end)"""
_TO_HELP = "hours that begin before (default: now)"


class _Prompt(NamedTuple):
    """What was asked about: tokens, or packed hashes."""

    tokens: list[int]
    hashes: bytes


def add_questions(commands: Commands) -> None:
    """The commands, of which `ask` does each."""
    lookup = add_command(
        commands,
        "lookup",
        "who holds how much of a prompt's prefix, in which tiers",
        "kvbm-catalog lookup prompt.txt --namespace my-model",
    )
    _add_prompt(lookup)
    _add_common(lookup, limit=True)
    route = add_command(
        commands,
        "route",
        "which instance should serve a prompt, and what each would cost, by parts",
        "kvbm-catalog route prompt.txt --namespace my-model",
    )
    _add_prompt(route)
    route.add_argument(
        "--input-tokens",
        type=_tokens_count,
        metavar="N",
        help="of the whole prompt (default: those given, or the hashes' blocks)",
    )
    route.add_argument(
        "--send",
        action="store_true",
        help="have the catalog remember the prompt as sent there, as a router's question does",
    )
    _add_common(route, limit=True)
    who = add_command(
        commands,
        "who",
        "who holds one block, in which tier",
        "kvbm-catalog who 5f0c…(32 hex digits) --namespace my-model",
    )
    who.add_argument("hash", metavar="HASH", type=_one_hash, help="of the block, 32 hex digits")
    who.add_argument("--namespace", metavar="N", default="", help=_NAMESPACE_HELP)
    _add_common(who)
    instances = add_command(
        commands,
        "instances",
        "each instance: its state, what its tiers hold, and what is wrong with it",
        "kvbm-catalog instances",
    )
    instances.add_argument("name", metavar="NAME", nargs="?", help="only this one, with all that is known of it")
    instances.add_argument("--namespaces", action="store_true", help="the namespaces, with their ids, instead")
    _add_common(instances)
    usage = add_command(
        commands,
        "usage",
        "what tenants have used by clock hour: bytes held by tier, blocks put and read, tokens and GPU seconds saved",
        "kvbm-catalog usage --from 2026-01-01 --to 2026-02-01 --csv",
    )
    usage.add_argument("--from", dest="since", type=time_of, metavar="TIME", help=_FROM_HELP)
    usage.add_argument("--to", dest="until", type=time_of, metavar="TIME", help=_TO_HELP)
    usage.add_argument("--tenant", action="append", metavar="NAME", help="only this one; may be given several times")
    usage.add_argument("--csv", action="store_true", help="a line an hour and tenant, as kvbm-replay usage gives it")
    _add_common(usage)
    watch = add_command(
        commands,
        "watch",
        "what changes from now on, a line each, until interrupted",
        "kvbm-catalog watch --instance gpu-7",
    )
    watch.add_argument("--namespace", metavar="N", default="", help=_NAMESPACE_HELP)
    watch.add_argument("--instance", metavar="NAME", help="changes of this one's blocks")
    watch.add_argument(
        "--prompt", metavar="PROMPT", default="", help=f"who has how much of it, whenever that changes; {_PROMPT_HELP}"
    )
    watch.add_argument("--after", metavar="POSITION", help="go on from here, as an earlier watch's lines have it")
    _add_common(watch)


def ask(arguments: argparse.Namespace) -> int:
    """One question, and its answer on standard output. Raises CatalogError, ConfigError."""
    settings = settings_of(arguments)
    url = arguments.url or settings.catalog.url or listening_url(settings)
    client = catalog_clients(settings, url)
    try:
        _QUESTIONS[arguments.command](arguments, settings, client)
    finally:
        client.close()
    return 0


def listening_url(settings: Settings) -> str:
    """Of the catalog that runs with these settings; an IPv6 address may be written without brackets in
    `catalog.listen`.
    """
    host, _, port = settings.catalog.listen.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    return f"{'https' if settings.catalog.tls_cert else 'http'}://{f'[{host}]' if ':' in host else host}:{port}"


def _add_prompt(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("prompt", metavar="PROMPT", help=_PROMPT_HELP)
    parser.add_argument("--namespace", metavar="N", default="", help=_NAMESPACE_HELP)
    parser.add_argument("--tenant", metavar="NAME", default="", help="with a model: whose namespaces")
    parser.add_argument("--salt", metavar="TEXT", default="", help="with token ids: the request's cache_salt")
    parser.add_argument("--lora", metavar="NAME", default="", help="with token ids: the request's adapter")
    parser.add_argument("--lora-path", metavar="PATH", default="", help="… and its path, as the engine has it")
    parser.add_argument(
        "--media",
        metavar="ID@OFFSET+TOKENS",
        type=_media,
        action="append",
        help="with token ids: an image or the like in the prompt; once for each, in order",
    )


def _add_common(parser: argparse.ArgumentParser, limit: bool = False) -> None:
    if limit:
        parser.add_argument(
            "--limit", type=_limit, default=LIMIT, metavar="N", help=f"at most so many instances (default {LIMIT})"
        )
    parser.add_argument(
        "--url",
        metavar="URL",
        default="",
        help="of the catalog (default: catalog.url, else the address of catalog.listen)",
    )
    parser.add_argument("--json", action="store_true", help="the answer as JSON, in the fields of the HTTP API")
    add_settings(parser)


# -- questions --------------------------------------------------------------------------------------------------------


def _lookup(arguments: argparse.Namespace, settings: Settings, client: Catalog) -> None:
    prompt = _read_prompt(arguments.prompt)
    if (tokens := _asked_by_tokens(client, arguments, prompt)) is not None:
        answer = client.lookup_prompt(tokens, limit=arguments.limit)
    else:
        namespace, hashes = _namespace_and_hashes(client, settings, arguments.namespace, prompt)
        answer = client.lookup(namespace, hashes, limit=arguments.limit)
    _print(arguments, answer, lambda: _told_lookup(answer))


def _route(arguments: argparse.Namespace, settings: Settings, client: Catalog) -> None:
    prompt = _read_prompt(arguments.prompt)
    if (tokens := _asked_by_tokens(client, arguments, prompt)) is not None:
        _route_tokens(arguments, client, tokens)
        return
    namespace, hashes = _namespace_and_hashes(client, settings, arguments.namespace, prompt)
    count = arguments.input_tokens or len(prompt.tokens)
    if not count:
        if isinstance(namespace, bytes):
            raise ConfigError(
                f"the tokens of a block are not known for namespace {namespace.hex()}; give the prompt's length, as "
                "--input-tokens 2000"
            )
        count = len(hashes) // HASH_BYTES * namespace.block_tokens
    if isinstance(client, CatalogClient):
        answer = client.route(namespace, hashes, count, limit=arguments.limit, remember=arguments.send)
    elif arguments.send:
        answer = client.route(namespace, hashes, count, limit=arguments.limit)
    else:
        raise ConfigError(
            "catalogs of several parts remember each route as sent; give --send if it may be, or one --url"
        )
    _print(arguments, answer, lambda: _told_route(answer))


def _who(arguments: argparse.Namespace, settings: Settings, client: Catalog) -> None:
    answer = client.block(_namespace(client, arguments.namespace), arguments.hash)
    _print(arguments, answer, lambda: _told_block(answer))


def _instances(arguments: argparse.Namespace, settings: Settings, client: Catalog) -> None:
    if arguments.namespaces:
        namespaces = client.namespaces()
        _print(arguments, namespaces, lambda: [_namespace_table(namespaces)])
        return
    if arguments.name is None:
        found = client.instances()
        _print(arguments, found, lambda: [_instance_table(found)])
        return
    one = client.instance(arguments.name)
    if one is None:
        raise CatalogError(
            f"the catalog knows no instance {arguments.name!r}; `kvbm-catalog instances` lists those it knows"
        )
    _print(arguments, one, lambda: [_all_of(one)])


def _watch(arguments: argparse.Namespace, settings: Settings, client: Catalog) -> None:
    if not isinstance(client, CatalogClient):
        raise ConfigError("a watch is of one catalog; give one --url, of the part that has the instance or namespace")
    namespace: Namespace | NamespaceId | None = None
    hashes = None
    if arguments.prompt:
        namespace, hashes = _namespace_and_hashes(client, settings, arguments.namespace, _read_prompt(arguments.prompt))
    elif arguments.namespace or arguments.instance is None:
        namespace = _namespace(client, arguments.namespace)
    watch = client.watch(namespace, arguments.instance, hashes, arguments.after)
    try:
        for event in watch:
            if arguments.json:
                say(as_json(event))
            else:
                for line in _watched(event):
                    say(line)
    finally:
        watch.close()


def _usage(arguments: argparse.Namespace, settings: Settings, client: Catalog) -> None:
    if not isinstance(client, CatalogClient):
        raise ConfigError("usage is told by one catalog; give one --url: catalogs of one database have all of it")
    since, until = (None if text is None else parse_time(text) for text in (arguments.since, arguments.until))
    check_stretch(since, until)
    report = client.usage(arguments.since or "", arguments.until or "", arguments.tenant)
    if arguments.csv:
        say_csv(csv_of(report.hours))
        for line in gap_lines(report):
            say(line, to=sys.stderr)
    else:
        _print(arguments, report, lambda: list(lines_of(report)))


def time_of(text: str) -> str:
    """A time that a catalog can be asked about; argparse names the option. Raises ArgumentTypeError."""
    found = parse_time(text, time.time_ns() // 1_000_000)
    if found is None:
        raise argparse.ArgumentTypeError(f"{text[:80]!r} is no time; {TIMES_HOW}")
    return text if clock_us(text) is None else time_text(found)


_QUESTIONS: dict[str, Ask] = {
    "lookup": _lookup,
    "route": _route,
    "who": _who,
    "instances": _instances,
    "usage": _usage,
    "watch": _watch,
}
QUESTIONS = tuple(_QUESTIONS)


# -- what is asked about ----------------------------------------------------------------------------------------------


def _read_prompt(given: str) -> _Prompt:
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
                f"{_PROMPT_HELP}"
            ) from None
    found = _parsed(text)
    if found is None or len(text) > _PROMPT_BYTES:
        raise ConfigError(
            f'{place} holds neither token ids nor hashes; give ids ("1 2 3" or [1, 2, 3]) or hashes of 32 hex digits, '
            f"at most {_PROMPT_BYTES >> 20} MiB"
        )
    return found


def _parsed(text: str) -> _Prompt | None:
    words = text.replace(",", " ").replace("[", " ").replace("]", " ").replace('"', " ").split()
    if words and all(_HASHES.fullmatch(word) for word in words):
        hashes = bytes.fromhex("".join(words))
        if len(hashes) > MAX_HASHES * HASH_BYTES:
            raise ConfigError(f"{len(hashes) // HASH_BYTES} hashes; a question has at most {MAX_HASHES}")
        return _Prompt([], hashes)
    if words and all(_TOKENS.fullmatch(word) and int(word) < 1 << 32 for word in words):
        if len(words) > MAX_TOKENS:
            raise ConfigError(f"{len(words)} token ids; a question has at most {MAX_TOKENS}")
        return _Prompt([int(word) for word in words], b"")
    return None


def _namespace_and_hashes(
    client: Catalog, settings: Settings, asked: str, prompt: _Prompt
) -> tuple[Namespace | NamespaceId, bytes]:
    namespace = _namespace(client, asked)
    if not prompt.tokens:
        return namespace, prompt.hashes
    if isinstance(namespace, bytes):
        raise ConfigError(
            f"the catalog does not know what namespace {namespace.hex()} is, so tokens cannot be hashed for it; give "
            "hashes"
        )
    secrets = TenantSecrets(settings.catalog.tenant_secrets, settings.catalog.tenant_secrets_file)
    if namespace.tenant and namespace.tenant not in secrets:
        raise ConfigError(_no_secret(client, namespace, secrets))
    secret = secrets[namespace.tenant].encode() if namespace.tenant in secrets else b""
    hashes = client.hashes(namespace, secret, prompt.tokens)
    if not hashes:
        raise ConfigError(
            f"{len(prompt.tokens)} token ids fill no block; a block of this namespace has {namespace.block_tokens}"
        )
    return namespace, hashes


def _no_secret(client: Catalog, namespace: Namespace, secrets: TenantSecrets) -> str:
    """That tokens cannot be hashed for a tenant, what to give, and which namespaces of the model need nothing more."""
    others = [
        one
        for one in client.namespaces()
        if one.fields.model == namespace.model and (not one.fields.tenant or one.fields.tenant in secrets)
    ]
    listed = "; or one of these with --namespace" + _list_of(others) if others else ""
    return (
        f"tokens of tenant {namespace.tenant!r} are hashed with its secret, which is not in catalog.tenant_secrets or "
        "its file; give --set catalog.tenant_secrets_file=FILE, in which stands "
        f'[tenants.{namespace.tenant}] and below it secret = "…", or give hashes instead of tokens{listed}'
    )


def _list_of(namespaces: Sequence[NamespaceSummary]) -> str:
    lines = [f"\n  {one.id}  {_named(one)}" for one in namespaces[:_MOST_NAMED]]
    more = len(namespaces) - len(lines)
    lines += [f"\n  and {more} more; see `kvbm-catalog instances --namespaces`"] if more else []
    return f":{''.join(lines)}"


def _route_tokens(arguments: argparse.Namespace, client: Catalog, tokens: PromptTokens) -> None:
    if arguments.input_tokens:
        raise ConfigError("--input-tokens goes with hashes; of token ids all are given")
    if isinstance(client, CatalogClient):
        answer = client.route_prompt(tokens, limit=arguments.limit, remember=arguments.send)
    else:
        answer = client.route_prompt(tokens, limit=arguments.limit)
    _print(arguments, answer, lambda: _told_route(answer))


def _asked_by_tokens(client: Catalog, arguments: argparse.Namespace, prompt: _Prompt) -> PromptTokens | None:
    """What the catalog is asked by tokens; None: hashes are given, or are made here."""
    has_keys = bool(arguments.salt or arguments.lora or arguments.lora_path or arguments.media)
    if not prompt.tokens:
        if has_keys:
            raise ConfigError("--salt, --lora, --lora-path and --media go with token ids, and hashes are given")
        return None
    asked = str(arguments.namespace)
    known = client.namespaces()
    by_model = [one for one in known if asked and one.fields.model == asked]
    if by_model and (has_keys or any(one.fields.scheme != HASHABLE_SCHEME for one in by_model)):
        return _prompt_tokens(arguments, prompt, None, asked)
    if by_model:
        return None
    namespace = _namespace(client, asked)
    if not isinstance(namespace, Namespace) or (namespace.scheme == HASHABLE_SCHEME and not has_keys):
        return None
    return _prompt_tokens(arguments, prompt, namespace, "")


def _prompt_tokens(
    arguments: argparse.Namespace, prompt: _Prompt, namespace: Namespace | None, model: str
) -> PromptTokens:
    return PromptTokens(
        tokens=prompt.tokens,
        namespace=namespace,
        model=model,
        tenant=arguments.tenant if model else "",
        salt=arguments.salt,
        lora=arguments.lora,
        lora_path=arguments.lora_path,
        media=arguments.media or (),
    )


def _media(text: str) -> MediaAsked:
    found = _MEDIA.fullmatch(text)
    if found is None:
        raise argparse.ArgumentTypeError(f"{text[:80]!r} is no media; give IDENTIFIER@OFFSET+TOKENS, as cat-1@16+576")
    name, offset, tokens = found.groups()
    return MediaAsked(identifier=name, offset=int(offset), tokens=int(tokens))


def _namespace(client: Catalog, asked: str) -> Namespace | NamespaceId:
    """The one that is meant. An id that the catalog does not know is asked for as it is."""
    known = client.namespaces()
    by_model = [one for one in known if not asked or one.fields.model == asked]
    fitting = by_model or [one for one in known if one.id.startswith(asked.lower())]
    if len(fitting) == 1:
        return fitting[0].fields
    if not fitting and re.fullmatch(r"[0-9a-fA-F]{32}", asked):
        return NamespaceId(bytes.fromhex(asked))
    if not fitting:
        what = f"the catalog knows no namespace {asked!r}" if asked else "the catalog knows no namespace yet"
    elif asked:
        what = f"{asked!r} may be any of {len(fitting)} namespaces"
    else:
        what = f"the catalog knows {len(known)} namespaces"
    choices = fitting or known
    how = f"; give --namespace with an id of these, or its beginning{_list_of(choices)}" if choices else ""
    raise ConfigError(f"{what}{how}")


def _named(one: NamespaceSummary) -> str:
    fields = one.fields
    words = [fields.model, fields.revision, fields.kv_dtype, f"{fields.block_tokens} tokens", fields.ranks]
    words += [f"group {fields.kv_group}"] if fields.kv_group else []
    words += [f"lora {fields.lora}"] if fields.lora else []
    words += [f"tenant {fields.tenant}"] if fields.tenant else []
    return plain(", ".join([word for word in words if word] + [fields.scheme]))


# -- words ------------------------------------------------------------------------------------------------------------


def _print(arguments: argparse.Namespace, answer: object, told: Callable[[], Sequence[Listing | str]]) -> None:
    if arguments.json:
        say(as_json(answer))
        return
    print_told(told())


def _tiers(tiers: dict[str, int]) -> str:
    return ", ".join(f"{name} {count}" for name, count in tiers.items() if count)


def _view(age_s: float) -> list[str]:
    return [f"this view is {age_s:.1f} s old: the catalog cannot tell at the moment what is newer"] if age_s else []


def _missed(missed: MissedAnswer | msgspec.UnsetType) -> list[str]:
    return [] if isinstance(missed, msgspec.UnsetType) else [f"nothing was found: {missed.message}"]


def _told_lookup(answer: LookupAnswer) -> list[Listing | str]:
    table = Listing("instance", "#blocks", "tiers", "#with its pools", remark="remark")
    for one in answer.instances:
        table.add(one.instance, one.depth, _tiers(one.tiers), one.reach, remark=_SUSPECT if one.suspect else "")
    for pool in answer.pools:
        table.add(f"pool {pool.pool}", pool.depth, "OBJECT", "")
    told: list[Listing | str] = [f"{answer.blocks} full blocks; the longest prefix held is of {answer.deepest}"]
    told += [table] if answer.instances or answer.pools else []
    told += [f"{answer.more} more instances hold some of it; see --limit"] if answer.more else []
    told += [f"left out, because not live: {', '.join(answer.excluded)}"] if answer.excluded else []
    told += _missed(answer.missed)
    return told + _view(answer.view_age_s)


def _told_route(answer: RouteAnswer) -> list[Listing | str]:
    names = ("cost s", "waits", "computes", "fetches", "balance", "first token s", "blocks", "missing tokens")
    table = Listing("instance", *(f"#{name}" for name in names), remark="remark")
    for one in answer.ranked:
        remarks = ["suspect"] if one.suspect else []
        remarks += [] if one.admitted else ["not admitted"]
        seconds = (one.cost_s, one.queueing_s, one.recompute_s, one.fetch_s, one.balance_s, one.ttft_s)
        numbers = (*(f"{value:.4f}" for value in seconds), one.depth, one.missing_tokens)
        table.add(one.instance, *numbers, remark=", ".join(remarks))
    told: list[Listing | str] = [
        f"send it to {answer.instance}" if answer.instance else "no instance is there to serve it",
        table,
    ]
    told += [] if answer.admitted else ["it is not admitted now: refuse it, or ask again later"]
    told += [f"{answer.more} more instances cost more; see --limit"] if answer.more else []
    told += [f"left out: {name}, {why}: {_LEFT_OUT.get(why, '')}" for name, why in answer.excluded.items()]
    told += _missed(answer.missed)
    return told + _view(answer.view_age_s)


def _told_block(answer: BlockAnswer) -> list[Listing | str]:
    table = Listing("holder", "kind", "tier", remark="remark")
    for one in answer.holders:
        table.add(one.name, one.kind, one.tier, remark=_SUSPECT if one.suspect else "")
    told: list[Listing | str] = (
        [table] if answer.holders else [f"nobody holds block {answer.hash} of namespace {answer.namespace}"]
    )
    told += _missed(answer.missed)
    return told + _view(answer.view_age_s)


def _namespace_table(namespaces: Sequence[NamespaceSummary]) -> Listing:
    table = Listing("namespace", "fields")
    for one in namespaces:
        table.add(one.id, _named(one))
    return table


def _instance_table(found: Sequence[InstanceSummary]) -> Listing:
    used = [tier.name for tier in Tier if any(pool.tier == tier.name for one in found for pool in one.pools)]
    held = (f"#{tier} held / slots" for tier in used)
    table = Listing("instance", "state", *held, "#queued tokens", "#heard s ago", remark="remark")
    for one in found:
        tiers = [_filled(one, tier) for tier in used]
        queued = "" if one.queued_tokens is None else one.queued_tokens
        age = "" if one.heartbeat_age_s is None else f"{one.heartbeat_age_s:.1f}"
        table.add(one.instance, one.state, *tiers, queued, age, remark=_remarks(one))
    return table


def _filled(one: InstanceSummary, tier: str) -> str:
    slots = sum(pool.slots for pool in one.pools if pool.tier == tier)
    return f"{one.held_blocks.get(tier, 0)} / {slots or '?'}" if any(pool.tier == tier for pool in one.pools) else ""


def _remarks(one: InstanceSummary) -> str:
    words = [f"left out: {one.excluded}"] if one.excluded else []
    words += [f"suspect: {'; '.join(one.suspicions)}"] if one.suspect else []
    words += ["partial: the catalog's capacity was reached"] if one.partial else []
    return "; ".join(words + ([one.trouble] if one.trouble else []))


def _all_of(one: InstanceSummary) -> Listing:
    table = Listing("field", "value")
    for name, value in msgspec.to_builtins(one).items():
        if name == "pools":
            for pool in one.pools:
                table.add(
                    f"pool {pool.name or pool.tier}",
                    f"{pool.tier}, {pool.held_blocks} of {pool.slots or '?'} blocks of {pool.block_bytes or '?'} "
                    f"bytes, {pool.reach}",
                )
        elif value not in (None, "", [], {}):
            table.add(
                name,
                _tiers(value) if name == "held_blocks" else ", ".join(value) if isinstance(value, list) else value,
            )
    return table


def _watched(event: WatchEvent) -> list[str]:
    match event:
        case WatchBegun(position=position, missed=missed):
            return [f"watching from {position}", *_missed(missed)]
        case BlockChanges(holder=holder, is_pool=is_pool, changes=changes):
            name = f"pool {holder}" if is_pool else holder
            return [f"{name} {_changed(one)}" for one in changes]
        case InstanceChange(instance=instance, what="state", excluded=excluded, suspect=suspect):
            return [f"{instance} is {f'left out: {excluded}' if excluded else 'live'}{', suspect' if suspect else ''}"]
        case InstanceChange(instance=instance, what=what):
            return [f"{instance} {what}"]
        case KnownInstances(instances=instances):
            return [f"another catalog goes on; it knows {len(instances)} instances"]
        case PrefixDepths(answer=answer):
            held = (
                ", ".join(f"{one.instance} {one.depth} ({_tiers(one.tiers)})" for one in answer.instances) or "nobody"
            )
            return [f"of {answer.blocks} blocks: {held}", *_missed(answer.missed)]
        case Missed(instance=instance, why=why):
            return [f"missed{f' of {instance}' if instance else ''}: {why}"]
        case WatchEnded(why=why):
            return [f"the catalog ends the watch: {why}"]


def _changed(change: BlockChange) -> str:
    if change.what == "ended":
        return f"has said all that {change.tier} holds"
    count, first = len(change.hashes) // (2 * HASH_BYTES), change.hashes[: 2 * HASH_BYTES]
    return f"{change.what} {count} in {change.tier}: {first}{'…' if count > 1 else ''}"


# -- numbers ----------------------------------------------------------------------------------------------------------


def _limit(text: str) -> int:
    return count_between(text, 1, MAX_LIMIT)


def _tokens_count(text: str) -> int:
    return count_between(text, 1, MAX_INPUT_TOKENS)


def _one_hash(text: str) -> bytes:
    if not re.fullmatch(r"[0-9a-fA-F]{32}", text):
        raise argparse.ArgumentTypeError(f"{text[:80]!r} is no hash; give its 32 hex digits")
    return bytes.fromhex(text)
