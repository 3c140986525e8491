"""The file that says who may ask the catalog: names, roles, tenants, and hashes of tokens. No token stands in it.

    [[token]]
    name = "router-acme"
    role = "router"                      # router, operator or metrics
    tenants = ["acme"]                   # of a router: whose namespaces it may know of, or "all"
    sha256 = "<64 hex digits>"           # of the token
    not_after = 2027-01-01T00:00:00Z     # the token is good until then; without it, for ever

    [[certificate]]
    name = "router-beta.example"         # in the certificate: a DNS name or URI, else the common name
    role = "router"
    tenants = ["beta"]

    [[nats]]
    name = "router-acme"                 # who asks over NATS with the key of this name (kvbm nats-permissions --router)
    role = "router"
    tenants = ["acme"]

`kvbm-catalog token` writes such files. Two tokens of one name may be good at the same time: that is how one replaces
the other.
"""

from __future__ import annotations

import datetime
import hashlib
import os
import re
import secrets
import stat
import tomllib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Literal, NamedTuple, cast, get_args

from kvbm.core.asks import is_caller
from kvbm.core.errors import ConfigError
from kvbm.core.quoting import toml_text, toml_texts
from kvbm.files import alone, open_plain, replace_file, stranger

Role = Literal["router", "operator", "metrics"]
ROLES: tuple[str, ...] = get_args(Role)
TOKEN_BYTES = 32
TOKEN_PREFIX = "kvbm_"
_MOST_BYTES = 4 << 20
_NAME = re.compile(r"[A-Za-z0-9_.:/@*-]{1,256}")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_HEAD = (
    "# Who may ask the catalog. Written by `kvbm-catalog token`, which keeps entries and drops remarks. It holds "
    "hashes, no tokens.\n"
    "# Without its last line it is not whole, and nobody reads it.\n"
)
_END = "\n# That is all.\n"


class CallerEntry(NamedTuple):
    """One way to prove to be a caller.

    Attributes:
        sha256: of the token, in hex; "" where a certificate proves it, or the server of NATS.
        tenants: None for all.
        not_after: good until then, in seconds since 1970; None: for ever.
        is_nats: the server of NATS proves it, by what it lets the caller publish.
    """

    name: str
    role: Role
    tenants: frozenset[str] | None
    sha256: str = ""
    not_after: float | None = None
    is_nats: bool = False

    @property
    def kind(self) -> str:
        """Of its table in the file."""
        return "nats" if self.is_nats else "token" if self.sha256 else "certificate"


class NewToken(NamedTuple):
    """What a token is made for.

    Attributes:
        tenants: of a router; None for all.
        expires_s: how long it is good; None: for ever.
        replace_s: the name's older tokens are good for so long yet; None: there may be none.
    """

    name: str
    role: str
    tenants: Sequence[str] | None = None
    expires_s: float | None = None
    replace_s: float | None = None


def hashed(token: str) -> str:
    """What the file keeps of a token. 256 random bits need no salt and no slow hash."""
    return hashlib.sha256(token.encode()).hexdigest()


_KINDS = ("token", "certificate", "nats")
_OF_NOTHING = hashed("")


def read_entries(path: Path, of_others: bool = False) -> list[CallerEntry]:
    """The entries of a file.

    Args:
        of_others: also of a file that belongs to another user than who asks, or root.
    Raises: ConfigError: it cannot be read, others may write it, or what is wrong in it.
    """
    try:
        with open(open_plain(path, follows=True), "rb") as file:
            found = os.fstat(file.fileno())
            if found.st_mode & 0o022:
                raise ConfigError(
                    f"{_where(path)} can be written by others (mode {stat.S_IMODE(found.st_mode):04o}); run: chmod 600 "
                    f"{path}"
                )
            if (user := stranger(found)) is not None and not of_others:
                raise ConfigError(
                    f"{_where(path)} belongs to user {user}, who could let anybody ask; run: chown root {path}, or "
                    "chown it to who runs the "
                    "catalog"
                )
            if found.st_size > _MOST_BYTES:
                raise ConfigError(f"{_where(path)} has more than {_MOST_BYTES} bytes; take out what is over")
            data = file.read(_MOST_BYTES)
    except OSError as error:
        raise ConfigError(
            f"{_where(path)} cannot be read ({error.strerror}); make one with: kvbm-catalog token --access {path} "
            "--name NAME "
            "--role operator"
        ) from None
    return _parse(data, _where(path))


def add_token(path: Path, wanted: NewToken, now_s: float) -> str:
    """Make a token, and put its hash into the file, which is made if it is not there, for its owner alone.

    Returns the token.

    What has run out is taken out on the way. Other processes that do the same at the same time wait for each other.

    Root may do so for another user: the file goes on to belong to that one, who finds a hash in it and no token.

    Args:
        now_s: seconds since 1970.
    Raises: ConfigError: the file cannot be used, the name has a token already, or what makes no sense.
    """
    entry = _new_entry(wanted, now_s)
    token = TOKEN_PREFIX + secrets.token_urlsafe(TOKEN_BYTES)
    with _alone(path):
        entries = [
            one for one in (read_entries(path, os.geteuid() == 0) if path.exists() else []) if not _is_over(one, now_s)
        ]
        older = [one for one in entries if one.sha256 and one.name == wanted.name]
        if older and wanted.replace_s is None:
            raise ConfigError(
                f"{_where(path)} has {len(older)} token(s) of {wanted.name!r} already; retire them with --replace "
                "SECONDS, the time both "
                "are good, or give another --name"
            )
        if older:
            end_s = now_s + cast(float, wanted.replace_s)
            entries = [
                one._replace(not_after=min(one.not_after or end_s, end_s)) if one in older else one for one in entries
            ]
        write_entries(path, [*entries, entry._replace(sha256=hashed(token))])
    return token


def write_entries(path: Path, entries: Sequence[CallerEntry]) -> None:
    """Replace the file in one step, readable to its owner alone. Raises ConfigError."""
    try:
        replace_file(path, (_HEAD + "".join(map(_written, entries)) + _END).encode())
    except OSError as error:
        raise ConfigError(f"{_where(path)} cannot be written ({error.strerror}); choose another place for it") from None


# -- inside -----------------------------------------------------------------------------------------------------------


def _where(path: Path) -> str:
    return f"catalog.access {path}"


def _is_over(entry: CallerEntry, now_s: float) -> bool:
    return entry.not_after is not None and entry.not_after <= now_s


def _new_entry(wanted: NewToken, now_s: float) -> CallerEntry:
    if not _NAME.fullmatch(wanted.name):
        raise ConfigError(f"--name is {wanted.name!r}; use 1 to 256 letters, digits and any of _ . : / @ -")
    if wanted.role not in ROLES:
        raise ConfigError(f"--role is {wanted.role!r}; use one of {', '.join(ROLES)}")
    if wanted.tenants and wanted.role != "router":
        raise ConfigError(f"--tenant is for routers; a caller of role {wanted.role} has none, so leave it out")
    for key, span_s in (("--expires", wanted.expires_s), ("--replace", wanted.replace_s)):
        if span_s is not None and not 0 <= span_s <= 1e9:
            raise ConfigError(f"{key} is {span_s:g}; give seconds, from 0 to 1000000000")
    not_after = None if wanted.expires_s is None else now_s + wanted.expires_s
    tenants = None if wanted.tenants is None else frozenset(wanted.tenants)
    return CallerEntry(wanted.name, cast(Role, wanted.role), tenants, not_after=not_after)


@contextmanager
def _alone(path: Path) -> Iterator[None]:
    """While nobody else adds to a file of this folder."""
    with ExitStack() as held:
        try:
            held.enter_context(alone(path.parent))
        except OSError as error:
            raise ConfigError(
                f"{_where(path)} cannot be written ({error.strerror}); choose another place for it"
            ) from None
        yield


def _parse(data: bytes, where: str) -> list[CallerEntry]:
    try:
        text = data.decode()
        tree = tomllib.loads(text)
    except (UnicodeDecodeError, tomllib.TOMLDecodeError, RecursionError) as error:
        raise ConfigError(f"{where} is not TOML ({error}); correct it") from None
    if text.startswith(_HEAD) and _END not in text:
        raise ConfigError(f"{where} is cut off: its last line, {_END.strip()!r}, is not there; put it back from a copy")
    unknown = sorted(set(tree) - set(_KINDS))
    if unknown:
        raise ConfigError(
            f"{where} has {unknown[0]!r}; write [[token]], [[certificate]] and [[nats]], and nothing else"
        )
    entries: list[CallerEntry] = []
    for kind in _KINDS:
        tables = tree.get(kind, [])
        if not isinstance(tables, list) or not all(isinstance(table, dict) for table in tables):
            raise ConfigError(f"{where}: {kind} is no list of tables; write [[{kind}]]")
        entries += [_entry(kind, table, f"{where}, {kind} {at}") for at, table in enumerate(tables, start=1)]
    for field, what in (("sha256", "token"), ("name", "certificate"), ("name", "nats")):
        seen = Counter(getattr(entry, field) for entry in entries if entry.kind == what)
        twice, count = max(seen.items(), key=lambda found: found[1], default=("", 0))
        if count > 1:
            raise ConfigError(f"{where} has one {what} twice ({field} {twice[:12]!r}); keep one of them")
    if not entries:
        raise ConfigError(f"{where} names nobody; add a token with: kvbm-catalog token, or take catalog.access away")
    return entries


def _entry(kind: str, table: Mapping[str, Any], where: str) -> CallerEntry:
    """Raises ConfigError."""
    known = {"name", "role", "tenants", "not_after"} | ({"sha256"} if kind == "token" else set())
    unknown = sorted(set(table) - known)
    if unknown:
        raise ConfigError(f"{where}: there is no entry {unknown[0]!r}; it has {', '.join(sorted(known))}")
    name, role, sha256 = table.get("name"), table.get("role"), table.get("sha256", "")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ConfigError(f"{where}: name is {name!r}; use 1 to 256 letters, digits and any of _ . : / @ -")
    if kind == "nats" and not is_caller(name):
        raise ConfigError(
            f'{where}: name is {name!r}, which cannot be part of a subject; use 1 to 128 letters, digits, "-" and "_"'
        )
    if role not in ROLES:
        raise ConfigError(f"{where} ({name}): role is {role!r}; use one of {', '.join(ROLES)}")
    if kind == "token" and (not isinstance(sha256, str) or not _SHA256.fullmatch(sha256)):
        raise ConfigError(f"{where} ({name}): sha256 is not 64 hex digits in lower case; write the token's SHA-256")
    if sha256 == _OF_NOTHING:
        raise ConfigError(
            f"{where} ({name}): sha256 is that of an empty token, which everybody has; write the token's SHA-256"
        )
    tenants = table.get("tenants")
    is_list = isinstance(tenants, list) and all(isinstance(one, str) for one in tenants)
    if (tenants is not None) if role != "router" else not (is_list or tenants == "all"):
        raise ConfigError(
            f'{where} ({name}): tenants is {tenants!r}; give a router a list of names, or "all", and others none'
        )
    until = table.get("not_after")
    if until is not None and (not isinstance(until, datetime.datetime) or until.tzinfo is None):
        raise ConfigError(
            f"{where} ({name}): not_after is {until!r}; write a time with its zone, as 2027-01-01T00:00:00Z"
        )
    allowed = frozenset(tenants) if isinstance(tenants, list) else None
    return CallerEntry(name, role, allowed, sha256, None if until is None else until.timestamp(), kind == "nats")


def _written(entry: CallerEntry) -> str:
    lines = [
        f"[[{entry.kind}]]",
        f"name = {toml_text(entry.name)}",
        f"role = {toml_text(entry.role)}",
    ]
    if entry.role == "router":
        allowed = toml_text("all") if entry.tenants is None else toml_texts(sorted(entry.tenants))
        lines.append(f"tenants = {allowed}")
    if entry.sha256:
        lines.append(f'sha256 = "{entry.sha256}"')
    if entry.not_after is not None:
        until = datetime.datetime.fromtimestamp(entry.not_after, datetime.UTC)
        lines.append(f"not_after = {until.strftime('%Y-%m-%dT%H:%M:%S')}Z")
    return "\n" + "\n".join(lines) + "\n"
