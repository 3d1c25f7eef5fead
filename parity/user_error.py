"""Tell mistakes of the user from all other exceptions, and write what an exception says."""

from __future__ import annotations

import re

from parity.cpu import UserError  # which imports nothing of parity, so the class lies there

__all__ = [
    "INTERRUPTS",
    "UserError",
]

# The one exception whose text is meant for the user who made the mistake, and what is not a mistake of theirs.


INTERRUPTS = (KeyboardInterrupt, GeneratorExit)
"""These are not mistakes if a user's code raises them; ``sys.exit()`` and ``pytest.skip()`` are."""


# What an exception says, as text that a terminal can show and a file can hold.


# Control characters but line breaks and tabs, and halves of surrogate pairs, which UTF-8 has no bytes for.
_UNPRINTABLE = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")


def printable(text: str) -> str:
    """Return the text with Python's escapes in the place of what a terminal obeys or a file cannot hold."""
    if text.isprintable():
        return text
    return _UNPRINTABLE.sub(lambda found: ascii(found[0])[1:-1], text)


# What PyTorch adds to each of CUDA's errors: where to search for it, and how to debug (``c10/cuda/CUDAException.cpp``).
_ADVICE = re.compile(r"\n(Search for `\w+' in https|CUDA kernel errors might be asynchronously).*", re.DOTALL)


def said(error: BaseException) -> str:
    """Return what an exception says, without PyTorch's advice on CUDA's errors.

    The code that says it may be a user's, and raise as well.
    """
    try:
        return printable(_ADVICE.sub("", str(error)))
    except KeyboardInterrupt:
        raise
    except BaseException as another:
        return f"(its __str__ raises {type(another).__name__})"


# How PyTorch and CUDA say that there is no GPU (``torch/cuda/__init__.py``, ``torch/cuda/_utils.py``,
# ``c10/cuda/CUDAFunctions.cpp``, ``torch/csrc/Device.cpp``, ``aten/src/ATen/detail/CUDAHooksInterface.h``).
_NO_GPU = re.compile(
    "Torch not compiled with CUDA|PyTorch was compiled without CUDA|No CUDA GPUs are available|no NVIDIA driver|"
    r"accelerator device when none is available|without ATen_cuda library|torch\.cuda\.\w+ requires CUDA|"
    r"dummy base class|'torch\._C' has no attribute '_cuda_|driver version is insufficient|no CUDA-capable device",
    re.IGNORECASE,
)


def advised(text: str) -> str:
    """Return what was raised, and what to do if it asked for a GPU that is not there."""
    if not _NO_GPU.search(text):
        return text
    return (
        f"{text}; this machine has no GPU: take the device of a tensor that is there (x.device), or leave it out: "
        "parity moves modules and inputs to where the kernels run"
    )


def raised(error: BaseException) -> str:
    """Return the exception's type and what it says, if anything."""
    return advised(printable(f"{type(error).__name__}: {said(error)}").removesuffix(": "))


def one_line(error: BaseException) -> str:
    """Return its type and the first line of its message, for a cell of a table."""
    return f"{type(error).__name__}: {said(error).strip().partition(chr(10))[0]}"
