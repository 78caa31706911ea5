"""The explorer in a real browser: every view, search, diff, reasons, keyboard; and the screenshot of the README."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from compile_and_serve.serve.inspect.data import load_dump
from compile_and_serve.serve.inspect.page import build_page
from tests.support.browser import CHROMEDRIVER, CHROMIUM, MISSING, chromium
from tests.support.dumps import LAYERS, deepen, make_dump, repeats

webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed")
WebDriverWait = pytest.importorskip("selenium.webdriver.support.ui").WebDriverWait
pytestmark = pytest.mark.skipif(CHROMIUM is None or CHROMEDRIVER is None, reason=MISSING)
VIEWS = ("pipeline", "graph", "diff", "reasons", "numbers", "timings", "memory")
IS_DRAWN = """
    const [name, view] = arguments;
    return location.pathname.endsWith(name) && document.readyState === "complete"
        && document.getElementById(`tab-${view}`)?.getAttribute("aria-selected") === "true"
        && document.getElementById("main").childElementCount > 0;
"""
Open = Callable[..., Any]


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with chromium(webdriver, tmp_path_factory.mktemp("chromium")) as driver:
        yield driver


@pytest.fixture
def open_page(browser: Any, tmp_path: Path) -> Iterator[Open]:
    """Open the explorer of a dump. At the end of the test the browser's console must be empty."""

    def open_dump(folder: Path, view: str = "pipeline") -> Any:
        page = tmp_path / f"report{len(list(tmp_path.glob('*.html')))}.html"
        page.write_text(build_page(load_dump(folder)), encoding="utf-8")
        browser.get(f"{page.as_uri()}#{view}")
        # On a busy machine `get` may return before the page is complete.
        WebDriverWait(browser, 60).until(lambda _: browser.execute_script(IS_DRAWN, page.name, view))
        return browser

    browser.get_log("browser")
    yield open_dump
    assert browser.get_log("browser") == []


def by_id(browser: Any, name: str) -> Any:
    return browser.find_element("id", name)


def texts(browser: Any, selector: str) -> list[str]:
    return [element.text for element in browser.find_elements("css selector", selector)]


def test_every_view_opens(dump: Path, open_page: Open) -> None:
    browser = open_page(dump)
    assert f"LlamaForCausalLM, {LAYERS} layers" in by_id(browser, "title").text
    for view in VIEWS:
        tab = by_id(browser, f"tab-{view}")
        tab.click()
        assert tab.get_attribute("aria-selected") == "true"
        assert len(by_id(browser, "main").text) > 20, view


def test_search_finds_a_node_and_shows_its_source(dump: Path, open_page: Open) -> None:
    browser = open_page(dump, "graph")
    assert repeats(dump) >= 2
    assert f"× {repeats(dump)}" in texts(browser, "#canvas .badge")
    search = by_id(browser, "search")
    search.send_keys("fused_linear")
    results = browser.find_elements("css selector", ".results button")
    assert len(results) == len(browser.find_elements("css selector", "#canvas .node.found")) >= 9
    search.send_keys("\n")
    details = by_id(browser, "details").text
    assert "models/families/llama.py:" in details
    assert "bfloat16[tokens, " in details
    assert "torch.ops.cas.fused_linear.default(" in details
    browser.find_element("css selector", "#details summary").click()
    block = browser.find_element("css selector", "#details details pre")
    # The "toggle" event fills in the text after the click has returned.
    code = WebDriverWait(browser, 10).until(lambda _: block.get_attribute("textContent"))
    assert "def call(args)" in code or "def call(self, args)" in code


def test_diff_of_a_pass(dump: Path, open_page: Open) -> None:
    browser = open_page(dump)
    browser.find_element("css selector", "button[aria-label='Diff of pass merge_linears']").click()
    assert f"merge_linears: {5 * LAYERS} of {5 * LAYERS} sites" in browser.find_element("css selector", "#main h2").text
    added = " ".join(texts(browser, ".diff .added"))
    removed = " ".join(texts(browser, ".diff .removed"))
    assert "self_attn_q_proj_k_proj_v_proj_weight" in added
    assert "self_attn_k_proj_weight" in removed
    before = len(browser.find_elements("css selector", ".diff tr"))
    browser.find_element("css selector", ".diff .fold button").click()
    assert len(browser.find_elements("css selector", ".diff tr")) > before


def test_reason_of_a_near_miss(dump: Path, open_page: Open) -> None:
    browser = open_page(dump)
    browser.find_element("xpath", f"//button[text()='{LAYERS} near misses']").click()
    row = texts(browser, "#main tbody tr")[0]
    assert "fuse_linears" in row
    assert "the norm's weight and its input have different dtypes (torch.float32 and torch.bfloat16)" in row
    assert "models/families/llama.py:" in row
    by_id(browser, "reason-filter").send_keys("no such reason")
    assert texts(browser, "#main tbody tr") == []


def test_roofline_shows_every_measured_piece(dump: Path, open_page: Open) -> None:
    browser = open_page(dump, "timings")
    pieces = len(load_dump(dump)["split"])
    assert len(browser.find_elements("css selector", "#main svg circle")) == 2 * (pieces + 1)  # and the op, at two sizes
    rows = texts(browser, "#main tbody tr")
    assert sum(row.startswith(f"rope_attention × {LAYERS}") for row in rows) == 2
    assert "GFLOP/s" in browser.find_element("css selector", "#main svg").get_attribute("aria-label")


def test_captures_and_memory(dump: Path, open_page: Open) -> None:
    text = by_id(open_page(dump, "memory"), "main").text
    assert "used bytes 3 MiB" in text
    assert "sizes [1,2,4]" in text
    assert "size 1 MiB" in text
    assert "pack_linear_weight(cat(model.layers.0.self_attn.q_proj.weight, " in text


def test_keyboard_navigation(dump: Path, open_page: Open) -> None:
    browser = open_page(dump)
    keys = webdriver.common.keys.Keys
    by_id(browser, "tab-pipeline").send_keys(keys.ARROW_RIGHT)
    active = browser.switch_to.active_element
    assert active.get_attribute("id") == "tab-graph"
    browser.find_element("tag name", "body").send_keys("/")
    assert browser.switch_to.active_element.get_attribute("id") == "search"
    by_id(browser, "canvas").send_keys(keys.ARROW_DOWN)
    first = browser.switch_to.active_element
    assert first.get_attribute("role") == "button"
    first.send_keys(keys.ARROW_DOWN)
    second = browser.switch_to.active_element
    assert second.get_attribute("data-node") != first.get_attribute("data-node")
    second.send_keys(keys.ENTER)
    assert "selected" in second.get_attribute("class")
    assert by_id(browser, "announce").get_attribute("textContent") == second.get_attribute("aria-label")


def test_dark_and_light(dump: Path, open_page: Open) -> None:
    browser = open_page(dump)
    colors = set()
    for _ in range(2):
        colors.add(browser.execute_script("return getComputedStyle(document.body).backgroundColor"))
        by_id(browser, "theme").click()
    assert colors == {"rgb(255, 255, 255)", "rgb(20, 23, 27)"}


def test_number_of_drawn_nodes_does_not_grow_with_depth(dump: Path, tmp_path: Path, open_page: Open) -> None:
    shallow = len(open_page(dump, "graph").find_elements("css selector", "#canvas .node"))
    deep = tmp_path / "deep"
    shutil.copytree(dump, deep)
    deepen(deep, 64)
    browser = open_page(deep, "graph")
    assert len(browser.find_elements("css selector", "#canvas .node")) == shallow
    assert f"× {repeats(dump) + 64 - LAYERS}" in texts(browser, "#canvas .badge")


@pytest.mark.slow
def test_screenshot_of_the_readme(request: pytest.FixtureRequest, tmp_path: Path, open_page: Open) -> None:
    """With `--screenshot FILE`: write a screenshot of SmolLM2-135M's graph with one fused linear selected."""
    target = request.config.getoption("--screenshot")
    if target is None:
        pytest.skip("no --screenshot FILE was given")
    import torch

    from compile_and_serve.models.registry import build_model
    from compile_and_serve.runtime.weights import read_config

    spec = build_model(read_config(request.getfixturevalue("smollm2_gguf")), dtype=torch.bfloat16)
    browser = open_page(make_dump(tmp_path / "dump", spec), "graph")
    by_id(browser, "search").send_keys("gate_proj\n")
    by_id(browser, "search").clear()
    Path(target).parent.mkdir(parents=True, exist_ok=True)
    assert browser.save_screenshot(str(target))
