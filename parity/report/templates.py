"""Render the templates of reports, which lie beside the modules that measure what they show."""

from __future__ import annotations

import functools

import jinja2
from markupsafe import Markup

from parity import shown
from parity.report.numbers import plural, short


def render(template: str, **context: object) -> str:
    """Return a report, with control characters in its values as escapes.

    A page's values are escaped as HTML. A markdown template names the filter that shows a value as it is: ``prose``,
    ``code``, ``fence`` for the lines of a block, or ``in_html``.

    Args:
        template: the template's path in the package, such as ``report/page.html.jinja``.
        context: the values that it shows, by name.

    Raises:
        jinja2.UndefinedError: if it names a value that it was not given.
    """
    return _read_templates().get_template(template).render(context)


@functools.cache
def _read_templates() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("parity", ""),
        autoescape=jinja2.select_autoescape(["html.jinja"]),
        finalize=lambda value: value if isinstance(value, Markup) or not isinstance(value, str) else shown.text(value),
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        undefined=jinja2.StrictUndefined,
    )
    quoting = {"prose": shown.prose, "code": shown.code, "fence": shown.fence, "in_html": shown.in_html}
    environment.filters.update(quoting, plural=plural, sentence=_as_sentence, short=short)
    return environment


def _as_sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:]}."
