"""A store that was opened is tried: a small object goes there, comes back and is deleted, or a sentence says which of
them failed.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from kvbm.core.errors import PoolError
from kvbm.pools.stores.base import Get, Got, Put, Refusal, StoreAwayError, StoreTrouble
from kvbm.pools.stores.memory import MemoryStore
from kvbm.pools.stores.trial import try_out

DENIED = Refusal(StoreTrouble.DENIED, "403 AccessDenied")
FULL = Refusal(StoreTrouble.REFUSED, "507 StorageFull")
SILENT = Refusal(StoreTrouble.SILENT, "no connection after 4 attempts")
MOVED = Refusal(StoreTrouble.REFUSED, "301 Moved")


class Failing(MemoryStore):
    """A store that refuses some kinds of calls."""

    def __init__(
        self, put: Refusal | None = None, get: Refusal | None = None, delete: Refusal | None = None, other: bool = False
    ) -> None:
        super().__init__()
        self._put, self._get, self._delete, self._other = put, get, delete, other

    def put(self, puts: Sequence[Put], deadline_s: float) -> list[Refusal | None]:
        return [self._put] * len(puts) if self._put else super().put(puts, deadline_s)

    def get(self, gets: Sequence[Get], deadline_s: float) -> list[Got | Refusal]:
        if self._get:
            return [self._get] * len(gets)
        found = super().get(gets, deadline_s)
        return [Got(b"x", 1) if self._other else one for one in found]

    def delete(self, names: Sequence[str], deadline_s: float) -> list[Refusal | None]:
        return [self._delete] * len(names) if self._delete else super().delete(names, deadline_s)


def test_a_store_that_carries_bytes_has_no_remarks_and_keeps_nothing() -> None:
    store = MemoryStore()
    assert try_out(store, 1.0) == ()
    assert store.objects == {}


@pytest.mark.parametrize(
    ("store", "words"),
    [
        (Failing(put=DENIED), "nothing can be put there (403 AccessDenied)"),
        (Failing(put=FULL), "nothing can be put there (507 StorageFull)"),
        (Failing(delete=DENIED), "stays there until a janitor comes"),
    ],
)
def test_who_may_not_put_may_read_and_the_janitor_alone_has_to_delete(store: Failing, words: str) -> None:
    [remark] = try_out(store, 1.0)
    assert words in remark


@pytest.mark.parametrize(
    ("store", "words"),
    [
        (Failing(put=DENIED, get=DENIED), "cannot be put (403 AccessDenied)"),
        (Failing(put=MOVED, get=MOVED), "cannot be put (301 Moved)"),
        (Failing(get=DENIED), "cannot be read (403 AccessDenied)"),
        (Failing(get=Refusal(StoreTrouble.ABSENT, "404 NoSuchKey")), "cannot be read (404 NoSuchKey)"),
        (Failing(other=True), "other bytes"),
    ],
)
def test_a_store_that_opens_and_carries_no_bytes_is_refused(store: Failing, words: str) -> None:
    with pytest.raises(PoolError) as caught:
        try_out(store, 1.0)
    assert words in str(caught.value) and not isinstance(caught.value, StoreAwayError)


@pytest.mark.parametrize("store", [Failing(put=SILENT), Failing(get=SILENT)])
def test_a_store_that_opens_and_does_not_answer_the_other_client_is_away(store: Failing) -> None:
    with pytest.raises(StoreAwayError, match="no connection after 4 attempts"):
        try_out(store, 1.0)


def test_a_store_that_forgets_may_have_forgotten() -> None:
    store = Failing(get=Refusal(StoreTrouble.ABSENT, "nothing"))
    store.forgets = True
    assert try_out(store, 1.0) == ()
