"""One cluster of three instances, and a browser, for each file; a test opens the page anew."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.browser import Browser
from tests.web_site import OTHER, WebSite


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WebSite]:
    with ExitStack() as opened:
        site = WebSite(tmp_path_factory.mktemp("site"), opened)
        for number, name in enumerate(("gpu-a", "gpu-b", "gpu-c")):
            engine = site.instance(name)
            engine.compute(1, 4 + 4 * number)  # a prompt that all have, each a different part of
            engine.compute(10 + number, 6, OTHER)
        site.wait_for(3)
        yield site


@pytest.fixture(scope="module")
def window() -> Iterator[Browser]:
    with ExitStack() as opened:
        yield Browser(opened)


@pytest.fixture
def page(window: Browser, site: WebSite, request: pytest.FixtureRequest) -> Iterator[Browser]:
    """The page, live. Afterwards: it has asked nobody else, and the console is clean.

    The picture of a failure lies in build/web.
    """
    window.forget()
    window.open(site.url + "/")
    window.reads("live", "#link")
    yield window
    window.shot(Path("build/web") / f"{request.node.name}.png")
    assert window.said() == []
    assert [url for url in window.asked() if not url.startswith(site.url + "/")] == []
