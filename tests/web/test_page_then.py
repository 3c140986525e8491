"""A prompt, its routes and the object pool as of an earlier moment, and whose clocks its times are of."""

from __future__ import annotations

import pytest

from tests.browser import Browser
from tests.catalog_site import HASHES, TOKENS
from tests.catalog_site import SPACE as PLAIN
from tests.web_past import Past, move, past, slider

__all__ = ["past", "slider"]


def shown(window: Browser, section: str) -> list[list[str]]:
    """Of its short table, the cells but for drawings."""
    return [[cell for cell in row if cell] for row in window.table_rows(section)]


def ask(window: Browser, view: str, prompt: str) -> None:
    window.go(view)
    window.choose(PLAIN.id.hex())
    window.fill("textarea", prompt)
    window.find("form button.primary").click()


@pytest.mark.parametrize("prompt", [str(TOKENS), HASHES.hex()], ids=["tokens", "hashes"])
def test_a_prompt_shows_who_held_how_deep_in_which_tier_then(slider: Browser, past: Past, prompt: str) -> None:
    move(slider, past.at(2))
    ask(slider, "block", prompt)
    slider.reads("Who held the 10 full blocks then, and how deep")
    first = [["one", "running", "4 of 10", "HBM", "4 of 10"], ["HOST", "2 of 10"]]
    slider.until(lambda: shown(slider, "Holders then") == first, "others held it")
    move(slider, past.at(6))
    last = [
        ["one", "running", "8 of 10", "HBM", "8 of 10"],
        ["HOST", "2 of 10"],
        ["two", "running", "6 of 10", "HOST", "6 of 10"],
        ["s3://kvbm/blocks", "pool of the cluster", "OBJECT", "3 of 10"],
    ]
    slider.until(lambda: shown(slider, "Holders then") == last, "the slider has moved, and they have not")
    slider.reads("Times are those of the instances' clocks")
    move(slider, past.at(0))
    slider.reads("Nobody held any of it then")
    move(slider, past.at(4))
    slider.reads("1 hole at this moment: what these instances held is not certain: two")
    slider.press("l")
    slider.reads("Who holds the 10 full blocks")


def test_hashes_without_a_namespace_are_those_of_the_first_blocks(slider: Browser, past: Past) -> None:
    move(slider, past.at(2))
    slider.go("block")
    slider.fill("textarea", HASHES[:80].hex())
    slider.find("form button.primary").click()
    slider.reads("Who held the 5 full blocks then")
    slider.fill("textarea", "00" * 32)
    slider.find("form button.primary").click()
    slider.reads("The history does not know the first block. choose the namespace")
    assert all("404" in one for one in slider.said())


def test_a_route_then_is_of_idle_engines_and_says_so(slider: Browser, past: Past) -> None:
    move(slider, past.at(6))
    ask(slider, "routes", str(TOKENS))
    slider.reads("one would have cost")
    slider.reads("it had 8 of 10 blocks")
    slider.reads("One that held nothing would have cost")
    slider.reads("Load then is not recorded: costs are those of idle engines.")
    slider.reads("What engines measured then is not recorded")
    rows = slider.until(lambda: slider.table_rows("Ranking"), "nobody is ranked")
    assert [(row[1], row[6], row[7]) for row in rows] == [("one", "8 / 10", "8"), ("two", "6 / 10", "16")]
    move(slider, past.at(2))
    slider.until(lambda: [row[6] for row in slider.table_rows("Ranking")] == ["4 / 10"], "it is still the later one")
    slider.press("l")
    slider.until(
        lambda: len(slider.run("return [...document.querySelectorAll('[aria-label=Ranking] th')]")) == 14, "now"
    )


def test_what_the_object_pool_had_then_is_of_claims_or_unknown(slider: Browser, past: Past) -> None:
    move(slider, past.at(6))
    slider.until(
        lambda: ["s3://kvbm/blocks", "–", "3", "3.00 KiB"] in [row[:4] for row in slider.table_rows("Tiers")],
        "the claims are not counted",
    )
    assert "OBJECT" not in [row[0] for row in slider.table_rows("Tiers")]
    move(slider, past.at(4))  # `two` has begun by then, and what it said of its blocks is missing
    slider.until(lambda: "s3://kvbm/blocks" not in slider.text("[aria-label=Tiers]"), "claims of later show")
    slider.go("instance/two")
    move(slider, past.at(6))
    slider.until(
        lambda: [row[4] for row in slider.table_rows("Pools") if row[0] == "OBJECT"] == ["–"], "it is told as its own"
    )


def test_the_slider_has_a_scale_a_legend_and_says_whose_clocks_it_is_of(slider: Browser) -> None:
    for words in ("by the instances' clocks", "blocks held, 0 to 1", "start", "stop", "hole"):
        slider.reads(words, "#time")
