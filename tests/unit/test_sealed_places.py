"""Places that are told to callers of some tenants: given back they are the same, and made up they are none."""

from __future__ import annotations

import pytest

from kvbm.catalog.index.change_log import ChangeLog, LogPlace
from kvbm.catalog.index.sealed_places import SealedPlaces
from kvbm.core.codec import decode_frame

RUN = "00ff00ff00ff00ff"


def test_a_place_comes_back_and_has_one_text() -> None:
    sealed = SealedPlaces()
    for place in ((0, 0), (1, 2), (2**64 - 1, 2**64 - 1)):
        text = sealed.seal(*place, RUN)
        assert sealed.unseal(text, RUN) == place
        assert sealed.seal(*place, RUN) == text
    assert len({sealed.seal(number, number, RUN) for number in range(1000)}) == 1000


def test_a_text_of_another_run_or_another_catalog_is_none() -> None:
    sealed = SealedPlaces()
    text = sealed.seal(7, 9, RUN)
    assert sealed.unseal(text, "another") is None
    assert SealedPlaces().unseal(text, RUN) is None


def test_a_text_with_any_bit_changed_is_none() -> None:
    sealed = SealedPlaces()
    text = sealed.seal(7, 9, RUN)
    data = bytes.fromhex(text[2:])
    for bit in range(8 * len(data)):
        spoilt = bytearray(data)
        spoilt[bit // 8] ^= 1 << bit % 8
        assert sealed.unseal("s." + spoilt.hex(), RUN) is None


@pytest.mark.parametrize(
    "text", ["", "s.", "s." + "0" * 63, "s." + "x" * 64, "s." + " " * 64, "1.2.run.stream", "s." + "ä" * 64]
)
def test_what_is_no_text_of_this_kind_is_none(text: str) -> None:
    assert SealedPlaces().unseal(text, RUN) is None


def test_only_who_may_know_of_all_is_told_places_in_clear() -> None:
    log = ChangeLog(1 << 20, decode_frame)
    log.begin(123456, lambda: "stream")
    place = log.place()
    clear, hidden = log.text(place, in_clear=True), log.text(place, in_clear=False)
    assert "123456" in clear and "123456" not in hidden
    assert log.place_of(clear, in_clear=True) == log.place_of(hidden, in_clear=False) == place
    assert log.place_of(clear, in_clear=False) is log.place_of(hidden, in_clear=True) is None
    assert log.find(place) == LogPlace(*place).serial
