"""Whom the page trusts: nobody. Tokens, what callers of some tenants see, and instances whose words are markup."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import urllib3

import kvbm.catalog.access.callers
from kvbm.catalog.access.callers import AccessOptions
from kvbm.catalog.access.file import NewToken, add_token, read_entries, write_entries
from kvbm.core.events import PoolStated
from kvbm.core.ids import Epoch, Namespace, Reach, Tier
from kvbm.reference.ledger import Ledger
from tests.browser import Browser, Keys
from tests.catalog_site import Instance
from tests.eventually import WAIT_S
from tests.web_callers import begin, enter
from tests.web_site import CLUSTER, OTHER, WebSite

HOSTILE = "<img src=x onerror=\"window.hacked='%s'\"><script>window.hacked='%s'</script>"


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[WebSite, dict[str, str]]]:
    """A catalog that asks who asks, and its tokens."""
    with ExitStack() as opened, pytest.MonkeyPatch.context() as patched:
        patched.setattr(kvbm.catalog.access.callers, "LOOK_S", 0.0)
        folder = tmp_path_factory.mktemp("guarded")
        access = folder / "access.toml"
        tokens = {
            "ops": add_token(access, NewToken("ops", "operator"), time.time()),
            "acme": add_token(access, NewToken("acme", "router", ["acme"]), time.time()),
            "scraper": add_token(access, NewToken("scraper", "metrics"), time.time()),
        }
        site = WebSite(folder / "site", opened, access=AccessOptions(file=str(access)))
        site.instance("gpu-a").compute(1, 4)
        site.instance("gpu-b").compute(2, 4, OTHER)
        site.wait_for(2, tokens["ops"])
        yield site, tokens


def test_a_token_opens_the_page_stays_in_the_tab_and_can_be_forgotten(
    window: Browser, guarded: tuple[WebSite, dict[str, str]]
) -> None:
    site, tokens = guarded
    begin(window, site)
    window.press(Keys.ESCAPE)
    window.press(Keys.ESCAPE)  # at which browsers close a dialog
    window.until(lambda: window.all("dialog[open]"), "nobody is asked any more")
    enter(window, "wrong")
    window.reads("does not know this token", "dialog")
    enter(window, tokens["ops"])
    window.reads("2 instances")
    assert tokens["ops"] not in window.run("return document.cookie + location.href + JSON.stringify(localStorage)")
    assert window.run("return sessionStorage.length") == 1
    window.driver.refresh()
    window.reads("2 instances")
    window.find("#token").click()
    window.reads("This catalog asks who you are", "dialog")
    assert window.run("return sessionStorage.length") == 0
    assert all(tokens["ops"] not in url for url in window.asked())


def test_a_caller_of_one_tenant_sees_who_serves_it_and_no_numbers(
    window: Browser, guarded: tuple[WebSite, dict[str, str]]
) -> None:
    site, tokens = guarded
    begin(window, site)
    enter(window, tokens["acme"])
    window.reads("Numbers, places and trouble are for operators", "#banner")
    window.until(lambda: window.rows("Instances"), "no instance shows")
    assert {row[2] for row in window.rows("Instances")} == {"–"}
    assert "zone-a" not in window.text() and "Event stream" not in window.text()
    window.go("tenants")
    window.until(lambda: [row[0] for row in window.rows("Tenants")] == ["acme"], "other tenants show, or not its own")
    window.reads("Earlier moments are for operators", "#time")
    window.go("instance/gpu-b")
    window.reads("It serves.")
    assert "Pools" not in window.text()


def test_who_may_only_read_metrics_is_told_so(window: Browser, guarded: tuple[WebSite, dict[str, str]]) -> None:
    site, tokens = guarded
    begin(window, site)
    enter(window, tokens["scraper"])
    window.reads("role may not ask this", "dialog")


def test_a_token_that_is_withdrawn_ends_the_feed(window: Browser, guarded: tuple[WebSite, dict[str, str]]) -> None:
    site, _ = guarded
    access = Path(site.settings["access"].file)
    token = add_token(access, NewToken("guest", "operator"), time.time())
    begin(window, site)
    enter(window, token)
    window.reads("2 instances")
    write_entries(access, [one for one in read_entries(access) if one.name != "guest"])
    window.reads("does not know this token", "dialog")


def test_the_page_itself_holds_no_data_and_may_load_nothing_else(guarded: tuple[WebSite, dict[str, str]]) -> None:
    site, _ = guarded
    answer = urllib3.request("GET", site.url + "/ui/", timeout=WAIT_S)
    policy = answer.headers["content-security-policy"]
    assert answer.status == 200 and b"gpu-a" not in answer.data
    assert "default-src 'none'" in policy and "unsafe" not in policy and "http" not in policy
    for path in ("/ui/%2e%2e/edge/page.py", "/ui//etc/passwd", "/ui/views", "/ui/page.py"):
        assert urllib3.request("GET", site.url + path, timeout=WAIT_S).status == 404, path
    assert urllib3.request("GET", site.url + "/v1/overview", timeout=WAIT_S).status == 401
    assert urllib3.request("GET", site.url + "/v1/overview/feed", timeout=WAIT_S).status == 401
    tag = answer.headers["etag"]
    again = urllib3.request("GET", site.url + "/ui/", headers={"if-none-match": tag}, timeout=WAIT_S)
    assert again.status == 304 and again.data == b""


def test_words_of_instances_models_and_tenants_are_never_markup(page: Browser, site: WebSite) -> None:
    name = "x\"'<b/onmouseover=hacked()"
    hostile = Instance(site.server.url, CLUSTER, name)
    space = Namespace(model=HOSTILE % ("m", "m"), block_tokens=16, tenant=HOSTILE % ("t", "t"))
    pools = [PoolStated(Tier.HBM, 64, 4096), PoolStated(Tier.OBJECT, 0, 4096, Reach.CLUSTER, HOSTILE % ("p", "p"))]
    hostile.ledger = Ledger(pools)
    hostile.ledger.start(Epoch(1), [space], [HOSTILE % ("z", "z")], HOSTILE % ("e", "e"), HOSTILE % ("v", "v"))
    hostile.publish()
    hostile.beat(
        trouble=HOSTILE % ("trouble", "trouble"),
        namespaces=(space.id,),
        told=(space.canonical(),),
        lends={HOSTILE % ("way", "way"): HOSTILE % ("l", "l")},
    )
    page.reads("4 instances")
    for view in ("overview", "tenants", "block", "routes"):
        page.go(view)
        page.until(lambda: page.text() != "", "nothing shows")
    page.go("tenants")
    page.reads("<img src=x onerror")
    page.go("routes")
    page.until(lambda: "<img" in page.text("select"), "the model is not offered")
    page.go("overview")
    page.click_row("Instances", name)
    page.reads("window.hacked='trouble'")
    page.reads("window.hacked='l'")
    assert page.run("return window.hacked === undefined && !document.querySelector('main img, main script, main b')")
    page.go("instance/%3Cimg%20src%3Dx%20onerror%3Dhacked()%3E")
    page.reads("No instance <img")
