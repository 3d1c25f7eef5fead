"""Compare from Python, without pytest: ``parity.compare``."""

from __future__ import annotations

import dataclasses
import math
import numbers
import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

from parity import te
from parity.case.case import SWITCHES_OVER_RANKS, Case, Pair, as_case, checked_steps, checked_switches
from parity.case.recipes import name_precisions
from parity.case.registry import checked_golden
from parity.case.validate import CheckedSize, attention_of, check_case
from parity.comparison import compare_at
from parity.judge.limits import Table, packaged
from parity.judge.over_seeds import judge_together
from parity.judge.request import Request
from parity.ranks.layout import degrees
from parity.result import Result, Switch
from parity.settings import PRECISION_NAMES, default_seconds
from parity.te import Backend, Precision, precision_named
from parity.te.attention_backend import AttentionBackend, checked_choice
from parity.user_error import UserError

# Checks of the arguments of ``parity.compare`` besides the pair; each raises a UserError that says what is wrong.
# Comparing nothing is an error, too: an empty list of results would look as if everything had passed.


_BACKENDS = ("auto", "gpu", "cpu")


def checked_precisions(precisions: object) -> list[str]:
    """Return the names of the precisions, at least one, all of them known."""
    if isinstance(precisions, str) or not isinstance(precisions, Iterable):
        raise UserError(f'precisions must be a list of names, such as ["bf16"], not {precisions!r}')
    names = list(name_precisions(precisions, "precisions"))
    if not names:
        raise UserError("precisions is empty; leave it out for all of them")
    return names


def checked_seeds(seeds: object) -> list[int]:
    """Return the seeds, at least one: Python's or NumPy's integers from 0."""
    if isinstance(seeds, str) or not isinstance(seeds, Iterable):
        raise UserError(f"seeds must be a list of whole numbers, such as range(3), not {seeds!r}")
    numbers = list(map(_require_seed, seeds))
    if not numbers:
        raise UserError("seeds is empty; leave it out for seed 0")
    return numbers


def check_kinds(backend: object, calibration: object, **switches: object) -> None:
    """Check that these arguments are valid.

    Raises:
        UserError: if one is not.
    """
    if backend not in _BACKENDS:
        raise UserError(f"the backend is {backend!r}, but must be one of {', '.join(_BACKENDS)}")
    for name, value in switches.items():
        if not isinstance(value, bool):
            raise UserError(f"{name} must be True or False, not {value!r}")
    if not (calibration is None or isinstance(calibration, Table)):
        raise UserError(f"calibration must be a table that parity.judge.limits.load() reads, not {calibration!r}")


def checked_diagnosis(diagnose: object, seconds: object) -> float | None:
    """Return how many seconds the search for a failure's cause may take: 0 for no limit, None for no search."""
    if not isinstance(diagnose, bool):
        raise UserError(f"diagnose must be True or False, not {diagnose!r}")
    if seconds is None:
        seconds = default_seconds()
    is_number = isinstance(seconds, numbers.Real) and not isinstance(seconds, bool)
    if not is_number or not 0.0 <= float(seconds) <= math.inf:  # type: ignore[arg-type]
        raise UserError(f"diagnosis_seconds must be a number of seconds, or 0 for no limit, not {seconds!r}")
    return float(seconds) if diagnose else None  # type: ignore[arg-type]


def _require_seed(seed: object) -> int:
    try:
        number = operator.index(seed)  # type: ignore[arg-type]
    except TypeError:
        number = -1
    if isinstance(seed, bool) or not 0 <= number < 2**63:
        raise UserError(f"a seed must be a whole number from 0 to 2**63 - 1, not {seed!r}")
    return number


def compare(
    pair: Case | Pair,
    precisions: Sequence[str | Precision] = PRECISION_NAMES,
    seeds: Iterable[int] = (0,),
    backend: Backend | Literal["auto"] = "auto",
    calibration: Table | None = None,
    attention: str = "auto",
    determinism: bool = False,
    stages: bool = False,
    diagnose: bool = True,
    diagnosis_seconds: float | None = None,
    steps: int = 0,
    switch: Switch = "",
    ranks: Mapping[str, int] | None = None,
    unwritten: bool = True,
    probe_weights: bool = False,
    golden: str | Precision | None = None,
) -> list[Result]:
    """Compare a pair at each of its sizes, precisions and seeds, without pytest.

    Args:
        pair: a function decorated with ``@parity.pair``, or a ``parity.Pair`` of modules, which are compared with the
            weights that they hold unless it says ``fill=True``.
        precisions: names from ``parity.te.PRECISIONS``, and what ``parity.recipe`` returns.
        seeds: seeds of weights, inputs and output gradients.
        backend: ``gpu``, ``cpu``, or ``auto`` for TE's real kernels if they can run.
        calibration: what faithful ports show, from ``parity calibrate``; the packaged table by default.
        attention: the attention backend that TE must use: ``flash``, ``fused``, ``unfused``, ``all`` for each in turn,
            or ``auto`` for the one that the pair asks for, else TE's own choice.
        determinism: whether to build and run the candidate again, to see whether it gives the same bytes.
        stages: whether to judge a port that passes stage by stage as well, which finds what a whole model hides.
        diagnose: whether to search for the cause of a failure; if not, a result has only the verdict, without findings.
        diagnosis_seconds: real time after which a search stops and returns what it has found, with a note; 0 for no
            limit. The default is the environment variable ``PARITY_DIAGNOSIS_SECONDS``, else 30.
        steps: how many steps both are trained for; each step is judged. 0 compares a single pass.
        switch: how the candidate is trained. ``resume``, ``resume-dcp`` and ``resume-safetensors`` save it halfway and
            go on with a new one, ``rollback`` with the same one. ``recompute`` makes each call through
            ``te.checkpoint``. ``micro-batches`` accumulates each step's gradients over parts of its batch. ``graph``
            replays CUDA graphs, and each step must equal the same training's without graphs. ``compile`` calls the
            candidate through ``torch.compile``. ``offload`` keeps activations on the host, and is compared like
            ``graph``.
        ranks: how many ranks compute the candidate together, such as ``dict(tp=2)``: degrees of ``tp``, ``cp``, ``ep``
            and ``dp``, and ``sequence_parallel``. The pair's function is then called with ``ranks=``. None for one
            process.
        unwritten: whether to run the candidate again with all memory that it allocates full of NaN, and garbage in
            the padding of its inputs, which shows whether it reads either.

        probe_weights: whether to compare a fresh model that passes with probing weights, in FP32, as well.
        golden: the recipe whose rounding is part of golden, as in ``@parity.pair``; None for what the pair says.

    Returns:
        One result for each size, precision, attention backend and seed, in this order.

    Raises:
        UserError: if an argument is not as above, or the pair's weight map or inputs do not fit.
        parity.te.BackendUnavailable: if the backend is not available on this machine.
    """
    case = as_case(pair)
    chosen = [precision_named(name) for name in checked_precisions(precisions) if case.runs_at(name)]
    seeds = checked_seeds(seeds)
    checked_choice(attention)
    check_kinds(
        backend, calibration, determinism=determinism, stages=stages, unwritten=unwritten, probe_weights=probe_weights
    )
    diagnosis = checked_diagnosis(diagnose, diagnosis_seconds)
    checked_steps(steps)
    checked_switches([switch] if switch else [], steps)
    made = degrees(ranks) if ranks is not None else None
    if made is not None and switch and switch not in SWITCHES_OVER_RANKS:
        known = ", ".join(SWITCHES_OVER_RANKS)
        raise UserError(f"a training over ranks knows {known}, and not {switch!r}; leave that or ranks out")
    if made is not None and not isinstance(pair, Case):
        raise UserError("a pair over ranks is built on each rank: declare its function with @parity.pair")
    case = case if made is None else dataclasses.replace(case, ranks=(made,))
    if (recipe := checked_golden(golden or case.golden, steps=steps, ranks=made)) != case.golden:
        case = dataclasses.replace(case, golden=recipe)
    kernels, table = te.kernels(backend), calibration or packaged()

    def judged(checked: CheckedSize, precision: Precision, forced: AttentionBackend | None, seed: int) -> Result:
        at = case, checked, precision, seed, kernels, table
        if steps:
            from parity.trainings.training import train_at

            return train_at(*at, steps, switch, forced, diagnosis, made)
        if made is not None:
            from parity.trainings.parallel import compare_over_ranks_at

            return compare_over_ranks_at(*at, made, forced, diagnosis)
        result = compare_at(*at, forced, determinism, diagnosis, stages, unwritten, probe_weights)
        if not case.invariance:
            return result
        from parity.invariance import check_invariance_at

        return check_invariance_at(Request(*at, forced), result)

    return [
        result
        for checked in check_case(case, kernels.te)
        for precision in chosen
        for forced in attention_of(case, checked, attention)
        for result in judge_together([judged(checked, precision, forced, seed) for seed in seeds])
    ]
