"""`cofire explore` in a real browser: pick, slide, drop; no console error, no request to another host, no sideways
scrolling. Run by `make browser`; needs Debian's chromium.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from playwright.sync_api import Browser, Page, expect, sync_playwright
from small import ROOT, tiny_gated

import cofire

SCREENSHOTS = ROOT / "build" / "browser"
WIDTHS = {375: 812, 1440: 900}
START = "from cofire.start import main; main()"


@contextmanager
def exploring(*what: object) -> Iterator[str]:
    """The address of a page that is there inside the block."""
    command = [sys.executable, "-c", START, "explore", *map(str, what), "--pictures", "24", "--json"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        yield json.loads(process.stdout.readline())["address"]
    finally:
        process.kill()
        process.communicate()


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """The page of the zoo's gated model."""
    with exploring() as found:
        yield found


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=shutil.which("chromium"))
        yield chromium
        chromium.close()


def macs(page: Page) -> list[int]:
    """What the two cards say: with all filters, and gated."""
    cards = page.locator(".cofire-side").all_inner_texts()
    return [int(re.search(r"([\d,]+) MACs", card)[1].replace(",", "")) for card in cards]


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", WIDTHS)
def test_the_page_answers_and_keeps_to_itself(
    browser: Browser, address: str, width: int, scheme: str, tmp_path: Path
) -> None:
    messages: list[str] = []
    elsewhere: list[str] = []
    SCREENSHOTS.mkdir(parents=True, exist_ok=True)
    page = browser.new_page(viewport={"width": width, "height": WIDTHS[width]}, color_scheme=scheme)
    page.on("console", lambda message: messages.append(message.text) if message.type == "error" else None)
    page.on("pageerror", lambda error: messages.append(str(error)))
    page.on("request", lambda r: None if r.url.startswith((address, "data:", "blob:")) else elsewhere.append(r.url))
    page.goto(address)
    expect(page.locator(".cofire-side")).to_have_count(2, timeout=60000)
    lights = page.locator(".cofire-wall .on")
    before, lit = macs(page), lights.count()
    assert 0 < before[1] < before[0]
    assert lit > 0
    assert page.locator(".cofire-heat").count() == 2

    # The threshold up: fewer lights and fewer MACs, the same network.
    number = page.locator("#threshold input[type=number]")
    number.fill("3")
    number.press("Enter")
    expect(lights).not_to_have_count(lit, timeout=60000)
    assert macs(page)[0] == before[0]
    assert macs(page)[1] < before[1]
    assert lights.count() < lit

    # Another picture: the dearest one.
    shown = page.locator(".cofire-picture").get_attribute("src")
    page.locator("button.thumbnail-item, .thumbnail-lg").last.click()
    expect(page.locator(".cofire-picture")).not_to_have_attribute("src", shown or "", timeout=60000)

    # What is no picture is refused, and the page stays as it was.
    shown = page.locator(".cofire-picture").get_attribute("src")
    (tmp_path / "bad.png").write_text("no picture")
    page.locator("input[type=file]").set_input_files(tmp_path / "bad.png")
    expect(page.locator("#told")).to_contain_text("bad.png is not a picture", timeout=60000)
    assert page.locator(".cofire-picture").get_attribute("src") == shown
    page.screenshot(path=SCREENSHOTS / f"explore-{width}-{scheme}.png", full_page=True)

    # A picture is taken.
    pixels = np.random.default_rng(0).integers(0, 255, (50, 70, 3), np.uint8)
    Image.fromarray(pixels).save(tmp_path / "good.png")
    page.get_by_label(re.compile("clear|remove", re.I)).first.click()
    expect(page.locator("#told")).not_to_contain_text("Not shown", timeout=60000)
    page.locator("input[type=file]").set_input_files(tmp_path / "good.png")
    expect(page.locator(".cofire-picture")).not_to_have_attribute("src", shown or "", timeout=60000)

    assert page.evaluate("document.documentElement.scrollWidth") <= width
    sideways = "pictures => [...pictures].filter(each => each.scrollWidth > each.clientWidth).length"
    assert page.locator(".grid-wrap").evaluate_all(sideways) == 0, "some pictures are out of sight"
    assert messages == []
    assert elsewhere == []
    page.close()


def test_where_k_is_fixed_it_is_what_slides(browser: Browser, tmp_path: Path) -> None:
    half = {unit.group: unit.out_channels // 2 for unit in tiny_gated().units if unit.gated}
    program = cofire.compile(tiny_gated(select="top", signature=half).eval()).save(tmp_path / "top.cofire")
    with exploring(program) as address:
        page = browser.new_page()
        page.goto(address)
        lights = page.locator(".cofire-wall .on")
        expect(lights).to_have_count(sum(half.values()), timeout=60000)
        before = macs(page)
        number = page.locator("#k input[type=number]")
        for share in (0.5, 2):
            number.fill(str(share))
            number.press("Enter")
            expect(lights).to_have_count(sum(round(share * k) for k in half.values()), timeout=60000)
            assert macs(page)[0] == before[0]
            assert (macs(page)[1] < before[1]) == (share < 1)
        assert page.locator("#threshold").count() == 0
        page.close()
