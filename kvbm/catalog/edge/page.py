"""The page that people look at: files of the folder `web`, read once and served as they are.

They hold no data: what the page shows, it asks the catalog for, as whoever has opened it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Callable, MutableMapping
from pathlib import Path
from typing import Any, NamedTuple

FOLDER = Path(__file__).parents[1] / "web"
ROOT, PAGE = "/ui", "/ui/"
MOST_BYTES = 300 << 10  # all files together
_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
# Nothing but the catalog's own files, nothing inline, and no text that becomes markup.
HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types 'none'",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-cache",
}

Scope = MutableMapping[str, Any]
App = Callable[
    [Scope, Callable[[], Awaitable[MutableMapping[str, Any]]], Callable[[MutableMapping[str, Any]], Awaitable[None]]],
    Awaitable[None],
]


class PageFile(NamedTuple):
    """One file, its type and its ETag."""

    body: bytes
    media_type: str
    tag: str


def page_files(folder: Path = FOLDER) -> dict[str, PageFile]:
    """The page's files, by path below the folder; "" is the page itself."""
    found: dict[str, PageFile] = {}
    for path in sorted(folder.rglob("*")):
        if (media_type := _TYPES.get(path.suffix)) is not None and path.is_file():
            body = path.read_bytes()
            tag = f'"{hashlib.sha256(body).hexdigest()[:32]}"'
            found[path.relative_to(folder).as_posix()] = PageFile(body, media_type, tag)
    if "index.html" in found:
        found[""] = found["index.html"]
    return found


class ToPage:
    """An ASGI application before another: browsers that ask for `/` get where the page is."""

    def __init__(self, app: App) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Any, send: Any) -> None:
        """See ASGI."""
        if scope["type"] == "http" and scope["path"] == "/" and scope["method"] in ("GET", "HEAD"):
            accepted = b",".join(value for name, value in scope["headers"] if name == b"accept")
            if b"text/html" in accepted:
                scope = {**scope, "path": ROOT}
        await self._app(scope, receive, send)
