"""Every way engines keep KV, held to a copy made block by block and tensor by tensor; on a CPU, in Triton's
interpreter, on a GPU.
"""

from __future__ import annotations

import gc
import importlib.util
import os
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvbm._native import RowCopier, SegmentTable, checksums
from kvbm.assembly import device_rings
from kvbm.core.errors import ConfigError, LayoutError, PoolError
from kvbm.core.ids import HASH_BYTES, Epoch, NamespaceId
from kvbm.pools.base import Proof, ReadOutcome
from kvbm.pools.hbm.device import DeviceCopies, Half, Lane, row_copies
from kvbm.pools.hbm.paged import NewSegmentCopies, PagedTensor, SegmentCopies, block_order, paged_layout
from kvbm.pools.hbm.pool import HbmPool
from tests.extras import needed
from tests.pool_runs import SHAPE

torch = needed("torch", "engine")

ROOT = Path(__file__).parents[2]
SLOTS = 11
Layers = list[list[PagedTensor]]


def _tensor(shape: tuple[int, ...], dtype: object = None, device: str = "cpu") -> object:
    """Random bytes of any dtype."""
    dtype = dtype or torch.bfloat16
    element_bytes = torch.empty((), dtype=dtype).element_size()
    raw = torch.randint(0, 256, (*shape[:-1], shape[-1] * element_bytes), dtype=torch.uint8)
    return raw.view(dtype).to(device)


def _kv_outside(device: str, dtype: object = None) -> Layers:
    dims = ("kv", "slots", "tokens", "heads", "dim")
    return [[PagedTensor(_tensor((2, SLOTS, 4, 2, 8), dtype, device), dims)] for _ in range(3)]


def _kv_inside(device: str) -> Layers:
    dims = ("slots", "kv", "tokens", "heads", "dim")
    return [[PagedTensor(_tensor((SLOTS, 2, 4, 2, 8), None, device), dims)] for _ in range(3)]


def _heads_first(device: str) -> Layers:
    """The shape says tokens, heads; the memory heads, tokens (HND)."""
    dims = ("kv", "slots", "tokens", "heads", "dim")
    return [[PagedTensor(_tensor((2, SLOTS, 2, 4, 8), None, device).permute(0, 1, 3, 2, 4), dims)] for _ in range(3)]


def _slots_inside_heads(device: str) -> Layers:
    dims = ("heads", "slots", "tokens", "kv", "dim")
    return [[PagedTensor(_tensor((2, SLOTS, 4, 2, 8), None, device), dims)] for _ in range(3)]


def _latent(device: str) -> Layers:
    """MLA: an odd number of bytes a token, in tensors that do not begin at a snapshot address."""
    kept = [_tensor((SLOTS * 4 * 9 + 1,), torch.float16, device)[1:].view(SLOTS, 4, 9) for _ in range(3)]
    return [[PagedTensor(tensor, ("slots", "tokens", "dim"))] for tensor in kept]


def _bytes(device: str) -> Layers:
    return [[PagedTensor(_tensor((SLOTS * 7 + 3,), torch.uint8, device)[3:].view(SLOTS, 7), ("slots", "bytes"))]]


def _views_of_one_tensor(device: str) -> Layers:
    """All layers of a slot together: views whose slots take turns, and make one segment."""
    whole = _tensor((SLOTS, 3, 2, 4, 2, 8), None, device)
    return [[PagedTensor(whole[:, layer], ("slots", "kv", "tokens", "heads", "dim"))] for layer in range(3)]


def _all_layers_in_one(device: str) -> Layers:
    return [
        [
            PagedTensor(
                _tensor((3, 2, SLOTS, 4, 2, 8), None, device), ("layers", "kv", "slots", "tokens", "heads", "dim")
            )
        ]
    ]


def _keys_apart(device: str) -> Layers:
    dims = ("slots", "tokens", "heads", "dim")
    return [
        [PagedTensor(_tensor((SLOTS, 4, 2, 8), None, device), dims, part) for part in ("keys", "values")]
        for _ in range(3)
    ]


def _scales_beside(device: str) -> Layers:
    """8-bit values with their scales, and a last layer of another size."""
    values, scales = ("kv", "slots", "tokens", "heads", "dim"), ("kv", "slots", "tokens", "heads")
    layers = [
        [
            PagedTensor(_tensor((2, SLOTS, 4, 2, 8), torch.float8_e4m3fn, device), values, "values"),
            PagedTensor(_tensor((2, SLOTS, 4, 2), torch.float32, device), scales, "scales"),
        ]
        for _ in range(2)
    ]
    return [
        *layers,
        [PagedTensor(_tensor((SLOTS, 2, 4, 2, 8), None, device), ("slots", "kv", "tokens", "heads", "dim"))],
    ]


def _padded(device: str) -> Layers:
    """Slots with room behind each, as when a page is rounded up."""
    return [
        [PagedTensor(_tensor((SLOTS, 2, 4, 2, 24), None, device)[..., :8], ("slots", "kv", "tokens", "heads", "dim"))]
    ]


def _large(device: str) -> Layers:
    """Segments of several chunks, the last one short."""
    return [[PagedTensor(_tensor((2, SLOTS, 9_011), torch.float16, device), ("kv", "slots", "dim"))] for _ in range(2)]


LAYOUTS: dict[str, Callable[[str], Layers]] = {
    "kv outside": _kv_outside,
    "kv inside": _kv_inside,
    "heads first": _heads_first,
    "slots inside heads": _slots_inside_heads,
    "latent": _latent,
    "bytes": _bytes,
    "views of one tensor": _views_of_one_tensor,
    "all layers in one": _all_layers_in_one,
    "keys apart": _keys_apart,
    "scales beside": _scales_beside,
    "padded": _padded,
    "large": _large,
}
COPIER = RowCopier(2)


def native(addresses: np.ndarray, strides: np.ndarray, sizes: np.ndarray, slots: int) -> SegmentCopies:
    return SegmentTable(addresses, strides, sizes, slots, COPIER)


def block_of(layers: Layers, slot: int) -> np.ndarray:
    """A slot's bytes, gathered without any of our arithmetic: each tensor's part, its dimensions as they lie in
    memory.
    """
    parts = []
    for layer in layers:
        for paged in layer:
            tensor = paged.tensor.select(paged.dims.index("slots"), slot)
            order = sorted(range(tensor.dim()), key=lambda dim: -tensor.stride(dim) if tensor.shape[dim] > 1 else 0)
            wide = [dim for dim in order if tensor.shape[dim] > 1]
            narrow = [dim for dim in order if tensor.shape[dim] == 1]
            plain = tensor.permute(narrow + wide).flatten().clone(memory_format=torch.contiguous_format)
            parts.append(plain.view(torch.uint8).cpu())
    return torch.cat(parts).numpy()


def blocks_of(layers: Layers, slots: list[int]) -> np.ndarray:
    return np.stack([block_of(layers, slot) for slot in slots])


def memory_of(layers: Layers) -> list[np.ndarray]:
    """Every byte of the memory that the tensors lie in, gaps too."""
    return [
        torch.tensor([], dtype=torch.uint8, device=paged.tensor.device)
        .set_(paged.tensor.untyped_storage())
        .cpu()
        .numpy()
        .copy()
        for layer in layers
        for paged in layer
    ]


def proof_of(rows: np.ndarray) -> Proof:
    return Proof(SHAPE.id, Epoch(1), bytes(len(rows) * HASH_BYTES), checksums(np.ascontiguousarray(rows)))


def read(pool: HbmPool, slots: list[int], rows: np.ndarray, at: list[int] | None = None) -> np.ndarray:
    result = pool.read(slots, NamespaceId(SHAPE.id), bytes(len(slots) * HASH_BYTES), rows, at)
    assert result.outcomes == [ReadOutcome.GOOD] * len(slots)
    return result.checksums


def _cuda() -> str:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device here")
    return "cuda"


OPENERS: dict[str, Callable[[Layers], HbmPool]] = {
    "native": lambda layers: HbmPool.of_layers(layers, checksums, native),
    "readable": lambda layers: HbmPool.of_layers(layers, checksums),
    "cuda-ring": lambda layers: HbmPool.of_layers(layers, checksums, native, "ring", device_rings(RowCopier(2))),
    "cuda-kernel": lambda layers: HbmPool.of_layers(layers, checksums, native, "kernel"),
    "cuda-batch": lambda layers: HbmPool.of_layers(layers, checksums, native, "batch"),
    "cuda-memcpy": lambda layers: HbmPool.of_layers(layers, checksums, native, "memcpy"),
    "cuda-torch": lambda layers: HbmPool.of_layers(layers, checksums, native, "torch"),
}


@pytest.fixture(params=[pytest.param(name, marks=pytest.mark.gpu if "cuda" in name else ()) for name in OPENERS])
def opened(request: pytest.FixtureRequest) -> Iterator[Callable[[str], tuple[HbmPool, Layers]]]:
    pools: list[HbmPool] = []

    def opened_pool(name: str) -> tuple[HbmPool, Layers]:
        layers = LAYOUTS[name](_cuda() if "cuda" in request.param else "cpu")
        pools.append(OPENERS[request.param](layers))
        return pools[-1], layers

    yield opened_pool
    for pool in pools:
        pool.close()


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_read_gathers_what_each_tensor_holds_of_a_slot(
    opened: Callable[[str], tuple[HbmPool, Layers]], name: str
) -> None:
    pool, layers = opened(name)
    slots, at = [7, 0, 10, 3], [2, 5, 0, 3]
    rows = np.full((6, pool.block_bytes), 0xA5, dtype=np.uint8)
    sums = read(pool, slots, rows, at)
    wanted = blocks_of(layers, slots)
    assert (rows[at] == wanted).all()
    assert (rows[[1, 4]] == 0xA5).all()
    assert (sums == checksums(wanted)).all()


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_write_fills_its_slots_and_not_a_byte_beside_them(
    opened: Callable[[str], tuple[HbmPool, Layers]], name: str
) -> None:
    pool, layers = opened(name)
    before, others = memory_of(layers), [slot for slot in range(SLOTS) if slot not in (1, 9, 4)]
    neighbours = blocks_of(layers, others)
    rows = np.random.default_rng(1).integers(0, 256, (5, pool.block_bytes), dtype=np.uint8)
    old = blocks_of(layers, [1, 9, 4])
    pool.write([1, 9, 4], rows, proof_of(rows[[4, 0, 2]]), [4, 0, 2])
    assert (blocks_of(layers, [1, 9, 4]) == rows[[4, 0, 2]]).all()
    assert (blocks_of(layers, others) == neighbours).all()
    pool.write([1, 9, 4], old, proof_of(old))  # whatever else had changed, such as a gap, would still differ
    assert all((now == then).all() for now, then in zip(memory_of(layers), before, strict=True))


@pytest.mark.parametrize("name", LAYOUTS)
def test_blocks_that_left_come_back_as_they_were_in_any_slots(
    opened: Callable[[str], tuple[HbmPool, Layers]], name: str
) -> None:
    pool, layers = opened(name)
    everything = blocks_of(layers, list(range(SLOTS)))
    rows = np.zeros((SLOTS, pool.block_bytes), dtype=np.uint8)
    read(pool, list(range(SLOTS)), rows)
    order = np.random.default_rng(2).permutation(SLOTS).tolist()
    pool.write(order, rows, proof_of(rows))
    assert (blocks_of(layers, order) == everything).all()


def test_copies_leave_alone_what_the_engine_writes_to_other_slots(
    opened: Callable[[str], tuple[HbmPool, Layers]],
) -> None:
    pool, layers = opened("kv outside")
    ours, wrong = [0, 2, 4, 6, 8], threading.Event()
    stop = threading.Event()

    def engine() -> None:
        """Computes in the other slots, all the while."""
        turn = 0
        while not stop.is_set():
            for layer in layers:
                layer[0].tensor[:, 1::2] = turn % 7
                if bool((layer[0].tensor[:, 1::2] != turn % 7).any()):
                    wrong.set()
            turn += 1

    thread = threading.Thread(target=engine)
    thread.start()
    try:
        random = np.random.default_rng(3)
        for _ in range(40):
            rows = random.integers(0, 256, (len(ours), pool.block_bytes), dtype=np.uint8)
            pool.write(ours, rows, proof_of(rows))
            back = np.zeros_like(rows)
            read(pool, ours, back)
            assert (back == rows).all()
    finally:
        stop.set()
        thread.join(60)
    assert not wrong.is_set()


def test_a_pool_of_layers_has_no_tensor_or_memory_of_its_own() -> None:
    pool = HbmPool.of_layers(_kv_inside("cpu"), checksums, native)
    assert pool.memory is None
    with pytest.raises(PoolError, match="engine's own tensors"):
        _ = pool.tensor
    pool.close()
    rows = np.zeros((1, pool.block_bytes), dtype=np.uint8)
    with pytest.raises(PoolError, match="closed"):
        pool.write([0], rows, proof_of(rows))


def test_the_tensors_live_as_long_as_their_pool_is_open() -> None:
    layers = _kv_inside("cpu")
    tensor = weakref.ref(layers[0][0].tensor)
    pool = HbmPool.of_layers(layers, checksums, native)
    del layers
    gc.collect()
    assert tensor() is not None
    pool.close()
    gc.collect()
    assert tensor() is None


def test_segments_that_follow_one_another_are_one() -> None:
    assert len(paged_layout(_views_of_one_tensor("cpu")).segments.sizes) == 1
    assert len(paged_layout(_kv_inside("cpu")).segments.sizes) == 3
    assert len(paged_layout(_kv_outside("cpu")).segments.sizes) == 6
    assert len(paged_layout(_slots_inside_heads("cpu")).segments.sizes) == 6


# -- the layout in words ----------------------------------------------------------------------------------------------


def test_the_layout_names_the_order_of_a_blocks_bytes() -> None:
    words = {name: paged_layout(make("cpu")).layout for name, make in LAYOUTS.items()}
    assert words["kv outside"] == "layers=3 kv=2 tokens=4 heads=2 dim=8 dtype=bfloat16"
    assert words["kv inside"] == words["views of one tensor"] == words["kv outside"]  # a slot's bytes are the same
    assert words["heads first"] == "layers=3 kv=2 heads=2 tokens=4 dim=8 dtype=bfloat16"
    assert words["keys apart"] == (
        "layers=3 keys: tokens=4 heads=2 dim=8 dtype=bfloat16 + values: tokens=4 heads=2 dim=8 dtype=bfloat16"
    )
    assert words["scales beside"] == (
        "layers=2 values: kv=2 tokens=4 heads=2 dim=8 dtype=float8_e4m3fn + scales: kv=2 tokens=4 heads=2 dtype=float32"
        "; layers=1 kv=2 tokens=4 heads=2 dim=8 dtype=bfloat16"
    )


def test_orders_that_only_names_tell_apart_have_other_words() -> None:
    square = torch.zeros(SLOTS, 4, 4, 8)
    tokens_first = paged_layout([[PagedTensor(square, ("slots", "tokens", "heads", "dim"))]])
    heads_first = paged_layout([[PagedTensor(square, ("slots", "heads", "tokens", "dim"))]])
    assert tokens_first.block_bytes == heads_first.block_bytes
    assert tokens_first.layout != heads_first.layout


def test_keys_before_all_values_are_another_layout_than_in_turns() -> None:
    turns = _keys_apart("cpu")
    blocks = [[[layer[part]] for layer in turns] for part in (0, 1)]
    assert paged_layout(turns).layout != paged_layout(blocks[0] + blocks[1]).layout


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_equal_words_mean_equal_bytes_and_random_strides_come_back(data: st.DataObject) -> None:
    names = ("slots", "kv", "tokens", "heads", "dim")
    sizes = {name: data.draw(st.integers(1, 4), name) for name in names}
    layers: Layers = []
    for _ in range(data.draw(st.integers(1, 3), "layers")):
        memory_order = data.draw(st.permutations(names), "order in memory")
        room = {name: size + data.draw(st.integers(0, 2), "gap") for name, size in sizes.items()}
        begin = data.draw(st.integers(0, 3), "begin")
        count = int(np.prod([room[name] for name in memory_order]))
        dtype = data.draw(st.sampled_from([torch.uint8, torch.float16, torch.float32]))
        flat = _tensor((begin + count,), dtype)[begin:]
        tensor = flat.view(*(room[name] for name in memory_order))[tuple(slice(sizes[name]) for name in memory_order)]
        shown = data.draw(st.permutations(names), "order of dimensions")
        layers.append([PagedTensor(tensor.permute([memory_order.index(name) for name in shown]), tuple(shown))])
    layout = paged_layout(layers)
    slots = data.draw(st.permutations(range(sizes["slots"])))
    wanted = blocks_of(layers, slots)
    for copies in (None, native):
        pool = HbmPool.of_layers(layers, checksums, copies)
        rows = np.full((len(slots), layout.block_bytes), 0xA5, dtype=np.uint8)
        assert (read(pool, slots, rows) == checksums(wanted)).all()
        assert (rows == wanted).all()
        before = memory_of(layers)
        pool.write(slots, np.zeros_like(rows), proof_of(np.zeros_like(rows)))
        assert not blocks_of(layers, slots).any()
        pool.write(slots, rows, proof_of(rows))
        assert all((now == then).all() for now, then in zip(memory_of(layers), before, strict=True))
    # The words say the order: a contiguous tensor of that order, which is what a block is, has the same.
    plain: Layers = []
    for layer in layers:
        order = block_order(layer[0])
        dims = tuple(layer[0].dims[dim] for dim in order)
        plain.append([PagedTensor(layer[0].tensor.permute(order).contiguous(), dims)])
    assert paged_layout(plain).layout == layout.layout
    assert (blocks_of(plain, slots) == wanted).all()


# -- what is refused --------------------------------------------------------------------------------------------------


def _one(tensor: object, *dims: str) -> Layers:
    return [[PagedTensor(tensor, dims)]]


def _sharing() -> Layers:
    whole = torch.zeros(SLOTS, 16)
    return [[PagedTensor(whole[:, begin : begin + 8], ("slots", "dim"))] for begin in (0, 4)]


def _at_other_paces() -> Layers:
    whole = torch.zeros(SLOTS * 16)
    return [
        [PagedTensor(whole.as_strided((4, 4), (16, 1)), ("slots", "dim"))],
        [PagedTensor(whole.as_strided((4, 4), (20, 1), 8), ("slots", "dim"))],
    ]


REFUSED: dict[str, tuple[Callable[[], Layers], str]] = {
    "nothing": (list, "0 layers"),
    "a layer without a tensor": (lambda: [*_kv_inside("cpu"), []], "4 layers"),
    "dimensions without names": (lambda: _one(torch.zeros(4, 3), "slots"), "layer 0: dimensions \\[4, 3\\] are named"),
    "no slots": (lambda: _one(torch.zeros(4, 3), "tokens", "dim"), 'the one that counts slots "slots"'),
    "a name twice": (lambda: _one(torch.zeros(4, 3, 3), "slots", "dim", "dim"), "a name of its own"),
    "an empty dimension": (lambda: _one(torch.zeros(4, 0), "slots", "dim"), "slots=4 dim=0"),
    "slots that are one and the same": (
        lambda: _one(torch.zeros(1, 8).expand(4, 8), "slots", "dim"),
        'dimension "slots" steps 0 bytes',
    ),
    "slots that reach into the next": (
        lambda: _one(torch.zeros(64).as_strided((4, 8), (6, 1)), "slots", "dim"),
        'dimension "slots" steps 24 bytes over 32',
    ),
    "tokens that reach into the next": (
        lambda: _one(torch.zeros(256).as_strided((4, 4, 8), (64, 7, 1)), "slots", "tokens", "dim"),
        'dimension "tokens"',
    ),
    "a tensor that is not dense": (
        lambda: _one(torch.eye(4).to_sparse(), "slots", "dim"),
        "layout torch.sparse_coo has no strides",
    ),
    "a tensor without memory": (lambda: _one(torch.zeros(4, 4, device="meta"), "slots", "dim"), "no memory"),
    "layers of other slots": (
        lambda: [*_one(torch.zeros(4, 8), "slots", "dim"), *_one(torch.zeros(5, 8), "slots", "dim")],
        "layer 1: 5 slots, layer 0 has 4",
    ),
    "parts without names": (
        lambda: [[PagedTensor(torch.zeros(4, 8), ("slots", "dim")), PagedTensor(torch.zeros(4, 8), ("slots", "dim"))]],
        "give each a name",
    ),
    "a tensor given twice": (lambda: 2 * _one(torch.zeros(4, 8), "slots", "dim"), "share bytes"),
    "tensors that share bytes": (_sharing, "share bytes"),
    "tensors whose slots step otherwise": (_at_other_paces, "lie in one another"),
    "elements that lie apart": (
        lambda: _one(torch.zeros(2, 70_000, 2)[..., 0], "slots", "dim"),
        "more than 65536 pieces",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_tensors_that_make_no_pool_are_refused_by_name(what: str) -> None:
    make, message = REFUSED[what]
    with pytest.raises(LayoutError, match=message):
        HbmPool.of_layers(make(), checksums, native)


def test_a_call_that_names_what_is_not_there_moves_nothing() -> None:
    layers = _kv_inside("cpu")
    layout = paged_layout(layers)
    rows = np.full((2, layout.block_bytes), 0xA5, dtype=np.uint8)
    before = memory_of(layers)
    both: list[NewSegmentCopies] = [native, lambda *columns: HbmPool.of_layers(layers, checksums)._copies]
    for new in both:
        copies = new(*layout.segments, layout.slots)
        slots, at = np.array([0, 1]), np.array([0, 1])
        for bad_slots, bad_rows, bad_at in (
            (np.array([0, SLOTS]), rows, at),
            (np.array([-1, 0]), rows, at),
            (slots, rows, np.array([0, 2])),
            (slots, rows, np.array([0])),
            (slots, rows[:1], None),
            (slots, rows[:, :-1].copy(), at),
        ):
            with pytest.raises(LayoutError):
                copies.gather(bad_slots, bad_rows, bad_at)
            with pytest.raises(LayoutError):
                copies.scatter(bad_slots, bad_rows, bad_at)
    assert (rows == 0xA5).all()
    assert all((now == then).all() for now, then in zip(memory_of(layers), before, strict=True))


def test_a_way_that_is_unknown_or_cannot_be_had_is_refused() -> None:
    from kvbm.pools.hbm.cuda import mover_of

    layers = _kv_inside("cpu")
    layout, device = paged_layout(layers), torch.device("cpu")
    with pytest.raises(ConfigError, match="auto, ring, kernel, batch, memcpy, torch"):
        mover_of("telepathy", layers, layout, device)
    if importlib.util.find_spec("triton") is None:
        with pytest.raises(ConfigError, match="needs Triton"):
            mover_of("kernel", layers, layout, device)


# -- what runs on the device, without one -----------------------------------------------------------------------------


def test_the_copies_without_triton_move_the_same_bytes() -> None:
    from kvbm.pools.hbm.cuda import TensorPacking

    for make in LAYOUTS.values():
        layers = make("cpu")
        packing = TensorPacking(layers, paged_layout(layers), torch.device("cpu"))
        for slots in ([4, 0, 9], [6]):
            wanted = blocks_of(layers, slots)
            packed = packing.gather(torch.tensor(slots))
            assert (packed.numpy() == wanted).all()
            room = packing.room(len(slots))
            room.copy_(torch.from_numpy(wanted ^ 0xFF))
            packing.scatter(torch.tensor(slots), room)
            assert (blocks_of(layers, slots) == wanted ^ 0xFF).all()


class AtOnce:
    """A queue whose work is over when it was queued."""

    def begin(self) -> None:
        """Nothing to wait for."""

    def run(self, work: Callable[[], None]) -> AtOnce:
        work()
        return self

    def query(self) -> bool:
        return True


def device_copies(way: str, layers: Layers, reaches: bool) -> DeviceCopies:
    """What runs on a GPU by that way, on a CPU."""
    from kvbm.pools.hbm.cuda import mover_of

    layout = paged_layout(layers)

    def half() -> Half:
        rows = np.zeros((3, layout.block_bytes), dtype=np.uint8)
        indexes = (torch.zeros(8, dtype=torch.int64) for _ in range(2))
        return Half(rows, row_copies(native, rows), rows.ctypes.data, *indexes)

    mover = mover_of(way, layers, layout, torch.device("cpu"))
    lanes = [Lane(AtOnce(), (half(), half()))]
    return DeviceCopies(mover, lanes, native, lambda rows: rows.ctypes.data if reaches else None, 60, 8)


def check_way(way: str, names: list[str]) -> None:
    """Hold a way to the plain copies, in runs longer than a launch: rows that the device reaches, others, and parts of
    wider rows.
    """
    for name in names:
        make = LAYOUTS[name]
        for reaches, parts in ((True, 1), (False, 1), (True, 3), (False, 3)):
            layers = make("cpu")
            moving = device_copies(way, layers, reaches)
            slots, at = np.array([7, 0, 10, 3, 4, 5, 1, 2, 9]), np.array([3, 4, 5, 9, 0, 1, 8, 6, 2])
            block_bytes = paged_layout(layers).block_bytes
            wide = np.full((12, parts * block_bytes), 0xA5, dtype=np.uint8)
            rows = wide[:, (parts - 1) // 2 * block_bytes :][:, :block_bytes]
            wanted = blocks_of(layers, slots.tolist())
            sums = moving.gather(slots, rows, at)
            assert (rows[at] == wanted).all(), name
            assert (sums == checksums(wanted)).all(), name
            assert (np.delete(rows, at, axis=0) == 0xA5).all(), name
            assert (wide == 0xA5).sum() - (rows == 0xA5).sum() == 12 * (parts - 1) * block_bytes, name
            before, others = memory_of(layers), blocks_of(layers, [6, 8])
            rows[at] ^= 0xFF
            rows.flags.writeable = False
            moving.scatter(slots, rows, at)
            assert (blocks_of(layers, slots.tolist()) == wanted ^ 0xFF).all(), name
            assert (blocks_of(layers, [6, 8]) == others).all(), name
            moving.scatter(slots, wanted, None)
            assert all((now == then).all() for now, then in zip(memory_of(layers), before, strict=True)), name


def test_the_way_without_triton_moves_the_same_bytes() -> None:
    check_way("torch", list(LAYOUTS))


_WAYS = """
from tests.conformance.test_paged_layouts import check_way
for way in ("kernel", "memcpy"):
    check_way(way, ["kv outside", "scales beside", "bytes"])
print("same")
"""

_REFUSED = """
import torch
from kvbm.pools.hbm import cuda
from kvbm.pools.hbm.cuda import MemcpyMover, mover_of
from kvbm.pools.hbm.paged import paged_layout
cuda._driver = lambda: None  # also where there is one: no way by it
from tests.conformance.test_paged_layouts import LAYOUTS
layers = LAYOUTS["kv inside"]("cpu")
assert isinstance(mover_of("auto", layers, paged_layout(layers), torch.device("cpu")), MemcpyMover)
print("slower")
"""

_INTERPRETED = """
import numpy as np, torch
from kvbm.pools.hbm.paged import paged_layout
from kvbm.pools.hbm.segment_kernel import SegmentKernel
from tests.conformance.test_paged_layouts import LAYOUTS, SLOTS, blocks_of, memory_of
for name, make in LAYOUTS.items():
    layers = make("cpu")
    layout = paged_layout(layers)
    kernel = SegmentKernel(layout.segments, torch.device("cpu"))
    # rows that are aligned, rows that are not, and rows with room between them
    for begin, stride in ((0, layout.block_bytes), (3, layout.block_bytes), (0, layout.block_bytes + 24)):
        memory = np.full(begin + 5 * stride + 16, 0xA5, dtype=np.uint8)
        address = memory.ctypes.data + begin
        rows = memory[begin : begin + 5 * stride].reshape(5, -1)[:, : layout.block_bytes]
        slots, at = [7, 0, 10], [4, 1, 2]
        wanted = blocks_of(layers, slots)
        kernel.gather(torch.tensor(slots), torch.tensor(at), address, stride)
        assert (rows[at] == wanted).all(), name
        assert (rows[[0, 3]] == 0xA5).all() and (memory[begin + 5 * stride :] == 0xA5).all(), name
        between = memory[begin : begin + 5 * stride].reshape(5, -1)[:, layout.block_bytes :]
        assert (between == 0xA5).all(), name
        before = memory_of(layers)
        new = np.random.default_rng(1).integers(0, 256, (3, layout.block_bytes), dtype=np.uint8)
        rows[at] = new
        kernel.scatter(torch.tensor(slots), torch.tensor(at), address, stride)
        assert (blocks_of(layers, slots) == new).all(), name
        rows[at] = wanted
        kernel.scatter(torch.tensor(slots), torch.tensor(at), address, stride)
        assert all((now == then).all() for now, then in zip(memory_of(layers), before, strict=True)), name
print("same")
"""

_COMPILED = """
import re, triton, triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from kvbm.pools.hbm.segment_kernel import _copy_chunks
for gathers in (True, False):
    fixed = {"GATHER": gathers, "WORD": tl.int64, "ALIGN": 16, "STEP": 2, "WIDTH": 1024}
    types = {"chunks": "*i64", "slots": "*i64", "at": "*i64", "rows": "i64", "row_stride": "i32", "chunk_count": "i32"}
    source = ASTSource(fn=_copy_chunks, signature=types | {name: "constexpr" for name in fixed}, constexprs=fixed)
    ptx = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4}).asm["ptx"]
    assert len(re.findall(r"ld\\.global\\.v2\\.b64", ptx)) == len(re.findall(r"st\\.global\\.v2\\.b64", ptx)) == 4, ptx
print("wide")
"""


def _in_triton(program: str, folder: Path, **environment: str) -> str:
    if importlib.util.find_spec("triton") is None:
        pytest.skip("Triton is not installed; it comes with torch's CUDA builds")
    run = subprocess.run(
        [sys.executable, "-c", program],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
        env={
            **os.environ,
            "TRITON_CACHE_DIR": str(folder),
            "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
        }
        | environment,
    )
    assert run.returncode == 0, run.stderr
    return run.stdout.strip()


@pytest.mark.triton
def test_the_kernel_moves_the_same_bytes_in_tritons_interpreter(tmp_path: Path) -> None:
    assert _in_triton(_INTERPRETED, tmp_path, TRITON_INTERPRET="1") == "same"


@pytest.mark.triton
def test_the_ways_with_triton_move_the_same_bytes(tmp_path: Path) -> None:
    assert _in_triton(_WAYS, tmp_path, TRITON_INTERPRET="1") == "same"


@pytest.mark.triton
def test_where_triton_cannot_compile_or_launch_bytes_take_the_slower_way(tmp_path: Path) -> None:
    told = _in_triton(_REFUSED, tmp_path, TRITON_INTERPRET="0")
    assert told.endswith("slower")
    assert "hbm.kernel_refused" in told


@pytest.mark.triton
def test_the_kernel_is_compiled_to_loads_and_stores_of_sixteen_bytes(tmp_path: Path) -> None:
    assert _in_triton(_COMPILED, tmp_path, TRITON_INTERPRET="0") == "wide"
