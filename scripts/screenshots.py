"""Take the screenshots for docs/reading-a-report.md, from the report of a run of examples with wrong ports.

    python scripts/screenshots.py [RECORD]

Without a record, the examples are compared first, which takes minutes. The script needs playwright and Chromium.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from playwright.sync_api import sync_playwright

from parity.report import html, record
from parity.report.markdown import digest

ROOT = Path(__file__).parents[1]
PICTURES = ROOT / "docs" / "pictures"
EXAMPLES = ("examples/wrong_ports.py", "examples/training/llama.py")
ARGUMENTS = ("--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking")
MOST_BYTES = 150_000


@dataclass(frozen=True)
class Picture:
    """A screenshot of the page.

    Attributes:
        name: the name of its file.
        item: the item that is opened; empty for the top of the page.
        part: a selector in the item, for the element that is scrolled to the top; empty for the item's beginning.
        scheme: light or dark.
        height: the height of the window.
    """

    name: str
    item: str = ""
    part: str = ""
    scheme: Literal["light", "dark"] = "light"
    height: int = 720


TAKEN = (
    Picture("matrix"),
    Picture("failing-case", "norm_linear_eps[bf16-64x128]", height=960),
    Picture("depth", "model_window_in_a_layer[bf16-2x32x64]", ".figures.wide", height=470),
    Picture("dark", "mlp_halves_exchanged[bf16-2x64x128]", scheme="dark", height=960),
)


def compared(folder: Path) -> Path:
    """Compare the examples, without a limit on the search for causes, and return the record. Some are meant to fail."""
    how = ("-p", "fp32,bf16", "--diagnosis", "0", "--name", "examples", "--report", str(folder))
    subprocess.run([sys.executable, "-m", "parity", "run", *EXAMPLES, *how], cwd=ROOT, check=False)
    return folder / "examples.jsonl"


def take(browser: Any, page: Path, picture: Picture) -> None:
    """Take one screenshot.

    Raises:
        SystemExit: if the file is too large for the documentation.
    """
    size = {"width": 1180, "height": picture.height}
    tab = browser.new_page(viewport=size, color_scheme=picture.scheme, reduced_motion="reduce")
    tab.goto(page.as_uri())
    if picture.item:
        item = tab.locator(f'.item[data-name="{picture.item}"]')
        tab.evaluate("id => { location.hash = id; }", item.get_attribute("id"))
        item.locator(".main-svg").first.wait_for()
        if picture.part:
            item.locator(picture.part).first.evaluate("part => part.scrollIntoView()")
        tab.evaluate("document.activeElement.blur()")
    tab.wait_for_timeout(1000)  # until all plots in view are drawn
    file = PICTURES / f"{picture.name}.png"
    tab.screenshot(path=file)
    tab.close()
    if file.stat().st_size > MOST_BYTES:
        raise SystemExit(f"{file} has {file.stat().st_size:,} bytes, more than {MOST_BYTES:,}: make it smaller")


def main() -> None:
    """Take all screenshots."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        source = Path(sys.argv[1]) if sys.argv[1:] else compared(folder)
        page = folder / "examples.html"
        page.write_text(html.draw(digest(record.read(source)), "examples"), encoding="utf-8")
        PICTURES.mkdir(exist_ok=True)
        with sync_playwright() as driver:
            browser = driver.chromium.launch(executable_path=shutil.which("chromium"), args=ARGUMENTS)
            for picture in TAKEN:
                take(browser, page, picture)
            browser.close()


if __name__ == "__main__":
    main()
