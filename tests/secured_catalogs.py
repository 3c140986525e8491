"""A catalog that asks who asks, with what its callers need: a CA, certificates, tokens; files are looked at with every
request.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import kvbm.catalog.access.callers
import kvbm.catalog.edge.tls
import kvbm.locate.credentials
from kvbm.assembly import NATIVE, NATIVE_INDEX
from kvbm.catalog.access.callers import AccessOptions
from kvbm.catalog.access.file import NewToken, add_token
from kvbm.catalog.edge.server import CatalogThread
from kvbm.catalog.service import ServiceSettings
from tests.certificates import Certificate, certify
from tests.eventually import WAIT_S
from tests.nats_fixture import cluster, nats_url

__all__ = ["Files", "cluster", "files", "look_at_once", "nats_url", "put", "serve"]


def put(*pairs: tuple[Path, Path]) -> None:
    """Put copies of files where others are, each in one step."""
    for source, target in pairs:
        beside = target.with_name(f".{target.name}")
        beside.write_bytes(source.read_bytes())
        beside.replace(target)


class Files(NamedTuple):
    """A CA, a server's certificate, a file of callers, and tokens of it in files."""

    folder: Path
    ca: Certificate
    server: Certificate
    access: Path

    def token(self, wanted: NewToken, now_s: float | None = None) -> str:
        return add_token(self.access, wanted, time.time() if now_s is None else now_s)

    def kept(self, name: str, token: str) -> str:
        path = self.folder / f"{name}.token"
        path.write_text(token + "\n")
        return str(path)


@pytest.fixture
def files(tmp_path: Path) -> Files:
    ca = certify(tmp_path, "ca")
    return Files(tmp_path, ca, certify(tmp_path, "server", ca), tmp_path / "access.toml")


@pytest.fixture
def serve(nats_url: str, cluster: str, sqlite_url: str) -> Iterator[Callable[..., str]]:
    """Starts a catalog with access options; gives its URL."""
    started: list[CatalogThread] = []

    def start(**access: Any) -> str:
        settings = ServiceSettings(
            nats_url=nats_url,
            database_url=sqlite_url,
            cluster=cluster,
            listen="127.0.0.1:0",
            connect_s=WAIT_S,
            access=AccessOptions(**access),
        )
        started.append(CatalogThread(settings, NATIVE, NATIVE_INDEX).start())
        return started[-1].url

    yield start
    for thread in started:
        thread.stop()


@pytest.fixture(autouse=True)
def look_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files are looked at with every request."""
    monkeypatch.setattr(kvbm.catalog.access.callers, "LOOK_S", 0.0)
    monkeypatch.setattr(kvbm.catalog.edge.tls, "LOOK_S", 0.0)
    monkeypatch.setattr(kvbm.locate.credentials, "LOOK_S", 0.0)
