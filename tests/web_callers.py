"""A page of a catalog that asks who asks, as somebody comes to it."""

from __future__ import annotations

from tests.browser import Browser, Keys
from tests.web_site import WebSite


def begin(window: Browser, site: WebSite) -> None:
    """The page as somebody opens it who was never here."""
    window.forget()
    window.open(site.url + "/ui/icon.svg")
    window.run("sessionStorage.clear()")
    window.open(site.url + "/")
    window.reads("This catalog asks who you are", "dialog")


def enter(window: Browser, token: str) -> None:
    """Give a token to the page that asks for one."""
    field = window.find("#token-field")
    field.send_keys(token, Keys.ENTER)
