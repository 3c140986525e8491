"""Real Chromium without a window, as Debian has it, driven over WebDriver."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, TypeVar

from selenium.common.exceptions import JavascriptException, StaleElementReferenceException
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.remote.webelement import WebElement

from kvbm.bench.browser import chromium
from kvbm.core.errors import MissingExtraError
from tests.eventually import WAIT_S, eventually
from tests.servers import ServerMissingError

__all__ = ["Browser", "Keys", "browser_at"]
R = TypeVar("R")


class Browser:
    """A window. What the page said to the console, and what it asked for, is kept for a test to look at."""

    def __init__(self, opened: ExitStack, width: int = 1440, height: int = 900) -> None:
        try:
            self.driver = chromium(opened, width, height, WAIT_S)
        except MissingExtraError as error:
            raise ServerMissingError(str(error)) from None
        self._said: list[str] = []

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
        """Wait for it; an element that was replaced meanwhile is looked for again."""

        def looked() -> R | None:
            try:
                return is_so()
            except (StaleElementReferenceException, JavascriptException):
                return None

        return eventually(looked, what)  # type: ignore[return-value]

    def reads(self, word: str, selector: str = "main") -> None:
        """Wait until an element says a word."""
        try:
            self.until(lambda: word in self.text(selector), "")
        except AssertionError:
            raise AssertionError(f"{selector} does not say {word!r}, but: {self.text(selector)[:2000]}") from None

    @property
    def focused(self) -> WebElement:
        """What has the focus."""
        return self.driver.switch_to.active_element

    # -- doing --------------------------------------------------------------------------------------------------------

    def open(self, url: str) -> None:
        """Go there."""
        self.driver.get(url)

    def press(self, *keys: str) -> None:
        """Press keys, wherever the focus is."""
        self.focused.send_keys(*keys)

    def shot(self, path: Path) -> None:
        """A picture of the window."""
        path.parent.mkdir(parents=True, exist_ok=True)
        self.driver.save_screenshot(str(path))

    # -- what went wrong ----------------------------------------------------------------------------------------------

    def said(self) -> list[str]:
        """What the console got since the browser began, with its level."""
        self._said += [f"{one['level']}: {one['message']}" for one in self.driver.get_log("browser")]
        return self._said


@contextmanager
def browser_at(url: str, **more: Any) -> Iterator[Browser]:
    """A browser that has opened a page."""
    with ExitStack() as opened:
        browser = Browser(opened, **more)
        browser.open(url)
        yield browser
