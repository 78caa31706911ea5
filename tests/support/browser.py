"""A headless Chromium for tests of pages, if there is one."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
CHROMEDRIVER = shutil.which("chromedriver")
MISSING = "there is no chromium with chromedriver (Debian: apt install chromium chromium-driver)"


@contextmanager
def chromium(webdriver: Any, profile: Path) -> Iterator[Any]:
    """The driver of a new browser. webdriver: selenium's module."""
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    # No sandbox: containers run tests as root. The pages are ours.
    for argument in (
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-dev-shm-usage",
        "--no-first-run",
        "--disable-background-networking",
        "--disable-component-update",
        "--disable-sync",
        "--disable-quic",
        "--window-size=1440,1000",
    ):
        options.add_argument(argument)
    options.add_argument(f"--user-data-dir={profile}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(CHROMEDRIVER))
    try:
        yield driver
    finally:
        driver.quit()
