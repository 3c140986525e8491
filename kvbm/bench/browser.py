"""Chromium without a window, for measuring the page and for its tests."""

from __future__ import annotations

import os
import shutil
import tempfile
from contextlib import ExitStack
from typing import TYPE_CHECKING

from kvbm.core.errors import KvbmError, MissingExtraError

if TYPE_CHECKING:
    from selenium.webdriver import Chrome

INSTALL, PACKAGES = "apt-get install --no-install-recommends", "chromium chromium-driver fonts-dejavu-core"
_PROGRAMS = ("chromium", "chromedriver")
_FLAGS = (
    "--headless=new",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
    "--no-proxy-server",
    "--force-color-profile=srgb",
)


def is_installed() -> bool:
    """Whether the programs are there."""
    return all(shutil.which(name) for name in _PROGRAMS)


def chromium(opened: ExitStack, width: int = 1440, height: int = 900, wait_s: float = 60.0) -> Chrome:
    """A window of a browser with a profile of its own, and logs of its console and of what it asks for.

    Args:
        opened: ends it. wait_s: for a page or a script.
    Raises: KvbmError: there is no Chromium. MissingExtraError: there is no selenium.
    """
    program, driver = (shutil.which(name) for name in _PROGRAMS)
    if program is None or driver is None:
        raise KvbmError(f"there is no browser to open the page in; install it with: {INSTALL} {PACKAGES}")
    try:
        from selenium.webdriver import Chrome, ChromeOptions
        from selenium.webdriver.chrome.service import Service
    except ImportError:
        raise MissingExtraError("what drives a browser (selenium)", "dev") from None
    options = ChromeOptions()
    options.binary_location = program
    profile = tempfile.mkdtemp(prefix="kvbm-browser-")
    opened.callback(shutil.rmtree, profile, True)
    for flag in (*_FLAGS, f"--window-size={width},{height}", f"--user-data-dir={profile}"):
        options.add_argument(flag)
    if os.geteuid() == 0:
        options.add_argument("--no-sandbox")  # as root it starts with no other
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    window = Chrome(options, Service(driver))
    opened.callback(window.quit)
    window.set_page_load_timeout(wait_s)
    window.set_script_timeout(wait_s)
    return window
