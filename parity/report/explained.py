"""Explain one result to whoever holds it in Python: as text, and as a small page for notebooks."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape

from parity.report import failure
from parity.report.record import Item
from parity.result import Profile, Result

_BARS = 60  # so that a notebook shows each of them
_LINE = '<div style="display:flex;align-items:flex-end;height:48px;gap:1px">{}</div>'
_BAR = '<div title="{title}" style="width:8px;height:{height:.0f}px;background:{colour}"></div>'


def explain(result: Result) -> str:
    """Return the verdict in words: what is wrong, where and why, with the evidence, or what a pass leaves open."""
    item = Item((result,))
    if result.status in ("failed", "error"):
        return f"{result.item}: {failure.message(item, details=True)}"
    told = [f"{result.item}: {result.status}{f', {result.reason}' * bool(result.reason)}", *failure.measures(result)]
    return "\n".join([*told, *(f"note: {note}" for note in result.notes)])


def draw(result: Result) -> str:
    """Return HTML that shows the verdict in words and, if it is known, where the worst tensor errs."""
    pictured = next((tensor for tensor in (result.worst, *result.tensors) if tensor and tensor.picture), None)
    parts = [f"<pre>{escape(explain(result))}</pre>"]
    if pictured is not None and pictured.picture is not None:
        parts.append(f"<p>{escape(pictured.label)}: its error (coloured) and the expected one (grey)</p>")
        parts += map("".join, map(_draw_profile, pictured.picture.profiles))
    return "".join(parts)


def _draw_profile(profile: Profile) -> Iterator[str]:
    """Yield an axis of a tensor as two lines of bars, as high as the error in each of its parts."""
    highest = max([*profile.error, *profile.expected]) or 1.0
    step = -(-len(profile.error) // _BARS)
    yield f"<p>dimension {profile.axis}, {profile.span * step} indices a bar, highest {highest:.3g}</p>"
    for values, colour in ((profile.error, "#d62728"), (profile.expected, "#999")):
        bars = [max(values[i : i + step]) for i in range(0, len(values), step)]
        drawn = (_BAR.format(title=f"{bar:.3g}", height=1 + 47 * bar / highest, colour=colour) for bar in bars)
        yield _LINE.format("".join(drawn))
