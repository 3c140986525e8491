"""Every view, of three instances that are real managers: what it shows is what the catalog knows."""

from __future__ import annotations

from selenium.webdriver.support.select import Select

from tests.browser import Browser
from tests.web_site import SPACE, WebSite, hashes_of, tokens_of


def test_a_browser_that_asks_for_the_catalog_gets_the_page_with_its_instances(page: Browser, site: WebSite) -> None:
    assert page.driver.current_url.startswith(site.url + "/ui/")
    page.reads("3 instances")
    rows = page.until(lambda: [one for one in page.rows("Instances") if one[1] == "live"], "nobody is live")
    assert [row[0] for row in rows] == ["gpu-a", "gpu-b", "gpu-c"]
    held = {row[0]: row[2] for row in rows}
    assert held == {"gpu-a": "10.4 %", "gpu-b": "14.6 %", "gpu-c": "18.8 %"}  # 10, 14 and 18 of 96 slots
    page.reads("Instances live 3 of 3: all are heard")
    page.reads("Blocks held 126")  # each of 42 in three tiers


def test_what_changes_shows_by_itself(page: Browser, site: WebSite) -> None:
    before = page.text()
    site.engines["gpu-a"].compute(500, 8)
    page.until(lambda: page.rows("Instances")[0][2] == "18.8 %", f"gpu-a's eight blocks do not show in {before}")


def test_an_instance_shows_its_pools_and_epoch(page: Browser) -> None:
    page.click_row("Instances", "gpu-b")
    page.reads("cluster web")
    page.reads("zone-a / rack-2 / gpu-b")
    for word in ("Epoch 1", "Pools", "HBM", "NVME", "None: its blocks count", "Copies", SPACE.id.hex(), "acme"):
        page.reads(word)
    page.driver.back()
    page.reads("3 instances")


def test_a_name_nobody_has_is_told_as_unknown(page: Browser) -> None:
    page.go("instance/nobody")
    page.reads("No instance nobody is known now")


def test_a_block_shows_who_holds_it_in_which_tier(page: Browser) -> None:
    page.go("block")
    page.fill("textarea", hashes_of(1, 8)[16 * 7 :].hex())
    page.find("form button.primary").click()
    page.reads("Who holds the block")
    names = {(row[0], row[2]) for row in page.table_rows("Holders")}
    assert names == {(name, tier) for name in ("gpu-b", "gpu-c") for tier in ("HBM", "HOST", "NVME")}
    page.reads("need a history")


def test_a_prompt_by_its_tokens_shows_how_much_of_it_each_has(page: Browser) -> None:
    page.go("block")
    page.choose(SPACE.id.hex())
    page.fill("textarea", ", ".join(map(str, tokens_of(1, 12))))
    page.find("form button.primary").click()
    page.reads("Who holds the 12 full blocks")
    found = {row[0]: row[3] for row in page.table_rows("Holders") if row[2] == "HBM"}
    assert found == {"gpu-a": "4 of 12", "gpu-b": "8 of 12", "gpu-c": "12 of 12"}


def test_words_that_are_no_prompt_are_refused_with_what_is_wrong(page: Browser) -> None:
    page.go("block")
    page.fill("textarea", "hello")
    page.find("form button.primary").click()
    page.reads("neither a hash of 32 hex digits nor a token id")
    page.fill("textarea", "0123456789abcdef")
    page.find("form button.primary").click()
    page.reads("found in the history alone")
    page.fill("textarea", "1, 2, 3")
    page.find("form button.primary").click()
    page.reads("hashed within a namespace")


def test_tenants_show_what_is_theirs(page: Browser) -> None:
    page.go("tenants")
    page.until(lambda: [row[0] for row in page.rows("Tenants")] == ["(no tenant)", "acme"], "tenants are not told")
    assert [row[-1] for row in page.rows("Tenants")] == ["3", "3"]
    page.reads("need a history")
    page.reads("need an archive")


def test_a_route_is_ranked_with_what_it_costs_and_why(page: Browser) -> None:
    page.go("routes")
    page.choose(SPACE.id.hex())
    page.fill("textarea", str(tokens_of(1, 12)))
    page.find("form button.primary").click()
    page.reads("gpu-c costs")
    page.reads("it need not compute 12 of 12 blocks")
    page.reads("The next, gpu-b, costs")
    page.reads("computing what is missing")
    assert [row[1] for row in page.table_rows("Ranking")] == ["gpu-c", "gpu-b", "gpu-a"]
    assert [row[9] for row in page.table_rows("Ranking")] == ["12 / 12", "8 / 12", "4 / 12"]


def test_without_a_history_the_slider_says_how_to_turn_it_on(page: Browser) -> None:
    page.reads("--archive DIR --history DIR", "#time")


def test_a_link_to_a_view_opens_it(page: Browser, site: WebSite) -> None:
    page.open(f"{site.url}/ui/#/block?hash={hashes_of(1, 1).hex()}&ns={SPACE.id.hex()}")
    page.driver.refresh()
    page.reads("Who holds the block")
    assert Select(page.find("select")).first_selected_option.get_attribute("value") == SPACE.id.hex()


CUT = """
const cut = [], found = [...document.querySelectorAll("main code, main .tile small, main .tile dd")];
for (const one of found) {
  const box = one.getBoundingClientRect(), own = getComputedStyle(one);
  if (!box.width || (one.title === one.innerText && own.cursor === "help")) continue;
  let isCut = own.display !== "inline" && one.scrollWidth > one.clientWidth + 1;
  for (let above = one.parentElement; above.tagName !== "MAIN"; above = above.parentElement) {
    const clips = getComputedStyle(above).overflowX !== "visible";
    isCut ||= clips && box.right > above.getBoundingClientRect().right + 1;
  }
  if (isCut) cut.push(one.innerText);
}
return [cut, found.length];
"""


LONG = "of 3,000: 1,204 silent, 310 stopped, 22 restarted, 3 newer, 17 unheard"


def test_ids_and_notes_can_be_read_whole(page: Browser) -> None:
    views = {
        "overview": "Instances live",
        "instance/gpu-b": SPACE.id.hex(),
        f"block?hash={hashes_of(1, 8)[16 * 7 :].hex()}&ns={SPACE.id.hex()}": "Who holds the block",
    }
    for view, words in views.items():
        page.go(view)
        page.reads(words)
        if view == "overview":  # as it is where many are away
            page.run("document.querySelector('.tile small').textContent = arguments[0]", LONG)
        cut, seen = page.run(CUT)
        assert cut == [] and seen, view
    page.go("block")
    page.choose(SPACE.id.hex())
    page.run("document.querySelector('select[aria-label=Namespace]').dispatchEvent(new Event('change'))")
    page.until(lambda: page.text(".form .whole").startswith(SPACE.id.hex()), "the id is not told whole")
    names = page.run(
        "return [...document.querySelectorAll('select[aria-label=Namespace] option')].map((one) => one.text)"
    )
    assert any(name.startswith(SPACE.id.hex()[:8]) for name in names)
