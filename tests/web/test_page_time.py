"""The slider over a real archive and its history: what was so, at each moment, and what is not known."""

from __future__ import annotations

from datetime import UTC, datetime

import urllib3

from tests.browser import Browser, Keys
from tests.catalog_site import SPACE as PLAIN
from tests.catalog_site import Instance
from tests.eventually import WAIT_S, eventually
from tests.web_past import BLOCK, STEP_S, Past, held, move, past, slider, told
from tests.web_site import CLUSTER

__all__ = ["past", "slider"]


def test_the_overview_is_as_it_was_at_each_moment(slider: Browser, past: Past) -> None:
    seen = []
    for step in (0, 1, 2, 3, 6):
        move(slider, past.at(step))
        slider.until(lambda: slider.text("#time .at").startswith("As of"), "the moment is not told")
        seen.append(held(slider))
    assert seen[0] == {"one": "0 B"} and seen[1] == {"one": "4.00 MiB"} and seen[2] == {"one": "6.00 MiB"}
    assert seen[3]["one"] == "6.00 MiB" and set(seen[3]) == {"one", "two"}
    slider.reads("earlier moment", "#link")
    slider.press("l")
    slider.reads("Now", "#time")
    slider.reads("Event lag")


def test_a_hole_is_shown_as_a_hole(slider: Browser, past: Past) -> None:
    slider.until(lambda: slider.all("#time .hole"), "the slider draws no hole")
    move(slider, past.at(4))
    slider.reads("Holes 1 events are missing here")
    slider.reads("1 event missing, since")
    assert {row[0]: row[1] for row in slider.rows("Instances")}["two"] == "suspect"
    move(slider, past.at(1))
    slider.reads("Nothing is missing from the archive at this moment")


def test_an_instance_a_block_and_tenants_are_as_they_were(slider: Browser, past: Past) -> None:
    move(slider, past.at(2))
    slider.go("instance/one")
    slider.reads("Then: epoch 1, running")
    assert [(row[0], row[4]) for row in slider.table_rows("Pools")] == [("HBM", "4"), ("HOST", "2")]
    slider.reads("vllm 0.32")
    slider.go(f"block?hash={BLOCK}")
    slider.reads("Held then:")
    slider.reads("one in HOST since")
    sentences = slider.text(".life")
    times = slider.run("return [...document.querySelectorAll('.life li .mono')].map((one) => one.innerText)")
    assert len(times) > 1 and times == sorted(times, reverse=True)
    slider.reads("The newest first:")
    assert "one HBM" in sentences and "one HOST" in sentences and "offset" in sentences
    slider.go("tenants")
    slider.until(lambda: [row[0] for row in slider.rows("Tenants")] == ["(no tenant)"], "the tenants are others")
    assert slider.rows("Tenants")[0][1:3] == ["4.00 MiB", "2.00 MiB"]
    slider.go("routes")
    slider.reads("Load then is not recorded: costs are those of idle engines")
    slider.go("instance/two")
    slider.reads("It had not started by then")


def test_of_a_block_that_is_held_now_its_life_says_since_when(slider: Browser) -> None:
    slider.go(f"block?hash={BLOCK}&ns={PLAIN.id.hex()}")
    slider.reads("Who holds the block")
    slider.until(
        lambda: (
            {row[2]: row[7][:2] for row in slider.table_rows("Holders") if row[0] == "one"}
            == {"HBM": "20", "HOST": "20"}
        ),
        "it is not told since when",
    )


def test_a_slider_that_is_dragged_wildly_ends_with_what_it_shows(slider: Browser, past: Past) -> None:
    last = slider.run(
        "const i = document.querySelector('#time input'); const [a, b, end] = arguments; "
        "for (let n = 0; n < 500; n += 1) { i.value = a + ((n * 7919) % 997) / 997 * (b - a); "
        "i.dispatchEvent(new Event('input')); } i.value = end; i.dispatchEvent(new Event('input')); "
        "return document.documentElement.dataset.asked",
        past.at(0),
        past.at(6),
        past.at(1),
    )
    slider.until(lambda: slider.run("return document.documentElement.dataset.shown") == last, "another moment shows")
    assert held(slider) == {"one": "4.00 MiB"}
    asked = [url for url in slider.asked() if "/v1/history/overview" in url]
    assert 1 <= len(asked) < 20  # of five hundred moments
    # Back to now while an answer is under way: it is dropped.
    slider.run("document.querySelector('#time input').focus()")
    slider.press(Keys.ARROW_RIGHT, Keys.ARROW_RIGHT, "l")
    slider.reads("Now", "#time")
    slider.reads("Event lag")
    slider.until(lambda: set(held(slider)) == {"one", "two"}, "what was dropped shows")


def test_keys_step_through_time(slider: Browser) -> None:
    slider.press("[")
    slider.reads("As of", "#time")
    first = slider.text("#time .at")
    slider.press("[")
    slider.until(lambda: slider.text("#time .at") < first, "it is no step back")
    slider.press("]")
    slider.until(lambda: slider.text("#time .at") == first, "it is no step on")
    slider.press("s")
    assert slider.focused.get_attribute("type") == "range"
    slider.press(Keys.PAGE_DOWN)
    slider.until(lambda: slider.text("#time .at") < first, "PgDn does not go back")
    slider.press("l")
    slider.reads("Now", "#time")


def test_an_instance_that_was_killed_is_told_to_be_last_heard_then(window: Browser, past: Past) -> None:
    """Last in this file: it adds to the history."""
    site, at_s = past.site, past.begin_s + 7 * STEP_S
    gone, one = Instance(site.server.url, CLUSTER, "gone"), Instance(site.server.url, CLUSTER, "kept")
    for instance, start_s in ((gone, at_s), (one, at_s), (one, at_s + 2 * STEP_S)):
        instance.create(0, 2) if start_s == at_s else instance.create(2, 4)
        told(instance, start_s)
    one.beat()
    end = datetime.fromtimestamp(at_s + 2 * STEP_S, UTC).isoformat()[:19]
    eventually(
        lambda: urllib3.request("GET", site.url + "/v1/history", timeout=WAIT_S).json()["until"] >= end,
        "the history does not reach the last event",
    )
    window.forget()
    window.open(site.url + "/")
    window.find("#time input")

    def states() -> dict[str, str]:
        return {row[0]: row[1] for row in window.rows("Instances")}

    heard = f"last heard {datetime.fromtimestamp(at_s, UTC):%H:%M:%S}"
    move(window, past.at(6.8))
    window.until(lambda: states()["gone"] == "running", "it is not told to run while it was heard")
    move(window, past.at(8.2))
    window.until(lambda: states()["gone"] == heard, "it is not told when it was heard last")
    assert states()["kept"] == states()["one"] == "running"
    window.go("instance/gone")
    window.reads(f"Then: epoch 1, {heard}")
