"""Real Chromium without a window, as Debian has it, driven over WebDriver."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, TypeVar

from selenium.common.exceptions import JavascriptException, StaleElementReferenceException
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.remote.webelement import WebElement

from kvbm.bench.browser import INSTALL, PACKAGES, chromium, is_installed
from tests.eventually import WAIT_S, eventually
from tests.servers import ServerMissingError

__all__ = ["Browser", "Keys", "browser_at"]
R = TypeVar("R")


class Browser:
    """A window. What the page said to the console, and what it asked for, is kept for a test to look at."""

    def __init__(self, opened: ExitStack, width: int = 1440, height: int = 900) -> None:
        if not is_installed():
            raise ServerMissingError("Chromium and its driver", PACKAGES, INSTALL)
        self.driver = chromium(opened, width, height, WAIT_S)

    # -- looking ------------------------------------------------------------------------------------------------------

    def run(self, script: str, *arguments: object) -> Any:
        """What a script returns."""
        return self.driver.execute_script(script, *arguments)

    def find(self, selector: str) -> WebElement:
        """The first element, once it is there."""
        found = self.until(lambda: self.driver.find_elements("css selector", selector), f"there is no {selector}")
        return found[0]

    def all(self, selector: str) -> list[WebElement]:
        """All such elements now."""
        return self.driver.find_elements("css selector", selector)

    def text(self, selector: str = "main") -> str:
        """What is to be read in an element, "" where there is none; blanks and ends of lines are one blank each."""
        found = self.run("const e = document.querySelector(arguments[0]); return e ? e.innerText : ''", selector)
        return " ".join(str(found).split())

    def until(self, is_so: Callable[[], R], what: str) -> R:
        """Wait for it; what is not there yet, or was replaced meanwhile, is looked for again."""

        def looked() -> R | None:
            try:
                return is_so()
            except (StaleElementReferenceException, JavascriptException, LookupError):
                return None

        return eventually(looked, what)  # type: ignore[return-value]

    def reads(self, word: str, selector: str = "main") -> None:
        """Wait until an element says a word, in large or small letters."""
        try:
            self.until(lambda: word.lower() in self.text(selector).lower(), "")
        except AssertionError:
            raise AssertionError(f"{selector} does not say {word!r}, but: {self.text(selector)[:2000]}") from None

    @property
    def focused(self) -> WebElement:
        """What has the focus."""
        return self.driver.switch_to.active_element

    def rows(self, name: str) -> list[list[str]]:
        """The cells of the rows of a long table that are elements now, in their order."""
        return self.run(  # type: ignore[no-any-return]
            "const t = document.querySelector(`[role=grid][aria-label='${arguments[0]}']`); if (!t) return []; "
            "return [...t.querySelectorAll('.space .tr:not([hidden])')].sort((a, b) => a.getAttribute('aria-rowindex') "
            "- b.getAttribute('aria-rowindex')).map((r) => [...r.children].map((c) => c.innerText.trim()))",
            name,
        )

    def table_rows(self, section: str) -> list[list[str]]:
        """The cells of a short table, which lies in the section of that name."""
        return self.run(  # type: ignore[no-any-return]
            "return [...document.querySelectorAll(`[aria-label='${arguments[0]}'] tbody tr`)].map("
            "(r) => [...r.children].map((c) => c.innerText.trim()))",
            section,
        )

    def active_row(self) -> str:
        """The first cell of the row that a table's keys are at."""
        return str(
            self.run(
                "const id = document.activeElement.getAttribute('aria-activedescendant'); "
                "const row = id && document.getElementById(id); return row ? row.firstElementChild.innerText : ''"
            )
        )

    # -- doing --------------------------------------------------------------------------------------------------------

    def open(self, url: str) -> None:
        """Go there."""
        self.driver.get(url)

    def press(self, *keys: str) -> None:
        """Press keys, wherever the focus is."""
        self.focused.send_keys(*keys)

    def go(self, view: str) -> None:
        """To another view, as its link does."""
        self.run("location.hash = '#/' + arguments[0]", view)

    def fill(self, selector: str, text: str) -> None:
        """Put a text into a field of the view in place of what is there."""
        field = self.find(f"main {selector}")
        field.clear()
        self.run("arguments[0].value = arguments[1]; arguments[0].dispatchEvent(new Event('input'))", field, text)

    def choose(self, value: str) -> None:
        """Choose of the view's first list, once it offers that."""
        self.find(f"main select option[value='{value}']").click()

    def click_row(self, name: str, first: str) -> None:
        """Click a row of a long table by its first cell."""

        def clicked() -> bool:
            for row in self.all(f"[role=grid][aria-label='{name}'] .space .tr"):
                if row.text.split("\n")[0].strip() == first:
                    row.click()
                    return True
            return False

        self.until(clicked, f"there is no row {first}")

    def shot(self, path: Path) -> None:
        """A picture of the window."""
        path.parent.mkdir(parents=True, exist_ok=True)
        self.driver.save_screenshot(str(path))

    # -- what went wrong ----------------------------------------------------------------------------------------------

    def forget(self) -> None:
        """What was said and asked for before does not count."""
        self.driver.get("about:blank")
        self.driver.get_log("browser")
        self.driver.get_log("performance")

    def said(self) -> list[str]:
        """What the console got since it was asked for last, with its level."""
        return [f"{one['level']}: {one['message']}" for one in self.driver.get_log("browser")]

    def asked(self) -> list[str]:
        """The URLs that were asked for since then."""
        messages = [json.loads(one["message"])["message"] for one in self.driver.get_log("performance")]
        return [one["params"]["request"]["url"] for one in messages if one["method"] == "Network.requestWillBeSent"]


@contextmanager
def browser_at(url: str, **more: Any) -> Iterator[Browser]:
    """A browser that has opened a page."""
    with ExitStack() as opened:
        browser = Browser(opened, **more)
        browser.open(url)
        yield browser
