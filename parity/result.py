"""Hold the results of comparisons, as plain data that goes into JSON and back unchanged."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import math
from dataclasses import dataclass
from typing import Any, Literal, TypeVar, cast

from pydantic import TypeAdapter

from parity.shown import printable

Kind = Literal["output", "probed output", "reweighed output", "input gradient", "weight gradient"]
PROBED: Kind = "probed output"
REWEIGHED: Kind = "reweighed output"
Status = Literal["passed", "failed", "skipped", "error"]
Switch = Literal[
    "",
    "resume",
    "resume-dcp",
    "resume-safetensors",
    "rollback",
    "recompute",
    "micro-batches",
    "graph",
    "compile",
    "offload",
]
UNDECLARED = "pair"
"""The path of a pair of modules that no file declares."""
DeviceError = Literal["", "out of memory", "broken"]


class ProvesNothing(str):
    """A note that a comparison, or one of its two passes, would have passed whatever the candidate computed."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class Errors:
    """Say how far a tensor is from its golden value.

    Attributes:
        relative_l2: ``|x - golden| / |golden|`` in the Euclidean norm; infinite if only the golden value is all zero.
        max_abs: the largest ``|x - golden|``, in the tensor's own units.
        max_ulps: the largest distance in units in the last place of the compared dtype, at golden's magnitude.
        cosine: the cosine of the angle between the two, as flat vectors; 1 if both are all zero.
        sqnr_db: signal to quantization noise ratio, ``-20 log10(relative_l2)``; infinite if there is no error.
        golden_rms: root mean square of the measured golden elements, which gives ``max_abs`` a scale.
        nans: NaNs in the computed tensor where the golden value is finite.
        infs: infinities in the computed tensor where the golden value is finite.
        golden_non_finite: elements whose golden value is NaN or infinite.
        first_non_finite: index of the first NaN or infinity that is counted above, in ``x`` or else in golden.
    """

    relative_l2: float
    max_abs: float
    max_ulps: float
    cosine: float
    sqnr_db: float
    golden_rms: float
    nans: int = 0
    infs: int = 0
    golden_non_finite: int = 0
    first_non_finite: tuple[int, ...] | None = None

    @property
    def finite(self) -> bool:
        """Return whether every element of both tensors is finite."""
        return self.nans == self.infs == self.golden_non_finite == 0


@dataclass(frozen=True, slots=True)
class Finding:
    """A named cause of a failure, with its evidence.

    Attributes:
        code: a stable code, e.g. ``PAR001``; listed in ``docs/findings.md``.
        title: the cause in a few words, e.g. ``not-finite``.
        message: the evidence and what to do, in one sentence or two.
        sure: whether it is stated as a fact; if not, the message ends with the evidence against it.
        repair: what to change in the user's code, without the evidence, or where to look next (``advice`` says which);
            empty if nothing is known, and in older records.
        now: lines of the user's code as they are, if the finding knows them.
        then: the same lines as they should be.
        place: the first stage in which the candidate departs from the reference; empty if it is not known.
    """

    code: str
    title: str
    message: str
    sure: bool = True
    repair: str = ""
    now: tuple[str, ...] = ()
    then: tuple[str, ...] = ()
    place: str = ""

    @property
    def told(self) -> str:
        """The message, after the place if it is known."""
        return f"{self.place}: {self.message}" if self.place else self.message

    @property
    def name(self) -> str:
        """The code and the title, and ``perhaps`` if it is not sure."""
        return f"{self.code} {self.title}{'' if self.sure else ' (perhaps)'}"

    @property
    def advice(self) -> str:
        """Return what reports call the repair; ``PAR5xx`` say where an error is, not why, so they have a next step."""
        return "next step" if self.code.startswith("PAR5") else "repair"


@dataclass(frozen=True, slots=True)
class Code:
    """Hold lines of a user's code, for a repair that can be written as a change of lines.

    Attributes:
        now: the lines as they are; there may be none, since a default need not be written.
        then: the lines as they should be.
    """

    now: tuple[str, ...] = ()
    then: tuple[str, ...] = ()


NO_CODE = Code()


@dataclass(frozen=True, slots=True)
class Check:
    """One statistic of one tensor, against its limit.

    Attributes:
        statistic: a name of ``parity.judge.statistics``.
        value: the candidate's value; its sign, if it has one, gives a direction.
        limit: the bound on the value's magnitude, which a faithful port exceeds with a known, small probability.
        where: the worst place, or the mistake that the error resembles; empty if there is none to name.
        coefficient: how much of that mistake's change the error contains; about 1 if the mistake was made. For
            ``gain``, how much of golden it contains, beyond what the model's error does: a relative bias.
    """

    statistic: str
    value: float
    limit: float
    where: str = ""
    coefficient: float = 0.0

    @property
    def margin(self) -> float:
        """The value divided by its limit; up to 1 passes."""
        return abs(self.value) / self.limit


@dataclass(frozen=True, slots=True)
class Profile:
    """Describe how an error is distributed over consecutive parts of one axis of its tensor.

    Attributes:
        axis: the axis, from 0.
        span: how many indices a part has; the last part may have fewer.
        error: the root mean square of the candidate's finite errors in each part.
        expected: the same of the rounding model's errors.
        spoiled: how many NaNs and infinities the candidate has in each part; empty if it has none at all.
    """

    axis: int
    span: int
    error: tuple[float, ...]
    expected: tuple[float, ...]
    spoiled: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Histogram:
    """Count elements by the decimal logarithm of their error over the root mean square of the expected one.

    Attributes:
        start: the lower edge of the first bin; the first and the last bin also count what lies beyond them.
        width: the width of a bin.
        error: how many of the candidate's elements each bin has.
        expected: how many of the rounding model's elements each bin has.
        exact: how many of the candidate's and of the model's elements have no error at all; no bin counts them.
    """

    start: float
    width: float
    error: tuple[int, ...]
    expected: tuple[int, ...]
    exact: tuple[int, int] = (0, 0)


@dataclass(frozen=True, slots=True)
class Picture:
    """Show where a tensor's error lies and how it is distributed, in a few hundred numbers.

    Attributes:
        unit: the root mean square of the expected error, or of the candidate's if none is expected.
        profiles: one for each axis that is longer than 1.
        histogram: None if there are too few elements for one.
    """

    unit: float
    profiles: tuple[Profile, ...] = ()
    histogram: Histogram | None = None


@dataclass(frozen=True, slots=True)
class TensorResult:
    """One compared tensor of one run.

    Attributes:
        name: ``output``, or the reference's name of the input or parameter whose gradient this is.
        kind: what the tensor is.
        shape: in the reference's layout.
        errors: the candidate's errors against golden.
        expected: the errors of the reference under the precision's rounding model: the cost of a faithful port.
        tolerance_relative_l2: bound on ``errors.relative_l2``, which the check ``norm`` sets.
        tolerance_max_abs: bound on ``errors.max_abs``, in the tensor's own units, which the check ``largest`` sets.
        margin: the largest of the checks' margins; up to 1 passes; infinite if there is a NaN or Inf, or one expected.
        checks: every statistic that was judged.
        of: the outputs whose gradient it is, if not all are differentiated in one pass; else empty.
        step: the step of a training, from 1; 0 for a single pass.
        picture: where its error lies; only the worst tensors of a result have one, and none in older records.
        digest: a checksum of the candidate's bytes; empty if none was taken, as in older records.
    """

    name: str
    kind: Kind
    shape: tuple[int, ...]
    errors: Errors
    expected: Errors
    tolerance_relative_l2: float
    tolerance_max_abs: float
    margin: float
    checks: tuple[Check, ...] = ()
    of: str = ""
    step: int = 0
    picture: Picture | None = None
    digest: str = ""

    @property
    def label(self) -> str:
        """``output``, ``probed output``, ``d input``, ``d up_proj.weight`` or ``d up_proj.weight of output[loss]``."""
        label = label_of(self.kind, self.name)
        label = f"{label} of {self.of}" if self.of else label
        return f"{label} at step {self.step}" if self.step else label

    @property
    def key(self) -> tuple[Kind, str]:
        """Return what distinguishes it from the other tensors of a pass."""
        return self.kind, self.name

    @property
    def shape_label(self) -> str:
        """Return the shape as ``32x64``; ``scalar`` for a single number."""
        return "x".join(map(str, self.shape)) or "scalar"

    @property
    def numel(self) -> int:
        """Return how many elements it has."""
        return math.prod(self.shape)

    @property
    def passed(self) -> bool:
        return self.margin <= 1.0

    @property
    def finite(self) -> bool:
        """Return whether golden, the candidate and the rounding model are finite, so that it can be judged."""
        return self.errors.finite and self.expected.finite

    @property
    def probed(self) -> bool:
        """Return whether this is an output on the probing inputs."""
        return self.kind == PROBED

    @property
    def worst_check(self) -> Check | None:
        """The check that sets the margin."""
        return max(self.checks, key=lambda check: check.margin, default=None)


@dataclass(frozen=True, slots=True)
class Determinism:
    """Describe how a candidate differed when it was built again and run on the same inputs.

    Attributes:
        differing: labels of the tensors that had other bytes though every random number was the same.
        first: where the pass first differed; empty if nothing did, or if the place could not be found.
        drawn: labels of the tensors whose bytes depend on the random numbers.
    """

    differing: tuple[str, ...] = ()
    first: str = ""
    drawn: tuple[str, ...] = ()

    @property
    def summary(self) -> str:
        """All of this in one sentence, without a full stop."""
        if self.differing:
            where = f"first in {self.first}" if self.first else "further passes that were traced agreed"
            known = _KNOWN if "attn" in self.first or "Attention" in self.first else ""
            return f"other bytes the second time in {', '.join(self.differing)}; {where}{known}"
        if self.drawn:
            return (
                "the same bytes when it is built and run again from the same random numbers; "
                f"{', '.join(self.drawn)} depend on these, which stochastic rounding and dropout draw"
            )
        return "the same bytes when it is built and run again"


_KNOWN = "; TransformerEngine allows attention such kernels unless NVTE_ALLOW_NONDETERMINISTIC_ALGO=0"


@dataclass(frozen=True, slots=True)
class Step:
    """One step of a training.

    Attributes:
        number: the step's number, from 1.
        loss: the candidate's loss before the step.
        golden: the reference's loss in FP64, with the candidate's weights and batch.
        margin: the largest of the loss's and the gradients' margins.
        precision: the precision of the step, if the training changes it; else empty.
    """

    number: int
    loss: float
    golden: float
    margin: float
    precision: str = ""


@dataclass(frozen=True)
class StageResult:
    """What one stage of a pass does to the error.

    Attributes:
        end: where the stage ends, in words.
        backward: whether it computes a gradient.
        whole: the relative error of the value at its end against golden, with what earlier stages added; NaN for a
            gradient, and for an expert's tokens that golden gives to another one.
        added: the relative error that it adds.
        expected: the error that its roundings cost.
        gain: the added error's share along the value, in standard deviations of rounding.
        is_off: whether it adds more than rounding explains.
    """

    end: str
    backward: bool
    whole: float
    added: float
    expected: float
    gain: float
    is_off: bool


OR = ", or "


@dataclass(frozen=True, slots=True)
class ModuleFormats:
    """The formats of GEMM operands that modules of TE's computed with, as its kernels were given them.

    Attributes:
        modules: names of the modules in the candidate; empty for the candidate itself.
        operands: by GEMM and operand, such as ``fprop weight``, ``wgrad gradient`` or ``attention qkv``, the format:
            ``E4M3, one scale``, ``E4M3, 1x128``, ``E2M1, 1x16 (rotated)`` or ``bf16``; several if calls or a
            module's GEMMs differ, joined by ``OR``.
    """

    modules: tuple[str, ...]
    operands: dict[str, str]


@dataclass(frozen=True, slots=True, repr=False)
class Result:
    """The result of one case at one size, precision and seed.

    Attributes:
        case: the case's name.
        precision: the precision's name.
        size: the case's size, as declared.
        size_label: the size as item ids show it, e.g. ``2x1024x512``.
        seed: the seed of weights, inputs and output gradients.
        backend: ``gpu`` for TE's compiled kernels, ``cpu`` for emulated ones.
        status: ``skipped`` and ``error`` come with a reason and without tensors.
        reason: why it was skipped or could not run, else empty.
        tensors: every compared tensor.
        findings: named causes of a failure.
        notes: what the comparison leaves unproven, even if it passed; one sentence each.
        seconds: wall time of the whole comparison.
        path: the file that declares the case.
        attention: the attention backends that TE ran, e.g. ``fused (F16_arbitrary_seqlen)``; empty if it ran none.
        forced_attention: the attention backend that TE had to use; empty if it could choose.
        determinism: whether the candidate, built again, gives the same bytes; None if that was not asked for.
        device_error: what happened to the device meanwhile, see ``parity.te.devices``; empty if nothing did.
        traceback: where a part of the pair raised, from the user's code on; empty if none did.
        cut_short: whether the comparison was cut short because the run was interrupted or a process ended, so that a
            resumed run repeats it.
        steps: the steps of a training, as far as it got; empty for a single pass.
        stages: the stages of the pass, if they were asked for.
        ranks: the ranks that computed the candidate, such as ``tp2-sp``; empty for one process.
        equals: the precision without a recipe that this one equals, since nothing in the pass was quantized; empty if
            something was, or if that was not watched, as in trainings and over ranks.
        formats: the formats that TE's modules really computed in, at a precision with a recipe; empty if that was not
            watched, as in trainings and over ranks, and in older records.
    """

    case: str
    precision: str
    size: dict[str, Any]
    size_label: str
    seed: int
    backend: str
    status: Status
    reason: str = ""
    tensors: tuple[TensorResult, ...] = ()
    findings: tuple[Finding, ...] = ()
    notes: tuple[str, ...] = ()
    seconds: float = 0.0
    path: str = ""
    attention: str = ""
    forced_attention: str = ""
    determinism: Determinism | None = None
    device_error: DeviceError = ""
    traceback: str = ""
    cut_short: bool = False
    steps: tuple[Step, ...] = ()
    stages: tuple[StageResult, ...] = ()
    ranks: str = ""
    equals: str = ""
    formats: tuple[ModuleFormats, ...] = ()

    def __repr__(self) -> str:
        told = self.reason or ("within its limits" if self.within_limits else f"margin {self.margin:.3g}")
        names = ", ".join(finding.name for finding in self.findings)
        return f"<Result {self.item}, seed {self.seed}: {self.status}, {told}{names and f'; {names}'}>"

    def explain(self) -> str:
        """Return the verdict in words: what is wrong, where and why, with the evidence, or what a pass leaves open."""
        return str(_load_reports().explain(self))

    def _repr_html_(self) -> str:
        """Return what notebooks show: the verdict in words, and where the worst tensor errs."""
        return str(_load_reports().draw(self))

    @property
    def passed(self) -> bool:
        """Return whether every tensor stayed within its tolerance; never true for a skip or an error."""
        return self.status == "passed"

    @property
    def within_limits(self) -> bool:
        """Return whether it failed although no tensor is beyond its limits, so that its margin says nothing."""
        return self.status == "failed" and not self.margin > 1.0

    @property
    def margin(self) -> float:
        """The largest margin over all tensors; NaN if nothing was compared."""
        return max((tensor.margin for tensor in self.tensors), default=math.nan)

    @property
    def worst(self) -> TensorResult | None:
        """The tensor with the largest margin."""
        return max(self.tensors, key=lambda tensor: tensor.margin, default=None)

    @property
    def item(self) -> str:
        """``layernorm_mlp_swiglu[bf16-2x1024x512]``: the id without its file."""
        return item_name(self.case, self.precision, self.size_label, self.forced_attention)


def _load_reports() -> Any:
    """Return what explains results. Results need it only when somebody looks at one; it is built from them."""
    return importlib.import_module("parity.report.explained")


def strictly(result: Result) -> Result:
    """Return an error in place of a result that proves nothing: a skip, or a pass with a note that says so."""
    nothing = [note for note in result.notes if result.passed and isinstance(note, ProvesNothing)]
    if result.status != "skipped" and not nothing:
        return result
    reason = "; ".join(filter(None, (result.reason, *nothing)))
    return dataclasses.replace(result, status="error", reason=f"{reason} (an error because of --strict)", tensors=())


def label_of(kind: Kind, name: str) -> str:
    """Return ``output``, ``probed output``, ``reweighed output``, ``d input`` or ``d up_proj.weight``."""
    if kind.endswith("gradient"):
        return f"d {name}"
    return f"{kind.removesuffix('output')}{name}"


def item_name(case: str, precision: str, size_label: str, forced_attention: str = "") -> str:
    """Return ``attention_causal_mha[bf16-2x128x8x64-fused]``; without the last part if TE chooses its attention."""
    forced = f"-{forced_attention}" if forced_attention else ""
    return f"{case}[{precision}-{size_label}{forced}]"


Part = TypeVar("Part")


def as_printable(part: Part) -> Part:
    """Return the same result, or part of one, with texts that a terminal can show and a file can hold.

    Names of outputs and messages of exceptions come from users' code and may contain anything.
    """
    value: Any = part
    if isinstance(value, str):
        value = type(value)(printable(value))
    elif type(value) in (tuple, list):
        value = type(value)(map(as_printable, value))
    elif type(value) is dict:
        value = {as_printable(key): as_printable(entry) for key, entry in value.items()}
    elif type(value).__module__ == __name__:
        before = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        after = {name: as_printable(entry) for name, entry in before.items()}
        value = value if after == before else dataclasses.replace(value, **after)
    return cast(Part, value)


def label_of_way(size_label: str, steps: int = 0, switch: Switch = "", ranks: str = "", decoding: bool = False) -> str:
    """Return the label of a size with a training's steps and switch, the ranks, or that it decodes."""
    way = (f"steps{steps}" if steps else "", switch if steps else "", ranks, "decoding" if decoding else "")
    return "-".join(filter(None, (size_label, *way)))


def to_json(result: Result) -> dict[str, Any]:
    """Return a dict of JSON types; a number that JSON lacks becomes, for example, ``{"float": "inf"}``."""
    return _encode_non_finite(dataclasses.asdict(result))


def from_json(record: dict[str, Any]) -> Result:
    """Return the result that ``to_json`` was given; fields that this version does not know are left out.

    Raises:
        pydantic.ValidationError: if a field is missing or of another type; it is a ``ValueError``.
    """
    return _make_schema().validate_python(_decode_non_finite(record))


@functools.cache
def _make_schema() -> TypeAdapter[Result]:
    return TypeAdapter(Result)  # as slow to make as a hundred results are to read, and most processes read none


_NON_FINITE = {"inf": math.inf, "-inf": -math.inf, "nan": math.nan}


def _encode_non_finite(value: Any) -> Any:
    """Replace NaN and the infinities, for which JSON has no numbers, by ``{"float": "nan"}`` and the like."""
    if isinstance(value, float) and not math.isfinite(value):
        return {"float": str(value)}
    if isinstance(value, dict):
        return {key: _encode_non_finite(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [_encode_non_finite(entry) for entry in value]
    return value


def _decode_non_finite(value: Any) -> Any:
    if isinstance(value, dict):
        if value.keys() == {"float"} and value["float"] in _NON_FINITE:
            return _NON_FINITE[value["float"]]
        return {key: _decode_non_finite(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [_decode_non_finite(entry) for entry in value]
    return value
