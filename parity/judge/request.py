"""Describe the comparison that is asked for, and run its candidate again."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from parity.case.case import Case
from parity.case.validate import CheckedSize
from parity.judge.limits import Table
from parity.numerics.formats import LayerFormats, Recasts, Rounding
from parity.passes.all_passes import Recalled, Tensors, run_candidate
from parity.passes.prepare import Prepared
from parity.result import Determinism, Finding, ModuleFormats, Result, Status
from parity.te.attention_backend import AttentionBackend, attention_backends

if TYPE_CHECKING:
    from parity.stages.locate import Stages
    from parity.stages.watch import Watched
    from parity.te import Kernels, Precision


@dataclass(frozen=True, eq=False)
class CandidateRun:
    """A candidate's pass, and what was observed during it.

    Attributes:
        tensors: the candidate's tensors, in the reference's layout.
        unreached: TE's parameters that no gradient reached.
        draws: whether the candidate draws random numbers.
        attention: the attention backends that TE ran.
        determinism: whether the candidate, built again, gives the same bytes; None if it was not asked for.
        changed_inputs: names of the inputs that the candidate changes in place.
        detached_outputs: names of its outputs that require no gradient.
        numbers: the Python numbers that it returned.
        recalled: the outputs of its successive calls, which show whether it keeps state.
        formats: what each module of TE's computed in, at a precision with a recipe.
        changed: by weights of the candidate's, what debug features changed of its layers' formats, if it ran elsewhere.
        misformatted: a finding if modules had other formats than the pair asks for.
        mixed: what to say about modules that computed without the recipe, if the pair asks for no formats.
        recomputed: a finding if the backward pass computes a layer again under another recipe.
        unwritten: a finding if memory is read that nothing has written.
        padded: its tensors with garbage in the padding of its inputs, or what it raised, if what counts has changed.
        calls_te: whether the candidate uses TE at all.
        equals: the precision without a recipe that the pass equals, since nothing in it was quantized; else empty.
        left_out: the message about TE modules that hold weights and did not run; empty if all did.
        summed: noise as large as the loss of sums over micro-batches in gradients that are held in 16 bits, since the
            rounding model makes only one pass.
        adds_parts: whether it adds parts of sums that are rounded, as ranks do, and TE before 2.20 elsewhere may.
        recasts: by which scales attention's results were cast; empty if that is unknown.
        values: what it computed, in order, if its values were recorded.
        stages: its stages, once they were judged, by what they were judged with.
    """

    tensors: Tensors
    unreached: tuple[str, ...] = ()
    draws: bool = False
    attention: str = ""
    determinism: Determinism | None = None
    changed_inputs: tuple[str, ...] = ()
    detached_outputs: tuple[str, ...] = ()
    numbers: Mapping[str, float] = field(default_factory=dict)
    recalled: Recalled = field(default_factory=Recalled)
    formats: tuple[ModuleFormats, ...] = ()
    changed: Mapping[str, LayerFormats] = field(default_factory=dict)
    misformatted: tuple[Finding, ...] = ()
    mixed: str = ""
    recomputed: tuple[Finding, ...] = ()
    unwritten: tuple[Finding, ...] = ()
    padded: Tensors | str = field(default_factory=dict)
    calls_te: bool = True
    equals: str = ""
    left_out: str = ""
    summed: Tensors = field(default_factory=dict)
    adds_parts: bool = False
    recasts: Recasts = ()
    values: Sequence[Watched] | None = None
    stages: dict[Any, Stages] = field(default_factory=dict)

    @property
    def observed(self) -> tuple[Finding, ...]:
        """Return the findings that do not rest on numbers."""
        return self.unwritten + self.misformatted + self.recomputed


OnProgress = Callable[[Result | None, bool], object]


def ignore_progress(result: Result | None, decided: bool) -> None:
    """Do nothing."""


@dataclass(frozen=True, eq=False)
class Request:
    """One comparison that ``parity.comparison.judge_at`` is asked for.

    Attributes:
        case, checked, precision, seed, kernels: what is compared, at which size, how, and on which kernels.
        calibration: the table of limits.
        attention: the attention backend that TE is to run; None for its own choice.
        determinism: whether the candidate is built and run a second time.
        other_kernels: whether errors are granted that other faithful kernels may make.
        candidate_run: the candidate's pass, if it has been made already, as a step of a training has.
        on_progress: called with the result of a port that fails at first look, and whether a second look has ended;
            with None if that clears the port.
        unwritten: whether the candidate is run once more, with all memory that it allocates full of NaN, and garbage in
            the padding of its inputs.
        probe_weights: whether a fresh model that passes is compared with probing weights as well.
        golden: the recipe whose rounding is part of golden; None for FP64 alone.
    """

    case: Case
    checked: CheckedSize
    precision: Precision
    seed: int
    kernels: Kernels
    calibration: Table
    attention: AttentionBackend | None = None
    determinism: bool = False
    other_kernels: bool = True
    candidate_run: CandidateRun | None = None
    on_progress: OnProgress = ignore_progress
    unwritten: bool = False
    probe_weights: bool = False
    golden: Precision | None = None

    @property
    def rounding(self) -> Rounding:
        """What a right port rounds: all that the precision does or, where golden rounds operands, these alike."""
        if self.golden is None:
            return self.precision.rounding
        return replace(self.golden.rounding, storage=self.precision.dtype, shared=True)

    def result(self, status: Status, **fields: Any) -> Result:
        """Return a result of this comparison with a status and further fields."""
        return Result(
            case=self.case.name,
            precision=self.precision.name,
            size=dict(self.checked.size),
            size_label=self.checked.label,
            seed=self.seed,
            backend=self.kernels.backend,
            path=str(self.case.path),
            forced_attention=self.attention or "",
            status=status,
            **fields,
        )


def unchanged(module: nn.Module) -> None:
    """Leave a newly built candidate as it is."""


def run_again(
    request: Request,
    prepared: Prepared,
    change: Callable[[nn.Module], None] = unchanged,
    cotangents: Mapping[str, Tensor] | None = None,
    recalled: Recalled | None = None,
    alone: bool = False,
) -> Tensors:
    """Build and run the candidate once more, and return its tensors in the reference's layout.

    Args:
        request: the comparison.
        prepared: golden and what all passes share.
        change: called with the newly built module before it runs.
        cotangents: other output gradients, by the output's name.
        recalled, alone: as for ``run_candidate``.
    """
    given = prepared if cotangents is None else replace(prepared, cotangents=dict(cotangents))
    with attention_backends(request.attention):
        at = request.case, request.checked, given, request.precision, request.seed, request.kernels
        return run_candidate(*at, change, recalled=recalled, alone=alone)[0]
