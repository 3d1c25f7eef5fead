"""Name which step of ``torch.compile`` makes a candidate wrong."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from parity.mistakes.codes import repairable
from parity.passes.switches import DIFFERENTIATED, GENERATED, TRACED
from parity.result import Finding

_STEPS = {
    TRACED: (
        "tracing the Python code changes what it computes",
        "look for values that are declared constant or read where no guard checks them, and for code that asks "
        "torch.compiler.is_compiling()",
    ),
    DIFFERENTIATED: (
        "functionalization or ahead-of-time differentiation changes what is computed",
        "look at your own custom operations: what they write to (mutates_args), register_fake and register_autograd",
    ),
    GENERATED: (
        "the generated kernels compute something else, beyond what the limits allow for unrounded intermediate results",
        "try parity.Training(compile=...) with other options",
    ),
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
    beginning = f"a new module with the same weights computes step {number} correctly without torch.compile"
    wrong = next((one for one in backends or ("",) if not is_right(one)), None)
    if wrong is None:
        return repairable(
            "compiled-differs",
            f"{beginning}, and also if it is compiled now; only the code that was compiled in an earlier step is wrong",
            "look for values that the compiled code keeps from its compilation, such as a result of "
            "assume_constant_result, or a number that is read where no guard checks it",
        )
    if not wrong:
        return repairable(
            "compiled-differs",
            f"{beginning}, but not if it is compiled as the pair does it",
            "leave out parts of that compilation until the step is right",
        )
    what, repair = _STEPS[wrong]
    return repairable("compiled-differs", f'{beginning}, but not with backend="{wrong}": {what}', repair)
