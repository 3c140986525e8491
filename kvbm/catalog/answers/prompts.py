"""Questions about a prompt, as they come in a body: parsed and checked, for whatever carries them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import msgspec

from kvbm.catalog.access.long_requests import decode_request
from kvbm.core.answers import (
    MAX_HASHES,
    ErrorAnswer,
    ErrorDetail,
    HistoryRouteRequest,
    LookupRequest,
    RouteRequest,
)
from kvbm.core.backend import ReadNumberList
from kvbm.core.errors import LayoutError
from kvbm.core.ids import HASH_BYTES, Namespace, NamespaceId

HEX_DIGITS = 2 * HASH_BYTES
_TOKEN_IDS = "give token ids from 0 to 4294967295"
_WHOLE_REQUEST = "see /openapi.json for the fields of the request"
_REFUSED = {"body_too_large": "too_large", "body_too_slow": "too_slow"}
R = TypeVar("R", bound=LookupRequest)


class ApiError(Exception):
    """A request that fails: its status as of HTTP, and what its body says.

    Attributes:
        refused: what it counts as, by the kinds of `telemetry.metrics.REFUSALS`; "" where it was not refused for its
            size.
    """

    def __init__(self, status: int, code: str, message: str, what_to_do: str, matching: Sequence[str] = ()) -> None:
        """Args: matching: as in ErrorDetail."""
        super().__init__(message)
        self.status = status
        told = list(matching) if matching else msgspec.UNSET
        detail = ErrorDetail(code=code, message=message, what_to_do=what_to_do, matching=told)
        self.answer = ErrorAnswer(error=detail)
        self.refused = "too_large" if code.startswith("too_many_") else _REFUSED.get(code, "")


def decode_prompt(body: bytes | bytearray, kind: type[R], read: ReadNumberList) -> R:
    """The request in a body, its tokens read by `read`. Raises ApiError, LimitError: there is none."""
    try:
        return decode_request(body, kind, read)
    except (LayoutError, OverflowError) as error:
        raise bad_tokens(error) from None
    except msgspec.ValidationError as error:
        raise ApiError(422, "invalid_request", str(error), _WHOLE_REQUEST) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ApiError(400, "not_json", f"the body is not JSON: {error}", "send a JSON object") from None


def without_prompt(asked: R) -> R:
    """The request without its hashes and tokens, which are many, and what else belongs to these; a route says how many
    tokens there were.
    """
    bare = msgspec.structs.replace(asked, hashes=None, tokens=None, salt="", lora="", lora_path="", media=[])
    if isinstance(bare, RouteRequest | HistoryRouteRequest) and asked.tokens is not None:
        return msgspec.structs.replace(bare, input_tokens=len(asked.tokens))
    return bare


def asked_namespace(asked: LookupRequest) -> Namespace | NamespaceId:
    """The namespace as it is asked for: its fields, or its id. Raises ApiError: there is none."""
    if asked.namespace is None:
        raise ApiError(
            422, "namespace_missing", "hashes are given, and no namespace", "give its id or its fields, as namespace"
        )
    return asked.namespace if isinstance(asked.namespace, Namespace) else NamespaceId(bytes.fromhex(asked.namespace))


def id_of(namespace: Namespace | NamespaceId) -> NamespaceId:
    """Its id."""
    return namespace.id if isinstance(namespace, Namespace) else namespace


def packed_hashes(given: str | list[str]) -> bytes:
    """Hashes in hex, packed. Raises ApiError: they are none, or too many."""
    count = len(given) if isinstance(given, list) else len(given) // HEX_DIGITS
    if count > MAX_HASHES:
        raise ApiError(422, "too_many_hashes", f"{count} hashes; at most {MAX_HASHES} are taken", "give fewer")
    if isinstance(given, list):
        wrong = next((at for at, text in enumerate(given) if len(text) != HEX_DIGITS), None)
        if wrong is not None:
            raise bad_hash(f"hashes[{wrong}] has {len(given[wrong])} characters, not {HEX_DIGITS}")
        given = "".join(given)
    if len(given) % HEX_DIGITS:
        raise bad_hash(f"hashes has {len(given)} characters, which is no multiple of {HEX_DIGITS}")
    try:
        hashes = bytes.fromhex(given)
    except ValueError:
        raise bad_hash("hashes is not hexadecimal") from None
    if 2 * len(hashes) != len(given):  # fromhex skips blanks
        raise bad_hash("hashes is not hexadecimal")
    return hashes


def bad_hash(message: str) -> ApiError:
    """A hash that is none."""
    return ApiError(422, "bad_hash", message, f"write each hash as {HEX_DIGITS} hex digits")


def bad_tokens(error: Exception) -> ApiError:
    """Tokens that are none."""
    return ApiError(422, "bad_tokens", str(error), _TOKEN_IDS)
