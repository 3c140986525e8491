"""The specification of a block's coded bytes, for tests and readers alone: what the native coder writes and reads, byte
for byte.

A block of E elements becomes chunks of 16,384 elements (the last may have fewer) and eight zero bytes, which let a
reader load whole words. Every element of more than one byte is turned left by one bit, which brings the exponent's
eight high bits into its highest byte and the sign into its lowest bit. The highest byte is the element's *symbol*, the
others its *rest*, lowest byte first.

    chunk  := 0, the elements as they are
            | 1 + 2 * (slot 0 is new) + 4 * (slot 1 is new), rests, slots, [table of slot 0], [table of slot 1], sizes,
              streams
    slots  := a bit for each stream, stream 0 lowest: which of the two slots has its table; tables stay for later chunks
              of the block
    table  := 32 bytes with a bit for each symbol that occurs, then the lengths of their codes, two a byte, low half
              first
    sizes  := bytes of the eight streams, u16 each, little endian
    stream := the codes of its symbols, high bits first, filled up to a byte with zeros

The symbols of a chunk are shared out to eight streams: equal runs in order, of a multiple of 64 symbols; the last ones
may have fewer or none. Codes are canonical: shorter ones first, among equals by symbol. A symbol that is alone in its
table has length 0 and takes no bits.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from kvbm.pools.object.coding import Coding

CHUNK_ELEMENTS = 16 * 1024
STREAMS = 8
MOST_BITS = 11  # of a code
LEAST_GAIN = 32  # a block that does not lose one part in so many stays raw
_STREAM_STEP = 64
_SAMPLED_PIECES, _SAMPLED_ELEMENTS = 16, 256
_PAD = bytes(8)
_ALL = (1 << STREAMS) - 1
_ELEMENT_BYTES = {Coding.PLANES_8: 1, Coding.PLANES_16: 2, Coding.PLANES_32: 4}

Lengths = dict[int, int]  # symbol → bits of its code


class CodingError(ValueError):
    """Bytes that no encoder wrote."""


def code_lengths(counts: np.ndarray) -> Lengths:
    """Bits of each symbol's code: Huffman's, of two equally light parts the symbol before the pair, the rarest first.

    A symbol counts as at least 1 + 1/4096 of all, and as twice that again and again while a code is longer than
    MOST_BITS.

    Args:
        counts: 256, how often each symbol occurs.
    """
    present = sorted((int(counts[symbol]), symbol) for symbol in np.flatnonzero(counts).tolist())
    if len(present) < 2:
        return {symbol: 0 for _, symbol in present}
    least = 1 + (int(counts.sum()) >> 12)
    while True:
        depths = _depths([max(count, least) for count, _ in present])
        if max(depths) <= MOST_BITS:
            return {symbol: depth for (_, symbol), depth in zip(present, depths, strict=True)}
        least *= 2


def _depths(weights: list[int]) -> list[int]:
    """Depth of each leaf in Huffman's tree over weights in rising order."""
    leaves, count = list(weights), len(weights)
    weights, parents = list(weights), [0] * (2 * count - 1)
    leaf, node = 0, count
    for made in range(count, 2 * count - 1):
        children = []
        for _ in range(2):
            if leaf < count and (node == made or leaves[leaf] <= weights[node]):
                children.append(leaf)
                leaf += 1
            else:
                children.append(node)
                node += 1
        weights.append(weights[children[0]] + weights[children[1]])
        for child in children:
            parents[child] = made
    depths = [0] * (2 * count - 1)
    for at in reversed(range(2 * count - 2)):
        depths[at] = depths[parents[at]] + 1
    return depths[:count]


def codes_of(lengths: Lengths) -> dict[int, str]:
    """The codes, as strings of 0 and 1. Raises CodingError: some bits would mean nothing, or two things."""
    if list(lengths.values()) == [0]:
        return dict.fromkeys(lengths, "")
    if not all(1 <= length <= MOST_BITS for length in lengths.values()):
        raise CodingError(f"lengths from {min(lengths.values())} to {max(lengths.values())}, not 1 to {MOST_BITS}")
    if sum(1 << MOST_BITS - length for length in lengths.values()) != 1 << MOST_BITS:
        raise CodingError("lengths that make no whole code")
    codes, code, before = {}, 0, 0
    for length, symbol in sorted((length, symbol) for symbol, length in lengths.items()):
        code <<= length - before
        codes[symbol] = f"{code:0{length}b}"
        code, before = code + 1, length
    return codes


def split(block: np.ndarray, element_bytes: int) -> tuple[np.ndarray, np.ndarray]:
    """Symbols (E) and rests (E, element_bytes - 1) of a block's bytes."""
    if element_bytes == 1:
        return block, np.empty((len(block), 0), dtype=np.uint8)
    words = block.view(f"<u{element_bytes}")
    turned = (words << 1 | words >> 8 * element_bytes - 1).astype(words.dtype)
    planes = turned.view(np.uint8).reshape(-1, element_bytes)
    return planes[:, -1], planes[:, :-1]


def join(symbols: np.ndarray, rests: np.ndarray) -> np.ndarray:
    """The way back."""
    planes = np.column_stack((rests, symbols)).astype(np.uint8)
    if planes.shape[1] == 1:
        return planes.ravel()
    turned = planes.view(f"<u{planes.shape[1]}").ravel()
    words: np.ndarray = (turned >> 1 | turned << 8 * planes.shape[1] - 1).astype(turned.dtype)
    return words.view(np.uint8)


def stream_bounds(elements: int) -> list[tuple[int, int]]:
    """First symbol of each stream of a chunk, and the one behind its last."""
    most = -(-elements // (STREAMS * _STREAM_STEP)) * _STREAM_STEP
    return [(min(elements, at * most), min(elements, (at + 1) * most)) for at in range(STREAMS)]


def encode_block(block: np.ndarray, coding: Coding) -> tuple[bytes, Coding]:
    """A block's coded bytes, and how they are coded: as asked for, or RAW where that gains too little."""
    raw = block.tobytes()
    element_bytes = _ELEMENT_BYTES.get(coding, 0)
    if not element_bytes or len(raw) % element_bytes:
        return raw, Coding.RAW
    symbols, rests = split(np.frombuffer(raw, dtype=np.uint8), element_bytes)
    if not _would_shrink(symbols, element_bytes):
        return raw, Coding.RAW
    tables = _Slots()
    chunks = []
    for first in range(0, len(symbols), CHUNK_ELEMENTS):
        piece = slice(first, min(first + CHUNK_ELEMENTS, len(symbols)))
        elements = raw[piece.start * element_bytes : piece.stop * element_bytes]
        chunks.append(_encode_chunk(elements, symbols[piece], rests[piece], tables))
    coded = b"".join([*chunks, _PAD])
    return (coded, coding) if len(coded) + len(raw) // LEAST_GAIN < len(raw) else (raw, Coding.RAW)


def _would_shrink(symbols: np.ndarray, element_bytes: int) -> bool:
    """Whether 16 pieces of up to 256 elements say that a block loses one part in LEAST_GAIN."""
    piece = min(_SAMPLED_ELEMENTS, len(symbols) // _SAMPLED_PIECES + 1)
    firsts = [len(symbols) * number // _SAMPLED_PIECES for number in range(_SAMPLED_PIECES)]
    sample = np.concatenate([symbols[first : first + piece] for first in firsts])
    counts = _counts(sample)
    gained = 8 * len(sample) - _bits(counts, code_lengths(counts))
    return gained * LEAST_GAIN >= 8 * element_bytes * len(sample)


class _Slots:
    """The tables in force: lengths by slot, and the slot of the stream before."""

    def __init__(self) -> None:
        self.lengths: list[Lengths] = [{}, {}]
        self.newest = 1


class _Plan(NamedTuple):
    bits: int  # of tables and streams
    slots: int  # of each stream, a bit each
    fresh: dict[int, tuple[np.ndarray, Lengths]]  # by slot: whose table is new


def _encode_chunk(elements: bytes, symbols: np.ndarray, rests: np.ndarray, tables: _Slots) -> bytes:
    streams = [symbols[first:end] for first, end in stream_bounds(len(symbols))]
    plan = _plan(streams, tables)
    if plan.bits // 8 + 2 + 2 * STREAMS + STREAMS >= len(symbols):
        return b"\0" + elements
    for slot, (_, lengths) in plan.fresh.items():
        tables.lengths[slot] = lengths
    tables.newest = plan.slots >> STREAMS - 1
    codes = [codes_of(lengths) if lengths else {} for lengths in tables.lengths]
    coded = [_stream(stream, codes[plan.slots >> at & 1]) for at, stream in enumerate(streams)]
    head = bytes([1 + sum(2 << slot for slot in plan.fresh)])
    kept = [_table(*plan.fresh[slot]) for slot in sorted(plan.fresh)]
    sizes = np.array([len(stream) for stream in coded], dtype="<u2").tobytes()
    return b"".join([head, rests.tobytes(), bytes([plan.slots]), *kept, sizes, *coded])


def _plan(streams: list[np.ndarray], tables: _Slots) -> _Plan:
    """One table for all streams, or two where that takes fewer bits; each the one that a slot has, or a new one."""
    counts = [_counts(stream) for stream in streams]

    def group(members: int) -> tuple[np.ndarray, Lengths, int, list[int | None]]:
        of_group = np.sum([counts[at] for at in range(STREAMS) if members >> at & 1], axis=0)
        lengths = code_lengths(of_group)
        own = _bits(of_group, lengths) + 8 * len(_table(of_group, lengths))
        return of_group, lengths, own, [_same_bits(of_group, slot) for slot in tables.lengths]

    def least(members: tuple[np.ndarray, Lengths, int, list[int | None]], slot: int) -> tuple[int, bool]:
        _, _, own, same = members
        kept = same[slot]
        return (kept, False) if kept is not None and kept <= own else (own, True)

    every = group(_ALL)
    alike = 1 if (every[3][1] is not None and (every[3][0] is None or every[3][1] < every[3][0])) else 0
    bits, is_fresh = least(every, alike)
    slot = 1 - tables.newest if is_fresh else alike
    plan = _Plan(bits, slot * _ALL, {slot: every[:2]} if is_fresh else {})
    second = _second_group(counts, len(streams[0]))
    if not second:
        return plan
    one, other = group(_ALL & ~second), group(second)
    straight, crossed = ([least(one, at), least(other, 1 - at)] for at in range(2))
    is_crossed = sum(bits for bits, _ in crossed) < sum(bits for bits, _ in straight)
    chosen = crossed if is_crossed else straight
    bits = sum(bits for bits, _ in chosen)
    if bits >= plan.bits:
        return plan
    first = int(is_crossed)  # the slot of `one`
    found = {first: (one, chosen[0][1]), 1 - first: (other, chosen[1][1])}
    fresh = {slot: members[:2] for slot, (members, is_new) in found.items() if is_new}
    return _Plan(bits, _ALL & ~second if is_crossed else second, fresh)


def _second_group(counts: list[np.ndarray], most: int) -> int:
    """Streams (a bit each) rather like the one least like the first; 0 when all are alike, but for what chance makes of
    so many symbols.
    """
    from_first = [int(np.abs(counts[0] - other).sum()) for other in counts]
    farthest = int(np.argmax(from_first))
    if 2 * from_first[farthest] <= most + 4 * int(np.count_nonzero(sum(counts))):
        return 0
    from_farthest = [int(np.abs(counts[farthest] - other).sum()) for other in counts]
    return sum(1 << at for at in range(1, STREAMS) if from_farthest[at] < from_first[at])


def _counts(symbols: np.ndarray) -> np.ndarray:
    return np.bincount(symbols, minlength=256).astype(np.int64)


def _bits(counts: np.ndarray, lengths: Lengths) -> int:
    return sum(int(counts[symbol]) * length for symbol, length in lengths.items())


def _same_bits(counts: np.ndarray, lengths: Lengths) -> int | None:
    """What symbols take by a table that is there; None when it lacks one of them, or has but one."""
    if len(lengths) < 2 or any(int(symbol) not in lengths for symbol in np.flatnonzero(counts)):
        return None
    return _bits(counts, lengths)


def _table(counts: np.ndarray, lengths: Lengths) -> bytes:
    present = [lengths[int(symbol)] for symbol in np.flatnonzero(counts)]
    halves = [*present, 0] if len(present) % 2 else present
    packed = bytes(low | high << 4 for low, high in zip(halves[::2], halves[1::2], strict=True))
    return np.packbits(counts > 0, bitorder="little").tobytes() + packed


def _stream(symbols: np.ndarray, codes: dict[int, str]) -> bytes:
    text = "".join(codes[symbol] for symbol in symbols.tolist())
    return int(text.ljust(-(-len(text) // 8) * 8, "0") or "0", 2).to_bytes(-(-len(text) // 8), "big")


def decode_block(coded: bytes, coding: Coding, block_bytes: int) -> bytes:
    """The bytes of a block. Raises CodingError: no encoder wrote these."""
    element_bytes = _ELEMENT_BYTES.get(coding)
    if element_bytes is None:
        if len(coded) != block_bytes:
            raise CodingError(f"{len(coded)} bytes of a raw block of {block_bytes}")
        return coded
    if block_bytes % element_bytes or len(coded) < len(_PAD):
        raise CodingError(f"{len(coded)} bytes of a block of {block_bytes} in elements of {element_bytes}")
    reader = _Reader(coded[: -len(_PAD)])
    slots: list[dict[str, int] | None] = [None, None]
    parts = []
    for left in range(block_bytes // element_bytes, 0, -CHUNK_ELEMENTS):
        parts.append(_decode_chunk(reader, min(left, CHUNK_ELEMENTS), element_bytes, slots))
    if reader.left:
        raise CodingError(f"{reader.left} bytes behind the last chunk")
    return b"".join(parts)


def _decode_chunk(reader: _Reader, elements: int, element_bytes: int, slots: list[dict[str, int] | None]) -> bytes:
    kind = reader.take(1)[0]
    if kind == 0:
        return reader.take(elements * element_bytes)
    if kind & ~6 != 1:
        raise CodingError(f"a chunk of kind {kind}")
    rests = np.frombuffer(reader.take(elements * (element_bytes - 1)), dtype=np.uint8)
    of_streams = reader.take(1)[0]
    for slot in range(2):
        if kind >> slot + 1 & 1:
            slots[slot] = reader.table()
    sizes = np.frombuffer(reader.take(2 * STREAMS), dtype="<u2")
    symbols = np.empty(elements, dtype=np.uint8)
    for at, (first, end) in enumerate(stream_bounds(elements)):
        meanings = slots[of_streams >> at & 1]
        if meanings is None:
            raise CodingError(f"stream {at} by a table that never came")
        found = _symbols(reader.take(int(sizes[at])), meanings)
        symbols[first:end] = [next(found) for _ in range(end - first)]
    return join(symbols, rests.reshape(elements, element_bytes - 1)).tobytes()


def _symbols(stream: bytes, meanings: dict[str, int]) -> Iterator[int]:
    """The symbols of a stream, and no end of them where one takes no bits."""
    if "" in meanings:
        while True:
            yield meanings[""]
    code = ""
    for bit in "".join(f"{byte:08b}" for byte in stream):
        code += bit
        if code in meanings:
            yield meanings[code]
            code = ""
    raise CodingError(f"{len(stream)} bytes are too few for a stream's symbols")


class _Reader:
    """Takes a block's bytes from the front."""

    def __init__(self, data: bytes) -> None:
        self._data, self._at = data, 0

    @property
    def left(self) -> int:
        return len(self._data) - self._at

    def take(self, count: int) -> bytes:
        if count > self.left:
            raise CodingError(f"{count} bytes wanted, {self.left} are left")
        self._at += count
        return self._data[self._at - count : self._at]

    def table(self) -> dict[str, int]:
        """Code → symbol."""
        present = np.flatnonzero(np.unpackbits(np.frombuffer(self.take(32), dtype=np.uint8), bitorder="little"))
        if not len(present):
            raise CodingError("a table of no symbols")
        packed = self.take((len(present) + 1) // 2)
        lengths = {int(symbol): packed[at // 2] >> at % 2 * 4 & 15 for at, symbol in enumerate(present)}
        return {code: symbol for symbol, code in codes_of(lengths).items()}
