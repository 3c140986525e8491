"""Objects that only a tenant's keys open, and names that tell a stranger nothing.

A sealed object is, in bytes:

    at        bytes  field
     0            4  magic: "KVBE"
     4            2  version: 1, little-endian
     6            2  zero
     8            8  key id, as tenant_keys.py makes it
    16           12  nonce of the header, random
    28           12  nonce of the body, random
    40       h + 16  the object's header (header.py), AES-256-GCM, its tag behind it
    56 + h   b + 16  the object's encoded blocks, AES-256-GCM, their tag behind them

What both parts are authenticated with is the first 40 bytes and the object's name, so that parts of two objects do not
fit together, and an object does not fit another's name. The header can be opened without the body.

An object is named <k>/e/<tag of the tenant>/<HMAC-SHA-256 of namespace and hash>, under the tenant's key of names: who
lists the store sees how many objects a tenant has and how large they are, and neither which tenant nor which blocks.

A key seals 2**31 objects at most: beyond, random nonces may meet (NIST SP 800-38D, 8.3). At 4 MiB that is 8 PiB.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from kvbm.core.errors import ConfigError, MissingExtraError
from kvbm.core.ids import Namespace, NamespaceId
from kvbm.core.quoting import toml_text
from kvbm.pools.object.envelope import ObjectEnvelope, newer_object
from kvbm.pools.stores.base import Body, Refusal, StoreTrouble
from kvbm.pools.tenant_keys import KEY_ID_BYTES, KeySource, TenantKeys, digest

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

_MAGIC, _VERSION = b"KVBE", 1
_BEGIN = _MAGIC + _VERSION.to_bytes(2, "little") + bytes(2)
_NONCE_BYTES = 12
_TAG_BYTES = 16
_HEADER_NONCE = len(_BEGIN) + KEY_ID_BYTES
_BODY_NONCE = _HEADER_NONCE + _NONCE_BYTES
ENVELOPE_BYTES = _BODY_NONCE + _NONCE_BYTES
SEALED_FOLDER = "e"
_COMMAND_EVERY_S = 300.0  # how often a command that prints keys is asked again
_LACKING_S = 20.0  # and after an object needed a key that is not here


class TenantSealing:
    """Seals and opens the objects of one tenant, a `ObjectEnvelope`. Any thread."""

    extra_bytes = ENVELOPE_BYTES + 2 * _TAG_BYTES
    is_plain = False

    def __init__(
        self, keys: TenantKeys, folder: str, header_bytes: int, aead: _Aead, lacks: Callable[[bytes], Refusal]
    ) -> None:
        """Args:
        folder: of sealed objects.
        lacks: what is said of an object that was sealed with a key of another id.
        """
        self.lead_bytes = ENVELOPE_BYTES + header_bytes + _TAG_BYTES
        self._names_key = keys.names
        self._folder = f"{folder}/{keys.tag}/"
        self._current = keys.current
        self._ciphers = {key_id: aead.cipher(key) for key_id, key in keys.keys.items()}
        self._invalid = aead.invalid
        self._lacks = lacks

    def names(self, namespace: NamespaceId, hashes: Sequence[bytes]) -> list[str]:
        """As `ObjectEnvelope.names`."""
        return [
            self._folder + digest(self._names_key, b"kvbm.name.v1", namespace + block_hash).hex()
            for block_hash in hashes
        ]

    def wrap(self, name: str, header: np.ndarray, blocks: np.ndarray) -> memoryview:
        """As `ObjectEnvelope.wrap`, under the current key."""
        cipher = self._ciphers[self._current]
        begin = _BEGIN + self._current + os.urandom(2 * _NONCE_BYTES)
        bound = begin + name.encode()
        sealed = np.empty(self.lead_bytes + len(blocks) + _TAG_BYTES, dtype=np.uint8)
        sealed[:ENVELOPE_BYTES] = np.frombuffer(begin, dtype=np.uint8)
        lead = sealed[ENVELOPE_BYTES : self.lead_bytes]
        cipher.encrypt_into(begin[_HEADER_NONCE:_BODY_NONCE], header.data, bound, lead.data)
        cipher.encrypt_into(begin[_BODY_NONCE:], blocks.data, bound, sealed[self.lead_bytes :].data)
        return sealed.data

    def open_header(self, name: str, body: Body) -> bytes | Refusal:
        """As `ObjectEnvelope.open_header`."""
        lead = memoryview(body)[: self.lead_bytes]
        if len(lead) < self.lead_bytes:
            return b""
        version = int.from_bytes(lead[len(_MAGIC) : len(_MAGIC) + 2], "little")
        if bytes(lead[: len(_MAGIC)]) == _MAGIC and version > _VERSION:
            of_this = _BEGIN + bytes(lead[len(_BEGIN) :])  # opens where damage has changed the version
            opened = self.open_header(name, of_this)
            return b"" if isinstance(opened, bytes) and opened else newer_object(name, version, _VERSION)
        if bytes(lead[: len(_BEGIN)]) != _BEGIN:
            return b""
        key_id = bytes(lead[len(_BEGIN) : _HEADER_NONCE])
        cipher = self._ciphers.get(key_id)
        if cipher is None:
            return self._lacks(key_id)
        try:
            return cipher.decrypt(bytes(lead[_HEADER_NONCE:_BODY_NONCE]), lead[ENVELOPE_BYTES:], _bound(name, lead))
        except self._invalid:
            return b""

    def open_blocks(self, name: str, body: Body) -> np.ndarray | None:
        """As `ObjectEnvelope.open_blocks`."""
        lead = memoryview(body)
        room = len(lead) - self.lead_bytes - _TAG_BYTES
        if room < 0:
            return None
        blocks = np.empty(room, dtype=np.uint8)
        cipher = self._ciphers[bytes(lead[len(_BEGIN) : _HEADER_NONCE])]
        nonce = bytes(lead[_BODY_NONCE:ENVELOPE_BYTES])
        try:
            cipher.decrypt_into(nonce, lead[self.lead_bytes :], _bound(name, lead), blocks.data)
        except self._invalid:
            return None
        return blocks


class Sealing:
    """The sealings of all tenants that have keys, `Envelopes`. Any thread."""

    def __init__(
        self,
        source: KeySource,
        blocks: int,
        header_bytes: int,
        on_trouble: Callable[[str], None] = lambda message: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Read the keys. Raises ConfigError: they cannot be used. MissingExtraError: no cryptography."""
        self._aead = _aead()
        self._source = source
        self._folder = f"{blocks}/{SEALED_FOLDER}"
        self._header_bytes = header_bytes
        self._on_trouble = on_trouble
        self._clock = clock
        self._lock = threading.Lock()  # of reading the keys anew
        self._lacking = False  # whether an object needed a key that is not here
        self._told = ""
        self._changed = source.changed()
        self._read_s = clock()
        self._tenants = self._sealings()

    def check(self, namespaces: Iterable[Namespace]) -> None:
        """Raises ConfigError: the tenant of one of them has no keys."""
        for namespace in namespaces:
            if isinstance(found := self.of(namespace.id, namespace), Refusal):
                raise ConfigError(found.words)

    def of(self, namespace: NamespaceId, known: Namespace | None) -> ObjectEnvelope | Refusal:
        """As `Envelopes.of`."""
        if known is None:
            return Refusal(
                StoreTrouble.DENIED,
                f"namespace {namespace.hex()} is of a tenant that nobody has named; its keys are not known",
            )
        sealing = self._tenants.by_name.get(known.tenant)
        if sealing is not None:
            return sealing
        return Refusal(
            StoreTrouble.DENIED,
            f"{self._source.words} has no keys of tenant {known.tenant!r}; write a table "
            f"[tenants.{toml_text(known.tenant)}]",
        )

    def of_name(self, name: str) -> ObjectEnvelope | None:
        """As `Envelopes.of_name`."""
        folder, _, _ = name.rpartition("/")
        return self._tenants.by_folder.get(folder)

    def refresh(self) -> None:
        """Read the keys anew where they may have changed. Trouble leaves them as they are."""
        with self._lock:
            changed, now_s = self._source.changed(), self._clock()
            due = now_s - self._read_s >= (_LACKING_S if self._lacking else _COMMAND_EVERY_S)
            if changed == self._changed and not (changed is None and due):
                return
            self._read_s, self._lacking = now_s, False
            try:
                self._tenants = self._sealings()
            except ConfigError as error:
                self._lacking = True  # they are read again soon: a file at the next look, since it counts as unread
                if self._told != (why := str(error)):
                    self._told = why
                    self._on_trouble(f"the keys of before stay in use: {why}")
            else:
                self._changed, self._told = changed, ""

    def _sealings(self) -> _Tenants:
        """Raises ConfigError."""
        keys = self._source.load()
        by_name = {
            tenant: TenantSealing(one, self._folder, self._header_bytes, self._aead, partial(self._lacks, tenant))
            for tenant, one in keys.items()
        }
        return _Tenants(by_name, {f"{self._folder}/{one.tag}": by_name[tenant] for tenant, one in keys.items()})

    def _lacks(self, tenant: str, key_id: bytes) -> Refusal:
        self._lacking = True
        return Refusal(
            StoreTrouble.DENIED,
            f"an object was sealed with the key {key_id.hex()}, which {self._source.words} does not have among those "
            "of tenant"
            f" {tenant!r}; add it, or leave what it sealed to the janitor",
        )


class _Tenants(NamedTuple):
    """The same sealings, by tenant and by folder of names."""

    by_name: dict[str, TenantSealing]
    by_folder: dict[str, TenantSealing]


class _Aead(NamedTuple):
    """What we use of cryptography."""

    cipher: type[AESGCM]
    invalid: type[Exception]


def _aead() -> _Aead:
    """Raises MissingExtraError."""
    try:
        from cryptography.exceptions import InvalidTag
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM
    except ModuleNotFoundError as error:
        raise MissingExtraError("cryptography, which encrypts objects,", "crypto") from error
    return _Aead(AESGCM, InvalidTag)


def _bound(name: str, lead: memoryview) -> bytes:
    """What both parts of an object are authenticated with."""
    return bytes(lead[:ENVELOPE_BYTES]) + name.encode()
