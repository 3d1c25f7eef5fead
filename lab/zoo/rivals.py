"""The rules by which other projects compare tensors. Each says whether it rejects a tensor."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from parity.case.case import Case
from parity.case.validate import CheckedSize
from parity.passes import all_passes
from parity.passes.one_pass import outputs_of, run
from parity.passes.prepare import Prepared, cast, cast_module
from parity.result import PROBED, Kind
from parity.te import Kernels, Precision

# The tensors that the rules judge: those of a candidate, of its golden reference and of low-precision PyTorch.


# Tensors by labels such as ``output``, ``probed output`` or ``d up_proj.weight``.
Tensors = dict[str, Tensor]


def candidate(
    case: Case, checked: CheckedSize, prepared: Prepared, precision: Precision, seed: int, kernels: Kernels
) -> Tensors:
    """Return the candidate's tensors, in the reference's layout and in the dtypes that the candidate returns."""
    tensors, _ = all_passes.run_candidate(case, checked, prepared, precision, seed, kernels)
    return {
        _label(*key): tensor.to(precision.dtype) if key[0] == "weight gradient" else tensor
        for key, tensor in tensors.items()
    }


def golden(prepared: Prepared) -> Tensors:
    """Return the reference's tensors in FP64."""
    return _labelled(all_passes.golden_tensors(prepared))


def low_precision(prepared: Prepared, dtype: torch.dtype) -> Tensors:
    """Return the reference's tensors as plain PyTorch computes them in a dtype, FP32 without TF32 as by default."""
    module = cast_module(copy.deepcopy(prepared.reference), dtype)
    ran = run(
        module,
        prepared.call,
        cast(prepared.inputs, dtype),
        prepared.input_names,
        lambda outputs: {name: prepared.cotangents[name].to(output.dtype) for name, output in outputs.items()},
    )
    tensors = _labelled(all_passes.tensors_of(ran))
    if prepared.probed:
        with torch.no_grad():
            outputs = outputs_of(module, prepared.probe_call, cast(prepared.probe, dtype))
        tensors |= {_label(PROBED, name): output for name, output in outputs.items()}
    return tensors


def difference(one: Tensors, other: Tensors) -> Tensors:
    """Return ``one - other`` in FP64, without the tensors in which it is not finite."""
    differences = {name: tensor.double() - other[name].double() for name, tensor in one.items()}
    return {name: tensor for name, tensor in differences.items() if bool(tensor.isfinite().all())}


def is_output(label: str) -> bool:
    """Return whether a tensor is an output, probed or not; the others are gradients."""
    return not label.startswith("d ")


def _labelled(tensors: all_passes.Tensors) -> Tensors:
    return {_label(*key): tensor for key, tensor in tensors.items()}


def _label(kind: Kind, name: str) -> str:
    if kind == PROBED:
        return f"probed {name}"
    return name if kind == "output" else f"d {name}"


# The rules of other projects. Each says whether it rejects a tensor.
#
# All of them see the same tensors as parity does. PyTorch has no FP8 modules, so under a quantizing recipe the
# low-precision reference is the reference in BF16.


@dataclass(frozen=True)
class Compared:
    """The tensors that a rule judges, with what it needs to know about them.

    Attributes:
        candidate: the port's tensors, by name.
        golden: the reference's tensors in FP64.
        low_precision: the reference's tensors as plain PyTorch computes them in the precision's dtype.
        precision: the candidate's precision.
        module: the class name of the TE module, see ``module_of``.
    """

    candidate: Tensors
    golden: Tensors
    low_precision: Tensors
    precision: Precision
    module: str


Rule = Callable[[Compared, str], bool]


def assert_close_rejects(compared: Compared, name: str) -> bool:
    """Apply ``torch.testing.assert_close`` with its default tolerances by dtype, against low-precision PyTorch."""
    candidate = compared.candidate[name]
    try:
        torch.testing.assert_close(candidate, compared.low_precision[name].to(candidate.dtype))
    except AssertionError:
        return True
    return False


def te_tests_reject(compared: Compared, name: str) -> bool:
    """Apply the tolerances of TE's own tests, against low-precision PyTorch.

    Source: ``tests/pytorch/test_numerics.py`` (commit 00c727f) by module and dtype, and for a recipe
    ``quantization_tols`` of ``tests/pytorch/utils.py`` (commit 009e651).
    """
    atol, rtol = _te_tolerances(compared, is_output(name))
    expected = compared.low_precision[name].double()
    distance = (compared.candidate[name].double() - expected).abs()
    return not bool((distance <= atol + rtol * expected.abs()).all())


def twice_error_rejects(compared: Compared, name: str) -> bool:
    """Return whether the largest error exceeds twice that of low-precision PyTorch plus 3e-5, or 40 times for a recipe.

    Source: flash-attention, ``hopper/test_flash_attn.py`` as of 2024, which has 40 for FP8.
    """
    golden = compared.golden[name]
    error, reference_error = (
        (tensors[name].double() - golden).abs().max().item() for tensors in (compared.candidate, compared.low_precision)
    )
    bound = 40 * reference_error if compared.precision.recipe else 2 * reference_error + 3e-5
    return not error <= bound


def rmse_rejects(compared: Compared, name: str) -> bool:
    """Apply PyTorch's check of compiled benchmarks: reject an RMSE against FP64 above 2 or 3 times the reference's own.

    Source: ``torch._dynamo.utils.same`` (torch 2.8) with its defaults. A tensor that ``torch.allclose`` accepts at 1e-4
    passes. The factor is 3 for 16-bit dtypes and for fewer than 1000 elements.
    """
    candidate, golden, reference = (
        tensors[name].double() for tensors in (compared.candidate, compared.golden, compared.low_precision)
    )
    if torch.allclose(reference, candidate, atol=_RMSE_TOLERANCE, rtol=_RMSE_TOLERANCE):
        return False
    generous = compared.candidate[name].dtype in (torch.float16, torch.bfloat16) or golden.numel() < 1000
    bound = (3.0 if generous else 2.0) * _rmse(golden, reference) + _RMSE_TOLERANCE / 10
    return not _rmse(golden, candidate) <= bound


RULES: dict[str, Rule] = {
    "assert_close": assert_close_rejects,
    "TE's tests": te_tests_reject,
    "2x error": twice_error_rejects,
    "RMSE": rmse_rejects,
}


def rejected(rule: Rule, compared: Compared) -> tuple[str, ...]:
    """Return the names of the tensors that the rule rejects. A single one is enough to reject the port."""
    return tuple(name for name in compared.golden if rule(compared, name))


def rejects(rule: Rule, compared: Compared) -> bool:
    """Return whether the rule rejects the port."""
    return bool(rejected(rule, compared))


def module_of(candidate: nn.Module) -> str:
    """Return the class name of the largest module in the candidate for which TE's tests have tolerances.

    Raises:
        ValueError: if there is none.
    """
    classes = {type(module).__name__ for module in candidate.modules()}
    known = [name for name in _BY_MODULE if name in classes]
    if not known:
        raise ValueError(f"no test of TE's has tolerances for any of {', '.join(sorted(classes))}")
    return known[0]


_RMSE_TOLERANCE = 1e-4
_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
# dtype_tols: relative tolerances where a test names only an absolute one.
_RTOL = (1.3e-6, 1e-3, 1.6e-2)
# For outputs and for gradients: absolute and relative tolerances in the order of _DTYPES; larger modules first.
_BY_MODULE: dict[str, tuple[tuple[tuple[float, ...], tuple[float, ...]], ...]] = {
    "TransformerLayer": (((5e-3, 5e-2, 1e-1), _RTOL), ((5e-2, 5e-2, 1e-1), (1e-2, 1e-2, 1e-2))),
    "MultiheadAttention": (((5e-3, 5e-2, 5e-2), _RTOL), ((5e-2, 5e-2, 5e-2), (1e-2, 1e-2, 1e-2))),
    "LayerNormMLP": (((2e-2, 5e-2, 5e-2), (1e-3, 4e-2, 4e-2)), ((2e-2, 2e-1, 2e-1), (1e-3, 1e-2, 4e-2))),
    "DotProductAttention": (((5e-3, 5e-2, 5e-2), _RTOL), ((5e-2, 5e-2, 5e-2), (1e-2, 1e-2, 1e-2))),
    "LayerNormLinear": (((2.5e-4, 2e-3, 2e-2), (1e-3, 4e-2, 4e-2)), ((1e-3, 5e-2, 5e-2), (1e-3, 4e-2, 4e-2))),
    "Linear": (((5e-3, 5e-2, 5e-2), (1.3e-6, 1e-2, 2e-2)),) * 2,
    "RMSNorm": (((1e-7, 2e-3, 2e-2), _RTOL), ((2e-3, 2e-3, 2e-2), _RTOL)),
    "LayerNorm": (((1e-7, 2e-3, 2e-2), _RTOL), ((1e-4, 2e-3, 2e-2), _RTOL)),
}
_E4M3, _E2M1 = (0.0675, 0.125), (0.125, 0.25)


def _te_tolerances(compared: Compared, output: bool) -> tuple[float, float]:
    """Return the absolute and the relative tolerance."""
    if compared.precision.recipe:
        return _E2M1 if compared.precision.name == "nvfp4" else _E4M3
    atol, rtol = _BY_MODULE[compared.module][0 if output else 1]
    at = _DTYPES.index(compared.precision.dtype)
    return atol[at], rtol[at]


def _rmse(golden: Tensor, x: Tensor) -> float:
    return (golden - x).square().mean().sqrt().item()
