"""cuDNN's Python frontend, ``cudnn``, as far as attention with a score modification needs it (Flex Attention).

``DotProductAttention(score_mod=..., score_mod_bprop=...)`` of TransformerEngine 2.20 builds a graph of cuDNN's
(``attention/dot_product_attention/flex_attention.py``). A user's callables add pointwise operations to it, between the
scaled scores and the softmax, and between the gradient of the softmax's input and its scaling
(NVIDIA/cudnn-frontend at 3929da2, ``node/scaled_dot_product_flash_attention.h``). Operations and their arguments are
those of its ``python/pygraph/pointwise.cpp``; each computes in FP32, and its result is cast to the data type that it
was given.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from te_on_cpu import cuda, flash
from te_on_cpu.attention_problem import Attention, Band, Block, slice_for_block

NAME = "cudnn"

data_type = enum.Enum(
    "data_type",
    "FLOAT DOUBLE HALF INT8 INT32 INT8x4 UINT8 UINT8x4 INT8x32 BFLOAT16 INT64 BOOLEAN FP8_E4M3 FP8_E5M2 "
    "FAST_FLOAT_FOR_FP8 FP8_E8M0 FP4_E2M1 INT4 NOT_SET",
)
heur_mode = enum.Enum("heur_mode", "A B FALLBACK OPENSOURCE")
build_plan_policy = enum.Enum("build_plan_policy", "HEURISTICS_CHOICE ALL")
scalar_type = enum.Enum("scalar_type", "RUNTIME_PARAM COMPILE_TIME_CONST")

_DTYPES = {
    data_type.FLOAT: torch.float32,
    data_type.DOUBLE: torch.float64,
    data_type.HALF: torch.float16,
    data_type.BFLOAT16: torch.bfloat16,
    data_type.INT32: torch.int32,
    data_type.INT64: torch.int64,
    data_type.BOOLEAN: torch.bool,
}


class GraphNotSupported(RuntimeError):
    """Raised for a graph that cuDNN has no kernel for."""


def backend_version() -> int:
    """Return the version of the emulated cuDNN."""
    return cuda.cudnn_version()


def create_handle() -> object:
    """Return a handle, which has nothing to hold here."""
    return object()


def destroy_handle(handle: object) -> None: ...


def set_stream(handle: object, stream: int) -> None: ...


def _get_dtype(kind: Any) -> torch.dtype | None:
    """Return PyTorch's dtype for a data type of cuDNN's or PyTorch's, and None for ``NOT_SET``."""
    if isinstance(kind, torch.dtype):
        return kind
    if kind is not data_type.NOT_SET and kind not in _DTYPES:
        have = ", ".join(one.name for one in _DTYPES)
        raise NotImplementedError(f"the CPU's stand-in for cuDNN's graphs has no {kind}; it has {have}")
    return _DTYPES.get(kind)


class GraphTensor:
    """A tensor of a graph, or the result of an operation, which is computed when the graph is executed.

    Args:
        dim: as far as it is known; that of scores is ``[batch, heads, queries, keys]``.
        compute: maps the values of ``operands`` to this one; None for a tensor that is given.
        axis: for the indices of scores, along which axis.
    """

    def __init__(
        self,
        dim: Sequence[int] = (),
        stride: Sequence[int] = (),
        dtype: torch.dtype | None = None,
        compute: Callable[..., Tensor] | None = None,
        operands: Sequence[GraphTensor] = (),
        axis: int | None = None,
    ) -> None:
        self.dtype, self.compute, self.operands, self.axis = dtype, compute, operands, axis
        self._dim, self._stride, self._name = list(dim), list(stride), ""

    def get_dim(self) -> list[int]:
        return self._dim

    def set_dim(self, dim: Sequence[int]) -> GraphTensor:
        self._dim = list(dim)
        return self

    def get_stride(self) -> list[int]:
        return self._stride

    def set_stride(self, stride: Sequence[int]) -> GraphTensor:
        self._stride = list(stride)
        return self

    def get_data_type(self) -> Any:
        return next((kind for kind, dtype in _DTYPES.items() if dtype is self.dtype), data_type.NOT_SET)

    def set_data_type(self, data_type: Any) -> GraphTensor:
        self.dtype = _get_dtype(data_type)
        return self

    def get_name(self) -> str:
        return self._name

    def set_name(self, name: str) -> GraphTensor:
        self._name = name
        return self

    def set_output(self, is_output: bool) -> GraphTensor:
        return self

    def find(self, given: Mapping[GraphTensor, Tensor]) -> Tensor:
        """Return a view of the tensor that is given for this one, with this one's dimensions and strides."""
        whole = given[self]
        return whole.as_strided(self._dim, self._stride, whole.storage_offset())


# The pointwise operations: the names of their tensors, and what they compute of these and of their options.


def _relu(
    x: Tensor, negative_slope: float | None = None, lower_clip: float | None = None, upper_clip: float | None = None
) -> Tensor:
    lower = lower_clip or 0.0
    bent = torch.where(x > lower, x, lower + (negative_slope or 0.0) * (x - lower))
    return bent if upper_clip is None else bent.clamp(max=upper_clip)


def _leaky_relu(x: Tensor, negative_slope: float) -> Tensor:
    return _relu(x, negative_slope)


def _swish(x: Tensor, swish_beta: float | None = None) -> Tensor:
    return x * torch.sigmoid(x if swish_beta is None else swish_beta * x)


def _gelu_approx_tanh(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


def _add_square(a: Tensor, b: Tensor) -> Tensor:
    return a + b.square()


def _select_by_mask(yes: Tensor, no: Tensor, mask: Tensor) -> Tensor:
    return torch.where(mask.bool(), yes, no)


def _derive_backward(forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return the function that maps the gradient of a result of ``forward`` and its input to the input's gradient."""

    def compute(loss: Tensor, x: Tensor, **options: Any) -> Tensor:
        loss, x = torch.broadcast_tensors(loss, x)
        with torch.enable_grad():
            leaf = x.detach().clone().requires_grad_()
            return torch.autograd.grad(forward(leaf, **options), leaf, loss)[0]

    return compute


_ACTIVATIONS: dict[str, Callable[..., Tensor]] = {
    "elu": F.elu,
    "gelu": F.gelu,
    "gelu_approx_tanh": _gelu_approx_tanh,
    "leaky_relu": _leaky_relu,
    "relu": _relu,
    "sigmoid": torch.sigmoid,
    "softplus": F.softplus,
    "swish": _swish,
    "tanh": torch.tanh,
}
_OF_ONE: tuple[str, ...] = ("abs", "ceil", "cos", "erf", "exp", "floor", "log", "logical_not", "neg", "reciprocal")
_OF_ONE += ("rsqrt", "sin", "sqrt", "tan")
_OF_TWO = ("add", "div", "logical_and", "logical_or", "mul", "sub")
# By the names of PyTorch's functions.
_PAIRS = {"max": "maximum", "min": "minimum", "mod": "fmod", "pow": "pow"}
_COMPARISONS = {"eq": "eq", "ge": "ge", "gt": "gt", "le": "le", "lt": "lt", "neq": "ne"}
_OPERATIONS: dict[str, tuple[tuple[str, ...], Callable[..., Tensor]]] = {
    "add_square": (("a", "b"), _add_square),
    "bias": (("input", "bias"), torch.add),
    "binary_select": (("input0", "input1", "mask"), _select_by_mask),
    "identity": (("input",), torch.clone),
    "scale": (("input", "scale"), torch.mul),
}
_OPERATIONS |= {name: (("input",), getattr(torch, name)) for name in _OF_ONE}
_OPERATIONS |= {name: (("input",), compute) for name, compute in _ACTIVATIONS.items()}
_OPERATIONS |= {f"{name}_backward": (("loss", "input"), _derive_backward(one)) for name, one in _ACTIVATIONS.items()}
_OPERATIONS |= {name: (("a", "b"), getattr(torch, name)) for name in _OF_TWO}
_OPERATIONS |= {name: (("input0", "input1"), getattr(torch, of_torch)) for name, of_torch in _PAIRS.items()}
_OPERATIONS |= {f"cmp_{name}": (("input", "comparison"), getattr(torch, one)) for name, one in _COMPARISONS.items()}


def _add_pointwise(name: str, args: Sequence[Any], options: dict[str, Any]) -> GraphTensor:
    """Add one of ``_OPERATIONS`` to the graph, and return its result."""
    names, compute = _OPERATIONS[name]
    kind = _get_dtype(options.pop("compute_data_type", data_type.NOT_SET))
    label = options.pop("name", "")
    operands = [*args, *(options.pop(one) for one in names[len(args) :] if one in options)]
    if len(operands) != len(names) or not all(isinstance(one, GraphTensor) for one in operands):
        raise TypeError(f"{name} takes tensors of cuDNN's graph as {', '.join(names)}")
    compute(*(torch.zeros(1) for _ in names), **options)  # refuses options that there are not

    def compute_in_dtype(*values: Tensor) -> Tensor:
        is_kept = (kind is torch.bool or value.dtype is torch.bool for value in values)
        cast = (value if kept else value.to(kind or torch.float32) for value, kept in zip(values, is_kept, strict=True))
        return compute(*cast, **options)

    shape = torch.broadcast_shapes(*(one.get_dim() for one in operands))
    return GraphTensor(shape, compute=compute_in_dtype, operands=operands).set_name(label)


class Graph:
    """A graph of cuDNN's, which TE and a user's callables build, and which is executed with tensors for its tensors.

    It has attention and the pointwise operations; others raise ``NotImplementedError``.
    """

    def __init__(self, **_settings: Any) -> None:
        self._run: Callable[[Mapping[GraphTensor, Tensor]], None] | None = None

    def __getattr__(self, name: str) -> Callable[..., GraphTensor]:
        if name.startswith("_"):
            raise AttributeError(name)
        if name not in _OPERATIONS:
            raise NotImplementedError(
                f"the CPU's stand-in for cuDNN's graphs has no operation {name!r}; it has gen_index, tensor_scalar, "
                f"{', '.join(sorted(_OPERATIONS))}"
            )
        return lambda *args, **options: _add_pointwise(name, args, options)

    def tensor(
        self, dim: Sequence[int], stride: Sequence[int], data_type: Any = data_type.NOT_SET, **_options: Any
    ) -> GraphTensor:
        return GraphTensor(dim, stride, _get_dtype(data_type))

    def tensor_like(self, given: Tensor) -> GraphTensor:
        """Return a tensor of the graph for one like this, ``[batch, heads, queries, keys]``, or 1 for each."""
        if given.dim() != 4:
            raise ValueError(
                f"cuDNN's graph of attention needs tensors of 4 dimensions, but one is {list(given.shape)}"
            )
        return GraphTensor(given.shape, given.stride(), given.dtype)

    def tensor_scalar(self, value: float, scalar_type: Any = scalar_type.RUNTIME_PARAM) -> GraphTensor:
        return GraphTensor([1, 1, 1, 1], compute=lambda: torch.full((1, 1, 1, 1), value))

    def gen_index(
        self, input: GraphTensor, axis: int, compute_data_type: Any = data_type.NOT_SET, name: str = ""
    ) -> GraphTensor:
        """Return each element's index along an axis of ``input``, which is as large as the scores."""
        if axis not in range(4):
            raise ValueError(f"gen_index: axis={axis} is none of the axes of scores, 0 to 3")
        return GraphTensor(input.get_dim(), axis=axis).set_name(name)

    def sdpa(
        self,
        q: GraphTensor,
        k: GraphTensor,
        v: GraphTensor,
        attn_scale: float,
        generate_stats: bool = False,
        use_causal_mask: bool = False,
        score_mod: ScoreMod | None = None,
        name: str = "",
    ) -> tuple[GraphTensor, GraphTensor]:
        """Add attention's forward pass; return its output and the log-sum-exp of each query's scores."""
        scores = _make_scores(q, k)
        modified = _call_modifier("score_mod", score_mod, self, scores)
        output, stats = GraphTensor(), GraphTensor()

        def run(given: Mapping[GraphTensor, Tensor]) -> None:
            of_block = _Blockwise(given, scores, modified)
            attention = replace(_make_attention(attn_scale, use_causal_mask), modify=of_block.modify)
            made, lse, _ = flash.forward(q.find(given), k.find(given), v.find(given), attention)
            output.find(given).copy_(made)
            if generate_stats:
                stats.find(given).copy_(lse)

        self._run = run
        return output, stats

    def sdpa_backward(
        self,
        q: GraphTensor,
        k: GraphTensor,
        v: GraphTensor,
        o: GraphTensor,
        dO: GraphTensor,
        stats: GraphTensor,
        attn_scale: float,
        use_causal_mask: bool = False,
        score_mod: ScoreMod | None = None,
        score_mod_bprop: ScoreMod | None = None,
        use_deterministic_algorithm: bool = False,
        name: str = "",
    ) -> tuple[GraphTensor, GraphTensor, GraphTensor]:
        """Add attention's backward pass; return the gradients of queries, keys and values."""
        scores, gradient = _make_scores(q, k), _make_scores(q, k)
        modified = _call_modifier("score_mod", score_mod, self, scores)
        passed = _call_modifier("score_mod_bprop", score_mod_bprop, self, gradient)
        results = GraphTensor(), GraphTensor(), GraphTensor()

        def run(given: Mapping[GraphTensor, Tensor]) -> None:
            of_block = _Blockwise(given, scores, modified, gradient, passed)
            attention = _make_attention(attn_scale, use_causal_mask)
            attention = replace(attention, modify=of_block.modify, modify_grad=of_block.modify_gradient)
            query, key, value, output, output_grad, lse = (one.find(given) for one in (q, k, v, o, dO, stats))
            made = flash.backward(query, key, value, output, output_grad, lse, attention)
            for result, gradients in zip(results, (made.query, made.key, made.value), strict=True):
                result.find(given).copy_(gradients)

        self._run = run
        return results

    def validate(self) -> None: ...

    def build_operation_graph(self) -> None: ...

    def create_execution_plans(self, modes: Sequence[Any]) -> None: ...

    def check_support(self) -> None:
        if self._run is None:
            raise GraphNotSupported("the CPU's stand-in for cuDNN's graphs computes attention alone, and there is none")

    def build_plans(self, policy: Any = None) -> None: ...

    def get_workspace_size(self) -> int:
        return 0

    def execute(self, variant_pack: Mapping[GraphTensor, Tensor], workspace: Tensor, handle: object = None) -> None:
        """Compute the outputs in place.

        Args:
            variant_pack: a tensor for each one of the graph that is given or an output.
        """
        self.check_support()
        assert self._run is not None
        self._run(variant_pack)


ScoreMod = Callable[[Graph, GraphTensor], GraphTensor]


def _make_scores(q: GraphTensor, k: GraphTensor) -> GraphTensor:
    batch, heads, queries, _ = q.get_dim()
    keys = k.get_dim()[2]
    return GraphTensor([batch, heads, queries, keys], [heads * queries * keys, queries * keys, keys, 1])


def _make_attention(scale: float, is_causal: bool) -> Attention:
    return Attention(scale, Band(None, 0 if is_causal else None, False))


def _call_modifier(name: str, score_mod: ScoreMod | None, graph: Graph, scores: GraphTensor) -> GraphTensor:
    """Return what a user's callable makes of scores, or of their gradient; without one, they stay as they are."""
    made = scores if score_mod is None else score_mod(graph, scores)
    if not isinstance(made, GraphTensor):
        raise TypeError(f"{name} has to return a tensor of cuDNN's graph, not {type(made).__name__}")
    return made


class _Blockwise:
    """Computes a score modification for one block of scores after the other.

    Args:
        given: tensors for those of the graph.
        scores: stands for the scaled scores.
        modified: what the softmax is taken of.
        gradient: stands for the gradient of ``modified``; only in the backward pass, as ``passed`` is.
        passed: the gradient of ``scores``.
    """

    def __init__(
        self,
        given: Mapping[GraphTensor, Tensor],
        scores: GraphTensor,
        modified: GraphTensor,
        gradient: GraphTensor | None = None,
        passed: GraphTensor | None = None,
    ) -> None:
        self._given, self._scores, self._modified = given, scores, modified
        self._gradient, self._passed = gradient, passed
        self._known: dict[GraphTensor, Tensor] = {}

    def modify(self, scores: Tensor, block: Block) -> Tensor:
        """Return a block's modified scores, FP32, in memory of their own."""
        self._known = {self._scores: scores}
        return self._compute_block(self._modified, block, scores.shape)

    def modify_gradient(self, gradient: Tensor, block: Block) -> Tensor:
        """Return the gradient of the scores of the block that was modified last, which it may also depend on."""
        assert self._gradient is not None
        assert self._passed is not None
        self._known[self._gradient] = gradient
        return self._compute_block(self._passed, block, gradient.shape)

    def _compute_block(self, result: GraphTensor, block: Block, shape: Sequence[int]) -> Tensor:
        return self._compute(result, block, shape).float().expand(shape).clone()

    def _compute(self, node: GraphTensor, block: Block, shape: Sequence[int]) -> Tensor:
        if node not in self._known:
            if node.axis is not None:
                value = _list_indices(node.axis, block, shape)
            elif node.compute is not None:
                value = node.compute(*(self._compute(one, block, shape) for one in node.operands))
            else:
                value = slice_for_block(node.find(self._given), block)
            self._known[node] = value if node.dtype is None else value.to(node.dtype)
        return self._known[node]


def _list_indices(axis: int, block: Block, shape: Sequence[int]) -> Tensor:
    """Return the indices of a block's scores along one axis, FP32."""
    first = (block.entries.start, block.heads.start, block.rows.start, block.columns.start)[axis]
    indices = torch.arange(first, first + shape[axis], dtype=torch.float32)
    return indices.view([-1 if one == axis else 1 for one in range(4)])


def build() -> ModuleType:
    """Return the module that ``import cudnn`` finds."""
    module = ModuleType(NAME, __doc__)
    functions = (backend_version, create_handle, destroy_handle, set_stream)
    enums = (build_plan_policy, data_type, heur_mode, scalar_type)
    vars(module).update({one.__name__: one for one in (*functions, *enums)})
    vars(module).update(cudnnGraphNotSupportedError=GraphNotSupported, pygraph=Graph, tensor=GraphTensor)
    return module
