"""The page of a run in a headless Chromium, used as people use it."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fakes import ENVIRONMENT, result, tensor
from test_page import EPS, PICTURE

from parity.report import html
from parity.report.markdown import digest
from parity.report.record import Record
from parity.result import Finding, Result

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: te-parity[dev]")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is found: apt-get install chromium")

ARGUMENTS = (
    "--headless --no-sandbox --disable-gpu --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync"
)
HOSTILE = "<img src=x onerror=\"document.title='run'\">"
LAYERS = [tensor(f"layers.{i}.q_proj.weight", "weight gradient", 0.5) for i in range(4)]


def results() -> Iterator[Result]:
    wrong = replace(tensor(margin=140.0), picture=PICTURE)
    yield result("norm_eps", margin=140.0, tensors=(wrong, *LAYERS), findings=(EPS,))
    yield result("norm_eps", "fp32", margin=3.0, findings=(Finding("PAR101", "gate-up-swapped", "swapped"),))
    yield result("mlp", margin=0.9, tensors=(replace(tensor(margin=0.9), picture=PICTURE),))
    yield result("mlp", "fp32", margin=0.2)
    yield result(f"hostile {HOSTILE}", margin=0.1, notes=(HOSTILE,))
    yield result("skips", "fp32", status="skipped", tensors=(), reason="no FP8")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the page, and with one without plots, which opens in a tenth of the time."""
    run = digest(Record(replace(ENVIRONMENT, items=6), tuple(results())))
    target = tmp_path_factory.mktemp("page")
    (target / "whole.html").write_text(html.draw(run, "run"), encoding="utf-8")
    (target / "quick.html").write_text(html.draw_with("/* no plots */", run, "run"), encoding="utf-8")
    return target


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as driver:
        chromium = driver.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS.split())
        yield chromium
        chromium.close()


@pytest.fixture
def opened(browser: Any, folder: Path, request: pytest.FixtureRequest) -> Iterator[Any]:
    """Open the page; fail on any console message, and on any request except for the file."""
    options = {"file": "quick.html", "viewport": {"width": 1200, "height": 800}} | getattr(request, "param", {})
    file = folder / options.pop("file")
    context = browser.new_context(**options)
    context.grant_permissions(["clipboard-read", "clipboard-write"])
    tab, wrong = context.new_page(), []
    tab.set_default_timeout(20_000)

    def route(handler: Any) -> None:
        if handler.request.url.split("#")[0] != file.as_uri():
            wrong.append(f"a request for {handler.request.url[:100]}")
        handler.continue_()

    context.route("**/*", route)
    tab.on("console", lambda message: wrong.append(f"{message.type}: {message.text}"))
    tab.on("pageerror", lambda error: wrong.append(str(error)))
    tab.goto(file.as_uri())
    yield tab
    context.close()
    assert wrong == []


def shown(tab: Any) -> list[str]:
    """Return the names of the items that the filter shows."""
    return tab.eval_on_selector_all(".item:not([hidden])", "items => items.map(item => item.dataset.name)")


def rows(tab: Any) -> list[str]:
    return tab.eval_on_selector_all(".matrix tbody tr:not([hidden])", "rows => rows.map(row => row.dataset.name)")


ALL = 6


@pytest.mark.parametrize(
    ("control", "value", "left"),
    [
        ("#filter-name", "NORM fp32", ["norm_eps[fp32-2x64]"]),
        ("#filter-name", "norm-eps", ["norm_eps[bf16-2x64]"]),
        ("#filter-name", "nothing is called so", []),
        ("#filter-precision", "fp32", ["mlp[fp32-2x64]", "norm_eps[fp32-2x64]", "skips[fp32-2x64]"]),
        ("#filter-status", "failed error", ["norm_eps[fp32-2x64]", "norm_eps[bf16-2x64]"]),
        ("#filter-status", "skipped", ["skips[fp32-2x64]"]),
        ("#filter-code", "PAR201 norm-eps", ["norm_eps[bf16-2x64]"]),
    ],
)
def test_filters_leave_what_matches_in_matrix_and_cases(opened: Any, control: str, value: str, left: list[str]) -> None:
    assert len(shown(opened)) == ALL
    fill = opened.fill if control == "#filter-name" else opened.select_option
    fill(control, value)
    assert sorted(shown(opened)) == sorted(left)
    assert rows(opened) == list(dict.fromkeys(name.split("[")[0] for name in left))
    assert opened.text_content("#count") == f"{len(left)} of {ALL} items"
    assert opened.is_visible("#nothing") == (not left)


def test_rows_and_cases_are_sorted_the_worst_first_by_name_and_back(opened: Any) -> None:
    def cases() -> list[str]:
        return opened.eval_on_selector_all(".case-name", "names => names.map(name => name.textContent)")

    declared = rows(opened)
    opened.select_option("#sort", "worst")
    assert rows(opened) == cases() == ["norm_eps", "mlp", f"hostile {HOSTILE}", "skips"]
    opened.select_option("#sort", "name")
    assert rows(opened) == cases() == [f"hostile {HOSTILE}", "mlp", "norm_eps", "skips"]
    opened.select_option("#sort", "")
    assert rows(opened) == declared


@pytest.mark.parametrize("opened", [dict(file="whole.html")], indirect=True)
def test_a_cell_opens_its_item_with_plots_and_the_repair_to_copy(opened: Any) -> None:
    item = opened.locator('.item[data-name="mlp[bf16-2x64]"]')
    assert item.get_attribute("open") is None
    opened.click('[aria-label^="mlp at bf16"]')
    assert item.get_attribute("open") is not None
    item.locator(".js-plotly-plot .main-svg").first.wait_for()
    failing = opened.locator('.item[data-name="norm_eps[bf16-2x64]"]')
    opened.click('[aria-label^="norm_eps at bf16"]')
    assert [" ".join(text.split()) for text in failing.locator(".diff > *").all_text_contents()] == [
        "− now: eps=1e-05",
        "+ then: eps=1e-06",
    ]
    failing.locator(".copy").first.click()
    failing.get_by_text("Copied").wait_for()
    assert opened.evaluate("navigator.clipboard.readText()") == "eps=1e-06"


def test_the_keys_reach_the_filter_the_matrix_and_an_item(opened: Any) -> None:
    focused = "document.activeElement.getAttribute('aria-label') || document.activeElement.id"
    opened.keyboard.press("/")
    opened.keyboard.type("mlp")
    assert opened.input_value("#filter-name") == "mlp"
    opened.keyboard.press("Escape")
    assert len(shown(opened)) == ALL
    opened.focus('[aria-label^="mlp at fp32"]')
    opened.keyboard.press("ArrowRight")
    assert opened.evaluate(focused).startswith("mlp at bf16")
    opened.keyboard.press("ArrowDown")
    assert opened.evaluate(focused).startswith("norm_eps at bf16")
    opened.keyboard.press("Enter")
    # Waiting for a function would evaluate text in the page, which its policy forbids.
    opened.wait_for_selector(".item[data-name='norm_eps[bf16-2x64]']:focus-within")


def test_what_a_record_names_is_text(opened: Any) -> None:
    opened.click(f"text=hostile {HOSTILE}")
    assert opened.locator("img").count() == 0
    assert opened.title() == "Parity report: run"


CONTRASTS = """() => {
    const parts = (colour) => {
        const canvas = Object.assign(document.createElement("canvas"), { width: 1, height: 1 }).getContext("2d");
        canvas.fillStyle = colour;
        canvas.fillRect(0, 0, 1, 1);
        return [...canvas.getImageData(0, 0, 1, 1).data].map((value) => value / 255);
    };
    const over = (above, below) => {
        const [r, g, b, a] = parts(above);
        return [r, g, b].map((value, i) => value * a + below[i] * (1 - a));
    };
    const behind = (element) => {
        if (!element) return [1, 1, 1];
        const colour = getComputedStyle(element).backgroundColor;
        const [r, g, b, a] = parts(colour);
        const below = a < 1 ? behind(element.parentElement) : [0, 0, 0];
        return a > 0 ? [r, g, b].map((value, i) => value * a + below[i] * (1 - a)) : below;
    };
    const light = (rgb) => rgb.map((v) => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4))
        .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
    const found = {};
    const selectors = [".verdict", ".tile", "th", ".cell a", ".legend", ".case-name", ".chip", ".item-codes",
        ".finding p", ".diff ins", ".diff del", "figcaption", ".quiet", "dt", "dd", "nav a", ".label"];
    for (const selector of selectors) {
        for (const element of document.querySelectorAll(selector)) {
            if (!element.checkVisibility() || element.closest(".dimmed")) continue;
            const below = behind(element);
            const one = light(over(getComputedStyle(element).color, below)), other = light(below);
            const ratio = (Math.max(one, other) + 0.05) / (Math.min(one, other) + 0.05);
            found[selector] = Math.min(found[selector] ?? 99, ratio);
        }
    }
    return found;
}"""


@pytest.mark.parametrize("opened", [dict(color_scheme="light"), dict(color_scheme="dark")], indirect=True)
def test_it_is_light_or_dark_as_the_system_or_the_reader_likes_and_text_can_be_read(opened: Any) -> None:
    is_dark = "(([r]) => r < 60)(getComputedStyle(document.body).backgroundColor.match(/\\d+/g).map(Number))"
    before = opened.evaluate(is_dark)
    assert before == opened.evaluate("matchMedia('(prefers-color-scheme: dark)').matches")
    opened.click('[aria-label^="norm_eps at bf16"]')
    for _ in range(2):
        contrasts = opened.evaluate(CONTRASTS)
        assert len(contrasts) > 12
        assert {name: ratio for name, ratio in contrasts.items() if ratio < 4.5} == {}  # WCAG 2.2, level AA
        opened.click("#theme")
        assert opened.evaluate(is_dark) != before
        before = not before


@pytest.mark.parametrize("opened", [dict(java_script_enabled=False)], indirect=True)
def test_the_tables_are_there_without_a_script(opened: Any) -> None:
    assert opened.locator('[aria-label^="norm_eps at bf16"]').is_visible()
    assert opened.locator(".case-name").first.is_visible()
    assert not opened.locator("#filter-name").is_visible()
    opened.locator(".case", has_text="norm_eps").locator(".item > summary", has_text="bf16").click()
    assert opened.locator(".diff ins").first.is_visible()
    assert opened.get_by_role("row", name="output").first.is_visible()


def test_it_prints(opened: Any) -> None:
    opened.click('[aria-label^="norm_eps at bf16"]')
    opened.emulate_media(media="print")
    assert not opened.locator("#filters").is_visible()
    assert opened.locator(".matrix").is_visible()
    assert opened.locator(".diff ins").first.is_visible()
    printed = opened.pdf(print_background=True)
    assert printed.startswith(b"%PDF")
    assert len(printed) > 20_000  # an empty page has less than a tenth of that


@pytest.mark.parametrize(
    "opened",
    [{"file": "whole.html", "viewport": {"width": width, "height": 900}} for width in (500, 1200)],
    indirect=True,
)
def test_the_legend_of_the_plot_over_depth_is_beside_or_above_it(opened: Any) -> None:
    figure = opened.locator(".figures.wide .plot").first
    figure.scroll_into_view_if_needed()
    figure.locator(".legend").first.wait_for(timeout=60_000)
    legend, lines = (figure.locator(part).first.bounding_box() for part in (".legend", ".cartesianlayer .xy"))
    above = legend["y"] + legend["height"] <= lines["y"] + 10  # the lines' markers
    assert above or legend["x"] >= lines["x"] + lines["width"] - 10
    assert lines["width"] > 150
    assert lines["height"] > 50
