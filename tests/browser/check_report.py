"""The report in a real browser: no console message, no request, no sideways scrolling. Run by `make browser`.

Not named test_*: it needs Debian's chromium, which the other tests do not.
"""

from __future__ import annotations

import itertools
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, ConsoleMessage, Page, Request, sync_playwright
from small import ROOT
from typer.testing import CliRunner

from cofire.cli import app

SCREENSHOTS = ROOT / "build" / "browser"
WIDTHS = {375: 812, 1440: 900}


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A report of a gated run beside a pruned one; of the run in COFIRE_REPORT_RUN, if that is set."""
    folder = tmp_path_factory.mktemp("runs")
    path = folder / "report.html"
    run = os.environ.get("COFIRE_REPORT_RUN")
    if run:
        _cofire("report", run, "--out", str(path))
        return path
    for name in ("resnet8_ftwt", "resnet8_l1"):
        recipe = str(ROOT / "recipes" / "digits" / f"{name}.toml")
        _cofire("train", recipe, "--set", "train.epochs=2", "--out", str(folder / name))
    _cofire("report", str(folder / "resnet8_ftwt"), "--compare", str(folder / "resnet8_l1"), "--out", str(path))
    return path


def _cofire(*words: str) -> None:
    done = CliRunner().invoke(app, list(words))
    assert done.exit_code == 0, (words, done.output, done.exception)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=shutil.which("chromium"))
        yield chromium
        chromium.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", WIDTHS)
def test_the_report_opens_by_itself_and_fits(browser: Browser, report: Path, width: int, scheme: str) -> None:
    messages: list[str] = []
    requests: list[str] = []
    page = browser.new_page(viewport={"width": width, "height": WIDTHS[width]}, color_scheme=scheme)

    def on_console(message: ConsoleMessage) -> None:
        messages.append(message.text)

    def on_request(request: Request) -> None:
        if not request.url.startswith("data:"):
            requests.append(request.url)

    page.on("console", on_console)
    page.on("pageerror", lambda error: messages.append(str(error)))
    page.on("request", on_request)
    page.goto(report.as_uri())
    SCREENSHOTS.mkdir(parents=True, exist_ok=True)
    page.screenshot(path=SCREENSHOTS / f"report_{width}_{scheme}.png", full_page=True)
    _check_overflow(page, width)
    page.evaluate("for (const part of document.querySelectorAll('details')) part.open = true")
    _check_overflow(page, width)
    heads = page.evaluate(
        "[...document.querySelectorAll('[aria-labelledby=summary] .summary tbody th')].map(head => head.offsetHeight)"
    )
    assert max(heads) < 100  # words are not cut into letters beside long names of runs
    assert messages == []
    assert requests == [report.as_uri()]
    # Text and axes of figures take the page's colour, in the dark too.
    colours = "[...document.querySelectorAll('svg text')].map(text => getComputedStyle(text).fill)"
    assert set(page.evaluate(colours)) == {page.evaluate("getComputedStyle(document.body).color")}
    assert page.locator("svg title").count() > 50
    page.close()


def _check_overflow(page: Page, width: int) -> None:
    assert page.evaluate("document.documentElement.scrollWidth") <= width


def test_headings_come_in_order_and_figures_have_names(browser: Browser, report: Path) -> None:
    page = browser.new_page()
    page.goto(report.as_uri())
    levels = page.evaluate("[...document.querySelectorAll('h1, h2, h3, h4')].map(h => Number(h.tagName[1]))")
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(after <= before + 1 for before, after in itertools.pairwise(levels))
    ids = page.evaluate("[...document.querySelectorAll('[id]')].map(element => element.id)")
    assert len(ids) == len(set(ids))
    assert page.locator("svg").count() == page.locator("svg[role=img][aria-label]").count() > 10
    assert page.locator("img").count() == page.locator("img[alt]").count() == 16
    assert page.locator("table").count() == page.locator("table > caption").count()
    page.close()


def test_pointing_at_a_bar_finds_its_value(browser: Browser, report: Path) -> None:
    page = browser.new_page(viewport={"width": 1440, "height": 900})
    page.goto(report.as_uri())
    found = page.evaluate(
        """() => {
            const panel = [...document.querySelectorAll('.panel')].find(p => p.innerText.includes('Pruning ratio'));
            panel.scrollIntoView();
            const bars = [...panel.querySelectorAll('g:has(> title)')];
            return bars.map(bar => {
                const box = bar.getBoundingClientRect();
                const hit = document.elementFromPoint(box.x + box.width / 2, box.y + box.height / 2);
                return hit !== null && bar.contains(hit) && bar.querySelector('title').textContent;
            });
        }"""
    )
    assert len(found) == 7
    assert all(text and text.endswith("filters off") for text in found)
    page.close()
