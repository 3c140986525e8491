"""The overview over HTTP: columns and changes, who sees what of it, and many who look at once."""

from __future__ import annotations

import asyncio
import json
import socket
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import urllib3

from kvbm.catalog.edge import overview
from kvbm.catalog.sql.store import SqlStore
from kvbm.core.overview import OverviewAnswer
from tests.catalog_site import OTHER, Instance, Running, run_catalog
from tests.eventually import WAIT_S, eventually
from tests.nats_fixture import cluster, nats_url
from tests.secured_catalogs import Files, files, look_at_once, serve
from tests.web_site import overview_of

__all__ = ["cluster", "files", "look_at_once", "nats_url", "serve"]
PAGES, MANY = 200, 20


@pytest.fixture
def running(nats_url: str, cluster: str, sqlite_url: str) -> Iterator[Running]:
    yield from run_catalog(nats_url, cluster, sqlite_url, liveness_s=WAIT_S)


class Feed:
    """One reader of the feed."""

    def __init__(self, url: str, token: str = "", buffer_bytes: int = 0) -> None:
        """Args: buffer_bytes: that the system takes for it before it is read; 0: as usual."""
        place = urlsplit(url)
        self.sock = socket.socket()
        if buffer_bytes:
            self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer_bytes)
        self.sock.settimeout(WAIT_S)
        self.sock.connect((place.hostname, place.port))
        head = f"authorization: Bearer {token}\r\n" if token else ""
        self.sock.sendall(f"GET /v1/overview/feed HTTP/1.1\r\nhost: {place.netloc}\r\n{head}\r\n".encode())
        self.read = self.sock.makefile("rb")
        self.status = int(self.read.readline().split()[1])

    def next(self) -> tuple[str, Any]:
        """The next event and what it says."""
        kind = ""
        while line := self.read.readline():
            text = line.decode().strip()
            if text.startswith("event: "):
                kind = text[7:]
            elif text.startswith("data: "):
                return kind, json.loads(text[6:])
        raise EOFError

    def close(self) -> None:
        self.read.close()
        self.sock.close()


def rows(answer: Any) -> dict[str, dict[str, Any]]:
    """By instance, with its words."""
    told, words = answer["rows"], answer["rows"]["words"]
    return {
        name: {
            "state": words[told["state"][at]],
            "excluded": words[told["excluded"][at]],
            "trouble": words[told["trouble"][at]],
            "place": words[told["place"][at]],
            "unread": told["unread"][at],
            "queued": told["queued"][at],
            "blocks": [tier[at] for tier in told["blocks"]],
            "slots": [tier[at] for tier in told["slots"]],
        }
        for at, name in enumerate(told["instance"])
    }


def started(running: Running, name: str, blocks: int) -> Instance:
    instance = running.instance(name)
    instance.create(0, blocks)
    instance.publish()
    instance.beat(queued_tokens=7, applied=instance.ledger.applied)
    return instance


def looked(url: str, is_wanted: Callable[[Any], bool], token: str = "") -> Any:
    """The overview, once it is as wanted."""

    def found() -> Any:
        answer = overview_of(url, token)
        return answer if is_wanted(answer) else None

    return eventually(found, "the overview is another")


def test_columns_say_of_each_instance_what_is_known(running: Running) -> None:
    first, second = started(running, "a", 6), started(running, "b", 3)
    second.beat(trouble="journal full: /data", applied=second.ledger.applied + 5)
    answer = looked(
        running.client.url, lambda told: {row["trouble"] for row in rows(told).values()} == {"", "journal full: /data"}
    )
    found = rows(answer)
    assert found["a"]["blocks"] == [6, 0, 0] and found["b"]["blocks"] == [3, 0, 0]
    assert found["a"]["slots"] == [64, 64, 0] and found["a"]["queued"] == 7
    assert found["a"]["unread"] == 0 and found["b"]["unread"] == 5
    assert found["a"]["place"] == "rack-1 / a" and found["a"]["state"] == "live"
    assert answer["states"] == {"live": 2} and answer["excluded"] == {}
    hbm = answer["tiers"][0]
    assert (hbm["tier"], hbm["instances"], hbm["blocks"], hbm["slots"], hbm["bytes"]) == ("HBM", 2, 9, 128, 9 * 1024)
    assert first.name == "a"


def test_a_feed_begins_whole_and_goes_on_with_what_has_changed(running: Running) -> None:
    first = started(running, "a", 2)
    started(running, "b", 2)
    looked(running.client.url, lambda told: len(rows(told)) == 2)
    feed = Feed(running.client.url)
    kind, whole = feed.next()
    assert kind == "overview" and "base" not in whole and set(rows(whole)) == {"a", "b"} and "tenants" in whole
    first.create(2, 5)
    first.publish()
    seen, version = rows(whole), whole["version"]
    while seen["a"]["blocks"][0] != 5:
        _, told = feed.next()
        assert told["base"] == version == told["version"] - 1 and told["run"] == whole["run"]
        assert set(rows(told)) <= {"a", "b"}
        seen, version = seen | rows(told), told["version"]
    feed.close()


def test_two_hundred_pages_share_one_computation(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """One look serves all that come while it is fresh; what goes out is made once, for however many."""
    first = started(running, "a", 2)
    looked(running.client.url, lambda told: rows(told)["a"]["blocks"][0] == 2 if rows(told) else False)
    counted = Counter[str]()
    counting(monkeypatch, counted)
    with ExitStack() as opened:
        with monkeypatch.context() as still:
            still.setattr(overview, "EVERY_S", 10 * WAIT_S)  # what was looked at stays fresh until all have come
            feeds = [Feed(running.client.url) for _ in range(PAGES)]
            for feed in feeds:
                opened.callback(feed.close)
            assert {feed.status for feed in feeds} == {200}
            begun = [feed.next()[1] for feed in feeds]
            assert len({(told["run"], told["version"]) for told in begun}) == 1
            assert counted["looks"] <= 1 and counted["texts"] <= 2, counted
        counted.clear()
        first.create(2, 6)
        first.publish()
        # Looks that are due again; those who wait are told of them
        looked(running.client.url, lambda told: rows(told)["a"]["blocks"][0] == 6)
        changes: dict[int, set[str]] = {}
        for feed in feeds:
            while True:
                _, told = feed.next()
                if "base" in told:
                    changes.setdefault(told["version"], set()).add(json.dumps(told))
                if rows(told).get("a", {}).get("blocks", [0])[0] == 6:
                    break
        assert changes and {len(texts) for texts in changes.values()} == {1}  # each change is the same for all
        assert counted["texts"] <= 2 * counted["looks"], counted  # a change and a whole one, not one for each page
    assert urllib3.request("GET", running.client.url + "/healthz", timeout=WAIT_S).status == 200


def counting(monkeypatch: pytest.MonkeyPatch, counted: Counter[str]) -> None:
    """Count looks at all instances, and texts that are made of them."""
    find, encode = overview.Overview._find, overview._encoded

    async def found(one: overview.Overview) -> Any:
        counted["looks"] += 1
        return await find(one)

    def encoded(answer: OverviewAnswer) -> bytes:
        counted["texts"] += 1
        return encode(answer)

    monkeypatch.setattr(overview.Overview, "_find", found)
    monkeypatch.setattr(overview, "_encoded", encoded)


def test_one_who_reads_nothing_holds_up_nobody_and_nothing_is_kept_for_it(
    running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = started(running, "a", 2)
    looked(running.client.url, lambda told: rows(told)["a"]["blocks"][0] == 2 if rows(told) else False)
    encode, step = overview._encoded, overview.Overview.next
    padding = b" " * (1 << 20)  # an answer of some 10,000 instances
    monkeypatch.setattr(overview, "_encoded", lambda answer: encode(answer) + padding)
    monkeypatch.setattr(overview, "EVERY_S", 0.05)
    monkeypatch.setattr(overview, "_BYTES_PER_S", 1 << 40)
    asked = Counter[object]()  # by feed, how often it has asked for more

    async def stepped(one: overview.Overview, *more: Any) -> Any:
        asked[asyncio.current_task()] += 1
        return await step(one, *more)

    monkeypatch.setattr(overview.Overview, "next", stepped)
    with ExitStack() as opened:
        deaf = Feed(running.client.url, buffer_bytes=4096)
        opened.callback(deaf.close)
        assert eventually(lambda: len(asked) == 1, "its feed does not begin")
        (of_deaf,) = asked
        others = [Feed(running.client.url) for _ in range(3)]
        for feed in others:
            opened.callback(feed.close)
        version = min(feed.next()[1]["version"] for feed in others)
        for feed in others:
            while feed.next()[1]["version"] < version + MANY:  # they go on, though it has not taken the first ones
                pass
        stopped = asked[of_deaf]
        assert stopped < MANY, f"{stopped} answers wait for one who reads nothing"
        for feed in others:
            while feed.next()[1]["version"] < version + 2 * MANY:
                pass
        assert asked[of_deaf] == stopped  # it waits for its reader, and asks for nothing
    assert first.name == "a"


def test_a_feed_whose_view_was_forgotten_goes_on_whole(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """As it is for who takes nothing for half a minute: the view that comes next has other versions."""
    monkeypatch.setattr(overview, "_VIEW_KEPT_S", -1.0)
    first = started(running, "a", 2)
    looked(running.client.url, lambda told: rows(told).get("a", {}).get("blocks", [0])[0] == 2)
    feed = Feed(running.client.url)
    version, blocks = feed.next()[1]["version"], 2
    first.create(2, 5)
    first.publish()
    while blocks != 5:
        _, told = feed.next()
        assert told["version"] > version and told.get("base", version) == version
        version, blocks = told["version"], rows(told).get("a", {}).get("blocks", [blocks])[0]
    feed.close()


def test_a_database_that_does_not_answer_holds_no_overview_up(
    running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def never(store: SqlStore) -> dict[str, int]:
        await asyncio.Event().wait()
        return {}

    monkeypatch.setattr(SqlStore, "tenant_quotas", never)
    instance = started(running, "a", 2)
    instance.beat(namespaces=(OTHER.id,), told=(OTHER.canonical(),))
    answer = looked(running.client.url, lambda told: "acme" in told["tenants"]["tenant"])
    assert set(answer["tenants"]["quota"]) == {None}


def test_more_feeds_than_there_is_room_for_are_told_so(nats_url: str, cluster: str, sqlite_url: str) -> None:
    from kvbm.config.settings import LimitSettings

    with ExitStack() as opened:
        site = run_catalog(nats_url, cluster, sqlite_url, limits=LimitSettings(watches=4, watches_per_caller=4))
        running = next(site)
        opened.callback(lambda: next(site, None))
        feeds = [Feed(running.client.url) for _ in range(3)]  # one caller may have three quarters
        for feed in feeds:
            opened.callback(feed.close)
            feed.next()
        assert Feed(running.client.url).status == 429
        feeds[0].close()
        eventually(lambda: Feed(running.client.url).status == 200, "a place that was left is not given again")


def test_callers_of_some_tenants_see_their_own_and_no_numbers(
    files: Files, serve: Any, nats_url: str, cluster: str
) -> None:
    from kvbm.catalog.access.file import NewToken

    ops = files.token(NewToken("ops", "operator"))
    acme = files.token(NewToken("acme", "router", ["acme"]))
    nobody = files.token(NewToken("nobody", "router", ["nobody"]))
    scraper = files.token(NewToken("scraper", "metrics"))
    url = serve(file=str(files.access))
    for name, spaces in (("a", [OTHER]), ("b", [])):
        instance = Instance(nats_url, cluster, name)
        instance.create(0, 2)
        instance.publish()
        told = tuple(space.canonical() for space in spaces)
        instance.beat(namespaces=tuple(space.id for space in spaces), told=told, trouble="a secret trouble")
    looked(url, lambda told: set(rows(told)) == {"a", "b"} and told["states"].get("live") == 2, ops)
    seen = looked(url, lambda told: set(rows(told)) == {"a"}, acme)
    text = json.dumps(seen)
    assert "secret trouble" not in text and "rack-1" not in text and not seen["catalog"]["sees_all"]
    assert rows(seen)["a"]["blocks"] == [0, 0, 0] and rows(seen)["a"]["queued"] is None
    assert seen["tiers"] == seen["pools"] == seen["ages"] == [] and seen["events"] == seen["missed"] == {}
    assert seen["tenants"]["tenant"] in ([], ["acme"])
    assert rows(overview_of(url, nobody)) == {}
    refused = {"authorization": f"Bearer {scraper}"}
    for path in ("/v1/overview", "/v1/overview/feed"):
        assert urllib3.request("GET", url + path, headers=refused, timeout=WAIT_S).status == 403
        assert urllib3.request("GET", url + path, timeout=WAIT_S).status == 401
    limited = {"authorization": f"Bearer {acme}"}
    detail = url + "/v1/overview/instances/a"
    assert urllib3.request("GET", detail, headers=limited, timeout=WAIT_S).status == 403
    feed = Feed(url, acme)
    assert set(rows(feed.next()[1])) <= {"a"}
    feed.close()


def test_a_heartbeat_tells_more_of_one_instance(running: Running) -> None:
    instance = started(running, "a", 2)
    instance.beat(
        namespaces=(OTHER.id,),
        told=(OTHER.canonical(),),
        put_bytes={OTHER.id: (300, 100)},
        put_total=(500, 200),
        lends={"tcp": "10.0.0.1:7"},
        prefill_tokens_per_s=1e4,
    )
    url = running.client.url + "/v1/overview/instances/"

    def told() -> Any:
        answer = urllib3.request("GET", url + "a", timeout=WAIT_S)
        found = json.loads(answer.data)
        return found if answer.status == 200 and found["lends"] else None

    found = eventually(told, "nothing is told of it")
    assert found["put_raw"] == 500 and found["put_stored"] == 200 and found["lends"] == {"tcp": "10.0.0.1:7"}
    assert [(one["tenant"], one["put_stored"]) for one in found["namespaces"]] == [("acme", 100)]
    unknown = urllib3.request("GET", url + "nobody", timeout=WAIT_S)
    assert unknown.status == 404 and json.loads(unknown.data)["error"]["code"] == "instance_unknown"


def test_browsers_are_shown_the_page_and_programs_what_this_is(running: Running) -> None:
    url = running.client.url
    browser = {"accept": "text/html,application/xhtml+xml,*/*;q=0.8"}
    answer = urllib3.request("GET", url + "/", headers=browser, redirect=False, timeout=WAIT_S)
    assert answer.status == 307 and answer.headers["location"] == "ui/"
    assert json.loads(urllib3.request("GET", url + "/", timeout=WAIT_S).data)["service"] == "kvbm-catalog"
    page = urllib3.request("GET", url + "/", headers=browser, timeout=WAIT_S)
    assert page.status == 200 and b"<title>kvbm catalog" in page.data


def test_the_page_is_small_and_of_this_folder_alone() -> None:
    from kvbm.catalog.edge.page import FOLDER, MOST_BYTES, page_files

    files_ = page_files()
    assert sum(len(one.body) for one in files_.values()) <= MOST_BYTES
    assert {path for path in files_ if path} == {
        str(path.relative_to(FOLDER)) for path in FOLDER.rglob("*") if path.is_file()
    }
    for path, one in files_.items():
        text = one.body.decode().replace("http://www.w3.org/2000/svg", "")
        assert "http://" not in text and "https://" not in text, path
        for word in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "new Function"):
            assert word not in text, (path, word)
        if path.endswith(".html"):
            assert " style=" not in text and "<script>" not in text and " onclick" not in text
    assert Path(FOLDER, "index.html").is_file()
