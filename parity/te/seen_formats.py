"""See in which formats TE's kernels read the operands of a candidate's GEMMs, and which module asked for each GEMM.

TE's Python hands operands to the kernels as tensors of its own classes, which say their format. So this is what a
module computed in, whatever its recipe says. Sources: ``general_gemm`` and ``general_grouped_gemm`` of
``pytorch/cpp_extensions/gemm.py``, and ``fused_attn_fwd`` and ``fused_attn_bwd`` of ``fused_attn.py``, in TE 2.14 to
2.20.2.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook
from torch.utils._pytree import tree_leaves

from parity.numerics.formats import Quantized, Role, describe_format
from parity.result import OR, ModuleFormats
from parity.te.recipes import list_roles, read_formats
from parity.te.state import is_quantized
from parity.user_error import UserError

NAME_MARK = "_parity_name"
"""The attribute for a TE module's name in the candidate, which copies of the module keep."""

_GEMMS = (
    *("generic_gemm", "te_general_grouped_gemm", "te_general_grouped_gemm_for_grouped_tensor"),
    *("te_general_grouped_gemm_for_discrete_in", "te_general_grouped_gemm_for_discrete_out"),
)
_ATTENTION = "transformer_engine.pytorch.attention.dot_product_attention"
_CALLERS_OF_ATTENTION = tuple(f"{_ATTENTION}.{name}" for name in ("backends", "context_parallel"))

# By whether A and B are transposed, which says along which dimension a GEMM reads them: A, and B.
_OPERANDS = {
    (True, False): ("fprop weight", "fprop input"),
    (False, False): ("dgrad weight", "dgrad gradient"),
    (False, True): ("wgrad input", "wgrad gradient"),
}
_ORDER = ("fprop", "dgrad", "wgrad", "attention")


class SeenFormats:
    """The formats of the operands of all GEMMs in a context, by module and operand.

    Attributes:
        roles: by module, the roles under which it asks a recipe for quantizers.
    """

    def __init__(self) -> None:
        self.roles: dict[str, set[Role]] = defaultdict(set)
        self._seen: dict[str, dict[str, dict[str, None]]] = defaultdict(lambda: defaultdict(dict))
        self._known: set[Hashable] = set()  # operands that were looked at, since most calls repeat an earlier one

    def of(self, candidate: nn.Module) -> None:
        """Note the roles of a candidate's modules, which have their names already."""
        for part in candidate.modules():
            name = _name_module(part)
            if name is not None:
                self.roles[name].update(list_roles(part).values())

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Look at the operands of every GEMM and fused attention in this context."""
        watches: list[tuple[Any, str, Callable[..., Any]]] = [
            (sys.modules["transformer_engine_torch"], name, self._watch_gemm) for name in _GEMMS
        ]
        for module in map(sys.modules.get, _CALLERS_OF_ATTENTION):
            watches += [(module, name, self._watch_attention) for name in ("fused_attn_fwd", "fused_attn_bwd")]
        before = [(of, name, getattr(of, name), watch) for of, name, watch in watches if hasattr(of, name)]
        for of, name, function, watch in before:
            setattr(of, name, functools.wraps(function)(watch(function)))
        hook = register_module_forward_hook(_sign_graph)
        try:
            yield
        finally:
            hook.remove()
            for of, name, function, _ in before:
                setattr(of, name, function)

    @property
    def rows(self) -> tuple[ModuleFormats, ...]:
        """Return what was seen; modules with the same formats share a row."""
        rows: dict[tuple[tuple[str, str], ...], list[str]] = defaultdict(list)
        for module, operands in self._seen.items():
            ordered = sorted(operands.items(), key=lambda entry: _ORDER.index(entry[0].partition(" ")[0]))
            rows[tuple((operand, OR.join(found)) for operand, found in ordered if found)].append(module)
        return tuple(ModuleFormats(tuple(sorted(modules)), dict(row)) for row, modules in rows.items())

    def _watch_gemm(self, kernel: Callable[..., Any]) -> Callable[..., Any]:
        def call(a: Any, transposes_a: bool, b: Any, transposes_b: bool, *args: Any, **kwargs: Any) -> Any:
            names = _OPERANDS.get((transposes_a, transposes_b))
            if names is not None:
                # The one is read along its last dimension if it is transposed, the other one if it is not.
                self._note_operands({names[0]: (a, not transposes_a), names[1]: (b, transposes_b)})
            return kernel(a, transposes_a, b, transposes_b, *args, **kwargs)

        return call

    def _watch_attention(self, function: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(function)
        is_forward = function.__name__ == "fused_attn_fwd"

        def call(*args: Any, **kwargs: Any) -> Any:
            given = signature.bind(*args, **kwargs).arguments
            result = function(*args, **kwargs)
            first, *others = result
            parts: dict[str, Any] = {"qkv": [given.get(name) for name in "qkv"]}
            if is_forward:
                parts |= {"probabilities": given.get("s_quantizer"), "context": first}
            else:
                parts |= {"context_gradients": given.get("d_o"), "score_gradients": given.get("dp_quantizer")}
                parts |= {"qkv_gradients": [first, *others[:2]]}
            self._note_operands({f"attention {part}": (x, False) for part, x in parts.items()})
            return result

        return call

    def _note_operands(self, operands: Mapping[str, tuple[Any, bool]]) -> None:
        """Note operands by their names, each with whether it is read along columns."""
        module = _find_module()
        if module is None:
            return
        for name, (operand, columnwise) in operands.items():
            key = module, name, _identify_operand(operand)
            if key not in self._known:
                self._known.add(key)
                self._seen[module][name].update(_describe_operand(operand, columnwise))


def _identify_operand(operand: Any) -> Hashable:
    """Return what tells operands apart that one module hands to one kernel."""
    if isinstance(operand, (list, tuple)):
        return tuple(map(_identify_operand, operand))
    of_tensor = (getattr(operand, name, None) for name in ("dtype", "_fp8_dtype", "_is_2D_scaled"))
    return type(operand), type(getattr(operand, "_quantizer", None)), *of_tensor


def _describe_operand(operand: Any, columnwise: bool) -> dict[str, None]:
    """Return the formats of a tensor, of several, or of what a quantizer makes, in words; nothing of None."""
    if operand is None:
        return {}
    if isinstance(operand, (list, tuple)):
        return {words: None for one in operand for words in _describe_operand(one, columnwise)}
    quantizer = getattr(operand, "_quantizer", None) or getattr(operand, "quantizer", None)  # of a grouped tensor
    if hasattr(operand, "make_empty"):
        quantizer = operand
    elif isinstance(operand, Tensor) and not is_quantized(operand):
        return {describe_format(None, operand.dtype): None} if operand.numel() else {}
    try:
        to_format = read_formats(quantizer, torch.bfloat16)[columnwise]
    except UserError:  # neither TE's nor a tensor's
        return {f"as {type(operand).__name__} holds it": None}
    numbers = getattr(operand, "_fp8_dtype", None)
    if isinstance(to_format, Quantized) and numbers is not None:  # the tensor's own word counts
        to_format = replace(to_format, numbers=numbers.name.removeprefix("kFloat8"))
        if not getattr(operand, "_is_2D_scaled", to_format.across > 1):
            to_format = replace(to_format, across=1)
    return {describe_format(to_format, torch.bfloat16): None}


# Find the module that asks for a kernel. In a forward pass, and in backward passes of TE's operations, a method of the
# module is running. In other backward passes only a node of autograd's graph is known, which its module has signed.


_SIGNATURE = "parity: module"


def _find_module() -> str | None:
    """Return the name of the module whose code or gradient runs now; None if it is none of the candidate's."""
    frame: FrameType | None = sys._getframe(3)
    while frame is not None and frame.f_code.co_name != "backward":
        owner = frame.f_locals.get("self")
        name = _name_module(owner) if isinstance(owner, nn.Module) else None
        if name is not None:
            return name
        frame = frame.f_back
    node: Any = torch._C._current_autograd_node()
    return None if node is None else node.metadata.get(_SIGNATURE)


def _name_module(module: nn.Module) -> str | None:
    """Return a TE module's name in the candidate, without its own parts that compute for it; None for any other."""
    parts: list[Any] = [module, *getattr(module, "basic_ops", ())]  # of operations that TE fuses for a pass
    name: str | None = next((vars(part)[NAME_MARK] for part in parts if NAME_MARK in vars(part)), None)
    return None if name is None else name.partition(".basic_ops.")[0].removesuffix(".fused_attention")


def _sign_graph(module: nn.Module, _: Any, returned: Any) -> None:
    """Write a TE module's name to the nodes of its graph that no module within it has signed."""
    name = _name_module(module)
    if name is None:
        return
    nodes: list[Any] = [x.grad_fn for x in tree_leaves(returned) if isinstance(x, Tensor) and x.grad_fn is not None]
    while nodes:
        node = nodes.pop()
        if _SIGNATURE not in node.metadata:
            node.metadata[_SIGNATURE] = name
            nodes += [source for source, _ in node.next_functions if source is not None]
