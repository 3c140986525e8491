"""What is loaded under an adapter's number: known once all ranks have said so, and suspected for good once one says
otherwise.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from kvbm.engines.vllm.adapters import Adapters, Loaded, Origin
from kvbm.engines.vllm.requests import has_own_ids


def said(*digests: str | None, number: int = 1) -> dict[int, list[Loaded]]:
    return {rank: [Loaded(number, digest)] for rank, digest in enumerate(digests)}


def test_an_adapter_is_known_when_all_ranks_have_said_what_they_have() -> None:
    adapters = Adapters(2)
    adapters.told({0: [Loaded(1, "a")]})
    assert not adapters.of(1).is_known
    adapters.told({1: [Loaded(1, "a")]})
    assert adapters.of(1).is_known
    assert adapters.of(1).digest == "a"


def test_ranks_that_have_other_weights_make_a_digest_of_their_own() -> None:
    one, other = Adapters(2), Adapters(2)
    one.told(said("a", "b"))
    other.told(said("b", "a"))
    assert one.of(1).is_known
    assert len({one.of(1).digest, other.of(1).digest, "a", "b"}) == 4


def test_other_weights_under_a_number_are_another_adapter_and_the_first_is_not_sure_any_more() -> None:
    adapters = Adapters(2)
    adapters.told(said("a", "a"))
    first = adapters.of(1)
    adapters.told(said("b", "b"))
    assert not first.is_known
    assert adapters.of(1).digest == "b"
    adapters.told(said("a", "a"))  # and back again
    assert adapters.of(1).is_known
    assert not first.is_known


def test_the_same_weights_loaded_again_are_the_same_adapter() -> None:
    adapters = Adapters(1)
    adapters.told(said("a"))
    first = adapters.of(1)
    adapters.told(said(None))
    assert not first.is_loaded
    assert first.is_known
    adapters.told(said("a"))
    assert adapters.of(1) is first
    assert first.is_loaded


def test_two_loads_between_two_steps_are_both_heard() -> None:
    adapters = Adapters(1)
    waiting = adapters.of(1)
    adapters.told({0: [Loaded(1, "a"), Loaded(1, "b")]})
    assert not waiting.is_known  # its blocks may be of either
    assert adapters.of(1).digest == "b"


def test_weights_without_a_digest_are_never_known() -> None:
    adapters = Adapters(1)
    adapters.told(said(""))
    assert not adapters.of(1).is_known
    adapters.told(said("a"))
    assert adapters.of(1).is_known


def test_blocks_of_equal_weights_are_equal_whatever_their_number() -> None:
    adapters = Adapters(1)
    adapters.told({0: [Loaded(1, "a"), Loaded(2, "a"), Loaded(3, "c")]})
    one, two, three, unheard = (Origin(adapters.of(number)) for number in (1, 2, 3, 4))
    assert one.equals(two)
    assert not one.equals(three)
    assert not one.equals(unheard)
    assert not one.equals(None)
    assert unheard.equals(Origin(adapters.of(4)))  # whichever they are
    assert not one.equals(Origin(adapters.of(1), is_pure=False))


def test_clients_cannot_make_the_engine_keep_ever_more_numbers() -> None:
    adapters = Adapters(1)
    first = adapters.of(1)
    for number in range(2, 10_000):
        adapters.of(number)
    assert len(adapters._known) <= 4096
    assert not first.is_sure


@pytest.mark.parametrize(
    ("identifier", "is_own"),
    [("a" * 64, False), ("b" * 128, False), ("sql:" + "0" * 64, False), ("cat.png", True), ("", True)],
)
def test_images_that_a_client_names_itself_are_told_from_hashed_ones(identifier: str, is_own: bool) -> None:
    assert has_own_ids(SimpleNamespace(mm_features=[SimpleNamespace(identifier=identifier)])) == is_own
    assert not has_own_ids(SimpleNamespace(mm_features=[]))
