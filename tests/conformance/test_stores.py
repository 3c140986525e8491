"""What every object store promises, asked of each one."""

from __future__ import annotations

import itertools
import random
import threading
import time
from collections.abc import Iterator
from contextlib import closing

import pytest

from kvbm.pools.stores.base import ForgetfulStore, Get, Got, ObjectStore, Put, Refusal, StoreTrouble
from kvbm.pools.stores.blobs import PART_BYTES
from tests.object_stores import OBJECT_STORES, WAIT_S, Place

DEADLINE_S = WAIT_S
SEED = 7

pytestmark = pytest.mark.parametrize("place", OBJECT_STORES, indirect=True)


@pytest.fixture
def store(place: Place) -> Iterator[ObjectStore]:
    with closing(place.open()) as opened:
        yield opened


def put(store: ObjectStore, **bodies: bytes) -> None:
    """Put what is not there yet."""
    assert store.put([Put(name, body) for name, body in bodies.items()], DEADLINE_S) == [None] * len(bodies)


def troubles(answers: list[Refusal | None]) -> list[StoreTrouble | None]:
    return [answer and answer.trouble for answer in answers]


def trouble(answer: Got | Refusal) -> StoreTrouble | None:
    return answer.trouble if isinstance(answer, Refusal) else None


def read(store: ObjectStore, *gets: Get) -> list[tuple[bytes, int]]:
    """Bodies and sizes of what is there."""
    answers = store.get(gets, DEADLINE_S)
    assert [answer for answer in answers if isinstance(answer, Refusal)] == []
    return [(bytes(answer.body), answer.size_bytes) for answer in answers if isinstance(answer, Got)]


def test_what_is_put_comes_back_whole(store: ObjectStore) -> None:
    bytes_of = random.Random(SEED).randbytes
    bodies = [bytes_of(size) for size in (1, 100, 70_000, 3 << 20)]
    names = [f"run/{at}" for at in range(len(bodies))]
    assert store.put([Put(*one) for one in zip(names, bodies, strict=True)], DEADLINE_S) == [None] * 4
    assert read(store, *(Get(name) for name in names)) == [(body, len(body)) for body in bodies]


def test_bodies_of_any_buffer_are_put(store: ObjectStore) -> None:
    bodies = [b"bytes", bytearray(b"bytearray"), memoryview(b"a long memory")[2:6]]
    assert store.put([Put(f"n{at}", body) for at, body in enumerate(bodies)], DEADLINE_S) == [None] * 3
    assert [body for body, _ in read(store, Get("n0"), Get("n1"), Get("n2"))] == [bytes(body) for body in bodies]


def test_an_empty_object_is_there(store: ObjectStore) -> None:
    put(store, empty=b"")
    assert read(store, Get("empty"), Get("empty", count=0), Get("empty", 5)) == [(b"", 0)] * 3
    assert troubles(store.put([Put("empty", b"x")], DEADLINE_S)) == [StoreTrouble.TAKEN]


def test_an_object_is_put_once_and_never_changed(store: ObjectStore) -> None:
    put(store, name=b"first")
    answers = store.put([Put("name", b"second"), Put("other", b"x")], DEADLINE_S)
    assert troubles(answers) == [StoreTrouble.TAKEN, None]
    assert read(store, Get("name")) == [(b"first", 5)]


def test_of_many_who_put_one_name_at_once_one_does(place: Place) -> None:
    with closing(place.open()) as one, closing(place.open()) as another:
        bodies = [bytes([at]) * 200_000 for at in range(8)]
        for turn in range(3):
            answers: list[list[Refusal | None]] = []
            start = threading.Barrier(len(bodies))

            def contend(at: int, name: str, answers: list[list[Refusal | None]], start: threading.Barrier) -> None:
                start.wait()
                answers.append((one, another)[at % 2].put([Put(name, bodies[at])], DEADLINE_S))

            threads = [
                threading.Thread(target=contend, args=(at, f"race{turn}", answers, start)) for at in range(len(bodies))
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            assert sorted(str(troubles(answer)[0]) for answer in answers) == ["None", *[str(StoreTrouble.TAKEN)] * 7]
            [(body, _)] = read(one, Get(f"race{turn}"))
            assert body in bodies


def test_what_is_not_there_is_absent_beside_what_is(store: ObjectStore) -> None:
    put(store, there=b"x")
    gets = [Get("missing"), Get("there"), Get("missing", 3, 5), Get("missing", 0, 0), Get("missing", 9)]
    answers = store.get(gets, DEADLINE_S)
    absent = StoreTrouble.ABSENT
    assert [trouble(answer) for answer in answers] == [absent, None, absent, absent, absent]


def test_parts_are_what_lies_there_and_tell_the_whole_size(store: ObjectStore) -> None:
    body = bytes(range(256)) * 4
    put(store, body=body)
    parts = [(0, 10), (5, 3), (1000, None), (1000, 24), (1000, 500), (1024, 1), (1024, None), (5000, 7), (3, 0)]
    found = read(store, *(Get("body", first, count) for first, count in parts))
    assert found == [(body[first : None if count is None else first + count], len(body)) for first, count in parts]


@pytest.mark.parametrize("expected", [-PART_BYTES, -1, 0, 1, 5 * PART_BYTES])
def test_a_large_object_comes_back_whole_whatever_was_expected(store: ObjectStore, expected: int) -> None:
    body = random.Random(SEED).randbytes(2 * PART_BYTES + 12_345)
    put(store, large=body)
    near = len(body) + expected
    gets = [Get("large", expected_bytes=near), Get("large", 7, expected_bytes=near), Get("large", 7, near, near)]
    assert read(store, *gets) == [(body, len(body)), (body[7:], len(body)), (body[7 : 7 + near], len(body))]


def test_deleted_is_gone_and_deleting_what_is_gone_succeeds(store: ObjectStore) -> None:
    put(store, a=b"1", b=b"2", c=b"3")
    assert store.delete(["a", "never", "b"], DEADLINE_S) == [None] * 3
    assert store.delete(["a"], DEADLINE_S) == [None]
    assert [trouble(answer) for answer in store.get([Get("a"), Get("b"), Get("c")], DEADLINE_S)] == [
        StoreTrouble.ABSENT,
        StoreTrouble.ABSENT,
        None,
    ]
    put(store, a=b"again")
    assert read(store, Get("a")) == [(b"again", 5)]


def test_nothing_asked_is_nothing_answered(store: ObjectStore) -> None:
    assert store.put([], DEADLINE_S) == store.get([], DEADLINE_S) == store.delete([], DEADLINE_S) == []


def test_names_may_have_all_their_letters(store: ObjectStore) -> None:
    names = [".kvbm/janitor", "A/b-C_d.e/0", "x" * 200, "1/" + "0f" * 32, "a.b", "-/_"]
    assert store.put([Put(name, name.encode()) for name in names], DEADLINE_S) == [None] * len(names)
    assert read(store, *(Get(name) for name in names)) == [(name.encode(), len(name)) for name in names]
    assert [one.name for one in store.listed("", DEADLINE_S)] == sorted(names)


def test_a_listing_is_in_order_and_begins_where_it_is_told_to(store: ObjectStore) -> None:
    before_ns = time.time_ns()
    names = ["4/aa/1", "4/aa/2", "4/ab/1", "4/b", "40/aa/1", ".kvbm/withdrawn/7"]
    put(store, **{name: name.encode() * 2 for name in names})

    def listed(prefix: str, after: str = "") -> list[str]:
        return [one.name for one in store.listed(prefix, DEADLINE_S, after)]

    assert listed("") == sorted(names)
    assert listed("4/") == ["4/aa/1", "4/aa/2", "4/ab/1", "4/b"]
    assert listed("4/a") == ["4/aa/1", "4/aa/2", "4/ab/1"]
    assert listed("4/aa/") == ["4/aa/1", "4/aa/2"]
    assert listed("4") == ["4/aa/1", "4/aa/2", "4/ab/1", "4/b", "40/aa/1"]
    assert listed("4/", "4/aa/2") == ["4/ab/1", "4/b"]
    assert listed("4/", "4/aa/15") == ["4/aa/2", "4/ab/1", "4/b"]
    assert listed("4/", "4/b") == listed("5/") == []
    [one] = store.listed(".kvbm/", DEADLINE_S)
    if store.forgets:  # it tells of the memory an object takes
        assert 2 * len(".kvbm/withdrawn/7") <= one.size_bytes < 500
    else:
        assert one.size_bytes == 2 * len(".kvbm/withdrawn/7")
    minute_ns = 60 * 10**9  # a server's clock in seconds, on this machine
    assert before_ns - minute_ns < one.modified_ns < time.time_ns() + minute_ns


def test_a_listing_of_several_pages_is_whole(store: ObjectStore) -> None:
    names = [f"many/{at:04}" for at in range(1203)]
    assert store.put([Put(name, b"x") for name in names], 2 * DEADLINE_S) == [None] * len(names)
    assert [one.name for one in store.listed("many/", DEADLINE_S)] == names
    begun = store.listed("many/", DEADLINE_S, "many/0100")
    assert [one.name for one in itertools.islice(begun, 3)] == names[101:104]
    assert store.delete(names, 2 * DEADLINE_S) == [None] * len(names)
    assert list(store.listed("many/", DEADLINE_S)) == []


def test_a_store_that_forgets_says_what_is_gone_and_nothing_of_what_it_cannot_tell(place: Place) -> None:
    with closing(place.open()) as store:
        if not store.forgets:
            assert not isinstance(store, ForgetfulStore)
            return
        assert isinstance(store, ForgetfulStore)
        names = [f"a[*?]^/{at}" for at in range(600)]
        assert store.put([Put(name, b"x") for name in names[::2]], DEADLINE_S) == [None] * 300
        assert store.absent(names, DEADLINE_S) == [False, True] * 300
        assert [one.name for one in store.listed("a[*?]^/", DEADLINE_S)] == sorted(names[::2])
        assert list(store.listed("a[*?]^", DEADLINE_S, "b")) == []
    assert store.absent(names, DEADLINE_S) == [False] * 600  # it is closed, so nobody knows


def test_a_small_object_is_replaced_only_if_it_is_what_was_expected(store: ObjectStore) -> None:
    def replace(body: bytes, expected: bytes | None) -> StoreTrouble | None:
        answer = store.replace("lease", body, expected, DEADLINE_S)
        return answer and answer.trouble

    assert replace(b"one", b"zero") is StoreTrouble.TAKEN
    assert replace(b"one", None) is None
    assert replace(b"two", None) is StoreTrouble.TAKEN
    assert replace(b"two", b"zero") is StoreTrouble.TAKEN
    assert read(store, Get("lease")) == [(b"one", 3)]
    assert replace(b"two", b"one") is None
    assert replace(b"three", b"one") is StoreTrouble.TAKEN
    assert read(store, Get("lease")) == [(b"two", 3)]
    store.delete(["lease"], DEADLINE_S)
    assert replace(b"three", b"two") is StoreTrouble.TAKEN
    assert replace(b"four", None) is None


def test_of_many_who_replace_at_once_one_does(place: Place) -> None:
    with closing(place.open()) as one, closing(place.open()) as another:
        held = b"0"
        assert one.replace("lease", held, None, DEADLINE_S) is None
        for turn in range(5):
            answers: dict[bytes, Refusal | None] = {}
            start = threading.Barrier(4)

            def contend(
                at: int, held: bytes, mine: bytes, answers: dict[bytes, Refusal | None], start: threading.Barrier
            ) -> None:
                start.wait()
                answers[mine] = (one, another)[at % 2].replace("lease", mine, held, DEADLINE_S)

            threads = [
                threading.Thread(target=contend, args=(at, held, b"%d by %d" % (turn, at), answers, start))
                for at in range(4)
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            [winner] = [mine for mine, answer in answers.items() if answer is None]
            assert {answer.trouble for answer in answers.values() if answer} == {StoreTrouble.TAKEN}
            assert read(one, Get("lease")) == [(winner, len(winner))]
            held = winner


def test_a_store_shows_that_it_heeds_conditions_and_keeps_nothing_of_the_trial(store: ObjectStore) -> None:
    assert store.ignored_conditions("trial", DEADLINE_S) == ()
    assert list(store.listed("", DEADLINE_S)) == []


def test_many_threads_share_a_store(store: ObjectStore) -> None:
    bytes_of = random.Random(SEED).randbytes
    bodies = {f"{thread}/{at}": bytes_of(50_000) for thread in range(4) for at in range(8)}
    wrong: list[str] = []

    def work(thread: int) -> None:
        mine = {name: body for name, body in bodies.items() if name.startswith(f"{thread}/")}
        put(store, **mine)
        found = read(store, *(Get(name) for name in mine))
        wrong.extend(name for name, (body, _) in zip(mine, found, strict=True) if body != mine[name])

    threads = [threading.Thread(target=work, args=(at,)) for at in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert read(store, *(Get(name) for name in bodies)) == [(body, len(body)) for body in bodies.values()]


def test_stores_of_one_place_share_its_objects_and_its_name(place: Place) -> None:
    if place.kind == "memory":
        return  # its stores are one
    with closing(place.open()) as one, closing(place.open()) as same, closing(place.open(name="other")) as renamed:
        put(one, name=b"x")
        assert one.name == same.name
        assert renamed.name == "other"
        assert read(same, Get("name")) == read(renamed, Get("name")) == [(b"x", 1)]


def test_a_closed_store_says_so_at_once(place: Place) -> None:
    store = place.open()
    put(store, name=b"x")
    store.close()
    store.close()
    if place.kind == "memory":
        return  # the others still use it
    answers = [*store.get([Get("name")], DEADLINE_S), *store.put([Put("a", b"")], DEADLINE_S)]
    assert [answer and answer.words for answer in answers if not isinstance(answer, Got)] == [
        "the store is closed here"
    ] * 2
    with closing(place.open()) as again:
        assert read(again, Get("name")) == [(b"x", 1)]
