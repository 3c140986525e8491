"""What people ask a running catalog on the command line: `kvbm-catalog lookup`, `route`, `hashes`, `who`, `instances`,
`tenants`, `usage` and `watch`.
"""

from __future__ import annotations

import argparse
import re
import sys
import time
from collections.abc import Callable, Sequence
from typing import TypeAlias

import msgspec

from kvbm.assembly import catalog_clients
from kvbm.catalog_asked import (
    ANY_NAMESPACE,
    PROMPT_HELP,
    FoundBlocks,
    asked_by_tokens,
    blocks_found,
    meant_by,
    named_in_words,
    namespace_and_hashes,
    namespace_of,
    read_prompt,
)
from kvbm.catalog_tables import Filled, Listing, print_told, tenant_rows, tenant_table
from kvbm.command_line import Commands, add_command, add_settings, count_between, seconds, settings_of
from kvbm.config import Settings
from kvbm.core.answers import (
    LIMIT,
    MAX_INPUT_TOKENS,
    MAX_LIMIT,
    BlockAnswer,
    InstanceSummary,
    LookupAnswer,
    MediaAsked,
    MissedAnswer,
    NamespaceSummary,
    PoolSummary,
    RouteAnswer,
)
from kvbm.core.clock_times import clock_us
from kvbm.core.errors import CatalogError, ConfigError
from kvbm.core.ids import HASH_BYTES, Namespace, NamespaceId, Reach, Tier
from kvbm.core.prompt_tokens import PromptTokens
from kvbm.core.questions import id_of
from kvbm.core.usage import TIMES_HOW, csv_of, gap_lines, lines_of, parse_stretch, parse_time, time_text, unused_lines
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
from kvbm.locate.base import Catalog
from kvbm.locate.http import TIMEOUT_S, CatalogClient
from kvbm.progress import Watch
from kvbm.terminal import as_json, say, say_csv

_MEDIA = re.compile(r"(.+)@(\d{1,7})\+(\d{1,7})")
_OF_HEARTBEAT = ("published", "applied", "trouble", "run", "queued_tokens", "running_requests", "free_slots")
_SHORT = 12  # hex digits of a hash in a table
_SUSPECT = "suspect: may hold more or less"
_LEFT_OUT = {
    "silent": "it has the prompt's first block, and no heartbeat of it comes",
    "stopped": "it had the prompt's first block",
    "restarted": "it has the prompt's first block, and its new epoch is not read yet",
    "newer": "it has the prompt's first block, and writes what this catalog cannot read; upgrade the catalog",
    "stopping": "it is about to stop, and is sent nothing new",
}
Ask: TypeAlias = Callable[[argparse.Namespace, Settings, Catalog], None]

_NAMESPACE_HELP = """its id or the beginning of it, or its model; may be left out where the catalog knows only one. With
`instances`, ids are in `--namespaces`"""


_FROM_HELP = """hours that begin from here on: ISO 8601, in UTC where it says no zone, Unix seconds or a clock time such
as 13:19 (UTC, the last one there was) (default: 31 days before the end)"""
_TO_HELP = "hours that begin before; a clock time is the first one after --from (default: now)"


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
    _add_block_questions(commands)
    instances = add_command(
        commands,
        "instances",
        "each instance: its state, what its tiers hold, and what is wrong with it",
        "kvbm-catalog instances",
    )
    instances.add_argument("name", metavar="NAME", nargs="?", help="only this one, with all that is known of it")
    instances.add_argument("--namespaces", action="store_true", help="the namespaces, with their ids, instead")
    _add_common(instances)
    tenants = add_command(
        commands,
        "tenants",
        "each tenant against its limits: what it has in object pools, its share of them, its quotas",
        "kvbm-catalog tenants",
    )
    tenants.description = """What each tenant has in object pools, what share of all in them that is, and what it may
have there and in each instance's HOST and NVMe, as the catalog's settings and its database say.

What a tenant used by clock hour is in `kvbm-catalog usage`."""
    _add_common(tenants)
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
    _add_namespace(watch)
    watch.add_argument("--instance", metavar="NAME", help="changes of this one's blocks")
    watch.add_argument(
        "--prompt", metavar="PROMPT", default="", help=f"who has how much of it, whenever that changes; {PROMPT_HELP}"
    )
    watch.add_argument("--after", metavar="POSITION", help="go on from here, as an earlier watch's lines have it")
    _add_common(watch)


def _add_block_questions(commands: Commands) -> None:
    hashes = add_command(
        commands,
        "hashes",
        "the hashes of a prompt's full blocks, a line each",
        "kvbm-catalog hashes prompt.txt --namespace my-model",
    )
    hashes.add_argument("prompt", metavar="PROMPT", help=PROMPT_HELP)
    _add_namespace(hashes)
    _add_common(hashes)
    who = add_command(
        commands,
        "who",
        "who holds one block, in which tier",
        "kvbm-catalog who 5f0c71a2",
    )
    who.description = """Who holds one block, in which tier: in all namespaces, or in the one that is given.

A beginning of a hash is looked up in the catalog's history (catalog.history); without one, give all 32 digits."""
    who.add_argument("hash", metavar="HASH", type=_digits, help="its 32 hex digits, or at least the first 8")
    _add_namespace(who)
    _add_common(who)


def ask(arguments: argparse.Namespace) -> int:
    """One question, and its answer on standard output. Raises CatalogError, ConfigError."""
    settings = settings_of(arguments)
    url = arguments.url or settings.catalog.url or listening_url(settings)
    client = catalog_clients(settings, url, arguments.timeout)
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
    parser.add_argument("prompt", metavar="PROMPT", help=PROMPT_HELP)
    _add_namespace(parser)
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


def _add_namespace(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--namespace", metavar="N", default="", help=_NAMESPACE_HELP)
    parser.add_argument("--tenant", metavar="NAME", help='only namespaces of this tenant; "" for those of none')


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
    add_timeout(parser)
    parser.add_argument("--json", action="store_true", help="the answer as JSON, in the fields of the HTTP API")
    add_settings(parser)


def add_timeout(parser: argparse.ArgumentParser) -> None:
    """`--timeout`, for which a catalog that is asked may take."""
    parser.add_argument(
        "--timeout",
        type=seconds,
        default=TIMEOUT_S,
        metavar="S",
        help=f"how long an answer of the catalog may take (default {TIMEOUT_S:g})",
    )


# -- questions --------------------------------------------------------------------------------------------------------


def _lookup(arguments: argparse.Namespace, settings: Settings, client: Catalog) -> None:
    prompt = read_prompt(arguments.prompt)
    if (tokens := asked_by_tokens(client, arguments, prompt)) is not None:
        answer = client.lookup_prompt(tokens, limit=arguments.limit)
    else:
        namespace, hashes = namespace_and_hashes(client, settings, meant_by(arguments), prompt)
        answer = client.lookup(namespace, hashes, limit=arguments.limit)
    _print(arguments, answer, lambda: _told_lookup(answer))


def _route(arguments: argparse.Namespace, settings: Settings, client: Catalog) -> None:
    prompt = read_prompt(arguments.prompt)
    if (tokens := asked_by_tokens(client, arguments, prompt)) is not None:
        _route_tokens(arguments, client, tokens)
        return
    namespace, hashes = namespace_and_hashes(client, settings, meant_by(arguments), prompt)
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


def _route_tokens(arguments: argparse.Namespace, client: Catalog, tokens: PromptTokens) -> None:
    if arguments.input_tokens:
        raise ConfigError("--input-tokens goes with hashes; of token ids all are given")
    if isinstance(client, CatalogClient):
        answer = client.route_prompt(tokens, limit=arguments.limit, remember=arguments.send)
    else:
        answer = client.route_prompt(tokens, limit=arguments.limit)
    _print(arguments, answer, lambda: _told_route(answer))


def _hashes(arguments: argparse.Namespace, settings: Settings, client: Catalog) -> None:
    namespace, hashes = namespace_and_hashes(client, settings, meant_by(arguments), read_prompt(arguments.prompt))
    each = [hashes[at : at + HASH_BYTES].hex() for at in range(0, len(hashes), HASH_BYTES)]
    _print(arguments, {"namespace": id_of(namespace).hex(), "hashes": each}, lambda: each)


def _who(arguments: argparse.Namespace, settings: Settings, client: Catalog) -> None:
    meant = meant_by(arguments)
    is_one = len(arguments.hash) == 2 * HASH_BYTES and meant != ANY_NAMESPACE
    if is_one:
        answer = client.block(namespace_of(client, meant), bytes.fromhex(arguments.hash))
        _print(arguments, answer, lambda: _told_block(answer))
        return
    found = blocks_found(client, meant, arguments.hash)
    _print(arguments, found.answers, lambda: _told_blocks(arguments.hash, found))


def _instances(arguments: argparse.Namespace, settings: Settings, client: Catalog) -> None:
    if arguments.namespaces:
        namespaces = client.namespaces()
        _print(arguments, namespaces, lambda: [_namespace_table(namespaces)])
        return
    _tell_degraded(client)
    if arguments.name is None:
        found = client.instances()
        _print(arguments, found, lambda: _instance_table(found))
        return
    one = client.instance(arguments.name)
    if one is None:
        raise CatalogError(
            f"the catalog knows no instance {arguments.name!r}; `kvbm-catalog instances` lists those it knows"
        )
    _print(arguments, one, lambda: [*_all_of(one)])


def _tell_degraded(client: Catalog) -> None:
    """Say, aside, what of the catalog does not work though it answers, and how old its view is. Callers who may not
    know it are told nothing.
    """
    answer = client.ready()
    if not answer.ready:
        say(f"the catalog is not ready: {answer.reason}", to=sys.stderr)
    if answer.degraded:
        say(f"the catalog is degraded: {answer.degraded}", to=sys.stderr)


def _watch(arguments: argparse.Namespace, settings: Settings, client: Catalog) -> None:
    if not isinstance(client, CatalogClient):
        raise ConfigError("a watch is of one catalog; give one --url, of the part that has the instance or namespace")
    namespace: Namespace | NamespaceId | None = None
    hashes = None
    if arguments.prompt:
        namespace, hashes = namespace_and_hashes(client, settings, meant_by(arguments), read_prompt(arguments.prompt))
    elif arguments.namespace or arguments.tenant is not None or arguments.instance is None:
        namespace = namespace_of(client, meant_by(arguments))
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


def _tenants(arguments: argparse.Namespace, settings: Settings, client: Catalog) -> None:
    if not isinstance(client, CatalogClient):
        raise ConfigError("tenants are told by one catalog; give one --url: each knows the claims of its own parts")
    _tell_degraded(client)
    told = client.tenants()
    if sum(pool.blocks for pool in told.pools) and not any(told.tenants.blocks):
        say("the catalog has not counted yet what lies in pools; ask again in ten seconds", to=sys.stderr)
    rows = {"tenants": tenant_rows(told), "more": told.tenants.more}
    _print(arguments, rows, lambda: tenant_table(told))


def _usage(arguments: argparse.Namespace, settings: Settings, client: Catalog) -> None:
    if not isinstance(client, CatalogClient):
        raise ConfigError("usage is told by one catalog; give one --url: catalogs of one database have all of it")
    stretch = parse_stretch(arguments.since, arguments.until, time.time_ns() // 1_000_000)
    since, until = ("" if one is None else time_text(one) for one in stretch)
    with Watch("usage"):
        report = client.usage(since, until, arguments.tenant)
    asked = arguments.tenant or ()
    if set(asked) - {hour.tenant for hour in report.hours}:
        known = {one.fields.tenant for one in client.namespaces()}
        for line in unused_lines(report.hours, asked, known, "the catalog"):
            say(f"kvbm-catalog: {line}", to=sys.stderr)
    if arguments.csv:
        say_csv(csv_of(report.hours))
        for line in gap_lines(report):
            say(line, to=sys.stderr)
    else:
        _print(arguments, report, lambda: list(lines_of(report)))


def time_of(text: str) -> str:
    """A time that a catalog can be asked about; argparse names the option. Raises ArgumentTypeError."""
    if parse_time(text) is None and clock_us(text) is None:
        raise argparse.ArgumentTypeError(f"{text[:80]!r} is no time; {TIMES_HOW}")
    return text


_QUESTIONS: dict[str, Ask] = {
    "lookup": _lookup,
    "route": _route,
    "hashes": _hashes,
    "who": _who,
    "instances": _instances,
    "tenants": _tenants,
    "usage": _usage,
    "watch": _watch,
}
QUESTIONS = tuple(_QUESTIONS)


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
    table = Listing("instance", "#blocks", "~tiers", "#with its pools", remark="remark")
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


def _told_blocks(digits: str, found: FoundBlocks) -> list[Listing | str]:
    """Of a block in all namespaces, or of those whose hashes begin alike."""
    if found.namespaces == 1:
        return _told_block(found.answers[0])
    table = Listing("block", "~namespace", "holder", "kind", "tier", remark="remark")
    held = [(answer, one) for answer in found.answers for one in answer.holders]
    for answer, one in held:
        named = f"{answer.namespace[:8]} {found.models.get(answer.namespace, '')}".rstrip()
        table.add(answer.hash[:_SHORT], named, one.name, one.kind, one.tier, remark=_SUSPECT if one.suspect else "")
    told: list[Listing | str] = [table] if held else [f"nobody holds {found.what(digits)}"]
    told += [f"hash {one}" for one in sorted({answer.hash for answer, _ in held})]
    told += [found.unread] if found.unread else []
    return told + _view(max((answer.view_age_s for answer in found.answers), default=0.0))


def _namespace_table(namespaces: Sequence[NamespaceSummary]) -> Listing:
    table = Listing("namespace", "~fields")
    for one in namespaces:
        table.add(one.id, named_in_words(one))
    return table


def _instance_table(found: Sequence[InstanceSummary]) -> list[Listing | str]:
    if not found:
        return ["the catalog knows no instance yet: none has published to its stream, or sent a heartbeat"]
    used = [tier.name for tier in Tier if any(_own(one, tier.name) for one in found)]
    held = (f"#{tier} held / slots" for tier in used)
    table = Listing("instance", "state", *held, "#queued tokens", "#heard s ago", remark="remark")
    for one in found:
        tiers = [_filled(one, tier) for tier in used]
        queued = "" if one.queued_tokens is None else one.queued_tokens
        age = "" if one.heartbeat_age_s is None else f"{one.heartbeat_age_s:.1f}"
        table.add(one.instance, one.state, *tiers, queued, age, remark=_remarks(one))
    shared = {pool.name: pool.held_blocks for one in found for pool in one.pools if _is_shared(pool)}
    return [table, *(f"pool {name or '(no name)'} of all: {blocks} blocks" for name, blocks in sorted(shared.items()))]


def _is_shared(pool: PoolSummary) -> bool:
    return pool.reach == Reach.CLUSTER.name


def _own(one: InstanceSummary, tier: str) -> list[PoolSummary]:
    """Pools of one tier that are the instance's alone."""
    return [pool for pool in one.pools if pool.tier == tier and not _is_shared(pool)]


def _filled(one: InstanceSummary, tier: str) -> Filled | str:
    own = _own(one, tier)
    return Filled(one.held_blocks.get(tier, 0), sum(pool.slots for pool in own)) if own else ""


def _remarks(one: InstanceSummary) -> str:
    words = [f"left out: {one.excluded}"] if one.excluded else []
    words += [f"suspect: {'; '.join(one.suspicions)}"] if one.suspect else []
    words += ["partial: the catalog's capacity was reached"] if one.partial else []
    return "; ".join(words + ([one.trouble] if one.trouble else []))


def _all_of(one: InstanceSummary) -> list[Listing | str]:
    table = Listing("field", "~value")
    for name, value in msgspec.to_builtins(one).items():
        if name == "pools":
            for pool in one.pools:
                table.add(
                    f"pool {pool.name or pool.tier}",
                    f"{pool.tier}, {pool.held_blocks} of {pool.slots or '?'} blocks of {pool.block_bytes or '?'} "
                    f"bytes, {pool.reach}",
                )
        elif value not in (None, "", [], {}):
            text = _tiers(value) if isinstance(value, dict) else ", ".join(value) if isinstance(value, list) else value
            table.add(name, text)
    if one.heartbeat_age_s is None:
        return [table, "no heartbeat of it was heard since this catalog began: what it would say is left out"]
    said = ", ".join(name for name in _OF_HEARTBEAT if getattr(one, name) not in (None, "", {}))
    return [table, f"as of its last heartbeat, {one.heartbeat_age_s:.1f} s ago: {said}"]


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


def _media(text: str) -> MediaAsked:
    found = _MEDIA.fullmatch(text)
    if found is None:
        raise argparse.ArgumentTypeError(f"{text[:80]!r} is no media; give IDENTIFIER@OFFSET+TOKENS, as cat-1@16+576")
    name, offset, tokens = found.groups()
    return MediaAsked(identifier=name, offset=int(offset), tokens=int(tokens))


def _digits(text: str) -> str:
    if not re.fullmatch(r"[0-9a-fA-F]{8,32}", text):
        raise argparse.ArgumentTypeError(f"{text[:80]!r} is no hash; give its 32 hex digits, or at least the first 8")
    return text.lower()
