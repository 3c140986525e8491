"""Hand-off: a prompt is computed by one engine, the prefiller, and decoded by another, the decoder.

What travels between them in `kv_transfer_params` is a hint, which any client may have written: who has the blocks, and
until when. Which blocks they are follows from the decoder's own prompt, so a wrong hint is a miss. Never in it: tokens,
and the root of their hashes.

Three shapes of proxies are known:

- The prefiller's answer is handed to the decoder. `do_remote_decode` asks for it, and it has our key `kvbm` alone: it
  merges with what another connector of the engine answers, and a decoder without kvbm passes it over.
- Nothing is handed over. A consumer (`kv_role`) expects its prompts to be computed elsewhere.
- Both get the request at once. The prefiller's has `remote_decoder`, the decoder's `remote_prefiller`.

Nothing here imports vLLM, has a clock, or keeps state.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, NamedTuple

import msgspec

from kvbm.core.ids import HASH_BYTES

KEY = "kvbm"
KEEP_KEY = "kvbm.keep_s"  # in a request's kv_transfer_params
VERSION = 1
_LONGEST_S = 1e9  # that blocks are kept for, whatever settings say
_PREFILLER_WORDS = ("kv_request_id", "remote_host", "remote_port")  # without one of them vLLM computes the prompt
_Hash = Annotated[str, msgspec.Meta(pattern=f"^[0-9a-f]{{{2 * HASH_BYTES}}}$", max_length=2 * HASH_BYTES)]
_Count = Annotated[int, msgspec.Meta(ge=1, lt=1 << 62)]


class HandoffRules(NamedTuple):
    """`[handoff]` of the settings, see there."""

    wait_s: float = 10.0
    unsaid_wait_s: float = 0.1
    ttl_s: float = 60.0
    keep_s: float = 0.0
    keep_most_s: float = 600.0


class HandoffHint(NamedTuple):
    """What a prefiller says of a prompt.

    Attributes:
        instance, epoch: of the prefiller. lends: other instances can read its HOST.
        namespace: id of its blocks.
        tokens: of the prompt, whose blocks are stored by now or are being stored.
        last: hash of the last of these blocks.
        until_ms: so long they are kept, by the prefiller's clock; milliseconds since 1970.
    """

    instance: str
    epoch: int
    lends: bool
    namespace: bytes
    tokens: int
    last: bytes
    until_ms: int

    def params(self) -> dict[str, Any]:
        """It, as an answer's `kv_transfer_params`."""
        return {
            KEY: {
                "version": VERSION,
                "instance": self.instance,
                "epoch": self.epoch,
                "lends": self.lends,
                "namespace": self.namespace.hex(),
                "tokens": self.tokens,
                "last": self.last.hex(),
                "until_ms": self.until_ms,
            }
        }


class _Words(msgspec.Struct, frozen=True, kw_only=True):
    """A hint as it travels; what a later version adds is passed over."""

    instance: Annotated[str, msgspec.Meta(min_length=1, max_length=128)]
    epoch: _Count
    lends: bool
    namespace: _Hash
    tokens: _Count
    last: _Hash
    until_ms: _Count


def hint_of(params: Mapping[str, Any] | None) -> HandoffHint | None:
    """The hint in a request's `kv_transfer_params`; None where there is none that makes sense."""
    words = params.get(KEY) if isinstance(params, Mapping) else None
    if not isinstance(words, Mapping) or type(words.get("version")) is not int or words["version"] != VERSION:
        return None
    try:
        said = msgspec.convert(dict(words), _Words)
    except (msgspec.ValidationError, TypeError):
        return None
    return HandoffHint(
        said.instance,
        said.epoch,
        said.lends,
        bytes.fromhex(said.namespace),
        said.tokens,
        bytes.fromhex(said.last),
        said.until_ms,
    )


def is_for_a_decoder(params: Mapping[str, Any] | None) -> bool:
    """Whether what a request computes is to be decoded by another engine."""
    return isinstance(params, Mapping) and bool(params.get("do_remote_decode") or params.get("remote_decoder"))


def kept_s(params: Mapping[str, Any] | None, rules: HandoffRules) -> float:
    """How long the blocks of an answered request are kept for its next turn; what is no time counts as not said."""
    said = params.get(KEEP_KEY) if isinstance(params, Mapping) else None
    if isinstance(said, bool) or not isinstance(said, int | float) or not said >= 0:
        said = rules.keep_s
    return float(min(said, rules.keep_most_s, _LONGEST_S))


def wants_hint(params: Mapping[str, Any] | None) -> bool:
    """Whether the answer is handed to the decoder."""
    return isinstance(params, Mapping) and bool(params.get("do_remote_decode"))


def is_computed_now(params: Mapping[str, Any] | None) -> bool:
    """Whether another engine has got the same request, to compute its prompt."""
    said = params.get("remote_prefiller") if isinstance(params, Mapping) else None
    return isinstance(said, Mapping) and all(said.get(word) for word in _PREFILLER_WORDS)
