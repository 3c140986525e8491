"""The keys of tenants whose blocks are encrypted in objects and in NVME: a TOML file, or what a command prints.

    [tenants.acme]
    names = "<32 bytes, base64>"        # makes names; never changed, or everything put before is lost
    current = "2026-11"                 # seals what is put
    keys.2026-10 = "<32 bytes, base64>" # each opens what it has sealed
    keys.2026-11 = "<32 bytes, base64>"

Blocks of namespaces without a tenant have the keys of [tenants.""]. To rotate: add a key everywhere, then make it
current, then take the old one away once nothing it has sealed is wanted any more. `kvbm keys` writes such files.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import os
import secrets
import selectors
import shlex
import signal
import subprocess
import time
import tomllib
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from kvbm.core.errors import ConfigError
from kvbm.core.quoting import toml_text
from kvbm.files import SMALL_BYTES, alone, read_small, replace_file, settled_stamp, stranger

KEY_BYTES = 32
KEY_ID_BYTES = 8
TAG_BYTES = 8
_COMMAND_WAIT_S = 10.0
_PIECE_BYTES = 64 << 10


class TenantKeys(NamedTuple):
    """What seals and opens the objects of one tenant.

    Attributes:
        names: key of names.
        current: id of the key that seals.
        keys: by id, 8 bytes made of the key itself.
    """

    tenant: str
    names: bytes
    current: bytes
    keys: Mapping[bytes, bytes]

    @property
    def tag(self) -> str:
        """What stands for the tenant in names, 16 hex digits that tell a stranger nothing."""
        return digest(self.names, b"kvbm.tenant.v1", self.tenant.encode())[:TAG_BYTES].hex()


class KeySource(NamedTuple):
    """Where keys come from.

    Attributes:
        load: reads them. Raises ConfigError.
        changed: something that differs when a new read may find other keys; None when only a read can tell.
    """

    words: str
    load: Callable[[], dict[str, TenantKeys]]
    changed: Callable[[], object]


def digest(key: bytes, purpose: bytes, *parts: bytes) -> bytes:
    """HMAC-SHA-256 of parts, for one purpose."""
    return hmac.digest(key, b"\0".join((purpose, *parts)), hashlib.sha256)


def keys_of_file(path: str) -> KeySource:
    """Keys that stand in a file; it may be replaced while we run."""
    where = f"pools.object.keys {path}"

    def load() -> dict[str, TenantKeys]:
        try:
            text = read_small(Path(path)).decode("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            why = error.strerror if isinstance(error, OSError) else "no text"
            raise ConfigError(
                f"{where} cannot be read ({why}); make one with: kvbm keys {path} --tenant NAME"
            ) from None
        return parse_keys(text, where)

    return KeySource(where, load, lambda: settled_stamp(path))


def keys_of_command(command: str, wait_s: float = _COMMAND_WAIT_S) -> KeySource:
    """Keys that a command prints, as the file has them. It gets no shell and no input, and `wait_s` at most."""
    where = f"pools.object.keys_command {command!r}"

    def load() -> dict[str, TenantKeys]:
        try:
            status, printed, last = _run(shlex.split(command), wait_s)  # the operator's own words, from the settings
        except TimeoutError:
            raise ConfigError(
                f"{where} has not ended within {wait_s:g} s; make it faster, or use pools.object.keys"
            ) from None
        except (OSError, ValueError, IndexError) as error:
            raise ConfigError(f"{where} cannot be run ({error}); give a program with its arguments") from None
        if len(printed) > SMALL_BYTES:
            raise ConfigError(f"{where} prints more than {SMALL_BYTES} bytes and was ended; run it by hand")
        if status:
            said = last.decode(errors="replace").strip().splitlines()
            raise ConfigError(
                f"{where} ended with status {status} ({said[-1] if said else 'without a word'}); run it by hand"
            )
        return parse_keys(printed.decode(errors="replace"), where)

    return KeySource(where, load, lambda: None)


def _run(command: list[str], wait_s: float) -> tuple[int, bytes, bytes]:
    """Status of a program, what it printed, and the end of its complaints.

    One that prints more than is read is ended, and so is whatever it has started. Raises OSError, ValueError,
    IndexError: it cannot be run. TimeoutError.
    """
    ends_s = time.monotonic() + wait_s
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
    )
    assert process.stdout is not None and process.stderr is not None
    printed, last = bytearray(), bytearray()
    with process.stdout as out, process.stderr as complaints, selectors.DefaultSelector() as selector:
        selector.register(out, selectors.EVENT_READ)
        selector.register(complaints, selectors.EVENT_READ)
        try:
            while selector.get_map() and len(printed) <= SMALL_BYTES:
                ready = selector.select(max(0.0, ends_s - time.monotonic()))
                if not ready or time.monotonic() >= ends_s:
                    raise TimeoutError
                for key, _ in ready:
                    data = os.read(key.fd, _PIECE_BYTES)
                    if not data:
                        selector.unregister(key.fileobj)
                    elif key.fileobj is out:
                        printed += data
                    else:
                        last = (last + data)[-_PIECE_BYTES:]
            if len(printed) <= SMALL_BYTES:
                try:
                    process.wait(max(0.0, ends_s - time.monotonic()))
                except subprocess.TimeoutExpired:
                    raise TimeoutError from None
        finally:
            if process.poll() is None:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    return process.returncode, bytes(printed), bytes(last)


def parse_keys(text: str, where: str) -> dict[str, TenantKeys]:
    """Keys by tenant. No message shows a key.

    Raises: ConfigError: which tenant, which entry, and what to write.
    """
    try:
        tree = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise ConfigError(f"{where} is not TOML ({error}); correct it") from None
    tenants = tree.get("tenants")
    if not isinstance(tenants, dict) or not tenants or set(tree) != {"tenants"}:
        raise ConfigError(f"{where} has no keys; write a table [tenants.NAME] for each tenant, and nothing else")
    return {tenant: _tenant_keys(tenant, table, where) for tenant, table in tenants.items()}


def new_key() -> str:
    """A key as a file has it."""
    return base64.b64encode(secrets.token_bytes(KEY_BYTES)).decode()


def add_key(path: Path, tenant: str, name: str) -> None:
    """Give a tenant a new current key in a file, which is made if it is not there, and readable to its owner alone.

    Raises: ConfigError: the file cannot be used, it is another user's, or the tenant has a key of this name.
    """
    try:
        with alone(path.parent):
            if path.exists() and (user := stranger(path.stat())) is not None:
                raise ConfigError(
                    f"{path} belongs to user {user}, who would have the new key; run this as that user, or chown the "
                    "file"
                )
            replace_file(path, _with_key(path, tenant, name).encode())
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be used ({error}); give a file of keys, or one that is not there") from None


def _with_key(path: Path, tenant: str, name: str) -> str:
    """The text of a file with one key more. Raises OSError, UnicodeDecodeError, ConfigError."""
    tree: dict[str, Any] = {"tenants": {}}
    if path.exists() and (text := read_small(path).decode("utf-8")):
        parse_keys(text, str(path))
        tree = tomllib.loads(text)
    table = tree["tenants"].setdefault(tenant, {"names": new_key(), "keys": {}})
    if name in table["keys"]:
        raise ConfigError(f"{path}: tenant {tenant!r} has a key {name!r} already; give another --name")
    table["current"] = name
    table["keys"][name] = new_key()
    return _written(tree["tenants"])


def _tenant_keys(tenant: str, table: object, where: str) -> TenantKeys:
    """Raises ConfigError."""
    of = f"{where}, tenant {tenant!r}"
    if not isinstance(table, dict) or not isinstance(table.get("keys"), dict) or not table["keys"]:
        raise ConfigError(f"{of}: it has no keys; write keys.NAME = a key of {KEY_BYTES} bytes in base64")
    unknown = sorted(set(table) - {"names", "current", "keys"})
    if unknown:
        raise ConfigError(f"{of}: there is no entry {unknown[0]!r}; it has names, current and keys")
    keys = {name: _key(key, f"{of}: keys.{name}") for name, key in table["keys"].items()}
    current = table.get("current")
    if current not in keys:
        raise ConfigError(f"{of}: current is {current!r}; write the name of one of its keys: {', '.join(keys)}")
    names = _key(table.get("names"), f"{of}: names")
    return TenantKeys(tenant, names, _key_id(keys[current]), {_key_id(key): key for key in keys.values()})


def _key(text: object, where: str) -> bytes:
    """Raises ConfigError."""
    try:
        key = base64.b64decode(text, validate=True) if isinstance(text, str) else b""
    except (binascii.Error, ValueError):
        key = b""
    if len(key) != KEY_BYTES:
        raise ConfigError(
            f"{where} is no key of {KEY_BYTES} bytes in base64; write one, as `openssl rand -base64 32` prints it"
        )
    return key


def _key_id(key: bytes) -> bytes:
    """What an envelope calls a key: made of the key, so that two keys never share it and its name can be changed."""
    return digest(key, b"kvbm.key.v1")[:KEY_ID_BYTES]


def _written(tenants: Mapping[str, Mapping[str, Any]]) -> str:
    lines = []
    for tenant, table in tenants.items():
        lines += [
            f"[tenants.{toml_text(tenant)}]",
            f"names = {toml_text(table['names'])}",
            f"current = {toml_text(table['current'])}",
        ]
        lines += [f"keys.{toml_text(name)} = {toml_text(key)}" for name, key in table["keys"].items()]
        lines += [""]
    return "\n".join(lines)
