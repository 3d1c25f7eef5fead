"""What parity takes from ``te_on_cpu``, which emulates TE's kernels and a GPU. The other folders ask here."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from parity.user_error import UserError
from te_on_cpu import EmulationError, cuda, kernel_choices
from te_on_cpu.float8 import fp8_dtype, is_float8_tensor
from te_on_cpu.versions import NEWEST, OLDEST

__all__ = [
    "NEWEST",
    "OLDEST",
    "check_environment",
    "cuda",
    "fp8_dtype",
    "gpu_name",
    "is_float8_tensor",
]


@contextmanager
def _as_user_errors() -> Iterator[None]:
    """Raise the emulation's complaints about variables and versions as a ``UserError``."""
    try:
        yield
    except EmulationError as error:
        raise UserError(str(error)) from None


def check_environment() -> None:
    """Read the variables that describe the emulated GPU and its kernels.

    Raises:
        UserError: if one of them is not valid.
    """
    with _as_user_errors():
        cuda.check_environment()
        kernel_choices.current()


def gpu_name() -> str:
    """Return the GPU that TE's Python finds on the CPU kernels, such as ``emulated Hopper (compute capability 9.0)``.

    Kernel choices follow if there are any: ``... with the kernel choices fp8-14-bit, tf32-truncated``.

    Raises:
        UserError: if a variable that describes them is not valid.
    """
    with _as_user_errors():
        gpu, choices = cuda.emulated_gpu(), sorted(kernel_choices.current())
    name = f"{gpu.name} (compute capability {gpu.major}.{gpu.minor})"
    return f"{name} with the kernel choices {', '.join(choices)}" if choices else name
