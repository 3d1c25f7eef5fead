"""Give each candidate TE's process-wide state as in a new process, and observe what the candidate does with it."""

from __future__ import annotations

import copy
import dataclasses
import functools
import inspect
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils._pytree import tree_leaves

from parity.numerics.aten import NO_BACKWARD
from parity.numerics.formats import Recasts
from parity.shown import few_of
from parity.te.recipes import derive_rounding, round_alike
from parity.trace.whose import is_of_te, line_running
from parity.user_error import UserError

if TYPE_CHECKING:
    from parity.te import Precision

# TE's global state of quantization, fresh for each candidate.
#
# TE keeps the amax buffers of every module that ever ran with delayed scaling, and goes over them all after each pass,
# so the hundredth candidate of a process pays for those before it. State that is left by a pass that raised within a
# recipe's context stays as well. Source: ``FP8GlobalStateManager`` in ``pytorch/quantization.py`` of TE 2.14 to 2.20.


_Ran = TypeVar("_Ran")

# By how many powers of two a scale may be smaller than a pass asks for: the format then loses just one power of two at
# the lower end of its range.
_TOO_SMALL = 1.0
# By how many powers of two it may be larger. Beyond this, saturation costs more than rounding: E4M3's largest number is
# 448, and 464 is as near to it as to the next one. E5M2 reaches farther.
_TOO_LARGE = math.log2(464 / 448)


@contextmanager
def fresh_quantization() -> Iterator[None]:
    """Make TE forget all modules that ran before this context, and restore its state afterwards."""
    manager = state_manager()
    if manager is None:
        yield
        return
    before = {
        name: value
        for name, value in vars(manager).items()
        if not name.startswith("__") and not isinstance(value, (classmethod, staticmethod))
    }
    manager.reset()
    try:
        with _watch_autocast(manager, _refuse_without_model):
            yield
    finally:
        for name, value in before.items():
            setattr(manager, name, value)


@contextmanager
def _watch_autocast(manager: Any, look: Callable[[dict[str, Any]], None]) -> Iterator[None]:
    """Show the arguments of each ``te.autocast`` that is entered to a function, which may change them."""
    entered = vars(manager)["autocast_enter"]
    signature = inspect.signature(entered.__func__)

    @functools.wraps(entered.__func__)
    def enter(*args: Any, **kwargs: Any) -> None:
        bound = signature.bind(*args, **kwargs)
        look(bound.arguments)
        entered.__func__(*bound.args, **bound.kwargs)

    manager.autocast_enter = classmethod(enter)
    try:
        yield
    finally:
        manager.autocast_enter = entered


def _refuse_without_model(given: dict[str, Any]) -> None:
    """Raise if a recipe that is entered rounds otherwise than every precision there is.

    Raises:
        UserError: if it does; says how to declare it.
    """
    from parity.te import DECLARED, PRECISIONS

    recipe = given.get("fp8_recipe")
    if not given.get("enabled") or recipe is None:
        return
    own = derive_rounding(recipe, torch.bfloat16)
    known = (each.rounding for each in (*PRECISIONS.values(), *DECLARED.values()) if each.recipe)
    if not any(round_alike(own, replace(rounding, storage=own.storage)) for rounding in known):
        arguments = ", ".join(
            f"{each.name}={getattr(recipe, each.name)}"
            for each in dataclasses.fields(recipe)
            if each.default not in (dataclasses.MISSING, getattr(recipe, each.name))
        )
        raise UserError(
            f"{type(recipe).__name__}({arguments}), which is entered at {line_running()}, rounds in a way that no "
            "precision has, so there is nothing to judge it by; declare it with parity.recipe(NAME, lambda: ...), and "
            "compare at that precision"
        )


@contextmanager
def quantization_seen() -> Iterator[list[str]]:
    """Yield a list that receives the name of the first of TE's kernels that gets a quantizer or a quantized tensor."""
    found: list[str] = []

    def watched(kernel: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(kernel)
        def call(*args: Any, **kwargs: Any) -> Any:
            kinds = (kind.__name__ for one in tree_leaves((args, kwargs)) for kind in type(one).__mro__)
            if not found and any(name.startswith("Quantize") for name in kinds):
                found.append(kernel.__name__)
            return kernel(*args, **kwargs)

        return call

    kernels = vars(sys.modules["transformer_engine_torch"])
    before = {name: each for name, each in kernels.items() if callable(each) and not isinstance(each, type)}
    kernels.update({name: watched(each) for name, each in before.items()})
    try:
        yield found
    finally:
        kernels.update(before)


def settled(
    run: Callable[[], _Ran], warmup_passes: int, on_all_ranks: Callable[[bool], bool] = lambda fits: fits
) -> _Ran:
    """Return the result of the first pass after the warm-up whose scales fit its own numbers.

    With delayed scaling a tensor's scale comes from earlier passes, and is 1 at first. A gradient smaller than the
    format's smallest number then becomes 0, and so do all gradients computed from it, so that they have no scale. So
    each pass settles the scales of one more layer, from the loss backwards.

    Args:
        run: one pass forward, or forward and backward.
        warmup_passes: how many passes to make at least; with 0, no scale comes from an earlier pass.
        on_all_ranks: returns whether the scales of all ranks fit, if several compute together.
    """
    ran = run()
    # A pass settles at least one tensor, unless each pass computes something else: with other numbers, or with modules
    # that it creates, whose scales TE keeps as well.
    most = warmup_passes + len(_copy_scales()) if warmup_passes else 0
    for passes in range(1, most + 1):
        before = _copy_scales()
        ran = run()
        if passes >= warmup_passes and on_all_ranks(_do_scales_fit(before, _copy_scales())):
            break
    return ran


def _copy_scales() -> list[Tensor]:
    """Return copies of the scales of each group of tensors that TE keeps a history of."""
    manager = state_manager()
    if manager is None:
        return []
    buffers = getattr(manager, "quantization_state", manager).global_scale_buffer  # older managers hold it themselves
    return [scale.clone() for scales in buffers.values() for scale in scales]


def _do_scales_fit(used: list[Tensor], asked_for: list[Tensor]) -> bool:
    """Return whether a pass used scales that fit its own numbers."""
    if len(used) != len(asked_for):
        return False
    moves = [(x / y).log2() for x, y in zip(used, asked_for, strict=True)]
    return all(bool(((move >= -_TOO_SMALL) & (move <= _TOO_LARGE)).all()) for move in moves)


def state_manager() -> Any:
    """Return TE's class that holds the state; None if TE is not imported."""
    quantization = sys.modules.get("transformer_engine.pytorch.quantization")
    return None if quantization is None else quantization.FP8GlobalStateManager


# TE's process-wide caches and switches, reset for each candidate to what a new process has.
#
# If ``DotProductAttention`` is given no ALiBi slopes, it takes those of the previous call if the sizes agree, so that
# slopes that one port forgets would come from another port's pass. ``LayerNormMLP`` chooses its kernels by how
# ``te.checkpoint`` ran last. The other caches hold tensors that depend only on sizes, but they hand out the tensor
# itself, and code that writes to it changes it for all later passes. ``attention_backend`` resets which attention
# kernel TE picked. Source: the modules named here, in TE 2.14 to 2.20.


_TE = "transformer_engine.pytorch"
_ATTENTION = f"{_TE}.attention.dot_product_attention"

_CACHES = {
    f"{_ATTENTION}.utils": ("_cu_seqlens_cache",),
    f"{_ATTENTION}.softmax": ("_default_causal_mask",),
    f"{_ATTENTION}.dot_product_attention": ("_thd_policy_backend_cache", "_thd_policy_validation_cache"),
    f"{_ATTENTION}.context_parallel": (
        "_cu_seqlens_info_with_cp_cache",
        "_seq_chunk_ids_cache_for_reordering_before_attn",
        "_seq_chunk_ids_cache_for_reordering_after_attn",
        "_softmax_offset_chunk_ids_cache",
    ),
    f"{_TE}.module.base": ("_dummy_wgrads",),
}
"""Dicts and lists that are empty in a new process, by module. Other modules refer to the same objects."""

_ALIBI = f"{_ATTENTION}.dot_product_attention", "_alibi_cache"
"""A dict that always has the same keys."""

_SWITCHES: dict[str, dict[str, Any]] = {
    f"{_TE}.distributed": {
        "_USE_REENTRANT_ACTIVATION_RECOMPUTE": True,
        "_IN_ACTIVATION_RECOMPUTE_REGION": False,
        "_ACTIVATION_RECOMPUTE_PHASE": False,
    },
    f"{_TE}.graph": {"_IS_GRAPH_CAPTURING": False},  # a capture that raises leaves it set
}
"""Variables with their values in a new process, by module."""


@contextmanager
def fresh_caches() -> Iterator[None]:
    """Empty TE's caches of earlier passes in this context, and restore them afterwards.

    A cache that this version of TE lacks, or whose module is not imported yet, is left out.
    """
    with ExitStack() as stack:
        for module, names in _CACHES.items():
            for name in names:
                stack.enter_context(_replace_cache_content(_find_cache(module, name), None))
        alibi = _find_cache(*_ALIBI)
        # Without slopes TE computes slopes and biases anew, whatever else the cache holds.
        stack.enter_context(_replace_cache_content(alibi, dict.fromkeys(alibi or ())))
        for module, values in _SWITCHES.items():
            stack.enter_context(_switch_attributes(module, values))
        yield


def _find_cache(module: str, name: str) -> Any:
    """Return the cache, or None if there is none."""
    return getattr(sys.modules.get(module), name, None)


@contextmanager
def _replace_cache_content(cache: Any, content: Any) -> Iterator[None]:
    """Let the dict or list hold only this content in the context; it stays the same object."""
    if cache is None:
        yield
        return
    before = cache.copy()
    _refill_cache(cache, content)
    try:
        yield
    finally:
        _refill_cache(cache, before)


def _refill_cache(cache: Any, content: Any) -> None:
    cache.clear()
    if content:
        (cache.update if isinstance(cache, dict) else cache.extend)(content)


@contextmanager
def _switch_attributes(module: str, values: dict[str, Any]) -> Iterator[None]:
    loaded = sys.modules.get(module)
    before = {name: getattr(loaded, name) for name in values if hasattr(loaded, name)}
    for name in before:
        setattr(loaded, name, values[name])
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(loaded, name, value)


# Recipes that a candidate turns on by itself, by entering ``te.autocast`` within the precision's own.
#
# Source: ``FP8GlobalStateManager.autocast_enter`` in ``pytorch/quantization.py`` of TE 2.20. Versions that keep their
# state in another way are left alone.


_STATE = ("autocast_depth", "fp8_enabled", "fp8_recipe")


@contextmanager
def own_recipes(has_recipe: bool, left_out: bool = False) -> Iterator[list[str]]:
    """List the recipes entered in this context that differ from the one around them, with the user's line of each.

    Args:
        has_recipe: whether the precision has a recipe, in whose context the candidate runs.
        left_out: whether to ignore the candidate's own recipe, so that the one around it stays on.
    """
    seen: list[str] = []
    manager = state_manager()
    state: Any = getattr(manager, "quantization_state", None)
    if manager is None or not all(hasattr(state, name) for name in _STATE):
        yield seen
        return

    def look(given: dict[str, Any]) -> None:
        is_the_precisions = has_recipe and state.autocast_depth == 0
        if not is_the_precisions and given.get("enabled") and not _is_current(state, given.get("fp8_recipe")):
            seen.append(_describe_recipe(given.get("fp8_recipe")))
            if left_out:
                given |= {"enabled": state.fp8_enabled, "fp8_recipe": state.fp8_recipe}

    with _watch_autocast(manager, look):
        yield seen


def _is_current(state: Any, recipe: Any) -> bool:
    return bool(state.fp8_enabled) and type(recipe) is type(state.fp8_recipe)


def _describe_recipe(recipe: Any) -> str:
    name = "TE's default recipe" if recipe is None else type(recipe).__name__
    line = line_running()
    return f"{name} at {line}" if line else name


# Modules that a backward pass recomputes under another recipe than that of the forward pass.
#
# ``torch.utils.checkpoint`` restores PyTorch's own autocast for its recomputation, but not TE's. The backward pass of a
# training step runs after ``te.autocast`` has been left, so the layer is recomputed without quantization, and its
# gradients are those of another function. ``te.checkpoint`` enters the recipe again (``_CheckpointFunction.backward``
# in ``pytorch/distributed.py`` of TE 2.20). No tolerance shows this, since unquantized numbers are nearer to FP64.


@dataclass
class Recomputes:
    """The recipes under which each of TE's modules ran: in the forward pass, and when a backward pass reran it."""

    _names: dict[nn.Module, str] = field(default_factory=dict)
    _forward: dict[nn.Module, set[str]] = field(default_factory=dict)
    _again: dict[nn.Module, set[str]] = field(default_factory=dict)

    def watch(self, module: nn.Module) -> None:
        """Remember the names of a candidate's modules before it runs."""
        self._names |= {part: name for name, part in module.named_modules()}

    @contextmanager
    def recorded(self) -> Iterator[None]:
        """Note every call of one of TE's modules in this context."""
        hook = register_module_forward_pre_hook(self._note_recipe)
        try:
            yield
        finally:
            hook.remove()

    def _note_recipe(self, module: nn.Module, _: Any) -> None:
        if any(is_of_te(kind) for kind in type(module).__mro__):
            in_backward = torch._C._current_graph_task_id() != NO_BACKWARD
            (self._again if in_backward else self._forward).setdefault(module, set()).add(_name_active_recipe())

    @property
    def otherwise(self) -> list[str]:
        """Say which module first ran again under another recipe, and what to do about it; empty if none did."""
        for module, again in self._again.items():
            before = self._forward.get(module, again)
            if not again <= before:
                name = self._names.get(module) or type(module).__name__
                return [
                    f"{name} runs under {_join_recipes(before)} in the forward pass, but under "
                    f"{_join_recipes(again - before)} when the backward pass recomputes it, so the gradients do not "
                    "belong to what the forward pass computed; use te.checkpoint instead of torch.utils.checkpoint, "
                    "or enter the same te.autocast in the second context that its context_fn returns"
                ]
        return []


def checkpointed(checkpoint: Callable[..., Any], call: Callable[..., Any] | None) -> Callable[..., Any]:
    """Return a call that ``te.checkpoint``, or PyTorch's, makes, so that the backward pass computes it again."""

    def recomputed(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return checkpoint(call or nn.Module.__call__, module, *args, use_reentrant=False, **kwargs)

    return recomputed


def _name_active_recipe() -> str:
    manager = state_manager()
    if manager is None or not manager.is_fp8_enabled():
        return "no recipe"
    return type(manager.get_fp8_recipe()).__name__


def _join_recipes(recipes: set[str]) -> str:
    return " and ".join(sorted(recipes))


# Weight gradients that TE adds to ``main_grad``, a buffer that a trainer keeps, instead of to ``grad``.
#
# ``fuse_wgrad_accumulation`` of TE's modules and ``accumulate_into_main_grad`` of ``te.ops.Linear`` make a GEMM add to
# ``weight.main_grad``. If the weight has an attribute ``grad_added_to_main_grad``, TE sets it and leaves a dummy in
# ``grad``, which is zero if the weight's ``zero_out_wgrad`` is true. Source: ``pytorch/module/linear.py`` and
# ``pytorch/ops/_common.py`` of TE 2.20; Megatron-LM's ``DistributedDataParallel`` is such a trainer.


_MAIN_GRAD_SWITCHES = ("fuse_wgrad_accumulation", "_accumulate_into_main_grad")
"""The names of this switch in TE's modules and in its operations."""


def clear(module: nn.Module) -> None:
    """Set every ``main_grad`` to zero; if TE adds to one and there is none, create it, in FP32."""
    for parameter in _added_to_main_grad(module):
        main_grad = getattr(parameter, "main_grad", None)
        if main_grad is None or main_grad.device != parameter.device:
            parameter.main_grad = torch.zeros(parameter.shape, dtype=torch.float32, device=parameter.device)
        parameter.grad_added_to_main_grad = False
        parameter.zero_out_wgrad = True
    for parameter in module.parameters():
        main_grad = getattr(parameter, "main_grad", None)
        if isinstance(main_grad, Tensor):
            main_grad.zero_()


# A gradient that was rounded to 16 bits and multiplied by a number has at least this cosine with the original.
_HANDED_OVER = 0.999


def gradient(parameter: Any) -> Tensor | None:
    """Return a parameter's gradient, wherever it is; None if none arrived.

    A parameter that PyTorch's own code uses as well, such as a tied embedding, has one part in ``main_grad`` and one in
    ``grad``. A port may have handed ``main_grad`` over to ``grad``, and clipped or unscaled it there.
    """
    grad, main_grad = parameter.grad, getattr(parameter, "main_grad", None)
    if not (getattr(parameter, "grad_added_to_main_grad", False) and isinstance(main_grad, Tensor)):
        return grad
    if grad is None or torch.equal(grad, main_grad.to(grad.dtype)):
        return main_grad
    along = torch.nn.functional.cosine_similarity(grad.flatten().to(main_grad), main_grad.flatten(), 0)
    return grad if abs(float(along)) > _HANDED_OVER else main_grad + grad


def _added_to_main_grad(module: nn.Module) -> Iterator[Any]:
    """Yield the parameters whose gradients TE adds to ``main_grad``, and some that never get one, such as biases."""
    for submodule in module.modules():
        if any(getattr(submodule, switch, False) is True for switch in _MAIN_GRAD_SWITCHES):
            yield from (parameter for parameter in submodule.parameters(recurse=False) if parameter.requires_grad)


# Parameters that TE holds quantized, as ``te.quantized_model_init`` (formerly ``fp8_model_init``) makes them.


def moved(candidate: nn.Module, *, device: torch.device | None = None, dtype: torch.dtype | None = None) -> nn.Module:
    """Return the candidate itself, on the given device or in the given dtype.

    Moving makes quantized parameters forget that they are trained (``Float8Tensor`` in TE 2.20.2), which is repaired
    here. Complex buffers, such as rotary tables, keep their dtype, as under ``module.bfloat16()``, while
    ``module.to(dtype)`` would drop their imaginary part.
    """
    trained = [parameter.requires_grad for parameter in candidate.parameters()]
    complex_buffers = [
        (module, name, buffer)
        for module in candidate.modules()
        for name, buffer in module.named_buffers(recurse=False)
        if buffer.is_complex()
    ]
    for module, name, _ in complex_buffers:
        module._buffers[name] = None
    candidate.to(device=device, dtype=dtype)
    for module, name, buffer in complex_buffers:
        module._buffers[name] = buffer.to(device)
    for parameter, requires_grad in zip(candidate.parameters(), trained, strict=True):
        parameter.requires_grad_(requires_grad)
    return candidate


def dequantized(candidate: nn.Module) -> nn.Module:
    """Return the candidate itself, with each quantized parameter replaced by one in FP32 with the same values."""
    for module in candidate.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if is_quantized(parameter):
                plain = nn.Parameter(dequantized_tensor(parameter.detach()).float(), parameter.requires_grad)
                module.register_parameter(name, plain)
    return candidate


def dequantized_tensor(parameter: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Return a quantized parameter's values, in its own dtype or another; any other parameter is returned as it is."""
    held: Any = parameter
    return held.dequantize(dtype=dtype) if is_quantized(parameter) else parameter


def check(candidate: nn.Module, precision: Precision) -> None:
    """Check that the precision fits the quantized parameters.

    Args:
        candidate: the candidate, in the precision's dtype as far as its parameters allow that.
        precision: the precision at which it is compared.

    Raises:
        UserError: if the precision has no recipe, or TE keeps such a parameter in another dtype.
    """
    quantized = {name: parameter for name, parameter in candidate.named_parameters() if is_quantized(parameter)}
    dtype = str(precision.dtype)
    if quantized and precision.recipe is None:
        raise UserError(
            f"the candidate holds {few_of(list(quantized), 1)} quantized (te.quantized_model_init), so it "
            f"cannot compute in {precision.name}; list only the recipe's precision in the pair's precisions, or build "
            "the module without quantized_model_init"
        )
    others = [name for name, parameter in quantized.items() if parameter.dtype is not precision.dtype]
    if others:
        raise UserError(
            f"TE keeps the quantized {few_of(others, 1)} in {quantized[others[0]].dtype} whatever "
            f"module.to({dtype}) says, and {precision.name} computes in {dtype}; build the module with "
            f"params_dtype={dtype}"
        )


def is_quantized(parameter: Tensor) -> bool:
    """Return whether a parameter is a quantized tensor of TE's."""
    is_of_te = type(parameter).__module__.startswith("transformer_engine.")
    return is_of_te and getattr(parameter, "quantizer", parameter) is not None  # a GroupedTensor may have none


def over_quantization(held: Tensor, values: Tensor) -> float:
    """Return a quantized parameter's distance from the values that it should have, relative to its format's error."""
    filled = copy.deepcopy(held)
    with torch.no_grad():
        filled.copy_(values.to(torch.float32))
    off, costs = (
        float((dequantized_tensor(x.detach(), torch.float32).double() - values).norm()) for x in (held, filled)
    )
    return off / costs if costs else math.inf if off else 1.0


def stale_transposes(module: nn.Module, in_a_graph: bool = False) -> dict[str, Tensor]:
    """Return the transposed copies of FP8 parameters that are not their transposes, although TE considers them valid.

    GPUs before Blackwell compute gradients of inputs from this copy. ``Float8Tensor`` keeps it until something tells
    it that its numbers have changed (``_transpose_invalid`` in ``pytorch/tensor/storage/float8_tensor_storage.py`` of
    TE 2.20.2).

    Args:
        module: holds the parameters.
        in_a_graph: whether to include copies that TE knows to be invalid, since a graph's replay does not check.
    """
    found = {}
    for name, parameter in module.named_parameters():
        held: Any = parameter
        numbers, transposed = getattr(held, "_data", None), getattr(held, "_transpose", None)
        if not isinstance(numbers, Tensor) or not isinstance(transposed, Tensor):
            continue
        if held._transpose_invalid and not in_a_graph:
            continue
        wide = numbers.reshape(-1, numbers.shape[-1])
        if not torch.equal(wide.t().view(torch.uint8), transposed.reshape(wide.shape[::-1]).view(torch.uint8)):
            found[name] = transposed
    return found


# What delayed scaling keeps of each tensor that it quantizes: its amax history, and the scale that follows.
# ``fp8_meta`` of TE's modules and ``_fp8_metas`` of its operations hold them: three tensors per GEMM in the forward
# pass (input, weight, output) and two in the backward pass; operations have no outputs. Source:
# ``pytorch/module/base.py``, ``pytorch/ops/op.py`` and ``pytorch/constants.py`` of TE 2.20.2.


Role = Literal["input", "weight", "output", "output gradient", "input gradient"]

_FORWARD: tuple[Role, ...] = ("input", "weight", "output")
_BACKWARD: tuple[Role, ...] = ("output gradient", "input gradient")


@dataclass(frozen=True, eq=False)
class Slot:
    """Describe one tensor of a TE module under delayed scaling.

    Attributes:
        module: the module's name.
        place: distinguishes the tensor from the module's others.
        role: what the tensor is in its GEMM.
        weights: names of the parameters that the GEMM multiplies; empty if it has none, as in attention.
        history: TE's own amax history, FP32: the current pass first, then the earlier ones, the oldest first.
        scale: TE's own scale, one number in FP32.
        recipe: the recipe by which the scale is computed.
        largest: the largest number of the tensor's format.
    """

    module: str
    place: tuple[str, int]
    role: Role
    weights: tuple[str, ...]
    history: Tensor
    scale: Tensor
    recipe: Any
    largest: float

    @property
    def name(self) -> str:
        """Return the tensor's name in messages."""
        whose = few_of(self.weights, 1) or self.module or "the module"
        return whose if self.role == "weight" else f"the {self.role} of {whose}"


def slots(module: nn.Module) -> Iterator[Slot]:
    """Yield what delayed scaling keeps for each tensor of a module; nothing before its first pass or without it."""
    for path, one in module.named_modules():
        metas = getattr(one, "_fp8_metas", None)  # of an operation, by direction
        found = [getattr(one, "fp8_meta", None)] if metas is None else list(metas.values())
        for meta in found:
            if isinstance(meta, Mapping):
                forward = _FORWARD if metas is None else _FORWARD[:2]
                yield from _find_slots(path, one, meta, "scaling_fwd", forward, "max_fwd")
                yield from _find_slots(path, one, meta, "scaling_bwd", _BACKWARD, "max_bwd")


def _find_slots(
    path: str, module: nn.Module, meta: Mapping[str, Any], key: str, roles: tuple[Role, ...], largest: str
) -> Iterator[Slot]:
    kept = meta.get(key)
    history, scales = getattr(kept, "amax_history", None), getattr(kept, "scale", None)
    if not isinstance(history, Tensor) or not isinstance(scales, Tensor):
        return
    # A custom recipe keeps scales for those tensors alone that it scales by histories, so they may be fewer.
    recipe = getattr(kept, "_inner_delayed_scaling_recipe", None) or meta["recipe"]
    if len(scales) != getattr(kept, "num_quantizers", len(scales)):
        return
    gemms = _list_gemm_weights(path, module)
    for place in range(len(scales)):
        gemm, role = divmod(place, len(roles))
        weights = gemms[gemm] if gemm < len(gemms) else ()
        limit = float(getattr(recipe.fp8_format.value, largest))
        yield Slot(path, (key, place), roles[role], weights, history[:, place], scales[place], recipe, limit)


def _list_gemm_weights(path: str, module: nn.Module) -> list[tuple[str, ...]]:
    """Return the names of the weights of each of a module's GEMMs."""
    own = [name for name, one in module.named_parameters(recurse=False) if one.dim() > 1]
    together = [name for name in getattr(module, "weight_names", ()) if name in own]  # concatenated for one GEMM
    rest = [name for name in own if name not in together]
    gemms = [tuple(together)] * bool(together) + [(name,) for name in rest]
    return [tuple(f"{path}.{name}" if path else name for name in gemm) for gemm in gemms]


@dataclass(frozen=True, eq=False)
class Kept:
    """Hold what delayed scaling kept of one tensor at one time.

    Attributes:
        slot: the tensor.
        history: a copy of its amax history.
        scale: its scale.
        weight: the largest magnitude that a weight is quantized from; None if that is unknown, or it is no weight.
    """

    slot: Slot
    history: Tensor
    scale: float
    weight: float | None

    @property
    def amax(self) -> float:
        """Return the amax that the scale comes from."""
        return self.slot.largest / self.scale


def kept(
    module: nn.Module, quantized_from: Callable[[str], Tensor | None] | None = None
) -> dict[tuple[str, tuple[str, int]], Kept]:
    """Return what delayed scaling keeps now, by module and place.

    Args:
        quantized_from: returns the numbers that a weight of this name is quantized from, None if they are unknown; not
            needed if magnitudes of weights are not asked for.
    """

    def largest(slot: Slot) -> float | None:
        names = slot.weights if quantized_from and slot.role == "weight" else ()
        found = [quantized_from(name) for name in names] if quantized_from else []
        known = [float(x.detach().abs().max()) for x in found if x is not None]
        return max(known) if known and len(known) == len(names) else None

    return {
        (one.module, one.place): Kept(one, one.history.detach().cpu().clone(), float(one.scale), largest(one))
        for one in slots(module)
    }


_NEARLY_SAME = 0.5  # in powers of two: RoPE turns two numbers into one that is up to this much larger


def recasts(scaling: Iterable[Kept]) -> Recasts:
    """Return by which scales each attention casts the gradients of queries, keys and values, and the layer before them.

    The first is that of ``META_DQKV`` (``pytorch/cpp_extensions/fused_attn.py`` of TE 2.20.2). The layer before it is
    one of the two that TE's attention has beside it, the one with nearly the same amax. If none has, it reads what
    attention has cast as it is, as with ``fp8_mha``.

    Returns:
        Nothing if that is unknown for some attention, such as one whose queries and keys come from layers of their own.
    """
    found = []
    gradients = [one for one in scaling if one.slot.place[0] == "scaling_bwd" and one.slot.role == "output gradient"]
    for own in gradients:
        if own.slot.weights or own.slot.place[1] or not bool(own.history.any()):
            continue
        beside = [x for x in gradients if x.slot.weights and _is_beside(x.slot.module, own.slot.module)]
        if not 0 < len(beside) <= 2 or not all(0.0 < x.scale < math.inf for x in (own, *beside)):
            return ()
        by_ratio = {abs(math.log2(x.amax / own.amax)): x.amax for x in beside if bool(x.history.any())}
        least = min(by_ratio, default=math.inf)
        found.append((own.amax, by_ratio[least] if least < _NEARLY_SAME else own.amax))
    return tuple(found)


def _is_beside(name: str, other: str) -> bool:
    """Return whether two names are those of modules that one module holds."""
    return name.rpartition(".")[0] == other.rpartition(".")[0]
