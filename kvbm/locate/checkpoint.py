"""A catalog's checkpoint, fetched into a folder, for a replica to begin with."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import urllib3

from kvbm.core.errors import CatalogError
from kvbm.locate.requests import CatalogAwayError, CatalogRequest, error_code
from kvbm.locate.transport import CatalogTransport

CHECKPOINT_QUIET_S = 30.0
_PATH = "/v1/checkpoint"
_PART_BYTES = 1 << 20
_HEAD_BYTES = 64 << 10  # a manifest has some hundred


def fetch_checkpoint(
    transport: CatalogTransport,
    folder: Path,
    timeout_s: float,
    quiet_s: float,
    refusal: Callable[[str, int, bytes], CatalogError],
) -> bool:
    """Write the two files of the newest checkpoint;

    False: the catalog has none. Raises CatalogError: they do not come whole.

    Args:
        timeout_s: of the connection. quiet_s: nothing comes for so long.
        refusal: makes the error of an answer that is one.
    """
    failed: CatalogError | None = None
    for at in range(len(transport.places)):
        try:
            answer = transport.follow(CatalogRequest("GET", _PATH), at, timeout_s, quiet_s)
        except CatalogAwayError as error:
            failed = failed or error
            continue
        try:
            if answer.status == 200:
                _write(answer, folder)
                return True
            body = answer.read(_HEAD_BYTES)
            if answer.status == 404 and error_code(body) == "no_checkpoint":
                return False
            raise refusal(_PATH, answer.status, body)
        except (urllib3.exceptions.HTTPError, OSError) as error:
            raise CatalogError(f"the catalog's checkpoint did not come whole ({error}); try again") from None
        finally:
            answer.close()
    assert failed is not None
    raise failed


def _write(answer: urllib3.BaseHTTPResponse, folder: Path) -> None:
    """The manifest is two lines; behind it is the index."""
    head = b""
    while head.count(b"\n") < 2:
        part = answer.read(_HEAD_BYTES)
        head += part
        if not part or len(head) > 2 * _HEAD_BYTES:
            raise CatalogError("the answer is no checkpoint; is that the catalog?")
    end = head.index(b"\n", head.index(b"\n") + 1) + 1
    with (folder / "checkpoint.index").open("wb") as index:
        index.write(head[end:])
        while part := answer.read(_PART_BYTES):
            index.write(part)
    (folder / "checkpoint.json").write_bytes(head[:end])
