"""The page of `sparge report` in a real browser: it loads without a complaint, its controls work, it fits a phone."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from problems import randn

from sparge.bench.captured import Captured
from sparge.config import SparseConfig
from sparge.report.model import report_model
from sparge.report.page import Report, write_page
from sparge.report.sources import look_at_captured

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine"),
]
HEADS, LAYERS, FIRST = 4, 3, 5  # layers go by the number in their names


@pytest.fixture(scope="module")
def page_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three layers of different sparsity, with everything that a page can have."""
    config = SparseConfig(rule="topk", topk=0.3, subblocks=(1, 1), sinks=0, quantization="none", block=(64, 32))
    look = None
    for layer in range(LAYERS):
        q, k, v = (randn(3 * layer + seed, HEADS, 384, 32).cumsum(-2) / 8 for seed in range(3))
        captured = Captured(q, k, v, False, f"layers.{layer + FIRST}.attention")
        one = look_at_captured(captured, config, torch.device("cpu"), (4, 8, 12), lambda name: None)
        look = one if look is None else look
        look.layers += one.layers if one is not look else []
    assert look is not None
    sample = {"settings": "default", "seeds": 4, "psnr": 31.2, "worst_psnr": None, "ssim": 0.99, "skipped": 0.5}
    report = Report("a model", "few", {"run": "cpu"}, look, vision=[{**sample, "speedup": 2.0}])
    path = tmp_path_factory.mktemp("report") / "page.html"
    write_page(report, path)
    return path


@pytest.fixture(scope="module")
def pipeline_page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a small pipeline that makes video."""
    pytest.importorskip("diffusers")
    pytest.importorskip("skimage")
    from small_pipeline import SIZE, small_pipeline

    path = tmp_path_factory.mktemp("report") / "pipeline.html"
    asked = {"prompt": "a cat", "num_inference_steps": 2, **SIZE}
    report_model(small_pipeline(), asked, path, SparseConfig(rule="topk", topk=0.3, quantization="none"))
    return path


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as started:
        opened = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield opened
        opened.close()


def open_page(browser: Any, file: Path, width: int = 1200, scheme: str = "light") -> tuple[Any, list[str]]:
    page = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme).new_page()
    said: list[str] = []
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    page.on("request", lambda request: None if request.url.startswith(("file:", "data:")) else said.append(request.url))
    page.goto(file.as_uri())
    return page, said


def layers_of_map(page: Any) -> list[str]:
    return [text for text in page.locator("#map-error > span:not(.head)").all_inner_texts() if text]


@pytest.mark.parametrize(("width", "scheme"), [(1200, "light"), (1200, "dark"), (390, "light")])
def test_it_loads_without_a_complaint_and_fits(browser: Any, page_file: Path, width: int, scheme: str) -> None:
    page, said = open_page(browser, page_file, width, scheme)
    assert page.locator("#map-sparsity button").count() == HEADS * LAYERS
    assert page.locator("#table tbody tr").count() == HEADS * LAYERS
    assert page.locator("#curve canvas").count() == 4
    assert page.evaluate("document.documentElement.scrollWidth") <= width  # tables scroll by themselves
    assert page.evaluate("document.getElementById('mask').toDataURL()") != page.evaluate(
        "document.getElementById('mass').toDataURL()"
    )
    assert len(page.screenshot(full_page=True)) > 20_000
    assert said == []


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize(("width", "scheme"), [(1200, "light"), (1200, "dark"), (390, "light")])
def test_the_page_of_a_pipeline(browser: Any, pipeline_page: Path, width: int, scheme: str) -> None:
    page, said = open_page(browser, pipeline_page, width, scheme)
    assert page.locator("#map-sparsity button").count() == 2 * 2
    assert page.locator("#curve canvas").count() == 3  # frames of tokens
    assert page.locator("#orders tbody tr").count() == 2
    strips = page.locator(".samples img")
    assert strips.count() == 2 * 3
    for strip in strips.all():
        assert strip.evaluate("image => image.complete && image.naturalWidth") == 6 * 192  # six frames, doubled
        assert strip.bounding_box()["width"] <= width
    assert page.locator("#time .bar").count() == 2
    assert "cross-attention" in page.inner_text("#dense")
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert said == []


def test_the_colours_change_and_so_do_the_pictures(browser: Any, page_file: Path) -> None:
    page, said = open_page(browser, page_file)
    paper = "getComputedStyle(document.body).backgroundColor"
    mask = "document.getElementById('mask').toDataURL()"
    light = page.evaluate(paper), page.evaluate(mask)
    page.select_option("#theme", "dark")
    dark = page.evaluate(paper), page.evaluate(mask)
    assert light[0] != dark[0]
    assert light[1] != dark[1]
    assert said == []


def test_filters_and_order_hold_for_maps_and_table(browser: Any, page_file: Path) -> None:
    page, said = open_page(browser, page_file)
    page.fill("#layers", "6-7")
    page.fill("#heads", "0, 3")
    assert layers_of_map(page) == ["6", "7"]
    assert page.locator("#table tbody tr").count() == 4
    assert page.inner_text("#shown") == "4 of 12 heads"
    page.fill("#layers", "one")  # not understood: nothing changes but the field's colour
    assert page.locator("#table tbody tr").count() == 4
    assert "wrong" in page.get_attribute("#layers", "class")
    page.click("button[type=reset]")
    assert layers_of_map(page) == ["5", "6", "7"]
    page.select_option("#order", "error")
    worst = page.evaluate("data.layers.map((layer) => Math.max(...layer.error))")
    assert layers_of_map(page) == [str(FIRST + n) for n in sorted(range(LAYERS), key=lambda n: -worst[n])]
    assert said == []


def test_the_table_sorts_by_any_column(browser: Any, page_file: Path) -> None:
    page, said = open_page(browser, page_file)

    def column(number: int) -> list[float]:
        texts = page.locator(f"#table tbody td:nth-child({number})").all_inner_texts()
        return [float(text.rstrip(" %")) for text in texts]

    page.click("button[data-by=error]")
    assert column(4) == sorted(column(4), reverse=True)
    page.click("button[data-by=error]")
    assert column(4) == sorted(column(4))
    page.click("button[data-by=head]")
    assert column(2) == sorted(column(2))
    assert said == []


def test_the_keyboard_goes_from_cell_to_cell(browser: Any, page_file: Path) -> None:
    page, said = open_page(browser, page_file)
    page.get_by_label("layer 5, head 1: ").first.focus()
    for key in ("ArrowRight", "ArrowDown"):
        page.keyboard.press(key)
    assert "layer 6, head 2" in page.inner_text("#tip")
    page.keyboard.press("Enter")
    assert page.inner_text("#chosen").startswith("Layer 6 ")
    page.keyboard.press("ArrowUp")  # the focus stays where it was
    assert "layer 5, head 2" in page.inner_text("#tip")
    assert page.locator("#map-error button[tabindex='0']").count() == 1
    assert said == []


def test_a_cell_tells_its_values_and_shows_its_mask(browser: Any, page_file: Path) -> None:
    page, said = open_page(browser, page_file)
    cell = page.get_by_label("layer 7, head 1: ").first
    cell.hover()
    assert "layer 7, head 1" in page.inner_text("#tip")
    assert "relative L1" in page.inner_text("#tip")
    cell.click()
    assert page.inner_text("#chosen").startswith("Layer 7 (layers.7.attention), head 1: ")
    page.hover("#mask", position={"x": 5, "y": 5})
    assert page.inner_text("#patch").startswith("Queries 0 to 63, keys 0 to 31: ")
    page.locator("#strip button").nth(3).click()
    assert "head 3" in page.inner_text("#chosen")
    page.hover("#time .bar i")
    assert "attention" in page.inner_text("#tip")
    assert said == []
