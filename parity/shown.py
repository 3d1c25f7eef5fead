"""Make text that others wrote safe to show on a terminal, in markdown, in HTML and in a command to copy.

Names of pairs and tensors, messages of exceptions and lines of records may contain anything: escape sequences that move
a cursor, tags, links, the end of a table's row or of a shell's word.
"""

from __future__ import annotations

import html
import re
import shlex
from collections.abc import Iterable, Sequence

# Control characters except newline, marks that reverse the direction of writing, characters that some programs take for
# line ends, and halves of surrogate pairs.
_UNSEEN = re.compile(
    "[\x00-\x09\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028\u2029\u202a-\u202e\u2066-\u2069\ufeff\ud800-\udfff]"
)
# GitHub's runner obeys a line of a job's output that begins with ``::``, and ``##[`` anywhere in one.
_JOB_COMMAND = re.compile(r"^ *:(?=:)|##(?=\[)", re.MULTILINE)
_OPTION = re.compile("((?:--[a-z-]+=)?)(.*)")
_TICKS = re.compile("`+")
# What GitHub makes a link or a formula of, however it is escaped: an address, a user, an issue, a dollar sign.
_LIVE = re.compile(r"://|www\.|@\w|#\d|\$")
# What begins or ends emphasis, code or a link; a backslash before punctuation.
_MARKUP = re.compile(r"[*~`]|(?<![^\W_])_|_(?![^\W_])|\](?=[(\[:])|\\(?=[!-/:-@\[-`{-~]|$)")
# The place for a backslash in what would begin a heading, a list or a quotation, or end the text of a link.
_EDGE = re.compile(r"^ *(?:(?=[-+#=]+(?: |$)|>)|\d+(?=[.)](?: |$)))|(?=\]$)")
_ENTITY = re.compile("&(?=#?[0-9A-Za-z]+;)")
# Control characters except line breaks and tabs, and halves of surrogate pairs, which UTF-8 has no bytes for.
_UNPRINTABLE = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")


def written(value: float, digits: int = 4) -> str:
    """Return a number with so many significant digits, in the way people write it: 160000, not 1.6e+05."""
    return f"{float(f'{value:.{digits}g}'):.7g}"


def few_of(names: Sequence[str], most: int = 3, between: str = ", ") -> str:
    """Return the first names, and how many more there are: ``a, b and 4 more``."""
    more = len(names) - most
    return between.join(names[:most]) + (f"{between.strip(', ')} and {more} more" if more > 0 else "")


def printable(value: str) -> str:
    """Return the text with Python's escapes for the characters that a terminal obeys or a file cannot hold."""
    if value.isprintable():
        return value
    return _UNPRINTABLE.sub(lambda found: ascii(found[0])[1:-1], value)


def text(value: str) -> str:
    """Return lines for a terminal or a file; invisible characters become escapes such as ``\\x1b``."""
    return _JOB_COMMAND.sub(lambda found: f"{found[0]}\\", _UNSEEN.sub(_escape_character, value))


def line(value: str) -> str:
    """Return the text as one line, with line breaks escaped."""
    return text(value).replace("\n", "\\n")


def _escape_character(found: re.Match[str]) -> str:
    code = ord(found[0])
    return "    " if code == 9 else f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}"


def prose(value: str) -> str:
    """Return one line of markdown that shows the text as it is, with what would be live, such as a link, as code."""
    return _EDGE.sub(r"\g<0>\\", " ".join(map(_escape_word, line(value).split(" "))))


def _escape_word(word: str) -> str:
    """Return markdown that shows a word as it is."""
    if _LIVE.search(word):
        return code(word)
    return _ENTITY.sub("&amp;", _MARKUP.sub(r"\\\g<0>", word)).replace("<", "&lt;")


def code(value: str) -> str:
    """Return markdown that shows the text as code, whatever it holds."""
    shown = line(value)
    longest = max(map(len, _TICKS.findall(shown)), default=0)
    if not longest:
        return f"`{shown}`" if shown else ""
    ticks = "`" * (longest + 1)
    return f"{ticks} {shown} {ticks}"


def command(*words: str) -> str:
    """Return a shell's command, on one line, in which every word stands for itself, whatever it holds."""
    parts = (_OPTION.fullmatch(line(word)) for word in words)
    return " ".join(f"{part[1]}{shlex.quote(part[2])}" for part in parts if part)


def in_html(value: str) -> str:
    """Return one line of HTML."""
    return html.escape(line(value))


def fence(lines: Iterable[str]) -> str:
    """Return a markdown code block that shows the lines as they are; none of them can end the block."""
    body = text("\n".join(lines))
    ticks = "`" * max(3, 1 + max(map(len, _TICKS.findall(body)), default=0))
    return f"{ticks}text\n{body}\n{ticks}"


# Messages of exceptions, as text that a terminal can show and a file can hold.


# PyTorch's additions to each CUDA error: where to search for it, and how to debug (``c10/cuda/CUDAException.cpp``).
_ADVICE = re.compile(r"\n(Search for `\w+' in https|CUDA kernel errors might be asynchronously).*", re.DOTALL)


def said(error: BaseException) -> str:
    """Return the message of an exception, without PyTorch's advice on CUDA errors.

    The exception's ``__str__`` may be a user's code, and raise as well.
    """
    try:
        return printable(_ADVICE.sub("", str(error)))
    except KeyboardInterrupt:
        raise
    except BaseException as another:
        return f"(its __str__ raises {type(another).__name__})"


# The ways in which PyTorch and CUDA say that there is no GPU (``torch/cuda/__init__.py``, ``torch/cuda/_utils.py``,
# ``c10/cuda/CUDAFunctions.cpp``, ``torch/csrc/Device.cpp``, ``aten/src/ATen/detail/CUDAHooksInterface.h``).
_NO_GPU = re.compile(
    "Torch not compiled with CUDA|PyTorch was compiled without CUDA|No CUDA GPUs are available|no NVIDIA driver|"
    r"accelerator device when none is available|without ATen_cuda library|torch\.cuda\.\w+ requires CUDA|"
    r"dummy base class|'torch\._C' has no attribute '_cuda_|driver version is insufficient|no CUDA-capable device",
    re.IGNORECASE,
)


def advised(text: str) -> str:
    """Return the message, with advice if the code asked for a GPU that the machine does not have."""
    if not _NO_GPU.search(text):
        return text
    return (
        f"{text}; this machine has no GPU: use the device of an existing tensor (x.device), or name none, since parity "
        "moves modules and inputs to where the kernels run"
    )


def raised(error: BaseException) -> str:
    """Return the exception's type and its message, if it has one."""
    return advised(printable(f"{type(error).__name__}: {said(error)}").removesuffix(": "))


def one_line(error: BaseException) -> str:
    """Return the exception's type and the first line of its message, for a cell of a table."""
    return f"{type(error).__name__}: {said(error).strip().partition(chr(10))[0]}"
