"""What catalogs sum up of what was put in the object pool."""

from __future__ import annotations

from kvbm.catalog.put_bytes import put_by_instance, put_by_namespace
from kvbm.core.ids import Epoch, InstanceId, NamespaceId, Offset
from kvbm.streams.base import Heartbeat

A, B = InstanceId("a"), InstanceId("b")
ONE, OTHER = NamespaceId(bytes([1]) * 16), NamespaceId(bytes([2]) * 16)


def beat(instance: InstanceId, put: dict[NamespaceId, tuple[int, int]], total: tuple[int, int] = (0, 0)) -> Heartbeat:
    return Heartbeat(
        instance=instance,
        cluster="c",
        epoch=Epoch(1),
        published=Offset(0),
        wall_time_ns=0,
        put_bytes=put,
        put_total=total,
    )


def test_the_total_of_an_instance_does_not_shrink_with_the_namespaces_it_tells_of() -> None:
    before = [(A, beat(A, {ONE: (3000, 2000)}, (3000, 2000)))]
    after = [(A, beat(A, {OTHER: (10, 5)}, (3010, 2005)))]
    assert (put_by_instance(before)[A], put_by_instance(after)[A]) == ((3000, 2000), (3010, 2005))
    assert put_by_namespace(after) == {OTHER.hex(): (10, 5)}


def test_an_instance_that_tells_no_total_counts_with_what_it_tells() -> None:
    beats = [(A, beat(A, {ONE: (3, 2), OTHER: (5, 4)})), (B, beat(B, {ONE: (10, 10)}, (70, 60)))]
    assert put_by_instance(beats) == {A: (8, 6), B: (70, 60)}
    assert put_by_namespace(beats) == {ONE.hex(): (13, 12), OTHER.hex(): (5, 4)}


def test_who_puts_nothing_is_not_named() -> None:
    assert put_by_instance([(A, beat(A, {}))]) == {}
