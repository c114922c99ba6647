"""A real browser without a window, for tests and pictures of pages; nothing is downloaded for it."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
DRIVER = shutil.which("chromedriver")
SETTINGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--force-device-scale-factor=1",
    "--hide-scrollbars",
)


def why_missing() -> str | None:
    """What there is not, or None."""
    try:
        import selenium  # noqa: F401
    except ImportError:
        return "selenium is not installed"
    return None if CHROMIUM and DRIVER else "no Chromium with its driver (chromium, chromium-driver) is installed"


@contextmanager
def browser(width: int = 1280, height: int = 900) -> Iterator[Any]:
    """A browser with an empty profile of its own, and its logs of the console and of the network."""
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    assert CHROMIUM and DRIVER
    with tempfile.TemporaryDirectory(prefix="stepgraph-browser-", ignore_cleanup_errors=True) as folder:
        options = webdriver.ChromeOptions()
        options.binary_location = CHROMIUM
        for one in (*SETTINGS, f"--window-size={width},{height}", f"--user-data-dir={folder}"):
            options.add_argument(one)
        options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
        # Proxies are for the world outside; the driver is asked on this machine.
        environment = {name: value for name, value in os.environ.items() if not name.lower().endswith("_proxy")}
        driver = webdriver.Chrome(options, Service(DRIVER, env=environment))
        try:
            driver.set_script_timeout(10)
            driver.set_page_load_timeout(30)
            yield driver
        finally:
            driver.quit()
