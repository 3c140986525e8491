"""Arguments that cannot be used: each is named in one error, and the manager is as it was before."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

import kvbm
from kvbm.core.events import EvictReason
from kvbm.core.ids import HASH_BYTES, split_hashes
from kvbm.manager.onboard.expected import ExpectedBlocks
from kvbm.streams.base import ORIGIN
from tests.cores import CORES
from tests.eventually import WAIT_S
from tests.managers import hashes_of
from tests.owning_engines import mapped_rows

SPACE = kvbm.Namespace(model="one", revision="r1", block_tokens=16)
STRANGE = kvbm.Namespace(model="two", revision="r1", block_tokens=16)
BLOCK_BYTES = 64
SLOTS = 8
NAN, INF = float("nan"), float("inf")
CREATED, FRESH = hashes_of(1, 4), hashes_of(2, 2)

Bad = tuple[Any, type[kvbm.KvbmError]]
TYPE, VALUE = kvbm.ArgumentTypeError, kvbm.ArgumentValueError

_NUMBERS: list[Bad] = [(None, TYPE), (1.5, TYPE), ("1", TYPE), (True, TYPE), (-1, VALUE)]
_RUNS: list[Bad] = [
    (None, TYPE),
    ([CREATED], TYPE),
    (bytearray(16), TYPE),
    (np.zeros(16, np.uint8), TYPE),
    ("a" * 16, TYPE),
    (bytes(15), VALUE),
    (bytes(17), VALUE),
    (CREATED[:-1], VALUE),
]
_SECONDS: list[Bad] = [("1", TYPE), (True, TYPE), ([1], TYPE), (-1, VALUE), (NAN, VALUE)]
_SLOTS: list[Bad] = [
    (None, TYPE),
    (3, TYPE),
    ([1.5, 0], TYPE),
    (["0", "1"], TYPE),
    ([None, 0], TYPE),
    (bytes(8), TYPE),
    ("01", TYPE),
    ([0, -1], VALUE),
    ([-1, 0], VALUE),
    ([0, SLOTS], VALUE),
    ([SLOTS, 0], VALUE),
    ([0, 1 << 32], VALUE),
]
BAD: dict[str, list[Bad]] = {
    "namespace": [
        (SPACE, TYPE),
        (None, TYPE),
        (SPACE.id.hex(), TYPE),
        (bytearray(SPACE.id), TYPE),
        ([1], TYPE),
        (7, TYPE),
        (SPACE.id[:15], VALUE),
        (b"", VALUE),
        (STRANGE.id, VALUE),
    ],
    "hashes": _RUNS,
    "parent": [*_RUNS, (CREATED, VALUE), (b"", VALUE), (CREATED[:16], VALUE)],  # the last: with start 0
    "start": [*_NUMBERS, (1 << 32, VALUE)],
    "slots": _SLOTS,
    "count": _NUMBERS,
    "first": [*_NUMBERS, (5, VALUE)],
    "uses": [*_NUMBERS, (0, VALUE)],
    "wait_s": [*_SECONDS, (INF, VALUE)],
    "trace": [(b"00", TYPE), (7, TYPE), ({"traceparent": "00"}, TYPE)],
    "timeout_s": [*_SECONDS, (None, TYPE), (INF, VALUE)],
    "ttl_s": [*_SECONDS, (None, TYPE)],
    "priority": [*_NUMBERS, (101, VALUE)],
    "until_read": [(None, TYPE), (1, TYPE), ("yes", TYPE)],
    "most": _NUMBERS,
    "tier": [(None, TYPE), ("HBM", TYPE), (0, TYPE)],
    "reason": [(None, TYPE), ("cleared", TYPE), (0, TYPE)],
    "queued_tokens": [*_NUMBERS, (1 << 63, VALUE)],
    "running_requests": [*_NUMBERS, (1 << 63, VALUE)],
    "prefill_tokens_per_s": [("1", TYPE), (True, TYPE), (-1.0, VALUE), (NAN, VALUE), (INF, VALUE)],
    "queue_tokens_per_s": [("1", TYPE), (True, TYPE), (-1.0, VALUE), (NAN, VALUE), (INF, VALUE)],
    "namespaces": [
        (None, TYPE),
        (SPACE, TYPE),
        ([SPACE.id], TYPE),
        (["one"], TYPE),
        ([kvbm.Namespace(model="one", block_tokens=16, kv_dtype="unknown")], VALUE),
        ([kvbm.Namespace(model="one", block_tokens=16, layout="unknown")], VALUE),
    ],
    "tokens": [
        (None, TYPE),
        (7, TYPE),
        ("abc", TYPE),
        ([1, 1.5], TYPE),
        ([1, None], TYPE),
        (["1"], TYPE),
        ([[1], [2, 3]], TYPE),
        (np.array([1.0]), TYPE),
        ([-1], kvbm.LayoutError),
        ([1 << 32], kvbm.LayoutError),
        ([1, 1 << 64], kvbm.LayoutError),
        ([[1, 2]], kvbm.LayoutError),
    ],
    "root": [(None, TYPE), (SPACE, TYPE), ("r" * 16, TYPE), (bytes(15), VALUE), (b"", VALUE)],
    "block_tokens": [*_NUMBERS, (0, VALUE)],
    "stream": [(0x7F00, TYPE), ("default", TYPE), (object(), TYPE)],
    "store": [(None, TYPE), (7, TYPE)],
    "arrived": [(None, TYPE), ([True], VALUE), ([], VALUE)],
    "runs": [
        (None, TYPE),
        (7, TYPE),
        ([7], TYPE),
        ([CREATED], TYPE),
        ([(SPACE.id,)], TYPE),
        ([(SPACE.id, None)], TYPE),
        ([(SPACE.id, CREATED), (SPACE.id, CREATED[:-1])], VALUE),
    ],
    "is_whole": [(None, TYPE), (1, TYPE), ("yes", TYPE)],
    "objects": [(None, TYPE), (1, TYPE), ("yes", TYPE)],
    "expected": [
        (1, TYPE),
        ((1, 1.0), TYPE),
        (ExpectedBlocks(True, 1.0), TYPE),
        (ExpectedBlocks(-1, 1.0), VALUE),
        (ExpectedBlocks(1 << 40, 1.0), VALUE),
        (ExpectedBlocks(1, NAN), VALUE),
        (ExpectedBlocks(1, INF), VALUE),
        (ExpectedBlocks(1, 1.0, b"one"), TYPE),  # type: ignore[arg-type]
    ],
    "checksums": [(None, TYPE), ([1], VALUE), (np.zeros(2, np.float32), TYPE)],
}

# What only assembly, a publisher, a pool or a driver by hand calls.
INSIDE = {
    "start",
    "step_frames",
    "heartbeat",
    "disown",
}


class Held(NamedTuple):
    """A manager with four blocks, of which two are pinned, and two allocated slots."""

    manager: kvbm.Manager
    good: dict[str, dict[str, Any]]  # arguments that would do, by method


def settings_of(folder: Path, **flags: Any) -> kvbm.Settings:
    base = {"instance.data_dir": str(folder), "nats.enabled": False, "pools.hbm.slots": SLOTS, "pools.host.slots": 4}
    return kvbm.load_settings(flags=base | {name.replace("__", "."): value for name, value in flags.items()})


@pytest.fixture(scope="module", params=["native", "reference"])
def held(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Held]:
    settings = settings_of(tmp_path_factory.mktemp("held"), pools__hbm__device="cpu")
    with kvbm.open_manager(settings, [SPACE], BLOCK_BYTES, core=CORES[request.param]) as manager:
        slots = manager.allocate(4)
        assert slots is not None
        manager.create(SPACE.id, kvbm.NO_PARENT, 0, CREATED, slots)
        manager.unpin(slots[2:])
        allocated = manager.allocate(2)
        assert allocated is not None
        run = {"namespace": SPACE.id, "hashes": CREATED}
        good: dict[str, dict[str, Any]] = {
            "hash_tokens": {"tokens": [1, 2], "root": SPACE.root(), "block_tokens": 1},
            "declare": {"namespaces": [SPACE]},
            "match": {"hashes": CREATED, "namespace": SPACE.id},
            "acquire": run | {"wait_s": 0.0, "trace": ""},
            "allocate": {"count": 1, "namespace": SPACE.id},
            "create": {
                "namespace": SPACE.id,
                "parent": kvbm.NO_PARENT,
                "start": 0,
                "hashes": FRESH,
                "slots": allocated,
                "stream": None,
            },
            "unpin": {"slots": slots[:2], "stream": None},
            "release": {"slots": allocated, "stream": None},
            "keep": {
                "hashes": CREATED,
                "ttl_s": 1.0,
                "priority": 1,
                "namespace": SPACE.id,
                "until_read": False,
                "most": None,
            },
            "evict": {"tier": kvbm.Tier.HBM, "hashes": CREATED, "reason": EvictReason.CLEARED},
            "claim": run,
            "withdraw": run | {"reason": EvictReason.MISSING},
            "report_load": {
                "queued_tokens": 1,
                "running_requests": 1,
                "prefill_tokens_per_s": 5.0,
                "queue_tokens_per_s": 4,
            },
            "held": {"tier": kvbm.Tier.HBM},
            "settle": {"timeout_s": 0.0},
            "close": {"timeout_s": 1.0},
        }
        assert manager.settle(WAIT_S)
        yield Held(manager, good)


@pytest.fixture(scope="module")
def owning(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Held]:
    settings = settings_of(tmp_path_factory.mktemp("owning"), pools__hbm__owner="engine")
    with kvbm.open_engine_manager(settings, [SPACE], BLOCK_BYTES) as manager:
        manager.engine_stored(SPACE.id, kvbm.NO_PARENT, 0, CREATED)
        store = manager.begin_store(SPACE.id, kvbm.NO_PARENT, 0, CREATED[: 2 * HASH_BYTES])
        assert store is not None
        mapped_rows(manager)[store.slots] = 7
        run = {"namespace": SPACE.id, "hashes": CREATED}
        chain = {"namespace": SPACE.id, "parent": kvbm.NO_PARENT, "start": 0, "hashes": FRESH}
        yield Held(
            manager,
            {
                "engine_stored": chain,
                "engine_removed": {"hashes": CREATED, "reason": EvictReason.CAPACITY},
                "holders": {"hashes": CREATED, "namespace": SPACE.id, "objects": False},
                "begin_acquire": run | {"wait_s": 0.0, "first": 0, "is_whole": False, "expected": None, "trace": ""},
                "begin_find": {"runs": [(SPACE.id, CREATED)]},
                "storable": {"namespace": SPACE.id, "start": 0, "count": 1},
                "begin_store": chain | {"uses": 1, "trace": ""},
                "end_store": {"store": store, "arrived": [True, True], "checksums": np.zeros(2, np.uint32)},
                "keep_stored": {"store": store, "ttl_s": 1.0, "priority": 1, "until_read": False, "most": None},
                "refresh": {"hashes": CREATED, "namespace": SPACE.id},
            },
        )
        manager.close(0.1)  # a store is under way that nobody ends


def state(manager: kvbm.Manager) -> object:
    """All of a manager that a refused call could have changed."""
    beat = manager.heartbeat(ORIGIN)
    tiers = list(manager.pools.slots)
    return (
        manager.digest(),
        manager.applied(),
        manager.stats(),
        {tier: manager.held(tier) for tier in tiers},
        beat.namespaces,
        beat.free_slots,
        (beat.queued_tokens, beat.running_requests, beat.prefill_tokens_per_s, beat.queue_tokens_per_s),
    )


def check_all(held: Held, method: str) -> None:
    call: Callable[..., object] = getattr(held.manager, method)
    good = held.good[method]
    before = state(held.manager)
    optional = {name for name, one in inspect.signature(call).parameters.items() if one.default is None}
    for argument in good:
        for value, kind in BAD[argument]:
            if value is None and argument in optional:
                continue
            with pytest.raises(kind) as caught:
                call(**good | {argument: value})
            assert isinstance(caught.value, kvbm.KvbmError)
            assert isinstance(caught.value, TypeError | ValueError)
            assert argument.rstrip("s") in str(caught.value), (method, argument, value, str(caught.value))
            assert state(held.manager) == before, (method, argument, value)


METHODS = [
    "hash_tokens",
    "declare",
    "match",
    "acquire",
    "allocate",
    "create",
    "unpin",
    "release",
    "keep",
    "evict",
    "claim",
    "withdraw",
    "report_load",
    "held",
    "settle",
    "close",
]
OWNING_METHODS = [
    "engine_stored",
    "engine_removed",
    "holders",
    "begin_acquire",
    "begin_find",
    "storable",
    "begin_store",
    "end_store",
    "keep_stored",
    "refresh",
]


@pytest.mark.parametrize("method", METHODS)
def test_an_argument_that_cannot_be_used_is_named_and_nothing_has_changed(held: Held, method: str) -> None:
    check_all(held, method)


@pytest.mark.parametrize("method", OWNING_METHODS)
def test_so_it_is_where_the_engine_owns_hbm(owning: Held, method: str) -> None:
    check_all(owning, method)


def test_every_public_method_that_takes_arguments_is_tried_with_each_of_them(held: Held, owning: Held) -> None:
    for one, kind, names in ((held, kvbm.Manager, METHODS), (owning, kvbm.EngineHbmManager, OWNING_METHODS)):
        own = {name for name, _ in inspect.getmembers(kind, inspect.isfunction) if not name.startswith("_")}
        public = (own - INSIDE) - (set(METHODS) if kind is kvbm.EngineHbmManager else set())
        takes = {name: list(inspect.signature(getattr(kind, name)).parameters)[1:] for name in public}
        assert {name: set(taken) for name, taken in takes.items() if taken} == {
            name: set(one.good[name]) for name in names
        }


def test_what_is_short_and_what_is_no_slot_is_said_in_words(held: Held) -> None:
    manager, good = held.manager, held.good["create"]
    assert manager.allocate(SLOTS) is None
    with pytest.raises(TypeError, match=r"^slots is None, which is what allocate returns while HBM is short"):
        manager.create(**good | {"slots": manager.allocate(SLOTS)})
    with pytest.raises(ValueError, match=r"^slots has slot 8; each must be 0 to 7"):
        manager.unpin([SLOTS])
    with pytest.raises(ValueError, match=r"^slots has 1 entries for 2 hashes"):
        manager.create(**good | {"slots": good["slots"][:1]})
    with pytest.raises(TypeError, match=r"is a Namespace where its id belongs; give namespace\.id \(model 'one'\)"):
        manager.acquire(SPACE, CREATED)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"is not one the manager was opened with; .* declare"):
        manager.acquire(STRANGE.id, CREATED)


def test_a_start_without_a_parent_is_refused_and_nothing_has_changed(held: Held, owning: Held) -> None:
    for one, methods in ((held, ["create"]), (owning, ["engine_stored", "begin_store"])):
        before = state(one.manager)
        for method in methods:
            with pytest.raises(
                ValueError, match=r"^parent contradicts start: start is 7, and there is no parent; give"
            ):
                getattr(one.manager, method)(**one.good[method] | {"start": 7})
            assert state(one.manager) == before


def test_what_the_ledger_refuses_changes_nothing_either(held: Held) -> None:
    manager, (one, two) = held.manager, held.good["create"]["slots"]
    before = state(manager)
    calls: list[tuple[Callable[..., object], list[int]]] = [
        (manager.release, [one, two, one]),
        (manager.release, [one, 0]),
        (manager.unpin, [0, 1, 0]),
        (manager.unpin, [one, 0]),
    ]
    for call, slots in calls:
        with pytest.raises(kvbm.LedgerError, match=r"is not (allocated|pinned)"):
            call(slots)
        assert state(manager) == before
    with pytest.raises(kvbm.LedgerError, match="twice"):
        manager.create(**held.good["create"] | {"slots": [one, one]})
    assert state(manager) == before


def test_numpys_integers_do_as_pythons_do(held: Held) -> None:
    manager = held.manager
    slots = manager.allocate(np.int64(1))  # type: ignore[arg-type]
    assert slots is not None
    manager.release(np.array(slots))  # type: ignore[arg-type]
    hashes = manager.hash_tokens([1, 2, 3], SPACE.root(), 1)
    assert len(split_hashes(hashes)) == 3
    for kind in (np.int8, np.uint32, np.int64, np.uint64):
        assert manager.hash_tokens(np.array([1, 2, 3], kind), SPACE.root(), 1) == hashes


@pytest.mark.parametrize(
    ("fields", "kind"),
    [
        ({"model": None}, TYPE),
        ({"model": 7}, TYPE),
        ({"block_tokens": 0}, VALUE),
        ({"block_tokens": -16}, VALUE),
        ({"block_tokens": 16.0}, TYPE),
        ({"block_tokens": None}, TYPE),
        ({"block_tokens": np.int64(16)}, TYPE),
        ({"revision": None}, TYPE),
        ({"tenant": b"acme"}, TYPE),
        ({"lora": 1}, TYPE),
        ({"kv_group": -1}, VALUE),
        ({"kv_dtype": np.float32}, TYPE),
        ({"scheme_seed": "0"}, TYPE),
        ({"layout": None}, TYPE),
        ({"ranks": 1}, TYPE),
    ],
)
def test_a_namespace_of_fields_that_make_no_sense_is_not_made(fields: dict[str, Any], kind: type[Exception]) -> None:
    with pytest.raises(kind, match=rf"^{next(iter(fields))} is "):
        kvbm.Namespace(**{"model": "m", "block_tokens": 16} | fields)


@pytest.mark.parametrize(
    ("dims", "kind", "words"),
    [
        ((1.5, 16, 2, 8), TYPE, "layers is a float"),
        ((2, 16, None, 8), TYPE, "kv_heads is None"),
        ((2, 0, 2, 8), kvbm.LayoutError, "at least 1"),
        ((2, 16, 2, -8), kvbm.LayoutError, "at least 1"),
        ((2, 16, 2, 8, "int3"), kvbm.LayoutError, "'int3' is unknown"),
        ((2, 16, 2, 8, None), TYPE, "dtype is None"),
    ],
)
def test_a_shape_that_makes_no_sense_is_not_made(dims: tuple[Any, ...], kind: type[Exception], words: str) -> None:
    with pytest.raises(kind, match=words):
        kvbm.KvShape(*dims)


def test_a_manager_is_not_opened_with_what_it_cannot_use(tmp_path: Path) -> None:
    settings = settings_of(tmp_path, pools__hbm__device="memory")
    cases: list[tuple[tuple[Any, ...], type[Exception], str]] = [
        (({"pools.hbm.slots": 8}, [SPACE], 64), TYPE, "settings is a dict; give what load_settings returns"),
        ((settings, SPACE, 64), TYPE, "namespaces is a single Namespace; give a list"),
        ((settings, [SPACE.id], 64), TYPE, r"namespaces\[0\] is a bytes; give kvbm.Namespace objects"),
        ((settings, [SPACE], 64.0), TYPE, "block_bytes is a float"),
        ((settings, [SPACE], 0), VALUE, "block_bytes is 0"),
        ((settings, [SPACE], 64, None), TYPE, "engine is None"),
    ]
    for arguments, kind, words in cases:
        for opening in (kvbm.open_manager, kvbm.open_engine_manager):
            with pytest.raises(kind, match=words):
                opening(*arguments)
    with pytest.raises(kvbm.ConfigError, match="opened by open_engine_manager"):
        kvbm.open_manager(settings_of(tmp_path, pools__hbm__owner="engine"), [SPACE], 64)
    assert not list(tmp_path.iterdir())


def test_a_catalogs_client_refuses_before_it_asks() -> None:
    client = kvbm.CatalogClient("http://127.0.0.1:9")  # where nobody answers
    calls: list[tuple[Callable[[], object], type[Exception], str]] = [
        (lambda: client.lookup(SPACE.id, CREATED[:-1]), VALUE, "hashes has 63 bytes"),
        (lambda: client.find(SPACE.id, CREATED[:-1]), VALUE, "hashes has 63 bytes"),
        (lambda: client.find(SPACE.id, CREATED, first=-1), VALUE, "first is -1"),
        (lambda: client.find(SPACE.id, CREATED, limit=5), VALUE, "give 1 to 4"),
        (lambda: client.find(SPACE.id, CREATED, topology="zone"), TYPE, "topology is one text"),
        (lambda: client.find(SPACE.id, CREATED, topology=["z"] * 17), VALUE, "topology has 17 labels"),
        (lambda: client.find(SPACE.id, CREATED, asker=3), TYPE, "asker is an int"),  # type: ignore[arg-type]
        (lambda: client.find_many(SPACE.id, [CREATED], [0, 1]), VALUE, "firsts has 2 numbers for 1 runs"),
        (lambda: client.lookup(SPACE.id.hex(), CREATED), TYPE, "namespace is a str"),  # type: ignore[arg-type]
        (lambda: client.route(SPACE.id, CREATED, 1.5), TYPE, "input_tokens is a float"),  # type: ignore[arg-type]
        (lambda: client.block(SPACE.id, CREATED), VALUE, "block has 64 bytes"),
        (lambda: client.hashes(SPACE.id, b"", [1]), TYPE, "namespace is a bytes"),  # type: ignore[arg-type]
        (lambda: client.hashes(SPACE, "s", [1]), TYPE, "secret is a str"),  # type: ignore[arg-type]
        (lambda: client.hashes(SPACE, b"", [1.5] * 16), TYPE, r"tokens\[0\] is a float"),  # type: ignore[list-item]
    ]
    try:
        for call, kind, words in calls:
            with pytest.raises(kind, match=words):
                call()
    finally:
        client.close()
