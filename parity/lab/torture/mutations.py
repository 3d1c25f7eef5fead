"""Damage a file as disks, interruptions, editors and ill will do: bytes, lines, and values of JSON."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

# What a value is replaced by. The texts would move a cursor, begin a tag, end a row or a block, or run as code.

HOSTILE = "\x1b[2J\x07<script>alert(1)</script>\r\n| `x` ``` __import__('os').system('touch executed')"
_RAW = "\x00raw\x00"  # stands in a string for a text of JSON that Python does not write
_VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1e308, 5e-324, 2**63, -(2**63), "", "nan", "inf", "1", [], {}, [[]], [None], {"": 0}),
    *(HOSTILE, "\ud800", "\u202e", "\x00", "x" * 10_000, {"float": "nan"}, {"float": "inf"}, {"float": 1}),
    *(f"{_RAW}{text}" for text in ("NaN", "Infinity", "-Infinity", "1e999", "9" * 300, "9" * 5_000)),
    *(f"{_RAW}{'[' * depth}{']' * depth}" for depth in (50, 100_000)),
)


def mutated(sample: bytes, draw: random.Random) -> bytes:
    """Return the sample with one to three kinds of damage."""
    for _ in range(draw.choice((1, 1, 1, 2, 3))):
        sample = draw.choice(_KINDS)(sample, draw)
    return sample


def _flip(data: bytes, draw: random.Random) -> bytes:
    changed = bytearray(data)
    for _ in range(draw.choice((1, 1, 4, 64)) if changed else 0):
        changed[draw.randrange(len(changed))] ^= 1 << draw.randrange(8)
    return bytes(changed)


def _truncate(data: bytes, draw: random.Random) -> bytes:
    return data[: draw.randrange(len(data) + 1)]


def _delete(data: bytes, draw: random.Random) -> bytes:
    begin = draw.randrange(len(data) + 1)
    return data[:begin] + data[begin + draw.choice((1, 10, 1_000)) :]


def _insert(data: bytes, draw: random.Random) -> bytes:
    at = draw.randrange(len(data) + 1)
    not_utf8 = (b"\xff\xfe", b"\xc3", b"\xed\xa0\x80", draw.randbytes(16))
    texts = (b"\x00", b"\x00" * 4096, b"\n", b"\r\n", b"{", b"]", b'"', b"\\u0000", HOSTILE.encode())
    return data[:at] + draw.choice((*not_utf8, *texts)) + data[at:]


def _lines(data: bytes, draw: random.Random) -> bytes:
    """Delete, repeat or exchange lines."""
    lines = data.splitlines(keepends=True)
    if lines:
        here, there = draw.randrange(len(lines)), draw.randrange(len(lines))
        kind = draw.randrange(3)
        if kind == 0:
            del lines[here]
        elif kind == 1:
            lines.insert(there, lines[here])
        else:
            lines[here], lines[there] = lines[there], lines[here]
    return b"".join(lines)


def _value(data: bytes, draw: random.Random) -> bytes:
    """Replace, remove or rename a value of the JSON in a line, or of the JSON that the whole file is."""
    parts = data.splitlines()
    index = draw.randrange(len(parts)) if parts else 0
    for text, put in (
        (parts[index] if parts else b"", lambda new: b"\n".join([*parts[:index], new, *parts[index + 1 :]]) + b"\n"),
        (data, lambda new: new),
    ):
        try:
            content = json.loads(text)
        except (ValueError, RecursionError):
            continue
        return put(_written(_changed(content, draw)))
    return _flip(data, draw)


def _changed(content: Any, draw: random.Random) -> Any:
    """Change one value somewhere in the content, nearer to its leaves than to its root."""
    if not isinstance(content, (dict, list)) or not content or draw.random() < 0.1:
        return draw.choice(_VALUES)
    keys = list(content) if isinstance(content, dict) else range(len(content))
    key = draw.choice(keys)
    kind = draw.random()
    if kind < 0.05:
        del content[key]
    elif kind < 0.1 and isinstance(content, dict):
        content[draw.choice(("", "x", HOSTILE, *map(str, keys)))] = content.pop(key)
    else:
        content[key] = _changed(content[key], draw)
    return content


def _written(content: Any) -> bytes:
    text = json.dumps(content)
    mark = json.dumps(_RAW)[:-1]
    while mark in text:
        before, _, rest = text.partition(mark)
        raw, _, after = rest.partition('"')
        text = before + raw + after
    return text.encode()


_KINDS: tuple[Callable[[bytes, random.Random], bytes], ...] = (
    *(_flip, _truncate, _delete, _insert, _lines, _value, _value, _value, _value),
)
