"""The secrets of tenants: those of the settings, and those of a file, which is read anew when it changes.

    [tenants.acme]
    secret = "…"
    next = "…"                          # takes its place
    next_from = 2026-12-01T04:00:00Z    # at this moment, everywhere

At any moment a file names one secret for a tenant. Engines, routers and catalogs that have it before `next_from` change
over at that moment, as near to each other as their clocks are.
"""

from __future__ import annotations

import time
import tomllib
from collections.abc import Callable, Iterator, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

from kvbm.core.errors import ConfigError
from kvbm.files import read_small, settled_stamp, stamp
from kvbm.safe_log import SafeLog

log = SafeLog()

_LOOK_S = 1.0  # between two looks at the file
_FIELDS = {"secret", "next", "next_from"}


class _Entry(NamedTuple):
    """`next_from_s`: Unix time from which `next` counts."""

    secret: str
    next: str = ""
    next_from_s: float = float("inf")


class TenantSecrets(Mapping[str, str]):
    """Tenant → the secret that counts now. Any thread.

    Args:
        fixed: those of the settings; the file's come first.
        path: the file; "" for none.
        now_s: Unix time. clock: seconds that only grow.
    Raises: ConfigError: the file cannot be used. Later on such a file leaves the secrets as they are, with one warning;
        so does one
    without a tenant, for that tenant.
    """

    def __init__(
        self,
        fixed: Mapping[str, str],
        path: str = "",
        now_s: Callable[[], float] = time.time,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._fixed = {tenant: _Entry(secret) for tenant, secret in fixed.items()}
        self._path, self._now_s, self._clock = path, now_s, clock
        self._seen: object = None  # stamp of the file that was read; the next look tries one again that could not be
        self._told: object = None
        self._looked_s = float("-inf")
        self._entries = self._fixed
        if path:
            self._seen, self._looked_s = settled_stamp(path), clock()
            self._entries = self._fixed | read_secrets(path)

    def take(self, other: TenantSecrets) -> bool:
        """From now on the secrets are those of another, which has just been made. Whether any differs.

        A tenant that it does not name keeps its secret.
        """
        before = self._entries
        self._fixed, self._path, self._seen = other._fixed, other._path, other._seen
        self._told, self._looked_s = None, other._looked_s
        self._keep_missing(before, other._entries)
        return self._entries != before

    def __getitem__(self, tenant: str) -> str:
        self._look()
        entry = self._entries[tenant]
        return entry.next if self._now_s() >= entry.next_from_s else entry.secret

    def __iter__(self) -> Iterator[str]:
        self._look()
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def _look(self) -> None:
        if not self._path or self._clock() - self._looked_s < _LOOK_S:
            return
        self._looked_s = self._clock()
        seen = settled_stamp(self._path)
        if seen == self._seen:
            return
        try:
            found = self._fixed | read_secrets(self._path)
        except ConfigError as error:
            if self._told != (told := (stamp(self._path), str(error))):
                self._told = told
                log.warning("secrets.unread", why=str(error), effect="the secrets stay as they were")
            return
        self._seen, self._told = seen, None
        self._keep_missing(self._entries, found)
        log.info("secrets.read", tenants=len(self._entries))

    def _keep_missing(self, before: Mapping[str, _Entry], found: Mapping[str, _Entry]) -> None:
        missing = before.keys() - found.keys()
        if missing:  # half a file, perhaps; without a secret anybody could test the tenant's prompts
            log.warning(
                "secrets.missing",
                tenants=sorted(missing)[:5],
                effect="their secrets stay as they were until a restart",
                remedy="name them in the file, or restart without them",
            )
        self._entries = {**before, **found}


def read_secrets(path: str) -> dict[str, _Entry]:
    """The secrets of a file. No message shows one. Raises ConfigError: which tenant, which entry, and what to write."""
    where = f"catalog.tenant_secrets_file {path}"
    try:
        tree = tomllib.loads(read_small(Path(path), 16 << 20).decode("utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError, RecursionError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is no TOML"
        raise ConfigError(f"{where} cannot be read ({why}); write a table [tenants.NAME] with secret = …") from None
    tenants = tree.get("tenants")
    if not isinstance(tenants, dict) or set(tree) != {"tenants"}:
        raise ConfigError(f"{where} has no secrets; write a table [tenants.NAME] for each tenant, and nothing else")
    return {tenant: _entry(table, f"{where}, tenant {tenant!r}") for tenant, table in tenants.items()}


def _entry(table: Any, of: str) -> _Entry:
    if not isinstance(table, dict) or not set(table) <= _FIELDS or not _is_text(table.get("secret")):
        raise ConfigError(
            f"{of}: write secret = a text that is not empty, and with it next and next_from where it is to change"
        )
    if ("next" in table) != ("next_from" in table):
        raise ConfigError(f"{of}: write next and next_from together: the secret to come, and from when on it counts")
    if "next" not in table:
        return _Entry(table["secret"])
    begins = table["next_from"]
    if not _is_text(table["next"]) or not isinstance(begins, datetime) or begins.tzinfo is None:
        raise ConfigError(
            f"{of}: write next = a text that is not empty, and next_from = a time with its zone, as "
            "2026-12-01T04:00:00Z"
        )
    return _Entry(table["secret"], table["next"], begins.timestamp())


def _is_text(value: object) -> bool:
    """Whether it is a text with something in it."""
    return isinstance(value, str) and value != ""
