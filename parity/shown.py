"""Show text that others wrote, so that it does to a terminal, to markdown and to HTML what letters do, and no more.

Names of pairs and tensors, messages of exceptions and lines of records may hold anything: escape sequences that move a
cursor, tags, the end of a table's row.
"""

from __future__ import annotations

import html
import re
from collections.abc import Iterable

# Control characters, but for the line's end; what reverses the direction of writing, or ends a line for some programs;
# and half a surrogate pair.
_UNSEEN = re.compile(
    "[\x00-\x09\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028\u2029\u202a-\u202e\u2066-\u2069\ufeff\ud800-\udfff]"
)
_TICKS = re.compile("`+")
_ENTITY = re.compile("&(?=#?[0-9A-Za-z]+;)")


def text(value: str) -> str:
    """Return lines for a terminal or a file; what is unseen becomes an escape such as ``\\x1b``."""
    return _UNSEEN.sub(_escape, value)


def line(value: str) -> str:
    """Return the same in one line."""
    return text(value).replace("\n", "\\n")


def _escape(found: re.Match[str]) -> str:
    code = ord(found[0])
    return "    " if code == 9 else f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}"


def prose(value: str) -> str:
    """Return one line of markdown in which tags and entities are letters."""
    return _ENTITY.sub("&amp;", line(value)).replace("<", "&lt;")


def code(value: str) -> str:
    """Return markdown that shows the text as code, whatever it holds."""
    shown = line(value)
    longest = max(map(len, _TICKS.findall(shown)), default=0)
    if not longest:
        return f"`{shown}`" if shown else ""
    ticks = "`" * (longest + 1)
    return f"{ticks} {shown} {ticks}"


def in_html(value: str) -> str:
    """Return one line of HTML."""
    return html.escape(line(value))


def fence(lines: Iterable[str]) -> str:
    """Return markdown that shows lines as they are; none of them ends the block."""
    body = text("\n".join(lines))
    ticks = "`" * max(3, 1 + max(map(len, _TICKS.findall(body)), default=0))
    return f"{ticks}text\n{body}\n{ticks}"
