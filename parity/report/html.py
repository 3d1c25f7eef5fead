"""Draw the page of a run: one HTML file that needs no network, and whose tables need no script.

Whatever a record holds is text on the page. Jinja escapes it, control characters are shown as escapes, and a policy
lets the browser run the page's own scripts alone, by their hashes.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import html
import json
import math
from importlib import resources
from typing import Any

import jinja2
from markupsafe import Markup

from parity import shown
from parity.report.changes import Comparison
from parity.report.markdown import Digest
from parity.report.page import COLUMNS, page
from parity.report.plots import Plot


def draw(run: Digest, name: str, runs: Comparison | None = None) -> str:
    """Return the whole page.

    Args:
        run: what it shows.
        name: the report's name, for its title.
        runs: the run beside an older one, if what changed since is to be shown.
    """
    return draw_with(plotly(), run, name, runs)


def draw_with(plots_by: str, run: Digest, name: str, runs: Comparison | None = None) -> str:
    """Return the page with another library of plots, or none; arguments as for ``draw``."""
    view = page(run, name, runs)
    scripts = [plots_by, script()]
    text = _template().render(
        page=view,
        columns=COLUMNS,
        style=Markup(_file("page.css")),
        scripts=[Markup(script) for script in scripts],
        hashes=Markup(" ".join(f"'sha256-{_hash(script)}'" for script in scripts)),
        data=Markup(data_of(view.plots)),
    )
    return text + "\n"


@functools.cache
def plotly() -> str:
    """Return Plotly's script, 4.8 MB: plotly.py brings the full bundle and no smaller one."""
    from plotly.offline import get_plotlyjs

    bundle: str = get_plotlyjs()
    return bundle.replace("</script", "<\\/script")


def script() -> str:
    """Return the page's own script."""
    return _file("page.js")


def data_of(plots: dict[str, Plot]) -> str:
    """Return JSON for a script element: no text in it ends the element, and none has tags for Plotly."""
    numbers = {key: {"kind": plot.kind, **_escaped(plot.numbers)} for key, plot in plots.items()}
    text = json.dumps(numbers, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _escaped(value: Any) -> Any:
    """Escape texts as in HTML, since Plotly takes some tags in its labels for markup; JSON has no NaN."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, str):
        return html.escape(shown.line(value))
    if isinstance(value, dict):
        return {key: _escaped(entry) for key, entry in value.items()}
    return [_escaped(entry) for entry in value] if isinstance(value, list) else value


def _hash(script: str) -> str:
    return base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()


def _file(name: str) -> str:
    return (resources.files(__package__) / name).read_text(encoding="utf-8")


def _as_letters(value: Any) -> Any:
    """Show control characters as escapes; what is the page's own is left as it is."""
    return value if isinstance(value, Markup) or not isinstance(value, str) else shown.text(value)


@functools.cache
def _template() -> jinja2.Template:
    environment = jinja2.Environment(
        autoescape=True,
        finalize=_as_letters,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    return environment.from_string(_file("page.html.jinja"))
