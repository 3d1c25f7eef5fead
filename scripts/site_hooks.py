"""Add to the site what its pages link to outside of ``docs/``: reports, examples, sources and the notebook.

The pages contain links that work in a checkout. Here each linked file becomes a page of the site, and each link is
changed to lead to that page. So links work in both places, and ``mkdocs build --strict`` finds those that lead nowhere.
"""

from __future__ import annotations

import json
import os
import posixpath
import re
from collections.abc import Iterator
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
PICTURES = (".png", ".svg", ".gif", ".jpg", ".html")

_LINK = re.compile(r"(?<=\]\()([^)\s#<>]+)(?=[#)])")
_SHAPES = re.compile(r"(?<=\d)\] \[(?=\d)")  # two shapes side by side, which look like a link in Markdown


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the notebooks, and every file to which any page links, as pages."""
    for notebook in sorted((ROOT / "docs").glob("*.ipynb")):
        drawn = files.get_file_from_path(notebook.name)
        if drawn is not None:
            files.remove(drawn)
        files.append(File.generated(config, f"{notebook.stem}.md", content=_notebook(notebook)))
    files.append(File.generated(config, "index.md", abs_src_path=str(ROOT / "README.md")))
    todo = ["README.md"] + [f"docs/{file.src_uri}" for file in files.documentation_pages()]
    seen = set(todo)
    while todo:
        for target in _linked(todo.pop()):
            place = _place(target)
            if target in seen or files.get_file_from_path(place) is not None:
                continue
            seen.add(target)
            files.append(_file(target, place, config))
            if target.endswith(".md"):
                todo.append(target)
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Change links to files of the checkout into links to the pages that show them."""
    uri = page.file.src_uri
    sources = ("README.md" if uri == "index.md" else f"docs/{uri}", f"docs/{uri.removesuffix('.md')}.ipynb", uri)
    source = next((name for name in sources if (ROOT / name).exists()), None)
    if source is None:
        return markdown  # a source file, shown as it is

    def turned(link: re.Match[str]) -> str:
        target = _resolved(source, link[1])
        if target is None:
            return link[1]
        return posixpath.relpath(_place(target), posixpath.dirname(uri) or ".")

    if source.startswith("reports/"):
        markdown = _SHAPES.sub(r"] \[", markdown)
    return _LINK.sub(turned, markdown)


def _linked(source: str) -> Iterator[str]:
    """Yield the files of the checkout to which a page links."""
    path = ROOT / source
    if path.exists():
        for link in _LINK.findall(path.read_text(encoding="utf-8")):
            target = _resolved(source, link)
            if target is not None:
                yield target


def _resolved(source: str, link: str) -> str | None:
    """Return the path, from the checkout's root, of the file to which a page's link leads; None if there is none."""
    if ":" in link or link.startswith("/"):
        return None
    target = os.path.normpath(posixpath.join(posixpath.dirname(source), link))
    path = ROOT / target
    if path.is_dir() and (path / "README.md").exists():
        return f"{target}/README.md"
    return target if path.exists() and not target.startswith("..") else None


def _place(target: str) -> str:
    """Return the path at which the site has a file of the checkout."""
    path = ROOT / target
    if target == "README.md":
        return "index.md"
    if path.is_dir():
        return f"{target}/index.md"
    if path.suffix == ".ipynb":
        target = f"{target.removesuffix('.ipynb')}.md"
    elif path.suffix not in {".md", *PICTURES}:
        target = f"{target}.md"
    return target.removeprefix("docs/")


def _file(target: str, place: str, config: MkDocsConfig) -> File:
    """Return the page, or the picture, that shows a file of the checkout."""
    path = ROOT / target
    if path.is_dir():
        names = sorted(each.name for each in path.iterdir() if each.suffix in {".py", ".md"} and each.is_file())
        sources = "".join(_source(path / name, 2) for name in names)
        return File.generated(config, place, content=f"# {target}\n\n{sources}")
    if path.suffix in {".md", *PICTURES}:
        return File.generated(config, place, abs_src_path=str(path))
    return File.generated(config, place, content=_source(path, 1))


def _source(path: Path, level: int) -> str:
    """Return a section of a page that shows a source file."""
    language = {".py": "python", ".sh": "sh", ".toml": "toml"}.get(path.suffix, "text")
    text = path.read_text(encoding="utf-8").rstrip()
    return f"{'#' * level} {path.relative_to(ROOT)}\n\n~~~~~~{language}\n{text}\n~~~~~~\n\n"


def _notebook(path: Path) -> str:
    """Return a notebook as Markdown: its text, its code, and the output of its cells."""
    parts = []
    for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
        text = "".join(cell["source"])
        parts.append(text if cell["cell_type"] == "markdown" else f"~~~python\n{text}\n~~~")
        for output in cell.get("outputs", ()):
            printed = "".join(output.get("text") or output.get("data", {}).get("text/plain") or ())
            if printed.strip():
                parts.append(f"~~~text\n{printed.rstrip()}\n~~~")
    return "\n\n".join(parts) + "\n"
