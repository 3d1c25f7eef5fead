"""Run golden, the rounding model and the candidate over the same inputs, each as named tensors."""

from __future__ import annotations

import dataclasses
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from parity.case import transfer
from parity.case.case import Case, Pair, Rng, draw_inputs
from parity.case.transfer import separate_norms
from parity.case.validate import CheckedSize
from parity.case.weight_map import WeightMap, names
from parity.numerics.aten import Phase, address
from parity.numerics.errors import GoldenTensor
from parity.numerics.formats import Rounding
from parity.numerics.freedom import FUSED, Choice, Choices, Freedom, KinkSides
from parity.numerics.golden import in_fp64
from parity.numerics.kernel_choices import as_read
from parity.numerics.rounding import rounded
from parity.numerics.storing import OperandsRead, Stored, Watch
from parity.passes.draws import ScaledLookups
from parity.passes.one_pass import Pass, outputs_of, run
from parity.passes.prepare import Cache, Prepared, build, cast, cast_module, on_device, size_in_bytes
from parity.result import PROBED, Kind
from parity.te.debug_features import SeenFeatures
from parity.te.state import check, fresh_caches, fresh_quantization, moved, settled
from parity.trace.effects import attributes_of, changed_attributes
from parity.trace.whose import is_of_te
from parity.user_error import UserError

if TYPE_CHECKING:
    from parity.te import Kernels, Precision

# Noise on the FP32 inputs of a jittered pass, as large as that on any tensor that is stored in FP32.
#
# A norm rounds the mean and the root that it computes of its inputs to FP32 before it stores anything, and both depend
# on the order of the sums. If the mean is much larger than the deviations from it, one such rounding changes a whole
# row.


_STEP = torch.finfo(torch.float32).eps


def jittered(inputs: Any, rounding: Rounding, freedom: Freedom) -> Any:
    """Return FP32 inputs or cotangents with noise of up to two roundoffs, or unchanged in a pass without jitter.

    Whole numbers stay exact, because code compares floating-point flags and positions with them.
    """
    if freedom.jitter is None or rounding.storage is not torch.float32:
        return inputs
    noise = torch.Generator().manual_seed(freedom.jitter)

    def jitter(x: Tensor) -> Tensor:
        if not x.is_floating_point():
            return x
        uniform = 2.0 * torch.rand(x.shape, generator=noise).to(x.device) - 1.0
        return torch.where(x == x.round(), x, x * (1.0 + _STEP * uniform)).detach().requires_grad_(x.requires_grad)

    return tree_map_only(Tensor, jitter, inputs)


# The passes of a comparison besides golden, which are the rounding model's and the candidate's, as named tensors.


# TE concatenates these three weights (``noop_cat`` in ``pytorch/module/layernorm_linear.py`` of 2.20.2).
_SEPARATE_QKV = re.compile(r"(query|key|value)_weight$")

Tensors = dict[tuple[Kind, str], Tensor]


@dataclass
class Recalled:
    """The state that a candidate keeps between calls, as shown by calls before and after its pass.

    Attributes:
        changed: names of the attributes that its pass changed, without those of TE's own modules.
        before: its outputs on other inputs of the pair, in a call before the pass; empty if probing inputs follow the
            pass, or scales come from earlier passes.
        after: its outputs on the same other inputs, in a call after the pass; empty if ``before`` is.
    """

    changed: list[str] = field(default_factory=list)
    before: dict[str, Tensor] = field(default_factory=dict)
    after: dict[str, Tensor] = field(default_factory=dict)


def tensors_of(ran: Pass) -> Tensors:
    """Return all tensors of a pass by kind and name."""
    tensors: Tensors = {("output", name): tensor for name, tensor in ran.outputs.items()}
    tensors.update({("input gradient", name): tensor for name, tensor in ran.input_gradients.items()})
    tensors.update({("weight gradient", name): tensor for name, tensor in ran.weight_gradients.items()})
    return tensors


def golden_tensors(prepared: Prepared) -> Tensors:
    """Return the golden tensors on the inputs and on the probing inputs."""
    return tensors_of(prepared.golden) | _label_probed_outputs(prepared.probed)


def golden_truths(prepared: Prepared) -> dict[tuple[Kind, str], GoldenTensor]:
    """Return the golden tensors in the form that judging needs, kept for the next precision."""
    return prepared.cache.get(
        "truths",
        lambda: {key: GoldenTensor(tensor) for key, tensor in golden_tensors(prepared).items()},
        lambda truths: sum(truth.bytes_kept for truth in truths.values()),
    )


def _label_probed_outputs(outputs: dict[str, Tensor]) -> Tensors:
    return {(PROBED, name): output.detach() for name, output in outputs.items()}


def model_tensors(prepared: Prepared, rounding: Rounding, freedom: Freedom) -> Tensors:
    """Return the tensors of ``run_model``, kept because another precision may round alike.

    FP8 recipes with one scale per tensor do.
    """

    def run_and_chosen() -> tuple[Tensors, list[Tensor]]:
        choices = following(prepared, rounding)
        return run_model(prepared, rounding, freedom, choices=choices), [one.outcome for one in choices.own]

    kept = prepared.cache.group("models", rounding)
    return kept.get((freedom, prepared.wide, prepared.made), run_and_chosen, size_in_bytes)[0]


def rounding_chooses(prepared: Prepared, rounding: Rounding) -> bool:
    """Return whether a run of ``model_tensors`` with this rounding made other choices than a run without rounding."""
    exact = [one.outcome for one in choices_in(prepared, rounding)]
    runs = [outcomes for _, outcomes in prepared.cache.group("models", rounding).values()]
    return any(len(run) != len(exact) or not all(map(torch.equal, run, exact)) for run in runs)


def choices_in(prepared: Prepared, rounding: Rounding) -> list[Choice]:
    """Return the choices of a run of the model without rounding, if those with this rounding made any."""
    runs = prepared.cache.group("models", rounding).values()
    return unrounded_choices(prepared) if any(outcomes for _, outcomes in runs) else []


def unrounded_choices(prepared: Prepared) -> list[Choice]:
    """Return the choices of a run of the model without rounding, kept for the next precision."""

    def exact() -> list[Choice]:
        choices = Choices()
        run_model(prepared, Rounding(torch.float32), FUSED, choices=choices)
        return choices.own

    return prepared.cache.get(("unrounded choices", id(prepared.inputs)), exact, size_in_bytes)


def following(prepared: Prepared, rounding: Rounding, exact: Sequence[Choice] | None = None) -> Choices:
    """Return the choices for a run of the model, which follows those that the port was seen to make.

    Args:
        exact: the choices of a run without roundings, if it differs from the reference's.
    """
    if exact is None and prepared.made:
        exact = unrounded_choices(prepared)
    return Choices(prepared.made, exact or (), torch.finfo(rounding.storage).eps / 4)


def as_returned(prepared: Prepared, candidate: Tensors) -> Prepared:
    """Return ``prepared`` with the names of the outputs that a candidate returned in a wider dtype."""
    wide = (key for key, x in candidate.items() if returned_dtype(key[0], x, prepared.dtype) is not prepared.dtype)
    return dataclasses.replace(prepared, wide=frozenset(wide))


def returned_dtype(kind: Kind, tensor: Tensor, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype to which a port that computes in ``dtype`` rounds a tensor last.

    For an output in a wider dtype, that is its own. A gradient's dtype is the choice of autograd or of a trainer's
    buffer, and does not tell how the gradient was rounded before.
    """
    is_wider = torch.finfo(tensor.dtype).bits > torch.finfo(dtype).bits
    return tensor.dtype if is_wider and not kind.endswith("gradient") else dtype


def run_model(
    prepared: Prepared,
    rounding: Rounding,
    freedom: Freedom,
    kinks: KinkSides | None = None,
    choices: Choices | None = None,
    watch: Watch | None = None,
) -> Tensors:
    """Run the reference in FP32 under the rounding model, and round its results to the dtypes that the port returns.

    ``kinks`` and ``watch`` belong to the pass that has gradients, ``choices`` to both passes; None to follow those of
    the port. With a rounding to FP64, nothing but operands is rounded.
    """
    choices, stored = choices or following(prepared, rounding), Stored()
    dtype = torch.promote_types(rounding.storage, torch.float32)
    exact = in_fp64 if dtype is torch.float64 else nullcontext
    cast_module(prepared.reference, dtype)

    def given(tensors: Any) -> Any:
        """Return tensors of the port's dtype in the model's."""
        widened = jittered(cast(tensors, dtype), rounding, freedom)
        if rounding.storage is prepared.dtype:
            tree_map_only(Tensor, stored.add, widened)
        return widened

    cotangents = given(prepared.cotangents)
    model = under_model(prepared, rounding, freedom, kinks, choices, stored, watch)
    with exact(), model as phase, separate_norms(prepared.reference, prepared.weights):
        ran = run(
            prepared.reference,
            prepared.call,
            given(prepared.inputs),
            prepared.input_names,
            lambda outputs: {name: cotangents[name].to(output.dtype) for name, output in outputs.items()},
            before_backward=phase.begin_backward,
            differentiated=not prepared.evaluation,
        )
    model_numbers(prepared, rounding)[freedom] = ran.numbers
    tensors = tensors_of(ran)
    prepared.reference.zero_grad(set_to_none=True)  # frees a model's size of memory before the next pass
    if prepared.probed:
        with exact(), under_model(prepared, rounding, freedom, choices=choices, stored=stored):
            inputs = tree_map_only(Tensor, as_activation, given(prepared.probe))
            tensors |= _label_probed_outputs(outputs_of(prepared.reference, prepared.probe_call, inputs))
    as_they_are = {key for key, tensor in tensors.items() if key in prepared.wide or tensor in stored}
    returned = {key: x if key in as_they_are else rounding.store_part(x) for key, x in tensors.items()}
    return {
        key: _narrow_if_lossless(x, rounding.storage) if key[0] == "weight gradient" else x
        for key, x in returned.items()
    }


def with_golden_under(prepared: Prepared, rounding: Rounding) -> Prepared:
    """Return a copy whose golden rounds operands as a recipe does, with everything else in FP64."""
    tensors = run_model(prepared, rounding.of_golden, FUSED)
    outputs, probed, inputs, weights = (
        {name: x for (kind, name), x in tensors.items() if kind == wanted}
        for wanted in ("output", PROBED, "input gradient", "weight gradient")
    )
    golden = dataclasses.replace(prepared.golden, outputs=outputs, input_gradients=inputs, weight_gradients=weights)
    return dataclasses.replace(prepared, golden=golden, probed=probed, cache=Cache())


def _narrow_if_lossless(gradient: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a gradient in the dtype that it was rounded to if that is lossless, to save memory."""
    narrow = gradient.to(dtype)
    return narrow if torch.equal(narrow.to(gradient.dtype), gradient) else gradient


def model_numbers(prepared: Prepared, rounding: Rounding) -> dict[Freedom, dict[str, float]]:
    """Return the Python numbers that the passes with this rounding returned, by the freedom of each pass."""
    return prepared.cache.get(("numbers", rounding), dict[Freedom, dict[str, float]])


def under_model(
    prepared: Prepared,
    rounding: Rounding,
    freedom: Freedom,
    kinks: KinkSides | None = None,
    choices: Choices | None = None,
    stored: Stored | None = None,
    watch: Watch | None = None,
) -> AbstractContextManager[Phase]:
    """Make the reference in FP32 round and choose as the port's kernels do, within the context."""
    parameters = dict(prepared.reference.named_parameters())
    is_spared = rounding.quantizes  # without a recipe, TE's modules read FP32 as TF32 as always
    plain = [parameters[name] for name in prepared.outside_te | (prepared.unquantized if is_spared else frozenset())]
    roles = [(parameters[name], role) for name, role in prepared.roles.items()]
    changed = [
        (parameters[name], prepared.changed[held])
        for left, right in prepared.weights.items()
        for held in names(right)
        if held in prepared.changed and rounding != Rounding(torch.float32)
        for name in names(left)
    ]
    together = [[parameters[name] for name in group] for group in weights_in_one_tensor(prepared.weights)]
    # If one tensor holds the weights of several experts, each expert has an amax of its own.
    prepared.past.names = {address(one): name for name, one in parameters.items() if one.dim() == 2}
    prepared.past.held = {address(parameters[name]) for name in prepared.quantized}
    read = _weights_read(prepared, as_read(rounding, freedom.kernels))
    choices = choices or following(prepared, rounding)
    rest = kinks, read, choices, stored, prepared.past, watch
    return rounded(rounding, parameters.values(), freedom, together, plain, roles, changed, *rest)


def _weights_read(prepared: Prepared, rounding: Rounding) -> OperandsRead:
    """Return the weights as passes with this rounding read them, kept until the rounding or the weights change."""
    now = rounding, tuple(parameter.data_ptr() for parameter in prepared.reference.parameters())
    return prepared.cache.group("weights read", now).get("operands", OperandsRead, lambda read: read.held)


def weights_in_one_tensor(weight_map: WeightMap) -> list[list[str]]:
    """Group the reference's parameters that TE holds in one tensor, or concatenates before it quantizes them."""
    groups: dict[str, list[str]] = defaultdict(list)
    for left, right in weight_map.items():
        for name in names(right):
            groups[_SEPARATE_QKV.sub("qkv_weight", name)] += names(left)
    return [group for group in groups.values() if len(group) > 1]


def as_activation(x: Tensor) -> Tensor:
    """Return a tensor that requires a gradient, like the drawn inputs: what depends on it counts as an activation."""
    return x.detach().requires_grad_() if x.is_floating_point() else x


@fresh_caches()
@fresh_quantization()
def run_candidate(
    case: Case,
    checked: CheckedSize,
    prepared: Prepared,
    precision: Precision,
    seed: int,
    kernels: Kernels,
    change: Callable[[nn.Module], None] = lambda module: None,
    seen: Callable[[Pass], None] | None = None,
    recalled: Recalled | None = None,
    alone: bool = False,
    watching: Callable[[nn.Module], AbstractContextManager[None]] | None = None,
) -> tuple[Tensors, tuple[str, ...]]:
    """Return the candidate's tensors in the reference's layout, and the TE parameters that no gradient reached.

    ``change`` is called with the newly built module before it runs, and ``seen`` with its pass. ``recalled`` is filled
    in. If it is given and there are no probing inputs, the module is called on other inputs before the pass, which
    exposes a module that keeps what it computed from them. With ``alone``, probing inputs get a new module.
    ``watching`` makes the context of each forward pass on the pair's inputs, the last of which is the one compared.
    """
    built = prepared.cache.take("pair", lambda: build(case, checked, seed, kernels))
    pair = with_weights(built, prepared, precision)
    candidate = pair.candidate
    change(candidate)
    parameters = dict(candidate.named_parameters())
    features = SeenFeatures()

    @contextmanager
    def called() -> Iterator[None]:
        with _as_called(prepared, precision, kernels), watching(candidate) if watching else nullcontext():
            yield

    def once() -> Pass:
        return run(
            candidate,
            pair.call_candidate,
            prepared.inputs,
            prepared.input_names,
            lambda outputs: _fit_cotangents(prepared.cotangents, outputs),
            forward_context=called(),
            watch_inputs=seen is not None,
            differentiated=not prepared.evaluation,
        )

    def on_others() -> dict[str, Tensor]:
        with _as_called(prepared, precision, kernels):
            others = _other_inputs(pair, checked, prepared, seed, kernels)
            outputs = outputs_of(candidate, pair.call_candidate, tree_map_only(Tensor, as_activation, others))
        return {name: output.detach().clone() for name, output in outputs.items()}

    def untrained() -> None:
        """Give the module its weights again if a call has changed them, as an optimizer's step does."""
        if versions != [parameter._version for parameter in parameters.values()]:
            transfer.fill(candidate, prepared.candidate_weights)

    versions = [parameter._version for parameter in parameters.values()]
    called_before = recalled is not None and not prepared.probed
    state = attributes_of(candidate)
    before = on_others() if called_before else {}
    if called_before:
        untrained()
    with features.watched(candidate):
        ran = _run_until_settled(candidate, once, precision)
    prepared.note_changed(features.formats)
    if seen is not None:
        seen(ran)
    if recalled is not None:
        recalled.changed = _not_of_te(changed_attributes(candidate, state), candidate)
    if recalled is not None and called_before and not precision.warmup_passes:
        untrained()
        recalled.before, recalled.after = before, on_others()
    gradients = {
        name: ran.weight_gradients[name] if name in ran.weight_gradients else torch.zeros_like(parameter)
        for name, parameter in parameters.items()
    }
    frozen = tuple(name for name, parameter in parameters.items() if not parameter.requires_grad)
    shapes = transfer.parameter_shapes(prepared.reference)
    in_reference_layout = {} if pair.evaluation else transfer.gradients_to_reference(pair.weights, gradients, shapes)
    outputs = _shape_like_golden(ran.outputs, prepared.golden.outputs)
    tensors = tensors_of(dataclasses.replace(ran, outputs=outputs, weight_gradients=in_reference_layout))
    if prepared.probed:
        if alone or precision.warmup_passes:  # scales that come from other inputs would not fit these
            pair = with_weights(build(case, checked, seed, kernels), prepared, precision)
            change(pair.candidate)
        tensors |= _label_probed_outputs(
            _shape_like_golden(_probe_candidate(pair, prepared, precision, kernels), prepared.probed)
        )
    return tensors, ran.unreached + frozen


@contextmanager
def _as_called(prepared: Prepared, precision: Precision, kernels: Kernels) -> Iterator[None]:
    """Set the recipe, and in evaluation mode switch off gradients, so that a candidate is called as its users do."""
    with torch.set_grad_enabled(not prepared.evaluation), precision.autocast(kernels):
        yield


_Ran = TypeVar("_Ran")


def _run_until_settled(candidate: nn.Module, once: Callable[[], _Ran], precision: Precision) -> _Ran:
    """Return the first pass whose scales fit its own numbers.

    In evaluation mode TE keeps the scales that a training left. So they settle in training mode.
    """
    if candidate.training or not precision.warmup_passes:
        return settled(once, precision.warmup_passes)
    candidate.train()
    settled(once, precision.warmup_passes)
    candidate.eval()
    return once()


def _other_inputs(pair: Pair, checked: CheckedSize, prepared: Prepared, seed: int, kernels: Kernels) -> Any:
    """Return inputs drawn from another random stream of the seed, or the same inputs again if the shapes differ."""
    drawn = draw_inputs(pair, checked.size, Rng(seed, "inputs of another call"))
    others = cast(on_device(drawn, kernels.device), prepared.dtype)
    alike = _list_shapes(others) == _list_shapes(prepared.inputs)
    return others if alike else prepared.inputs


def _list_shapes(inputs: Any) -> list[Any]:
    return [x.shape if isinstance(x, Tensor) else x for x in tree_leaves(inputs)]


def _not_of_te(attributes: list[str], module: nn.Module) -> list[str]:
    of_te = {name for name, part in module.named_modules() if is_of_te(type(part))}
    return [attribute for attribute in attributes if attribute.rpartition(".")[0] not in of_te]


def with_weights(pair: Pair, prepared: Prepared, precision: Precision) -> Pair:
    """Return the pair with its candidate in the precision's dtype, holding the prepared weights or its own."""
    check(moved(pair.candidate, dtype=precision.dtype), precision)
    if pair.fill is not False:
        transfer.fill(pair.candidate, prepared.candidate_weights)
    return pair


def _probe_candidate(pair: Pair, prepared: Prepared, precision: Precision, kernels: Kernels) -> dict[str, Tensor]:
    """Return the candidate's outputs on the probing inputs; none if it looks up other rows than the reference."""
    scaled = ScaledLookups(prepared.dtype, prepared.evaluation)
    call = scaled.around(pair.call_candidate) if prepared.lookups else pair.call_candidate

    def once() -> dict[str, Tensor]:
        with _as_called(prepared, precision, kernels):
            return outputs_of(pair.candidate, call, tree_map_only(Tensor, as_activation, prepared.probe))

    outputs = _run_until_settled(pair.candidate, once, precision)
    return outputs if scaled.seen == prepared.lookups else {}


def _fit_cotangents(cotangents: dict[str, Tensor], outputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the cotangents in the candidate's dtype.

    Raises:
        UserError: if the candidate's outputs differ in number or shape from the reference's.
    """
    reference = {name: tuple(cotangent.shape) for name, cotangent in cotangents.items()}
    candidate = {name: tuple(output.shape) for name, output in outputs.items()}
    fit = reference.keys() == candidate.keys() and all(_is_as(candidate[name], reference[name]) for name in reference)
    if not fit:
        raise UserError(
            f"the candidate returns {candidate} where the reference returns {reference}; "
            "bring them to one shape in the pair's call_candidate or call_reference"
        )
    return {name: cotangents[name].to(output.dtype).view(output.shape) for name, output in outputs.items()}


def _is_as(shape: tuple[int, ...], reference: tuple[int, ...]) -> bool:
    """Return whether two shapes are the same, where ``[1]`` equals ``[]`` because TE returns a mean loss as ``[1]``."""
    return shape == reference or {shape, reference} == {(), (1,)}


def _shape_like_golden(outputs: dict[str, Tensor], golden: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the outputs, with single numbers in the shape in which the reference returns them."""
    return {
        name: x.view(golden[name].shape) if name in golden and _is_as(tuple(x.shape), tuple(golden[name].shape)) else x
        for name, x in outputs.items()
    }
