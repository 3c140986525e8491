"""Readers that say what a test tells them to, to owners over a unix socket, TCP and TLS."""

from __future__ import annotations

import random
import socket
import ssl
from pathlib import Path

from kvbm.core.ids import Namespace
from kvbm.transport.wire import (
    HEAD_BYTES,
    Bye,
    Grant,
    Hello,
    Message,
    NamespaceOpened,
    Open,
    Prove,
    ProvingSide,
    decode_body,
    decode_head,
    encode,
    key_proof,
    open_proof,
)
from tests.certificates import context_of
from tests.lenders import KEY, NAMESPACE, OWNER, SocketSite, root_of

_NONCES = random.Random(5)
_WAIT_S = 60.0


class Stranger:
    """A reader that says what it is told to.

    Attributes:
        owner: what the owner has said first.
        block_bytes: of the namespace, once it is open.
    """

    block_bytes = 0

    def __init__(self, site: SocketSite) -> None:
        self.is_tcp = site.transport in ("tcp", "nixl")
        if self.is_tcp:
            host, port = site.tcp.split(":")
            self.socket = socket.create_connection((host, int(port)), _WAIT_S)
            if site.tls is not None:  # the stranger has a certificate too
                context = context_of(Path(site.unix).parent, ssl.Purpose.SERVER_AUTH)
                self.socket = context.wrap_socket(self.socket, server_hostname=host)
        else:
            self.socket = socket.socket(socket.AF_UNIX)
            self.socket.settimeout(_WAIT_S)
            self.socket.connect(site.unix)
        self.nonce = _NONCES.randbytes(32)
        self.owner = self.heard()
        assert isinstance(self.owner, Hello)

    def exactly(self, count: int) -> bytes:
        data = b""
        while len(data) < count:
            piece = self.socket.recv(count - len(data))
            if not piece:
                raise ConnectionError("hung up")
            data += piece
        return data

    def heard(self) -> Message:
        kind, size = decode_head(self.exactly(HEAD_BYTES))
        return decode_body(kind, self.exactly(size))

    def say(self, *messages: Message | bytes) -> None:
        try:
            for message in messages:
                self.socket.sendall(message if isinstance(message, bytes) else encode(message))
        except OSError:
            pass  # hung up on already

    def hello(self) -> None:
        self.say(Hello(self.nonce, 0, 3, 0, "stranger"))

    def prove(self) -> None:
        """As far as a good reader gets."""
        self.hello()
        if self.is_tcp:
            self.say(Prove(key_proof(KEY, ProvingSide.READER, self.nonce, self.owner.nonce, OWNER)))
            assert self.heard() == Prove(key_proof(KEY, ProvingSide.OWNER, self.nonce, self.owner.nonce, OWNER))

    def opening(self, handle: int = 0, owner: str = OWNER, namespace: Namespace = NAMESPACE) -> Open:
        proof = open_proof(root_of(namespace), self.nonce, self.owner.nonce, namespace.id, owner)
        return Open(handle, namespace.id, proof)

    def open(self) -> None:
        """The namespace, on a connection that is proved."""
        self.prove()
        self.say(self.opening())
        opened = self.heard()
        assert isinstance(opened, NamespaceOpened) and (opened.handle, opened.is_open) == (0, True)
        self.block_bytes = opened.block_bytes

    def last_words(self) -> str:
        """What the owner says before it hangs up."""
        words = ""
        try:
            while True:
                message = self.heard()
                words = message.words if isinstance(message, Bye) else words
                if isinstance(message, Grant) and not message.lease:
                    self.exactly(self.block_bytes * len(message.tiers))
        except ConnectionError:
            self.socket.close()
            return words
