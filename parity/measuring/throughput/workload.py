"""Build workloads: a case at a size, and the modules that compute it, with the same rounded weights and inputs."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from parity.case import registry, transfer
from parity.case.case import Case, Pair, Rng
from parity.case.files import folder as built_in_folder
from parity.case.validate import CheckedSize
from parity.numerics import errors
from parity.numerics.blocked_attention import Band
from parity.numerics.golden import in_fp64
from parity.passes import one_pass
from parity.passes.prepare import build, cast, rounded_inputs, share_rounded_weights, vary_constants
from parity.reference import CoreAttention
from parity.shown import one_line
from parity.te import Kernels, precision_named
from parity.te.state import moved
from parity.user_error import UserError

# The attention that a plain module is timed with: PyTorch's fused one, which anyone who cares about speed would use.
#
# The references of ``parity.reference`` write attention out, or compute long attention in blocks, to be readable and
# exact. As a baseline of speed they would make every port look good.


def with_fused_attention(module: nn.Module) -> nn.Module:
    """Return the module itself, in which every ``CoreAttention`` now calls ``F.scaled_dot_product_attention``."""
    for part in module.modules():
        if isinstance(part, CoreAttention):
            part.forward = functools.partial(_call_fused_attention, part)  # type: ignore[method-assign]
    return module


def _call_fused_attention(
    core: CoreAttention, query: Tensor, key: Tensor, value: Tensor, key_is_padding: Tensor | None = None
) -> Tensor:
    """Attend as ``CoreAttention`` does, and make a mask only if ``is_causal`` does not suffice."""
    is_causal = core.causal and core.window is None and key_is_padding is None
    mask = None
    if not is_causal and (core.causal or core.window is not None):
        band = Band(math.inf if core.window is None else core.window, 0 if core.causal else math.inf)
        mask = ~band.hidden(range(query.shape[1]), range(key.shape[1]), query.device)
    if key_is_padding is not None:
        seen = ~key_is_padding[:, None, None, :]
        mask = seen if mask is None else mask & seen
    has_groups = query.shape[2] != key.shape[2]
    query, key, value = (x.transpose(1, 2) for x in (query, key, value))
    context = F.scaled_dot_product_attention(query, key, value, mask, is_causal=is_causal, enable_gqa=has_groups)
    return context.transpose(1, 2).flatten(2)


# Workloads: a case at a size.


# The built-in cases that are timed by default, the most informative first, at the sizes of an 8-billion-parameter Llama
# (A. Grattafiori et al., "The Llama 3 Herd of Models", arXiv 2407.21783, table 3). The GPT layer is as wide.
_LLAMA = dict(hidden=4096, ffn=14336, heads=32, groups=8)
_LARGE: dict[str, list[dict[str, int]]] = {
    "transformer_layer_llama": [dict(batch=1, seq=4096, **_LLAMA), dict(batch=1, seq=8192, **_LLAMA)],
    "layernorm_mlp_swiglu": [dict(batch=2, seq=4096, hidden=4096, ffn=14336)],
    "linear": [dict(batch=2, seq=4096, in_features=4096, out_features=14336)],
    "attention_causal_gqa": [dict(batch=2, seq=4096, heads=32, groups=8, head_dim=128)],
    "multihead_attention_separate_qkv": [dict(batch=1, seq=4096, hidden=4096, heads=32, groups=8)],
    "layernorm_linear": [dict(batch=2, seq=4096, in_features=4096, out_features=6144)],
    "transformer_layer_gpt": [dict(batch=1, seq=4096, hidden=4096, ffn=16384, heads=32)],
    "rmsnorm": [dict(batch=2, seq=4096, hidden=4096)],
    "layernorm": [dict(batch=2, seq=4096, hidden=4096)],
}


@dataclass(frozen=True)
class Workload:
    """A case at one size, named so that another process finds it.

    Attributes:
        file: the file that declares the case.
        case: the case's name.
        size: the factory's keyword arguments.
    """

    file: Path
    case: str
    size: Mapping[str, Any]

    @property
    def size_text(self) -> str:
        """Return a text such as ``batch 1, seq 4096``."""
        return ", ".join(f"{name} {value}" for name, value in self.size.items()) or "-"

    @property
    def name(self) -> str:
        """Return a text such as ``linear (batch 1, seq 4096)``."""
        return f"{self.case} ({self.size_text})"

    def load(self) -> Case:
        """Load the case from its file.

        Raises:
            UserError: as for ``registry.load_case``.
        """
        return registry.load_case(self.file, self.case)


def built_in(large: bool) -> list[Workload]:
    """Return the default workloads, at large sizes or at the sizes at which the cases are compared."""
    files = sorted(built_in_folder().glob("[!_]*.py"))
    cases = {case.name: case for file in files for case in registry.load_file(file)}
    return [
        Workload(cases[name].path, name, size)
        for name, sizes in _LARGE.items()
        for size in (sizes if large else cases[name].sizes)
    ]


def declared(cases: Iterable[Case]) -> list[Workload]:
    """Return cases at the sizes that they declare."""
    return [Workload(case.path, case.name, size) for case in cases for size in case.sizes]


def select(workloads: Iterable[Workload], keyword: str) -> list[Workload]:
    """Return the workloads whose names contain one of the keyword's comma-separated words; an empty one selects all.

    Raises:
        UserError: if no name does.
    """
    found = list(workloads)
    words = [word.strip() for word in keyword.split(",")]
    chosen = [workload for workload in found if any(word in workload.name for word in words)]
    if not chosen:
        raise UserError(f"no workload has {keyword!r} in its name; one name is {found[0].name!r}")
    return chosen


# The implementations of a workload: the plain module, eager or compiled, and TE in each precision.


EAGER, COMPILED, TE = "eager", "compiled", "TE"
# The order in which dtypes are measured, the most common in training first, in case time runs out.
DTYPES = (torch.bfloat16, torch.float32, torch.float16)


@contextmanager
def allow_tf32(allowed: bool) -> Iterator[None]:
    """Let PyTorch compute FP32 products in TF32 on a GPU or forbid it, within the context."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if allowed else "highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


@dataclass(frozen=True)
class Implementation:
    """Compute a workload in one way.

    Attributes:
        kind: ``eager``, ``compiled`` or ``TE``.
        precision: see ``Row.precision``.
    """

    kind: str
    precision: str

    @property
    def peak_format(self) -> str | None:
        """Return the format whose peak bounds it, see ``Peak``, or None if no peak is measured.

        TE computes FP32 products in TF32 (``common/gemm/cublaslt_gemm.cu`` of 2.20.2).
        """
        if self.precision.startswith(("fp8", "mxfp8")):
            return "fp8"
        if self.precision == "nvfp4":
            return None
        return "tf32" if (self.kind, self.precision) == (TE, "fp32") else self.precision

    @property
    def dtype(self) -> torch.dtype:
        return torch.float32 if self.precision == "tf32" else precision_named(self.precision).dtype

    def forward_context(self, kernels: Kernels) -> contextlib.AbstractContextManager[None]:
        """Return a new context of a forward pass."""
        if self.kind == TE:
            return precision_named(self.precision).autocast(kernels)
        return contextlib.nullcontext()

    def passes_context(self) -> contextlib.AbstractContextManager[None]:
        """Return the context of all passes, the backward ones too."""
        return allow_tf32(True) if self.precision == "tf32" else contextlib.nullcontext()

    @property
    def warmup(self) -> int:
        """Return the number of passes before the timed ones."""
        return 3 + (precision_named(self.precision).warmup_passes if self.kind == TE else 0)


def implementations(precisions: Sequence[str], compiled: Sequence[str], on_gpu: bool) -> Iterator[Implementation]:
    """Yield the implementations in these precisions, ordered by dtype.

    The plain FP32 module is measured in PyTorch's default, where products are in FP32, and on a GPU also in TF32, which
    is what TE computes in.

    Args:
        precisions: their names in ``parity.te``.
        compiled: the precisions in which the plain module is also compiled; ``fp32`` stands for ``tf32`` too.
        on_gpu: whether they run on a GPU.
    """
    for dtype in DTYPES:
        of_dtype = [name for name in precisions if precision_named(name).dtype is dtype]
        plain = [name for name in of_dtype if precision_named(name).recipe is None]
        if "fp32" in plain and on_gpu:
            plain.append("tf32")
        yield from (Implementation(EAGER, name) for name in plain)
        yield from (Implementation(TE, name) for name in of_dtype)
        yield from (Implementation(COMPILED, name) for name in plain if name.replace("tf32", "fp32") in compiled)


def compile_afresh(module: nn.Module) -> nn.Module:
    """Return the module under ``torch.compile``, which is reset first so that its recompile limit is never reached."""
    torch._dynamo.reset()
    return torch.compile(module)  # type: ignore[return-value]


# A workload's modules, which hold the same rounded weights, and the inputs that its passes take in turn.


_SEED = 0
_SETS_ON_CPU = 4
_CACHES_FILLED = 2  # how many times over the inputs together fill the GPU's last-level cache


@dataclass(frozen=True, eq=False)
class Subject:
    """A workload in one dtype.

    Attributes:
        pair: the pair; its reference holds the rounded weights, in FP64 until ``plain`` casts it.
        dtype: the dtype of parameters, inputs and gradients.
        inputs: sets of inputs as the pair returns them, in the dtype, on the device; passes take them in turn.
        candidate_weights: the TE module's weights, by name.
        golden: the reference's outputs in FP64 for the first inputs, by name.
        why_no_golden: why there is no golden, or empty.
    """

    pair: Pair
    dtype: torch.dtype
    inputs: list[Any]
    candidate_weights: dict[str, Tensor]
    golden: dict[str, Tensor]
    why_no_golden: str = ""

    def plain(self) -> nn.Module:
        """Return the reference in the dtype, which its weights fit exactly, and with PyTorch's fused attention."""
        return with_fused_attention(self.pair.reference).to(self.dtype)

    def worst_error(self, outputs: Sequence[Tensor]) -> float:
        """Return the largest relative L2 error of any output against golden. It is NaN or infinite if an output is.

        Raises:
            ValueError: if the number of outputs or their shapes differ.
        """
        shapes, golden_shapes = ([list(x.shape) for x in tensors] for tensors in (outputs, self.golden.values()))
        if shapes != golden_shapes:
            raise ValueError(f"it returns {shapes} where the plain module returns {golden_shapes}")
        return max(
            errors.relative_l2(float((output.detach().double() - golden).norm()), float(golden.norm()))
            for output, golden in zip(outputs, self.golden.values(), strict=True)
        )


def subject(case: Case, checked: CheckedSize, dtype: torch.dtype, kernels: Kernels) -> Subject:
    """Build the workload, round its weights and inputs to the dtype, and compute golden, with long attention in blocks.

    If golden does not fit into memory, or the reference does not run in FP64, only the errors are missing.
    """
    pair = built(case, checked, kernels)
    pair.reference.double()
    if case.vary_constants:
        vary_constants(pair.reference, Rng(_SEED, "weights"))
    candidate_weights = share_rounded_weights(pair, dtype)
    pair = dataclasses.replace(pair, candidate=nn.Identity())  # frees its memory
    first = rounded_inputs(pair, checked, dtype, _SEED, kernels.device)
    rest = [
        rounded_inputs(pair, checked, dtype, _SEED + i, kernels.device)
        for i in range(1, _count_input_sets(first, kernels.device))
    ]
    golden: dict[str, Tensor] = {}
    why = ""
    try:
        with torch.no_grad(), in_fp64():
            golden = one_pass.outputs_of(pair.reference, pair.call_reference, cast(first, torch.float64))
    except (RuntimeError, NotImplementedError) as error:
        why = f"the plain module in FP64: {one_line(error)}"
    return Subject(pair, dtype, [first, *rest], candidate_weights, golden, why)


def built(case: Case, checked: CheckedSize, kernels: Kernels) -> Pair:
    """Build the pair on the kernels' device, where initialising is much faster, or on the CPU if its factory fails."""
    try:
        with kernels.device:
            return build(case, checked, _SEED, kernels)
    except RuntimeError:  # a factory may draw from a generator on the CPU
        return build(case, checked, _SEED, kernels)


def candidate(case: Case, checked: CheckedSize, subject: Subject, kernels: Kernels) -> Pair:
    """Build a new pair, since TE's modules keep state. Its candidate holds the subject's weights, in its dtype."""
    pair = dataclasses.replace(built(case, checked, kernels), reference=nn.Identity())
    transfer.fill(moved(pair.candidate, dtype=subject.dtype), subject.candidate_weights)
    return pair


@dataclass(frozen=True)
class Passes:
    """The passes to time. ``i`` counts them, because their inputs rotate.

    Attributes:
        clear: drops the gradients; called before each pass and not timed.
        forward: ``forward(i)`` returns what ``backward`` needs.
        backward: called as ``backward(outputs, i)``.
        rotating_bytes: returns the memory taken only because the gradients that backward passes start from rotate.
    """

    clear: Callable[[], None]
    forward: Callable[[int], Any]
    backward: Callable[[Any, int], None]
    rotating_bytes: Callable[[], int] = lambda: 0

    def run(self, i: int) -> None:
        """Run both passes, untimed."""
        self.clear()
        self.backward(self.forward(i), i)


def passes(
    module: nn.Module, call: Callable[..., Any] | None, inputs: list[Any], forward_context: Callable[[], Any]
) -> Passes:
    """Make passes over inputs in turn. All floating-point inputs get gradients, as inside a model.

    Args:
        module: the module, in the inputs' dtype.
        call: as in ``parity.Pair``.
        inputs: one entry for each pass, as a pair's ``inputs`` returns them.
        forward_context: makes the context of each forward pass.
    """
    leaves = [tree_map_only(Tensor, _make_leaf, entry) for entry in inputs]
    gradients: list[list[Tensor]] = []

    def clear() -> None:
        module.zero_grad(set_to_none=True)
        for leaf in tree_leaves(leaves):
            if isinstance(leaf, Tensor):
                leaf.grad = None

    def forward(i: int) -> list[Tensor]:
        args, kwargs = one_pass.as_arguments(leaves[i % len(leaves)])
        with forward_context():
            returned = call(module, *args, **kwargs) if call else module(*args, **kwargs)
        return [leaf for leaf in one_pass.leaves_of(returned) if isinstance(leaf, Tensor) and leaf.is_floating_point()]

    def backward(outputs: list[Tensor], i: int) -> None:
        reached = [output for output in outputs if output.requires_grad]
        if not gradients:  # in the first warm-up pass
            gradients.extend([torch.randn_like(output) for output in reached] for _ in leaves)
        torch.autograd.backward(reached, gradients[i % len(leaves)])

    def rotating_bytes() -> int:
        return sum(gradient.nbytes for entry in gradients[1:] for gradient in entry)

    return Passes(clear, forward, backward, rotating_bytes)


def _make_leaf(value: Tensor) -> Tensor:
    return value.detach().clone().requires_grad_() if value.is_floating_point() else value


def _count_input_sets(inputs: Any, device: torch.device) -> int:
    """Return how many sets of inputs rotate: on a GPU, so many that its last-level cache cannot hold them."""
    if device.type != "cuda":
        return _SETS_ON_CPU
    size = sum(leaf.nbytes for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor))
    cache = int(getattr(torch.cuda.get_device_properties(device), "L2_cache_size", 50 << 20))
    return max(2, 1 + math.ceil(_CACHES_FILLED * cache / max(1, size)))
