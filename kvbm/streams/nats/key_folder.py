"""The folder that `kvbm nats-permissions` keeps: a seed for each user of the server, and which account is whose.

catalog.nk            the seed of the catalog
<role>-<name>.nk      that of an instance, a janitor, a user of replay, an operator, a router
….next.nk             the seed that is to replace it; until it does, the server permits both
accounts.json         the number of each user's account: it keeps its account, whoever comes or goes
"""

from __future__ import annotations

import datetime
import os
from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import msgspec

from kvbm.core.errors import ConfigError
from kvbm.core.names import NAME_RULE, is_name
from kvbm.files import alone, read_small, replace_file
from kvbm.streams.nats.credentials import keep_seed
from kvbm.streams.nats.permissions import ACCOUNT, Role, ServerUser, server_config

SPARE = 8  # accounts
OVERLAP_S = 86_400.0
_ACCOUNTS_BYTES = 16 << 20
_MOST_SPARE = 1000


class _Accounts(msgspec.Struct):
    """`accounts.json`.

    Attributes:
        numbers: file of a user's seed, without its ending → number of the user's account.
        made: accounts up to this number have been printed.
    """

    numbers: dict[str, int] = {}
    made: int = 0


class KeyChange(NamedTuple):
    """What is to be done to keys.

    Attributes:
        renew: users who get a second key. retire: those whose second key replaces the first.
        overlap_s: for how long a user is meant to have two.
        spare: accounts kept for users to come.
    """

    renew: Collection[str] = ()
    retire: Collection[str] = ()
    overlap_s: float = OVERLAP_S
    spare: int = SPARE


class Printed(NamedTuple):
    """What the command prints: the accounts, and remarks for whoever reads them."""

    text: str
    remarks: list[str]


def print_accounts(
    folder: Path,
    cluster: str,
    wanted: Sequence[tuple[Role, str]],
    change: KeyChange,
    now_s: float,
    put: Callable[[str], None] = lambda text: None,
) -> Printed:
    """The accounts of a catalog and of everybody wanted. Makes keys where there are none.

    Args:
        put: told the text before another command may change the folder, so that what was printed last is there last.
    Raises: ConfigError: an impossible name, one that is there twice or not at all, or a folder that cannot be used.
    MissingExtraError: keys need the package nkeys.
    """
    for role, name in wanted:
        if not is_name(name):
            raise ConfigError(f"--{role} {name!r} is no name; {NAME_RULE}")
    if not 0 <= change.spare <= _MOST_SPARE:
        raise ConfigError(f"--spare is {change.spare}; give 0 to {_MOST_SPARE}")
    named = [ServerUser("", name, role) for role, name in wanted]
    server_config(cluster, named)  # refuses what cannot be before it becomes files
    named.append(ServerUser("", None, Role.CATALOG))
    stems = {user.stem for user in named}
    _check_change(folder, stems, change)
    with ExitStack() as held:
        try:
            held.enter_context(alone(folder))
        except OSError as error:
            raise ConfigError(f"{folder} cannot be used ({error.strerror}); choose another folder for keys") from None
        _check_change(folder, stems, change)  # perhaps another has made the same change meanwhile
        printed = _print(folder, cluster, named, change, now_s)
        put(printed.text)
        return printed


def _print(folder: Path, cluster: str, named: list[ServerUser], change: KeyChange, now_s: float) -> Printed:
    is_new = not any(_seed(folder, user.stem).exists() for user in named)
    _change_keys(folder, change)
    accounts = _read_accounts(folder)
    known = accounts.made
    dropped = sorted(set(accounts.numbers) - {user.stem for user in named})
    spares = _number(accounts, [user.stem for user in named if user.kind is not Role.CATALOG], change.spare)
    users = [_with_keys(folder, user, accounts) for user in named]
    _write_accounts(folder, accounts)
    remarks, comments = [], []
    if dropped:
        remarks.append(
            f"{', '.join(dropped)} had an account and has none now: nats-server turns away who is not named; to keep "
            "them, name them "
            "again before it reloads"
        )
    for user in users:
        if user.next_nkey:
            comments.append(_on_overlap(folder, user, change.overlap_s, now_s))
    unknown = [user.stem for user in users if not is_new and accounts.numbers.get(user.stem, 0) > known]
    if unknown:
        remarks.append(
            f"there was no spare account for {', '.join(unknown)}: reload nats-server twice, or restart it, because at "
            "a reload it "
            "lends nothing to an account that is new to it"
        )
    text = server_config(cluster, users, [_account(number) for number in spares])
    return Printed("".join(f"# {comment}\n" for comment in comments) + text, comments + remarks)


def _check_change(folder: Path, stems: Collection[str], change: KeyChange) -> None:
    """Before anything is written. Raises ConfigError."""
    for option, chosen in (("--renew", change.renew), ("--retire", change.retire)):
        for stem in chosen:
            if stem not in stems:
                raise ConfigError(f"{option} {stem} is none of those named; give one of {', '.join(sorted(stems))}")
    for stem in change.retire:
        if not _next(folder, stem).exists():
            raise ConfigError(f"--retire {stem}: it has no second key; make one with --renew {stem}")
    for stem in change.renew:
        if not _seed(folder, stem).exists():
            raise ConfigError(f"--renew {stem}: it has no key yet; leave --renew out")


def _change_keys(folder: Path, change: KeyChange) -> None:
    for stem in change.retire:
        try:
            os.replace(_next(folder, stem), _seed(folder, stem))
        except OSError as error:
            raise ConfigError(f"--retire {stem}: {error.filename} cannot be moved ({error.strerror})") from None
    for stem in change.renew:
        keep_seed(_next(folder, stem))


def _number(accounts: _Accounts, stems: Sequence[str], spare: int) -> list[int]:
    """Give everybody an account, those first that the server knows; gives the spare ones.

    Who is not named loses its account. It is the last to be given to another, whose events must not meet the old one's
    imports.
    """
    left = {stem: number for stem, number in accounts.numbers.items() if stem in stems}
    free = [number for number in range(1, accounts.made + 1) if number not in left.values()]
    free.sort(key=lambda number: number in accounts.numbers.values())
    for stem in stems:
        if stem not in left:
            if not free:
                accounts.made += 1
                free.append(accounts.made)
            left[stem] = free.pop(0)
    while len(free) < spare:
        accounts.made += 1
        free.append(accounts.made)
    accounts.numbers = left
    return sorted(free)


def _with_keys(folder: Path, user: ServerUser, accounts: _Accounts) -> ServerUser:
    following = _next(folder, user.stem)
    account = "" if user.kind is Role.CATALOG else _account(accounts.numbers[user.stem])
    public = keep_seed(_seed(folder, user.stem))
    return user._replace(nkey=public, next_nkey=keep_seed(following) if following.exists() else "", account=account)


def _on_overlap(folder: Path, user: ServerUser, overlap_s: float, now_s: float) -> str:
    until_s = _next(folder, user.stem).stat().st_mtime + overlap_s
    until = datetime.datetime.fromtimestamp(until_s, datetime.UTC).strftime("%Y-%m-%dT%H:%MZ")
    when = f"until {until}" if now_s <= until_s else f"still, though it was meant to until {until}"
    return (
        f"{user.stem} has two keys {when}: when it uses {user.stem}.next.nk, end the other with --retire {user.stem} "
        "and reload "
        "nats-server"
    )


def _seed(folder: Path, stem: str) -> Path:
    return folder / f"{stem}.nk"


def _next(folder: Path, stem: str) -> Path:
    return folder / f"{stem}.next.nk"


def _account(number: int) -> str:
    return f"{ACCOUNT}-{number:04d}"


def _read_accounts(folder: Path) -> _Accounts:
    path = folder / "accounts.json"
    try:
        return msgspec.json.decode(read_small(path, _ACCOUNTS_BYTES), type=_Accounts)
    except FileNotFoundError:
        return _Accounts()
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{path} cannot be read ({error}); put it back, or remove it, print the accounts and reload nats-server "
            "twice"
        ) from None


def _write_accounts(folder: Path, accounts: _Accounts) -> None:
    path = folder / "accounts.json"
    try:
        replace_file(path, msgspec.json.format(msgspec.json.encode(accounts)) + b"\n")
    except OSError as error:
        raise ConfigError(f"{path} cannot be written ({error.strerror}); choose another folder for keys") from None
