"""The docs site in a real browser: every page loads, nothing comes from elsewhere, search finds; by `make browser`."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer

import pytest
from playwright.sync_api import Browser, Page, sync_playwright
from small import ROOT

SITE = ROOT / "build" / "site"
SCREENSHOTS = ROOT / "build" / "browser"
PAGES = sorted(path.parent.relative_to(SITE).as_posix() for path in SITE.rglob("index.html"))


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *words: object) -> None:
        """The tests speak for themselves."""


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(SITE)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=shutil.which("chromium"))
        yield chromium
        chromium.close()


def opened(browser: Browser, width: int, scheme: str) -> tuple[Page, list[str], list[str]]:
    """A page, what its console says, and what it asks for."""
    page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)  # type: ignore[arg-type]
    messages: list[str] = []
    requests: list[str] = []
    page.on("console", lambda message: messages.append(message.text))
    page.on("pageerror", lambda error: messages.append(str(error)))
    page.on("request", lambda request: requests.append(request.url))
    return page, messages, requests


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [375, 1440])
def test_every_page_loads_from_this_host_alone(browser: Browser, address: str, width: int, scheme: str) -> None:
    assert len(PAGES) > 15, "the site is not built: make docs"
    page, messages, requests = opened(browser, width, scheme)
    for name in PAGES:
        page.goto(f"{address}/{name}/")
        wide = page.evaluate("document.documentElement.scrollWidth")
        assert wide <= width, f"{name} scrolls sideways"
        if name == ".":
            SCREENSHOTS.mkdir(parents=True, exist_ok=True)
            page.screenshot(path=SCREENSHOTS / f"docs_{width}_{scheme}.png")
    assert messages == []
    assert {url for url in requests if not url.startswith((address, "data:"))} == set()


def test_search_finds_a_page(browser: Browser, address: str) -> None:
    page, messages, _ = opened(browser, 1440, "light")
    page.goto(address)
    page.locator(".md-search__input").click()
    page.keyboard.type("static twin", delay=20)
    page.locator(".md-search-result__item").first.wait_for()
    assert "twin" in page.locator(".md-search-result__list").inner_text().lower()
    assert messages == []
