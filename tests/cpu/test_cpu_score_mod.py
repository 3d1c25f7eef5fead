"""``score_mod`` of TE's attention: users' graphs of cuDNN's, computed on the CPU kernels, against FP64."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from packaging.version import Version
from torch import Tensor

from parity import te
from te_on_cpu import attention_problem, cudnn_frontend, versions
from te_on_cpu.loading import loader

TE = te.kernels("cpu").te
if versions.installed_version() < Version("2.20"):
    pytest.skip("score_mod came with TransformerEngine 2.20", allow_module_level=True)

import cudnn  # noqa: E402  # the stand-in, once TE is loaded

BATCH, QUERIES, KEYS, HEADS, GROUPS, FEATURES = 2, 24, 40, 4, 2, 16
CAP = torch.full((1, 1, 1, 1), 1.5)
SLOPES = torch.tensor([0.5, 0.25, 0.125, 0.0625]).view(1, HEADS, 1, 1)
FLOAT, INT32, BOOLEAN = cudnn.data_type.FLOAT, cudnn.data_type.INT32, cudnn.data_type.BOOLEAN


class Softcap:
    def forward(self, graph: Any, score: Any, tensors: dict[str, Any]) -> Any:
        self.divided = graph.div(a=score, b=tensors["cap"], compute_data_type=FLOAT)
        return graph.mul(graph.tanh(self.divided), tensors["cap"])

    def backward(self, graph: Any, gradient: Any, tensors: dict[str, Any]) -> Any:
        of_tanh = graph.tanh_backward(loss=graph.mul(gradient, tensors["cap"]), input=self.divided)
        return graph.div(of_tanh, tensors["cap"])


def add_distance(graph: Any, score: Any, tensors: dict[str, Any]) -> Any:
    rows, columns = (graph.gen_index(input=score, axis=axis).set_data_type(INT32) for axis in (2, 3))
    return graph.add(score, graph.mul(graph.sub(columns, rows, compute_data_type=FLOAT), tensors["slopes"]))


def hide_later_keys(graph: Any, score: Any, tensors: dict[str, Any]) -> Any:
    rows, columns = (graph.gen_index(input=score, axis=axis).set_data_type(INT32) for axis in (2, 3))
    keep = graph.cmp_ge(input=rows, comparison=columns, compute_data_type=BOOLEAN).set_data_type(BOOLEAN)
    return graph.binary_select(input0=score, input1=tensors["hidden"], mask=keep)


DISTANCE = torch.arange(KEYS) - torch.arange(QUERIES)[:, None]
CAPPED = Softcap()
HIDDEN, ZERO = torch.full((1, 1, 1, 1), -1e9), torch.zeros(1, 1, 1, 1)
# Arguments of DotProductAttention, and what they do to scaled scores.
MODIFICATIONS: dict[str, tuple[dict[str, Any], Callable[[Tensor], Tensor]]] = {
    "softcap": (
        dict(
            score_mod=CAPPED.forward,
            score_mod_bprop=CAPPED.backward,
            score_mod_tensors={"cap": CAP},
            score_mod_bprop_tensors={"cap": CAP},
        ),
        lambda scores: 1.5 * torch.tanh(scores / 1.5),
    ),
    "distance": (
        dict(score_mod=add_distance, score_mod_tensors={"slopes": SLOPES}),
        lambda scores: scores + SLOPES.double() * DISTANCE,
    ),
    "causal": (
        dict(
            score_mod=hide_later_keys,
            score_mod_bprop=hide_later_keys,
            score_mod_tensors={"hidden": HIDDEN},
            score_mod_bprop_tensors={"hidden": ZERO},
        ),
        lambda scores: scores.masked_fill(DISTANCE > 0, -math.inf),
    ),
}


def leaves(dtype: torch.dtype) -> list[Tensor]:
    """Return query, key, value and output gradient, each ``[batch, seq, heads, features]``."""
    rng = torch.Generator().manual_seed(0)
    shapes = [(QUERIES, HEADS), (KEYS, GROUPS), (KEYS, GROUPS), (QUERIES, HEADS)]
    return [torch.randn(BATCH, *shape, FEATURES, generator=rng).to(dtype) for shape in shapes]


def attend(modified: Callable[[Tensor], Tensor], query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Return attention with modified scores, from its formula."""
    query, key, value = (one.transpose(1, 2) for one in (query, key, value))
    key, value = (one.repeat_interleave(HEADS // GROUPS, 1) for one in (key, value))
    scores = modified(query @ key.mT / math.sqrt(FEATURES))
    return (scores.softmax(-1) @ value).transpose(1, 2).flatten(2)


def run(dtype: torch.dtype, qkv_format: str = "bshd", **options: Any) -> list[Tensor]:
    """Return TE's output and gradients, in ``bshd``."""
    query, key, value, gradient = leaves(dtype)
    given = [one.transpose(0, 1).contiguous() if qkv_format == "sbhd" else one for one in (query, key, value)]
    given = [one.requires_grad_() for one in given]
    module = TE.DotProductAttention(HEADS, FEATURES, num_gqa_groups=GROUPS, qkv_format=qkv_format)
    output = module(*given, attn_mask_type="no_mask", **options)
    output = output.transpose(0, 1) if qkv_format == "sbhd" else output
    gradients = torch.autograd.grad(output, given, gradient.flatten(2))
    return [output.detach(), *(one.transpose(0, 1) if qkv_format == "sbhd" else one for one in gradients)]


def run_exactly(modified: Callable[[Tensor], Tensor], dtype: torch.dtype) -> list[Tensor]:
    query, key, value, gradient = (one.double() for one in leaves(dtype))
    given = [one.requires_grad_() for one in (query, key, value)]
    output = attend(modified, *given)
    return [output.detach(), *torch.autograd.grad(output, given, gradient.flatten(2))]


def relative_errors(found: list[Tensor], exact: list[Tensor]) -> list[float]:
    return [float((one - other).norm() / other.norm()) for one, other in zip(found, exact, strict=True)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("qkv_format", ["bshd", "sbhd"])
@pytest.mark.parametrize("name", MODIFICATIONS)
def test_modified_scores_agree_with_fp64_forward_and_backward(name: str, qkv_format: str, dtype: torch.dtype) -> None:
    options, modified = MODIFICATIONS[name]
    errors = relative_errors(run(dtype, qkv_format, **options), run_exactly(modified, dtype))
    assert max(errors) < torch.finfo(dtype).eps  # at most 0.41 of it, as without a modification


@pytest.mark.parametrize("name", MODIFICATIONS)
def test_scores_are_modified_alike_in_blocks(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    options, _ = MODIFICATIONS[name]
    whole = run(torch.float16, **options)
    monkeypatch.setattr(attention_problem, "_SCORES_IN_A_BLOCK", 8 * KEYS)
    blocks = run(torch.float16, **options)
    for one, other in zip(whole, blocks, strict=True):
        torch.testing.assert_close(one, other, rtol=2**-9, atol=2**-9)


def test_without_its_gradient_a_modification_is_taken_for_a_shift() -> None:
    """That is what cuDNN does."""
    options, _ = MODIFICATIONS["softcap"]
    options = {name: value for name, value in options.items() if "bprop" not in name}
    whole = run_exactly(MODIFICATIONS["softcap"][1], torch.bfloat16)
    output, *gradients = relative_errors(run(torch.bfloat16, **options), whole)
    assert output < 2**-7
    assert min(gradients[:2]) > 0.1


SCALARS = {"two": torch.full((1, 1, 1, 1), 2.0)}
ACTIVATIONS: dict[str, tuple[dict[str, float], Callable[[Tensor], Tensor]]] = {
    "elu": ({}, F.elu),
    "gelu": ({}, F.gelu),
    "gelu_approx_tanh": ({}, lambda x: F.gelu(x, approximate="tanh")),
    "leaky_relu": ({"negative_slope": 0.25}, lambda x: F.leaky_relu(x, 0.25)),
    "relu": ({"lower_clip": -0.5, "upper_clip": 1.0, "negative_slope": 0.5}, lambda x: relu(x)),
    "sigmoid": ({}, torch.sigmoid),
    "softplus": ({}, F.softplus),
    "swish": ({"swish_beta": 2.0}, lambda x: x * torch.sigmoid(2 * x)),
    "tanh": ({}, torch.tanh),
}


def relu(x: Tensor) -> Tensor:
    return torch.where(x > -0.5, x, -0.5 + 0.5 * (x + 0.5)).clamp(max=1.0)


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_an_activation_and_its_gradient(name: str) -> None:
    given, modified = ACTIVATIONS[name]
    seen: list[Any] = []

    def forward(graph: Any, score: Any, tensors: dict[str, Any]) -> Any:
        seen.append(score)
        return getattr(graph, name)(input=score, **given)

    def backward(graph: Any, gradient: Any, tensors: dict[str, Any]) -> Any:
        return getattr(graph, f"{name}_backward")(loss=gradient, input=seen[-1], **given)

    found = run(torch.float16, score_mod=forward, score_mod_bprop=backward)
    assert max(relative_errors(found, run_exactly(modified, torch.float16))) < 2**-9


POINTWISE: dict[str, tuple[Callable[[Any, Any, Any], Any], Callable[[Tensor], Tensor]]] = {
    "one operand": (
        lambda g, x, two: g.neg(g.sqrt(g.abs(g.sin(g.cos(g.tan(g.erf(x))))))),
        lambda x: -x.erf().tan().cos().sin().abs().sqrt(),
    ),
    "exponentials": (
        lambda g, x, two: g.log(g.add(g.exp(x), g.rsqrt(g.reciprocal(two)))),
        lambda x: (x.exp() + 2**0.5).log(),
    ),
    "steps": (lambda g, x, two: g.sub(g.ceil(x), g.floor(g.div(x, two))), lambda x: x.ceil() - (x / 2).floor()),
    "extremes": (lambda g, x, two: g.max(g.min(x, g.identity(two)), g.neg(two)), lambda x: x.clamp(-2, 2)),
    "squares": (lambda g, x, two: g.add_square(g.pow(g.abs(x), two), x), lambda x: 2 * x.square()),
    "remainders": (lambda g, x, two: g.mod(g.scale(x, two), two), lambda x: (2 * x).fmod(2)),
    "biases": (lambda g, x, two: g.bias(x, g.gen_index(x, 3)), lambda x: x + torch.arange(KEYS)),
    "scalars": (
        lambda g, x, two: g.mul(x, g.tensor_scalar(3.0, cudnn.scalar_type.COMPILE_TIME_CONST)),
        lambda x: 3 * x,
    ),
    "comparisons": (
        lambda g, x, two: g.binary_select(
            x, two, g.logical_or(g.logical_and(g.cmp_lt(x, two), g.cmp_gt(x, g.neg(two))), g.cmp_le(two, x))
        ),
        lambda x: torch.where(x > -2, x, 2.0),
    ),
    "equality": (
        lambda g, x, two: g.binary_select(x, two, g.logical_not(g.cmp_neq(g.gen_index(x, 1), two))),
        lambda x: torch.where(torch.arange(HEADS).view(-1, 1, 1) == 2, x, 2.0),
    ),
    "heads and entries": (
        lambda g, x, two: g.binary_select(x, two, g.cmp_eq(g.gen_index(x, 0), g.gen_index(x, 1))),
        lambda x: torch.where(torch.arange(BATCH).view(-1, 1, 1, 1) == torch.arange(HEADS).view(-1, 1, 1), x, 2.0),
    ),
}


@pytest.mark.parametrize("name", POINTWISE)
def test_pointwise_operations(name: str) -> None:
    score_mod, modified = POINTWISE[name]
    module = TE.DotProductAttention(HEADS, FEATURES, num_gqa_groups=GROUPS, qkv_format="bshd")
    query, key, value, _ = leaves(torch.float16)
    output = module(
        *(query, key, value),
        attn_mask_type="no_mask",
        score_mod=lambda graph, score, tensors: score_mod(graph, score, tensors["two"]),
        score_mod_tensors=SCALARS,
    )
    exact = attend(modified, query.double(), key.double(), value.double())
    (error,) = relative_errors([output], [exact])
    assert error < 2**-9


def test_a_cached_graph_reads_the_tensors_of_each_call() -> None:
    outputs = [
        run(torch.float16, score_mod=add_distance, score_mod_tensors={"slopes": one * SLOPES})[0] for one in (1, 2)
    ]
    exact = run_exactly(lambda scores: scores + 2 * SLOPES.double() * DISTANCE, torch.float16)[0]
    assert max(relative_errors(outputs[1:], [exact])) < 2**-9
    assert not torch.equal(*outputs)


WRONG: list[tuple[Callable[..., Any], type[Exception], str]] = [
    (lambda g, x, t: g.reduction(x, mode=None), NotImplementedError, "has no operation 'reduction'; it has gen_index"),
    (lambda g, x, t: g.mul(x, 2.0), TypeError, "mul takes tensors of cuDNN's graph as a, b"),
    (lambda g, x, t: g.tanh(x, negative_slope=1.0), TypeError, "negative_slope"),
    (lambda g, x, t: g.gen_index(x, axis=4), ValueError, "axis=4 is none of the axes of scores"),
    (lambda g, x, t: x.set_data_type(cudnn.data_type.FP8_E4M3), NotImplementedError, "has no data_type.FP8_E4M3"),
    (lambda g, x, t: None, TypeError, "score_mod has to return a tensor of cuDNN's graph, not NoneType"),
    (lambda g, x, t: g.add(x, g.tensor_like(torch.zeros(3))), ValueError, r"4 dimensions, but one is \[3\]"),
]


@pytest.mark.parametrize(("score_mod", "kind", "words"), WRONG)
def test_what_there_is_not_is_refused_by_name(score_mod: Callable[..., Any], kind: type[Exception], words: str) -> None:
    with pytest.raises(kind, match=words):
        run(torch.float16, score_mod=score_mod)


def test_cudnn_is_found_wherever_te_runs_on_the_cpu() -> None:
    assert loader.CpuFinder(lambda: True).find_spec("cudnn", None) is not None
    assert loader.CpuFinder(lambda: False).find_spec("cudnn", None) is None


def test_the_module_says_what_cudnn_says() -> None:
    graph = cudnn.pygraph(io_data_type=cudnn.data_type.HALF)
    node = (
        graph.tensor([1, 2, 3, 4], [24, 12, 4, 1], data_type=cudnn.data_type.HALF)
        .set_name("q")
        .set_stride([24, 1, 2, 6])
    )
    assert (node.get_dim(), node.get_stride(), node.get_name()) == ([1, 2, 3, 4], [24, 1, 2, 6], "q")
    assert node.get_data_type() is cudnn.data_type.HALF
    assert node.set_data_type(cudnn.data_type.NOT_SET).get_data_type() is cudnn.data_type.NOT_SET
    assert cudnn.backend_version() == 91500
    cudnn.destroy_handle(cudnn.create_handle())
    with pytest.raises(cudnn.cudnnGraphNotSupportedError, match="attention alone"):
        graph.check_support()
    assert isinstance(node, cudnn_frontend.GraphTensor)
