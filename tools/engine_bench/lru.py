"""What a plain LRU of so many blocks would have answered: the yardstick for hit tokens."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple


class Served(NamedTuple):
    """A request that was answered, in token ids.

    Attributes:
        cached_tokens: of the prompt, not computed.
    """

    prompt: Sequence[int]
    output: Sequence[int]
    cached_tokens: int = 0


class LruCache:
    """Blocks by their chained hashes, the least recently used first to go.

    Within a request the deepest block counts as used first and the prompt's beginning as used last, as in vLLM's own
    prefix cache: without its beginning the rest of a chain is of no use.
    """

    def __init__(self, slots: int) -> None:
        self._slots = slots
        self._held: OrderedDict[bytes, None] = OrderedDict()

    def depth(self, chain: Sequence[bytes]) -> int:
        """Blocks held from the first one on, without a gap."""
        for at, block in enumerate(chain):
            if block not in self._held:
                return at
        return len(chain)

    def use(self, chain: Sequence[bytes]) -> None:
        """Make all of a request's blocks the most recent. A chain longer than the slots keeps its beginning."""
        for block in reversed(chain):
            self._held[block] = None
            self._held.move_to_end(block)
        while len(self._held) > self._slots:
            self._held.popitem(last=False)


def chain_of(tokens: Sequence[int], block_tokens: int) -> list[bytes]:
    """A hash for each full block, of its tokens and all before them."""
    found, parent = [], b""
    for begin in range(0, len(tokens) // block_tokens * block_tokens, block_tokens):
        words = ",".join(map(str, tokens[begin : begin + block_tokens]))
        parent = hashlib.sha256(parent + words.encode()).digest()
        found.append(parent)
    return found


def hit_tokens(requests: Sequence[Served], slots: int, block_tokens: int) -> list[int]:
    """Tokens of each prompt that an LRU would have had, one request after the other.

    A prompt's last token is always computed, because its output is wanted; the KV of the last generated token is never
    computed.
    """
    cache = LruCache(slots)
    found = []
    for request in requests:
        usable = (len(request.prompt) - 1) // block_tokens
        chain = chain_of([*request.prompt, *request.output[:-1]], block_tokens)
        found.append(cache.depth(chain[:usable]) * block_tokens)
        cache.use(chain)
    return found
