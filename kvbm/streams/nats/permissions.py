"""Who may do what on the stream: the server's permissions for each user, and the block of its configuration that says so.

An instance may write its own subjects and no others; the catalog makes the streams, reads all, and writes only what it alone
says. Neither may delete or purge. Answers travel on inboxes of the user's own, so that nobody reads another's.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, NamedTuple

from kvbm.core.errors import ConfigError
from kvbm.streams.base import (
    ERASE_PREFIX,
    ERASED_PREFIX,
    EVENTS_PREFIX,
    FENCE_PREFIX,
    PULSE_PREFIX,
    SAMPLES_PREFIX,
    SNAPSHOTS_PREFIX,
    cluster_filter,
    instance_subject,
)
from kvbm.streams.nats.connection import BORROWED_API, JS_API
from kvbm.streams.nats.credentials import INBOX
from kvbm.streams.nats.setup import ERASURES, PULSE, STREAM

ACCOUNT = "KVBM"  # whose the streams are


def instance_inbox(cluster: str, instance: str) -> str:
    """Where answers to an instance go. Raises ConfigError: an impossible name."""
    return instance_subject(f"{INBOX}.instance", cluster, instance)


def catalog_inbox(cluster: str | None) -> str:
    """Where answers to the catalog of a cluster, or of all, go. Raises ConfigError: an impossible name."""
    return cluster_filter(f"{INBOX}.catalog", cluster).removesuffix(".>")


def instance_permissions(cluster: str, instance: str) -> dict[str, Any]:
    """What the server should let an instance do, as nats-server's configuration has it. Raises ConfigError: an impossible name."""
    snapshots = instance_subject(SNAPSHOTS_PREFIX, cluster, instance)
    return {
        "publish": {"allow": [*_lent_to_instance(cluster, instance), f"{JS_API}.STREAM.INFO.{STREAM}"]},
        "subscribe": {"allow": [f"{instance_inbox(cluster, instance)}.>", snapshots]},
        "allow_responses": {"max": 1, "expires": "5s"},
    }


def _lent_to_instance(cluster: str, instance: str) -> list[str]:
    """The subjects of the account of the streams that an instance may send to, as it names them."""
    events, fence, pulse, samples = (
        instance_subject(prefix, cluster, instance)
        for prefix in (EVENTS_PREFIX, FENCE_PREFIX, PULSE_PREFIX, SAMPLES_PREFIX)
    )
    calls = [f"STREAM.INFO.{STREAM}", f"STREAM.INFO.{PULSE}", f"DIRECT.GET.{STREAM}.{events}"]
    calls += [f"DIRECT.GET.{STREAM}.{fence}", f"DIRECT.GET.{PULSE}.{pulse}"]
    calls += [f"DIRECT.GET.{ERASURES}.{_erasures_subject(cluster)}"]
    erased = instance_subject(ERASED_PREFIX, cluster, instance)
    return [events, fence, pulse, samples, erased, *(f"{BORROWED_API}.{call}" for call in calls)]


def _erasures_subject(cluster: str | None) -> str:
    """Where the record of erasures of a cluster, or of all, lies."""
    return f"{ERASE_PREFIX}.*" if cluster is None else cluster_filter(ERASE_PREFIX, cluster).removesuffix(".>")


def _true_subject(subject: str) -> str:
    """What an instance's subject is in the account of the streams: the server's own `$JS.API` hides one of that name."""
    return subject.replace(BORROWED_API, JS_API, 1) if subject.startswith(BORROWED_API) else subject


def catalog_permissions(cluster: str | None) -> dict[str, Any]:
    """What the server should let the catalog of a cluster, or of all, do. Raises ConfigError: an impossible name.

    It makes both streams, and readers of them. It may not write events or fences. Its pulses go under a name that is new at each
    start, and a permission cannot say the beginning of a name: so it may write all pulses.
    """
    allowed = [cluster_filter(prefix, cluster) for prefix in (SNAPSHOTS_PREFIX, PULSE_PREFIX, ERASED_PREFIX)]
    allowed.append(_erasures_subject(cluster))
    for stream in (STREAM, PULSE, ERASURES):
        allowed += [f"{JS_API}.STREAM.{call}.{stream}" for call in ("INFO", "CREATE", "MSG.GET")]
        allowed += [f"{JS_API}.CONSUMER.CREATE.{stream}", f"{JS_API}.CONSUMER.MSG.NEXT.{stream}.>"]
        allowed += [f"{JS_API}.CONSUMER.DELETE.{stream}.>", f"{JS_API}.DIRECT.GET.{stream}.>"]
    return {
        "publish": {"allow": allowed},
        "subscribe": {"allow": [f"{catalog_inbox(cluster)}.>", cluster_filter(SAMPLES_PREFIX, cluster)]},
    }


class ServerUser(NamedTuple):
    """A user of the server.

    Attributes:
        nkey: its public key (U…).
        instance: None for the catalog.
    """

    nkey: str
    instance: str | None = None


def server_config(cluster: str, users: Sequence[ServerUser]) -> str:
    """The block `accounts` of nats-server's configuration: the users of one cluster, and nobody else.

    The streams belong to the catalog's account. Each instance has an account of its own, for a server answers on whatever
    subject it is asked to: in one account an instance could have an answer, and with it a frame of its choice, stored as
    another's. Across accounts an answer finds its asker alone.

    Raises: ConfigError: an impossible name, or an instance twice.
    """
    instances = [user for user in users if user.instance is not None]
    if len({user.instance for user in instances}) != len(instances):
        raise ConfigError("an instance is named twice; each has one key")
    exports: list[dict[str, Any]] = []
    imports: list[dict[str, Any]] = []
    accounts: dict[str, Any] = {}
    for user in instances:
        assert user.instance is not None
        account = f"KVBM-{user.instance}"
        permissions = instance_permissions(cluster, user.instance)
        offered = _lent_to_instance(cluster, user.instance)
        asked = instance_subject(SNAPSHOTS_PREFIX, cluster, user.instance)
        exports += [{"service": _true_subject(subject), "accounts": [account]} for subject in offered]
        imports.append({"service": {"account": account, "subject": asked}})
        accounts[account] = {
            "users": [{"nkey": user.nkey, "permissions": permissions}],
            "imports": [
                {"service": {"account": ACCOUNT, "subject": _true_subject(subject)}, "to": subject}
                for subject in offered
            ],
            "exports": [{"service": asked, "accounts": [ACCOUNT]}],
        }
    catalogs = [
        {"nkey": user.nkey, "permissions": catalog_permissions(cluster)} for user in users if user.instance is None
    ]
    main = {"jetstream": "enabled", "users": catalogs, "exports": exports, "imports": imports}
    return f"accounts {json.dumps({ACCOUNT: main} | accounts, indent=2, ensure_ascii=False)}\n"
