"""An engine's paged KV: tensors in any stride order → the byte segments that one slot's block consists of.

An engine keeps KV as one or more tensors a layer, each with a dimension that counts slots. A block of ours is
contiguous: layer by layer, in a layer tensor by tensor as given, in a tensor the dimensions in the order of their
strides, widest first, and the slot's own left out; so a slot's bytes keep the order in which they lie in the engine's
memory. Elements are opaque bytes.

One segment is `bytes` consecutive bytes that slot s has at `address + s * stride`. Segments are found once, from shapes
and strides; where a tensor ends and the next goes on without a gap they are one.
"""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from kvbm.core.backend import ChecksumRows
from kvbm.core.errors import LayoutError

SLOTS = "slots"  # the name of the dimension that counts slots

_MAX_SEGMENTS = 1 << 16  # of a block; more means elements that lie apart, to be copied one by one


class StridedTensor(Protocol):
    """What we ask of a tensor; torch's has it."""

    @property
    def shape(self) -> Sequence[int]: ...
    @property
    def dtype(self) -> Any: ...
    def stride(self) -> Sequence[int]: ...
    def element_size(self) -> int: ...
    def data_ptr(self) -> int: ...


class PagedTensor(NamedTuple):
    """One tensor of an engine's KV.

    Attributes:
        tensor: the engine's own; a view of a larger one will do.
        dims: a name for each of its dimensions, such as ("kv", "slots", "tokens", "heads", "dim"). One is "slots"; the
            others tell layouts of equal sizes apart.
        part: what of its layer it holds, such as "keys", where a layer has more tensors than one.
    """

    tensor: StridedTensor
    dims: tuple[str, ...]
    part: str = ""


class PieceSegments(NamedTuple):
    """A block's pieces in the order they have in it, each an int64 array of one entry a segment.

    Attributes:
        addresses: where the piece of slot 0 lies.
        strides: bytes from one slot's piece to the next slot's.
        sizes: bytes of the piece.
    """

    addresses: np.ndarray
    strides: np.ndarray
    sizes: np.ndarray


class PagedLayout(NamedTuple):
    """Where the bytes of each slot lie.

    Attributes:
        slots, block_bytes: of the pool that the tensors make.
        segments: of one slot.
        layout: the order of a block's bytes in words, for a namespace's `layout` field: blocks of other words are not
            ours.
    """

    slots: int
    block_bytes: int
    segments: PieceSegments
    layout: str


class _Dim(NamedTuple):
    name: str
    size: int
    stride_bytes: int


class _Piece(NamedTuple):
    address: int
    stride: int
    bytes: int


def paged_layout(layers: Sequence[Sequence[PagedTensor]]) -> PagedLayout:
    """The segments of a block over all layers.

    Args:
        layers: the tensors of each layer; one that holds all layers is one layer.
    Raises: LayoutError: a tensor whose slots have no constant stride or share bytes, tensors with other slots or in one
        another, a part without a name; the message names the tensor by layer and part.
    """
    if not layers or not all(layers):
        raise LayoutError(f"paged KV of {len(layers)} layers; each needs at least one tensor")
    pieces: list[_Piece] = []
    words: list[str] = []
    slots: int | None = None
    for index, layer in enumerate(layers):
        parts = [paged.part for paged in layer]
        if len(set(parts)) < len(parts) or (len(parts) > 1 and not all(parts)):
            raise LayoutError(f"layer {index}: its tensors are the parts {parts}; give each a name of its own")
        described = []
        for paged in layer:
            name = f"layer {index}" + (f", {paged.part}" if paged.part else "")
            slot_dim, inner = _dims(paged, name)
            if slots is not None and slot_dim.size != slots:
                raise LayoutError(
                    f"{name}: {slot_dim.size} slots, layer 0 has {slots}; a block has a slot in every layer"
                )
            slots = slot_dim.size
            pieces += _pieces(paged.tensor.data_ptr(), paged.tensor.element_size(), slot_dim, inner, name)
            if len(pieces) > _MAX_SEGMENTS:
                raise LayoutError(
                    f"{name}: a block consists of more than {_MAX_SEGMENTS} pieces; its innermost dimension lies apart"
                )
            described.append(_describe(paged, inner))
        words.append(" + ".join(described))
    assert slots is not None
    _refuse_shared(pieces, slots)
    pieces = _joined(pieces)
    columns = (np.array(column, dtype=np.int64) for column in zip(*pieces, strict=True))
    return PagedLayout(slots, sum(piece.bytes for piece in pieces), PieceSegments(*columns), _layout(words))


def block_order(paged: PagedTensor) -> list[int]:
    """A tensor's dimensions in the order they have in a block, slots first: `tensor.permute` of them, contiguous, is
    our blocks.
    """
    slot_dim, inner = _dims(paged, "this tensor")
    return [paged.dims.index(dim.name) for dim in (slot_dim, *inner)]


def _dims(paged: PagedTensor, name: str) -> tuple[_Dim, list[_Dim]]:
    """The slots' dimension, and the others in the order they have in a block."""
    tensor, names = paged.tensor, paged.dims
    if str(getattr(tensor, "layout", "torch.strided")) != "torch.strided":
        raise LayoutError(
            f"{name}: a tensor of layout {getattr(tensor, 'layout', '')} has no strides; give a dense one"
        )
    shape, strides, element_bytes = tuple(tensor.shape), tuple(tensor.stride()), tensor.element_size()
    if len(names) != len(shape) or len(set(names)) != len(names) or SLOTS not in names:
        raise LayoutError(
            f"{name}: dimensions {list(shape)} are named {list(names)};"
            f' give each a name of its own and the one that counts slots "{SLOTS}"'
        )
    if min(shape) < 1:
        raise LayoutError(f"{name}: dimensions {_sizes(names, shape)}; each must be at least 1")
    dims = [_Dim(*dim) for dim in zip(names, shape, (stride * element_bytes for stride in strides), strict=True)]
    span = element_bytes
    for dim in sorted((dim for dim in dims if dim.size > 1), key=lambda dim: dim.stride_bytes):
        if dim.stride_bytes < span:
            raise LayoutError(
                f'{name}: dimension "{dim.name}" steps {dim.stride_bytes} bytes over {span} bytes of the dimensions '
                "inside it"
                f" ({_sizes(names, shape)}, strides {list(strides)} of {element_bytes} bytes); slots would share bytes"
            )
        span += (dim.size - 1) * dim.stride_bytes
    keys: list[int] = []  # a dimension of size 1 has no stride to speak of: it stands behind the one declared before it
    for dim in dims:
        keys.append(dim.stride_bytes if dim.size > 1 else keys[-1] if keys else 1 << 62)
    ordered = [dims[at] for at in sorted(range(len(dims)), key=lambda at: -keys[at])]
    slot_dim = dims[names.index(SLOTS)]
    return slot_dim, [dim for dim in ordered if dim.name != SLOTS]


def _pieces(address: int, element_bytes: int, slot_dim: _Dim, inner: list[_Dim], name: str) -> list[_Piece]:
    """A slot's runs of consecutive bytes in one tensor."""
    if address == 0:
        raise LayoutError(f"{name}: the tensor has no memory; give one on a CPU or a GPU")
    run = element_bytes
    apart = [dim for dim in inner if dim.size > 1]
    while apart and apart[-1].stride_bytes == run:
        run *= apart.pop().size
    offsets = np.zeros(1, dtype=np.int64)
    for dim in apart:
        if len(offsets) * dim.size > _MAX_SEGMENTS:
            raise LayoutError(
                f"{name}: a block consists of more than {_MAX_SEGMENTS} pieces; its innermost dimension lies apart"
            )
        offsets = np.add.outer(offsets, np.arange(dim.size, dtype=np.int64) * dim.stride_bytes).ravel()
    stride = slot_dim.stride_bytes if slot_dim.size > 1 else max(slot_dim.stride_bytes, run)
    return [_Piece(address + offset, stride, run) for offset in offsets.tolist()]


def _refuse_shared(pieces: list[_Piece], slots: int) -> None:
    """Refuse pieces of which two share bytes.

    Where the extents of pieces reach into one another, they must step alike.
    """
    ends = 0
    group: list[_Piece] = []
    for piece in [*sorted(pieces), _Piece(1 << 63, 1, 1)]:
        if piece.address >= ends:
            _refuse_shared_in(group)
            group = []
        group.append(piece)
        ends = max(ends, piece.address + (slots - 1) * piece.stride + piece.bytes)


def _refuse_shared_in(group: list[_Piece]) -> None:
    strides = {piece.stride for piece in group}
    if len(strides) > 1:
        raise LayoutError(
            f"paged KV: tensors lie in one another with slots {sorted(strides)} bytes apart; they would share bytes, "
            "or take"
            " turns in a way that has no constant stride"
        )
    if not group:
        return
    stride = group[0].stride
    phases = sorted((piece.address % stride, piece.bytes) for piece in group)
    phases.append((phases[0][0] + stride, 0))
    for (begin, size), (following, _) in itertools.pairwise(phases):
        if begin + size > following:
            raise LayoutError(
                f"paged KV: two tensors share bytes of their slots ({size} bytes at {begin} and at "
                f"{following % stride} of"
                f" every {stride}); give each byte once"
            )


def _joined(pieces: list[_Piece]) -> list[_Piece]:
    joined: list[_Piece] = []
    for piece in pieces:
        last = joined[-1] if joined else None
        if last is not None and last.stride == piece.stride and last.address + last.bytes == piece.address:
            joined[-1] = last._replace(bytes=last.bytes + piece.bytes)
        else:
            joined.append(piece)
    return joined


def _describe(paged: PagedTensor, inner: list[_Dim]) -> str:
    dtype = str(paged.tensor.dtype).removeprefix("torch.")
    part = f"{paged.part}: " if paged.part else ""
    return part + " ".join([*(f"{dim.name}={dim.size}" for dim in inner), f"dtype={dtype}"])


def _layout(words: list[str]) -> str:
    return "; ".join(f"layers={len(list(same))} {text}" for text, same in itertools.groupby(words))


def _sizes(names: Sequence[str], shape: Sequence[int]) -> str:
    return " ".join(f"{name}={size}" for name, size in zip(names, shape, strict=True))


class SegmentCopies(Protocol):
    """Copies between slots that lie in segments and rows.

    Any thread; all bytes of a run move in one call, without the GIL.

    `slots` and `at` are C-contiguous int64 arrays, `rows` uint8 of (m, block_bytes): the bytes of a row side by side,
    the rows any distance apart, so a part of each row of a pool will do. Row at[i] belongs to slots[i], row i where
    `at` is None. Each raises LayoutError before a byte moves: a slot or row outside, rows of another size or in one
    another.
    """

    def gather(self, slots: np.ndarray, rows: np.ndarray, at: np.ndarray | None = None) -> np.ndarray:
        """Fill rows from slots; the CRC-32C of each, u32."""

    def scatter(self, slots: np.ndarray, rows: np.ndarray, at: np.ndarray | None = None) -> None:
        """Fill slots from rows."""

    def checksums(self, slots: np.ndarray) -> np.ndarray:
        """The CRC-32C that `gather` would give each slot, u32."""


class NewSegmentCopies(Protocol):
    """Makes copies over segments: their columns as in `PieceSegments`, and how many slots they have."""

    def __call__(self, addresses: np.ndarray, strides: np.ndarray, sizes: np.ndarray, slots: int) -> SegmentCopies: ...


class ReferenceCopies:
    """The readable implementation of the native copies: one numpy copy a segment. The memory must outlive it."""

    def __init__(
        self, addresses: np.ndarray, strides: np.ndarray, sizes: np.ndarray, slots: int, checksums: ChecksumRows
    ) -> None:
        self._views = [
            _bytes_at(*segment, slots)
            for segment in zip(addresses.tolist(), strides.tolist(), sizes.tolist(), strict=True)
        ]
        self._slots = slots
        self._block_bytes = int(sizes.sum())
        self._checksums = checksums

    def gather(self, slots: np.ndarray, rows: np.ndarray, at: np.ndarray | None = None) -> np.ndarray:
        """As `SegmentCopies.gather`."""
        where = self._checked(slots, rows, at)
        begin = 0
        for view in self._views:
            end = begin + view.shape[1]
            rows[where, begin:end] = view[slots]
            begin = end
        return self._checksums(np.ascontiguousarray(rows if at is None else rows[where]))

    def scatter(self, slots: np.ndarray, rows: np.ndarray, at: np.ndarray | None = None) -> None:
        """As `SegmentCopies.scatter`."""
        where = self._checked(slots, rows, at)
        begin = 0
        for view in self._views:
            end = begin + view.shape[1]
            view[slots] = rows[where, begin:end]
            begin = end

    def checksums(self, slots: np.ndarray) -> np.ndarray:
        """As `SegmentCopies.checksums`."""
        return self.gather(slots, np.empty((len(slots), self._block_bytes), dtype=np.uint8))

    def _checked(self, slots: np.ndarray, rows: np.ndarray, at: np.ndarray | None) -> np.ndarray:
        where = np.arange(len(rows)) if at is None else at
        if rows.shape[1] != self._block_bytes or len(where) != len(slots):
            raise LayoutError(f"{len(slots)} slots of {self._block_bytes} bytes, rows of {rows.shape[1]}: {len(where)}")
        apart, inside = rows.strides
        if (len(rows) and self._block_bytes > 1 and inside != 1) or (len(rows) > 1 and apart < self._block_bytes):
            raise LayoutError(
                f"rows lie {apart} bytes apart, their bytes {inside}; the bytes of a row must lie side by side, and in "
                "no other row"
            )
        for what, indexes, end in (("slot", slots, self._slots), ("row", where, len(rows))):
            if len(indexes) and (int(indexes.min()) < 0 or int(indexes.max()) >= end):
                raise LayoutError(f"{what}s {indexes.min()} to {indexes.max()} wanted, there are {end}")
        return where


def _bytes_at(address: int, stride: int, size: int, slots: int) -> np.ndarray:
    """One segment of every slot, (slots, size) uint8, in place."""
    extent = (slots - 1) * stride + size
    flat = np.frombuffer(memoryview((ctypes.c_uint8 * extent).from_address(address)), dtype=np.uint8)
    return np.lib.stride_tricks.as_strided(flat, (slots, size), (stride, 1))
