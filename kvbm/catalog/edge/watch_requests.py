"""What a body asks to watch: parsed and checked."""

from __future__ import annotations

import msgspec

from kvbm.catalog.access.limits import LARGE_BODY_BYTES
from kvbm.catalog.answers.prompts import ApiError, packed_hashes
from kvbm.catalog.answers.watches import WatchAsked
from kvbm.core.ids import HASH_BYTES, InstanceId, Namespace, NamespaceId
from kvbm.core.watch_events import MAX_WATCHED_HASHES, WatchRequest

_WHOLE_REQUEST = "see /openapi.json for the fields of the request"


def decode_watch(body: bytes | bytearray) -> WatchAsked:
    """Raises ApiError: it asks for nothing that can be watched."""
    if len(body) > LARGE_BODY_BYTES:
        raise ApiError(
            413,
            "body_too_large",
            f"the body has more than {LARGE_BODY_BYTES} bytes",
            f"give at most {MAX_WATCHED_HASHES} hashes, best as one hex string",
        )
    try:
        asked = msgspec.json.decode(body, type=WatchRequest)
    except msgspec.ValidationError as error:
        raise ApiError(422, "invalid_request", str(error), _WHOLE_REQUEST) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ApiError(400, "not_json", f"the body is not JSON: {error}", "send a JSON object") from None
    if asked.namespace is None and (asked.instance is None or asked.hashes is not None):
        raise ApiError(
            422,
            "nothing_to_watch",
            "the request names nothing that can be watched",
            "give a namespace, an instance or both, or a namespace and hashes",
        )
    hashes = packed_hashes(asked.hashes) if asked.hashes is not None else None
    if hashes is not None and not 0 < len(hashes) // HASH_BYTES <= MAX_WATCHED_HASHES:
        raise ApiError(
            422,
            "too_many_hashes" if hashes else "bad_hash",
            f"a prefix of {len(hashes) // HASH_BYTES} hashes; 1 to {MAX_WATCHED_HASHES} are watched",
            "give the first blocks of the prompt",
        )
    namespace: Namespace | NamespaceId | None = None
    if asked.namespace is not None:
        namespace = (
            asked.namespace if isinstance(asked.namespace, Namespace) else NamespaceId(bytes.fromhex(asked.namespace))
        )
    instance = InstanceId(asked.instance) if asked.instance is not None else None
    return WatchAsked(namespace, instance, hashes, asked.limit, asked.after)
