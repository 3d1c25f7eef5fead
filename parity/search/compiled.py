"""Name which step of ``torch.compile`` makes a candidate wrong."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from parity.mistakes.codes import finding
from parity.passes.compiled import DIFFERENTIATED, GENERATED, TRACED
from parity.result import Finding

_STEPS = {
    TRACED: "Python is traced otherwise than it runs: look at what is told to be constant, or is read where no guard "
    "looks, and at code that asks torch.compiler.is_compiling()",
    DIFFERENTIATED: "operations are made functional and differentiated in advance otherwise than they run: look at "
    "operations of your own, what they write to (mutates_args) and their register_fake and register_autograd",
    GENERATED: "generated kernels compute otherwise than operations one by one: they keep more bits between those, "
    "which the limits allow for, or are wrong; try parity.Training(compile=...) with other options",
}


def compiled_otherwise(number: int, backends: Sequence[str], is_right: Callable[[str], bool]) -> Finding:
    """Return what is wrong with a step of a compiled candidate that is right without ``torch.compile``.

    Args:
        number: of the step.
        backends: those to try, of which each does more than the one before; the last is the candidate's. Empty if the
            pair compiles the candidate by itself.
        is_right: whether a new candidate with the same weights is right if it is compiled by a backend; by the pair's
            own way if that is empty.
    """
    beginning = f"a new module with the same weights computes step {number} right without torch.compile"
    wrong = next((one for one in backends or ("",) if not is_right(one)), None)
    if wrong is None:
        return finding(
            "compiled-differs",
            f"{beginning}, and also if it is compiled now, but what was compiled before is wrong: it keeps something "
            "of the time when it was compiled, such as what assume_constant_result has returned, or a number that is "
            "read where no guard looks",
        )
    if not wrong:
        return finding("compiled-differs", f"{beginning}, and wrong as the pair compiles it")
    return finding("compiled-differs", f'{beginning}, and wrong from backend="{wrong}" on: {_STEPS[wrong]}')
