"""The page while the catalog goes and comes, and what it is when instances do."""

from __future__ import annotations

from tests.browser import Browser
from tests.eventually import eventually
from tests.web_site import WebSite, overview_of


def test_it_says_who_is_left_out_and_why(page: Browser, site: WebSite) -> None:
    page.reads("3 instances")
    site.engines["gpu-c"].manager.close()
    page.reads("1 stopped – stopped cleanly: gpu-c")
    page.reads("Instances live 2 of 3: 1 stopped")
    page.run("arguments[0].focus()", page.find("[aria-label=Trouble] a"))
    site.engines["gpu-b"].compute(600, 7)
    page.until(lambda: page.rows("Instances")[1][2] == "21.9 %", "gpu-b's seven blocks do not show")
    assert page.focused.text == "gpu-c"  # what has the focus keeps it while numbers change
    page.find("main .chip:nth-of-type(3)").click()
    page.reads("1 of 3 instances")
    page.until(lambda: [row[0] for row in page.rows("Instances")] == ["gpu-c"], "others are left out")


def test_it_goes_on_by_itself_when_the_catalog_is_back(window: Browser, site: WebSite) -> None:
    window.forget()
    window.open(site.url + "/")
    window.reads("live", "#link")
    before = overview_of(site.url)["run"]
    site.restart()
    eventually(lambda: overview_of(site.url)["run"] != before, "the catalog is not another")
    window.until(lambda: window.text("#link").endswith("live"), "the page has not come back")
    site.engines["gpu-a"].compute(700, 9)
    window.until(lambda: window.rows("Instances")[0][2] == "19.8 %", "what is new does not show")
    assert [one for one in window.said() if "Failed to load resource" not in one] == []
