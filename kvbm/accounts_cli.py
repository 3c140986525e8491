"""`kvbm nats-permissions` and `kvbm keys`: accounts of the stream, and tenants' keys."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from kvbm.command_line import Commands, add_command, add_json, count_between, seconds, write_out
from kvbm.terminal import as_json, say


def add_permissions(commands: Commands) -> None:
    """The command, which `print_permissions` does."""
    permissions = add_command(
        commands,
        "nats-permissions",
        "print the accounts of the catalog and everybody named for nats-server's configuration; makes keys where there "
        "are none",
        "kvbm nats-permissions --cluster prod --keys keys --instance gpu-0 --instance gpu-1 --janitor gc-0 --out "
        "accounts.conf",
    )
    permissions.add_argument(
        "--cluster", default="local", metavar="NAME", help="its name, as instance.cluster (default local)"
    )
    permissions.add_argument(
        "--keys",
        type=Path,
        required=True,
        metavar="FOLDER",
        help="folder of the seeds, each the nats.nkey_seed of its owner: catalog.nk, instance-NAME.nk, janitor-NAME.nk "
        "and so on. "
        "Keep it: it says which account is whose",
    )
    for role, words in (
        ("instance", "an instance's name, as instance.id"),
        ("janitor", "the name of a `kvbm-catalog gc`, as gc.id"),
        ("replay", "a name for somebody who reads with kvbm-replay"),
        ("operator", "a name for somebody who erases"),
        ("replica", "a name for a replica of the catalog, in a router's process"),
        ("router", "a caller of the catalog over NATS, as [[nats]] of the file of callers names it"),
    ):
        permissions.add_argument(
            f"--{role}", action="append", default=[], metavar="NAME", help=f"{words}; may be given several times"
        )
    permissions.add_argument(
        "--out",
        type=Path,
        metavar="FILE",
        help="put them into this file in one step, instead of printing them; an error leaves the file as it was",
    )
    permissions.add_argument(
        "--spare",
        type=_small_count,
        default=8,
        metavar="N",
        help="accounts for users to come: nats-server lends nothing to an account that a reload makes (default 8)",
    )
    permissions.add_argument(
        "--renew",
        action="append",
        default=[],
        metavar="USER",
        help="make a second key, such as instance-gpu-0.next.nk for instance-gpu-0; the server permits both",
    )
    permissions.add_argument(
        "--retire", action="append", default=[], metavar="USER", help="the second key replaces the first one"
    )
    permissions.add_argument(
        "--overlap",
        type=seconds,
        default=86400.0,
        metavar="S",
        help="for how long a user is meant to have two keys; it is said until when (default 86400)",
    )


def add_keys(commands: Commands) -> None:
    """The command, which `make_key` does."""
    keys = add_command(
        commands,
        "keys",
        "give a tenant a new current key in a file of keys, as pools.object.keys; the file is made if it is not there",
        "kvbm keys keys.toml --tenant acme --name 2026-11",
    )
    keys.add_argument(
        "file",
        type=Path,
        metavar="FILE",
        help="readable to its owner alone, who must be you; keep a copy where keys are kept",
    )
    keys.add_argument(
        "--tenant", default="", metavar="NAME", help="whose objects; without it, those of namespaces without a tenant"
    )
    keys.add_argument(
        "--name",
        default="1",
        metavar="NAME",
        help="of the new key; older ones stay, and open what they sealed (default 1)",
    )
    add_json(keys)


def make_key(arguments: argparse.Namespace) -> int:
    """`kvbm keys`."""
    from kvbm.pools.tenant_keys import add_key

    add_key(arguments.file, arguments.tenant, arguments.name)
    made = {"file": str(arguments.file), "tenant": arguments.tenant, "key": arguments.name}
    words = f"tenant {arguments.tenant!r} has a new current key {arguments.name!r} in {arguments.file}"
    say(as_json(made) if arguments.json else words)
    return 0


def print_permissions(arguments: argparse.Namespace) -> int:
    """`kvbm nats-permissions`."""
    from kvbm.streams.nats.key_folder import KeyChange, print_accounts
    from kvbm.streams.nats.permissions import Role

    named = (Role.INSTANCE, Role.JANITOR, Role.REPLAY, Role.OPERATOR, Role.ROUTER, Role.REPLICA)
    wanted = [(role, name) for role in named for name in getattr(arguments, str(role))]
    change = KeyChange(arguments.renew, arguments.retire, arguments.overlap, arguments.spare)

    def put(text: str) -> None:
        if arguments.out is None:
            say(*text.removesuffix("\n").split("\n"))
        else:
            write_out(arguments.out, text, is_secret=False)  # nats-server may run as another user

    printed = print_accounts(arguments.keys, arguments.cluster, wanted, change, time.time(), put)
    for remark in printed.remarks:
        say(f"kvbm: {remark}", to=sys.stderr)
    return 0


def _small_count(text: str) -> int:
    return count_between(text, 0, 1000)
