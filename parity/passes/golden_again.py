"""Run the reference once more before a failure is blamed on the port: one that differs from itself judges nothing."""

from __future__ import annotations

from collections.abc import Collection, Iterator

import torch

from parity.numerics.errors import all_finite, difference, norm_of, relative_l2
from parity.numerics.golden import in_fp64
from parity.passes.all_passes import Tensors, tensors_of
from parity.passes.one_pass import run
from parity.passes.prepare import Prepared, cast
from parity.passes.refusals import SAME_IN_FP64, NothingToJudge
from parity.result import label_of
from parity.trace.effects import RandomState, other_numbers
from parity.trace.unwritten import Filled, lines_read

_CANCELS = 1e-3  # of the largest norm of a tensor: a smaller one may be what rounding leaves of terms that cancel


def check_golden_again(prepared: Prepared, device: torch.device) -> None:
    """Check that golden does not depend on random numbers, on what is in memory, or on how often the reference ran.

    ``prepare`` has checked the outputs of a reference that draws numbers or changes its own state. This looks at all
    references, and at gradients.

    Args:
        prepared: golden, and the reference.
        device: the one whose random numbers the reference draws.

    Raises:
        NothingToJudge: if an output or a gradient differs in another pass.
    """
    golden, drawn = tensors_of(prepared.golden), False

    def run_in(memory: Filled) -> Tensors:
        nonlocal drawn
        prepared.reference.double()
        given = cast(prepared.inputs, torch.float64), prepared.input_names, lambda _: prepared.cotangents
        with in_fp64(), other_numbers(device):
            before = RandomState.now(device)
            with memory:
                ran = run(prepared.reference, prepared.call, *given, differentiated=not prepared.evaluation)
            drawn = not RandomState.now(device).is_as(before)
        prepared.reference.zero_grad(set_to_none=True)
        return tensors_of(ran)

    filled = Filled(lambda place: False)
    change = next(_list_changes(golden, run_in(Filled())), "")
    if not change and all(map(all_finite, golden.values())):
        return
    quiet = run_in(filled)
    change = change or next(_list_changes(golden, quiet), "")  # golden may hold what memory full of NaN makes
    if not change:
        return
    told = f"{change}, so nothing can be compared with it"

    def is_read(places: Collection[str]) -> bool:
        return any(_list_changes(quiet, run_in(Filled(places.__contains__))))

    is_same = not is_read(())
    if is_same and (lines := lines_read(is_read, filled.places)):
        raise NothingToJudge(
            "the reference reads memory that nothing has written (PAR276 unwritten-memory): if that holds NaN, "
            f"{told}; it was allocated at {'; and at '.join(lines)}: write all of it before it is read"
        )
    if is_same and drawn:
        raise NothingToJudge(
            f"the reference draws random numbers (PAR253 not-reproducible): with other random numbers {told}; switch "
            "off the randomness in both modules, or draw the numbers once and give them to both as an input"
        )
    raise NothingToJudge(f"the reference differs from itself (PAR253 not-reproducible): run twice, {told}")


def _list_changes(golden: Tensors, again: Tensors) -> Iterator[str]:
    """Yield what differs in another pass of the reference in FP64, and by how much."""
    sizes = {key: norm_of(x.masked_fill(~x.isfinite(), 0.0)) for key, x in golden.items()}
    least = _CANCELS * max(sizes.values(), default=0.0)
    for key, x in golden.items():
        other, label = again.get(key), label_of(*key)
        if other is None or other.shape != x.shape:
            yield f"its {label} has another shape"
        elif not torch.equal(other.isfinite(), x.isfinite()):
            yield f"its {label} is finite in other places"
        else:
            moved = relative_l2(norm_of(difference(other, x).nan_to_num()), max(sizes[key], least))
            if moved > SAME_IN_FP64:
                yield f"its {label} changes by {moved:.2g} of its norm"
