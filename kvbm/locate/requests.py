"""What is sent to a catalog, whatever carries it, and how it fails."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import msgspec

from kvbm.core.answers import ErrorAnswer
from kvbm.core.errors import CatalogError

NOT_READY = ("not_ready", "no_instance")  # another catalog may have read further


class Request(NamedTuple):
    """One request, as HTTP has it.

    Attributes:
        path: with its query.
        body: None for none.
        may_repeat: asking twice does no harm.
        wait_s: for how long the catalog may wait before it answers.
    """

    method: str
    path: str
    body: bytes | None = None
    content_type: str = "application/json"
    may_repeat: bool = True
    wait_s: float = 0.0


class AwayError(CatalogError):
    """A catalog did not answer.

    Attributes:
        was_asked: it may have got the request.
    """

    def __init__(self, message: str, was_asked: bool) -> None:
        super().__init__(message)
        self.was_asked = was_asked


class Carrier(Protocol):
    """Takes requests to a catalog. Any thread may call it."""

    @property
    def page_limit(self) -> int:
        """Instances to ask for at a time; 0 for as many as the catalog gives."""

    @property
    def url(self) -> str:
        """Of the catalog, or of the server before it, that is asked first."""

    def send(self, request: Request, timeout_s: float) -> tuple[int, bytes]:
        """The answer's status and body. Raises CatalogError: none comes in time."""

    def close(self) -> None:
        """Give the connections back. Idempotent."""


def error_code(body: bytes) -> str:
    """The constant that names an error; "" where the body is none."""
    try:
        return msgspec.json.decode(body, type=ErrorAnswer).error.code
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return ""
