"""Who may do what on the stream: the server's permissions for each user, and the block of its configuration that says
so.

An instance may write its own subjects and no others; so may a janitor, which is an instance. The catalog makes the
streams, reads all, and writes only what it alone says. A user of replay reads events and changes nothing. An operator
writes what is to be erased. A router asks the catalog, under its own name. A replica of the catalog reads events and
heartbeats. None may delete or purge. Answers travel on inboxes of the user's own, so that nobody reads another's.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from enum import StrEnum
from typing import Any, NamedTuple

from kvbm.core.asks import ASKS_PREFIX, ask_subject
from kvbm.core.errors import ConfigError
from kvbm.streams.base import (
    ERASE_PREFIX,
    ERASED_PREFIX,
    EVENTS_PREFIX,
    PULSE_PREFIX,
    ROUTES_PREFIX,
    SAMPLES_PREFIX,
    SNAPSHOTS_PREFIX,
    cluster_filter,
    events_subject,
    fence_subject,
    instance_subject,
    pulse_subject,
)
from kvbm.streams.nats.connection import BORROWED_API, JS_API
from kvbm.streams.nats.credentials import INBOX
from kvbm.streams.nats.setup import ERASURES, PULSE, STREAM

ACCOUNT = "KVBM"  # whose the streams are


class Role(StrEnum):
    """What a user is. All but the catalog have names, and accounts of their own."""

    CATALOG = "catalog"
    INSTANCE = "instance"
    JANITOR = "janitor"
    REPLAY = "replay"
    OPERATOR = "operator"
    ROUTER = "router"
    REPLICA = "replica"


class ServerUser(NamedTuple):
    """A user of the server.

    Attributes:
        nkey: its public key (U…).
        name: of an instance or a janitor, its name in the cluster; of the catalog, None.
        role: None: the catalog's without a name, else an instance's.
        next_nkey: the key that is to replace the first one; both are permitted.
        account: its own on the server; "" for one named after it.
    """

    nkey: str
    name: str | None = None
    role: Role | None = None
    next_nkey: str = ""
    account: str = ""

    @property
    def kind(self) -> Role:
        """What it is."""
        return self.role or (Role.CATALOG if self.name is None else Role.INSTANCE)

    @property
    def stem(self) -> str:
        """Its name among those of all roles, as its file of keys has it."""
        return str(self.kind) if self.name is None else f"{self.kind}-{self.name}"


def instance_inbox(cluster: str, instance: str) -> str:
    """Where answers to an instance go. Raises ConfigError: an impossible name."""
    return instance_subject(f"{INBOX}.instance", cluster, instance)


def catalog_inbox(cluster: str | None) -> str:
    """Where answers to the catalog of a cluster, or of all, go. Raises ConfigError: an impossible name."""
    return cluster_filter(f"{INBOX}.catalog", cluster).removesuffix(".>")


def erase_subject(cluster: str | None) -> str:
    """Where it is written what is to be erased in a cluster, or in all. Raises ConfigError: an impossible name."""
    return f"{ERASE_PREFIX}.*" if cluster is None else cluster_filter(ERASE_PREFIX, cluster).removesuffix(".>")


def grant(cluster: str, role: Role, name: str = "") -> str:
    """What to do about a refusal, in words."""
    add = "" if role is Role.CATALOG else f" --{role} {name or 'NAME'}"
    return (
        f"print the accounts with `kvbm nats-permissions --cluster {cluster} --keys KEYS{add}`, with everybody else "
        "named too, and "
        "reload nats-server"
    )


def instance_permissions(cluster: str, instance: str) -> dict[str, Any]:
    """What the server should let an instance do, as nats-server's configuration has it.

    Raises ConfigError: an impossible name.
    """
    snapshots = instance_subject(SNAPSHOTS_PREFIX, cluster, instance)
    return {
        "publish": {"allow": [*_lent_to_instance(cluster, instance), f"{JS_API}.STREAM.INFO.{STREAM}"]},
        "subscribe": {"allow": [f"{instance_inbox(cluster, instance)}.>", snapshots]},
        "allow_responses": {"max": 1, "expires": "5s"},
    }


def _lent_to_instance(cluster: str, instance: str) -> list[str]:
    """The subjects of the account of the streams that an instance may send to, as it names them."""
    events, fence = events_subject(cluster, instance), fence_subject(cluster, instance)
    pulse = pulse_subject(cluster, instance)
    samples, erased = (instance_subject(prefix, cluster, instance) for prefix in (SAMPLES_PREFIX, ERASED_PREFIX))
    calls = [f"STREAM.INFO.{STREAM}", f"STREAM.INFO.{PULSE}", f"DIRECT.GET.{STREAM}.{events}"]
    calls += [f"DIRECT.GET.{STREAM}.{fence}", f"DIRECT.GET.{PULSE}.{pulse}"]
    calls += [f"DIRECT.GET.{ERASURES}.{erase_subject(cluster)}"]
    return [events, fence, pulse, samples, erased, *(f"{BORROWED_API}.{call}" for call in calls)]


def _lent_to_replay() -> list[str]:
    """So too, to a user who reads events. It is lent no consumers: who makes one says where it sends."""
    calls = (f"STREAM.INFO.{STREAM}", f"STREAM.INFO.{PULSE}", f"STREAM.MSG.GET.{STREAM}", _BATCHES)
    return [f"{BORROWED_API}.{call}" for call in calls]


def _lent_to_replica() -> list[str]:
    """So too, to a replica of the catalog: to what a user of replay is, and to heartbeats."""
    return [*_lent_to_replay(), f"{BORROWED_API}.STREAM.MSG.GET.{PULSE}", f"{BORROWED_API}.{_PULSE_BATCHES}"]


def _lent_to_router(cluster: str, name: str) -> list[str]:
    """So too, to a caller of the catalog."""
    return [ask_subject(cluster, name, "*")]


def _lent_to_operator(cluster: str) -> list[str]:
    """So too, to a user who says what is to be erased, erases the object pool, and reads how far everybody has come."""
    erased = cluster_filter(ERASED_PREFIX, cluster).removesuffix(">") + "*"
    calls = [f"STREAM.INFO.{stream}" for stream in (STREAM, PULSE, ERASURES)] + [f"STREAM.MSG.GET.{STREAM}"]
    calls += [f"DIRECT.GET.{ERASURES}.{subject}" for subject in (erase_subject(cluster), erased)]
    return [erase_subject(cluster), erased, *(f"{BORROWED_API}.{call}" for call in calls)]


# Each is answered by one message after another.
_BATCHES = f"DIRECT.GET.{STREAM}"
_PULSE_BATCHES = f"DIRECT.GET.{PULSE}"


def _true_subject(subject: str) -> str:
    """What an instance's subject is in the account of the streams: the server's own `$JS.API` hides one of that
    name.
    """
    return subject.replace(BORROWED_API, JS_API, 1) if subject.startswith(BORROWED_API) else subject


def catalog_permissions(cluster: str | None) -> dict[str, Any]:
    """What the server should let the catalog of a cluster, or of all, do. Raises ConfigError: an impossible name.

    It makes the streams, and readers of them. It has no business with events and fences, and may not write them; but
    who is in the account of the streams can have an answer stored under any subject, so its key is trusted with all of
    them. Its pulses go under a name that is new at each start, and a permission cannot say the beginning of a name: so
    it may write all pulses, and routes of all catalogs.
    """
    written = (SNAPSHOTS_PREFIX, PULSE_PREFIX, ERASED_PREFIX, ROUTES_PREFIX)
    allowed = [cluster_filter(prefix, cluster) for prefix in written]
    allowed += [erase_subject(cluster), f"{JS_API}.INFO"]
    for stream in (STREAM, PULSE, ERASURES):
        allowed += [f"{JS_API}.STREAM.{call}.{stream}" for call in ("INFO", "CREATE", "MSG.GET")]
        allowed += [f"{JS_API}.CONSUMER.CREATE.{stream}", f"{JS_API}.CONSUMER.MSG.NEXT.{stream}.>"]
        allowed += [f"{JS_API}.CONSUMER.DELETE.{stream}.>", f"{JS_API}.DIRECT.GET.{stream}.>"]
    heard = [cluster_filter(prefix, cluster) for prefix in (SAMPLES_PREFIX, ROUTES_PREFIX, ASKS_PREFIX)]
    return {
        "publish": {"allow": allowed},
        "subscribe": {"allow": [f"{catalog_inbox(cluster)}.>", *heard]},
        "allow_responses": {"max": 1, "expires": "60s"},  # to questions, on whatever inbox they name
    }


class _Rights(NamedTuple):
    """What a user with an account of its own may do.

    Attributes:
        lent: subjects of the streams' account that it may send to, as it names them.
        answered: subjects that the streams' account may ask it on.
    """

    permissions: dict[str, Any]
    lent: list[str]
    answered: list[str]


def _rights(cluster: str, user: ServerUser) -> _Rights:
    name = user.name or ""
    if user.kind in (Role.INSTANCE, Role.JANITOR):
        lent, asked = _lent_to_instance(cluster, name), instance_subject(SNAPSHOTS_PREFIX, cluster, name)
        return _Rights(instance_permissions(cluster, name), lent, [asked])
    instance_subject(EVENTS_PREFIX, cluster, name)  # refuses an impossible name
    own = [f"{JS_API}.STREAM.INFO.{STREAM}"]
    match user.kind:
        case Role.ROUTER:
            lent, own = _lent_to_router(cluster, name), []
        case Role.REPLAY:
            lent = _lent_to_replay()
        case Role.REPLICA:
            lent = _lent_to_replica()
        case _:
            lent = _lent_to_operator(cluster)
    permissions = {
        "publish": {"allow": [*lent, *own]},
        "subscribe": {"allow": [f"{INBOX}.>"]},  # nobody else is in its account
    }
    return _Rights(permissions, lent, [])


def server_config(cluster: str, users: Sequence[ServerUser], spares: Sequence[str] = ()) -> str:
    """The block `accounts` of nats-server's configuration: the users of one cluster, and nobody else.

    The streams belong to the catalog's account. Everybody else has an account of its own, for a server answers on
    whatever subject it is asked to: in one account an instance could have an answer, and with it a frame of its choice,
    stored as another's. Across accounts an answer finds its asker alone.

    Args:
        spares: accounts without users. nats-server, when it reloads its configuration, lends subjects to an account
            that it knew before, and forgets to lend them to one that is new. So who is added gets an account that was
            spare until then.
    Raises: ConfigError: an impossible name, or a user twice.
    """
    _check_once(users)
    services: dict[str, list[str]] = {}  # what the streams' account lends, and to which accounts
    imports: list[dict[str, Any]] = []
    accounts: dict[str, Any] = {}
    for user in users:
        if user.kind is Role.CATALOG:
            continue
        account = user.account or f"{ACCOUNT}-{user.stem}"
        rights = _rights(cluster, user)
        for subject in rights.lent:
            services.setdefault(_true_subject(subject), []).append(account)
        imports += [{"service": {"account": account, "subject": asked}} for asked in rights.answered]
        accounts[account] = {
            "users": _with_keys(user, rights.permissions),
            "imports": [
                {"service": {"account": ACCOUNT, "subject": _true_subject(subject)}, "to": subject}
                for subject in rights.lent
            ],
            "exports": [{"service": asked, "accounts": [ACCOUNT]} for asked in rights.answered],
        }
    catalogs = [
        entry for user in users if user.kind is Role.CATALOG for entry in _with_keys(user, catalog_permissions(cluster))
    ]
    streamed = {f"{JS_API}.{_BATCHES}", f"{JS_API}.{_PULSE_BATCHES}"}
    exports: list[dict[str, Any]] = [
        {"service": subject, "accounts": names} | ({"response": "stream"} if subject in streamed else {})
        for subject, names in services.items()
    ]
    main = {"jetstream": "enabled", "users": catalogs, "exports": exports, "imports": imports}
    all_of_them = {ACCOUNT: main} | accounts | {name: {} for name in spares}
    return f"accounts {json.dumps(all_of_them, indent=2, ensure_ascii=False)}\n"


def _check_once(users: Sequence[ServerUser]) -> None:
    """Raises ConfigError: an instance or another user is there twice."""
    instances = [user.name for user in users if user.kind in (Role.INSTANCE, Role.JANITOR)]
    if len(set(instances)) != len(instances):
        raise ConfigError("an instance is named twice; each has one key, and a janitor is an instance")
    stems = [user.stem for user in users if user.kind is not Role.CATALOG]
    for stem in stems:
        if stems.count(stem) > 1:
            raise ConfigError(f"{stem.replace('-', ' ', 1)} is named twice; each has one key")


def _with_keys(user: ServerUser, permissions: dict[str, Any]) -> list[dict[str, Any]]:
    keys = [user.nkey, *([user.next_nkey] if user.next_nkey else [])]
    return [{"nkey": key, "permissions": permissions} for key in keys]
