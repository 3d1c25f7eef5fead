"""Cases are checked before anything runs: they are built without memory, and mistakes name case, place and size."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import parity
from parity import te
from parity.case.case import Case, Pair
from parity.case.validate import check_case, check_module, parameters_outside_te, without_memory
from parity.numerics.formats import Rounding, e4m3, e5m2
from parity.numerics.rounding import rounded
from parity.user_error import UserError

te_module = parity.te.kernels("cpu").te
Factory = Callable[..., Any]
IDENTITY = {"weight": "weight"}


def case_of(factory: Factory, sizes: Sequence[dict[str, Any]] = ({},)) -> Case:
    return Case("my_case", factory, sizes, path=Path(__file__).resolve(), line=7)


def labels(factory: Factory, sizes: Sequence[dict[str, Any]] = ({},)) -> list[str]:
    return [checked.label for checked in check_case(case_of(factory, sizes), te_module)]


def complaint(factory: Factory, sizes: Sequence[dict[str, Any]] = ({},)) -> str:
    with pytest.raises(UserError) as caught:
        check_case(case_of(factory, sizes), te_module)
    return str(caught.value)


def linear_pair(te_module, hidden=4, **changes: Any) -> Pair:
    return Pair(
        **{
            "reference": nn.Linear(hidden, hidden, bias=False),
            "candidate": te_module.Linear(hidden, hidden, bias=False),
            "inputs": lambda rng, batch=2: rng.normal(batch, hidden),
            "weights": IDENTITY,
            **changes,
        }
    )


# Building without memory


def test_no_memory_is_taken_whatever_device_the_code_names():
    with without_memory():
        made = [
            torch.empty(3, device="cpu"),
            torch.zeros(3, device="cuda"),
            torch.randn(3, generator=torch.Generator()),
            torch.tensor([1.0]).to("cuda:0"),
            torch.ones(3).cuda(),
            torch.ones(3).cpu(),
            torch.ones(3).to(torch.device("cpu"), torch.bfloat16),
            torch.empty_like(torch.ones(3), device="cuda"),
            torch.ones(3).new_zeros(3, device="cpu"),
            *nn.Linear(3, 4, device="cuda").parameters(),
        ]
    assert {tensor.device.type for tensor in made} == {"meta"}


def test_after_building_without_memory_tensors_are_real_again():
    with pytest.raises(ZeroDivisionError), without_memory():
        raise ZeroDivisionError
    assert torch.ones(3).device.type == "cpu"


@pytest.mark.parametrize(
    "build",
    [
        lambda: te_module.Linear(16, 16),
        lambda: te_module.LayerNorm(16),
        lambda: te_module.RMSNorm(16),
        lambda: te_module.LayerNormLinear(16, 16),
        lambda: te_module.LayerNormMLP(16, 32, activation="swiglu", normalization="RMSNorm"),
        lambda: te_module.GroupedLinear(2, 16, 16),
        lambda: te_module.MultiheadAttention(16, 2, num_gqa_groups=1, fuse_qkv_params=True),
        lambda: te_module.TransformerLayer(16, 32, 2, device="cpu"),
    ],
    ids=["Linear", "LayerNorm", "RMSNorm", "LayerNormLinear", "LayerNormMLP", "GroupedLinear", "MHA", "Layer"],
)
def test_te_modules_are_built_without_memory_in_the_shapes_that_they_have_for_real(build):
    with without_memory():
        module = build()
    assert all(parameter.is_meta for parameter in module.parameters())
    real = {name: parameter.shape for name, parameter in build().named_parameters()}
    assert {name: parameter.shape for name, parameter in module.named_parameters()} == real


def test_a_sound_case_is_built_without_memory_once_a_size():
    built = []

    def factory(te_module, hidden):
        pair = linear_pair(te_module, hidden)
        built.append(pair)
        return pair

    check_case(case_of(factory, [{"hidden": 4}, {"hidden": 8}]), te_module)
    assert [{p.device.type for p in pair.candidate.parameters()} for pair in built] == [{"meta"}, {"meta"}]


def test_a_factory_that_reads_values_is_built_for_real():
    def factory(te_module):
        assert torch.ones(2).sum().item() == 2
        return linear_pair(te_module)

    assert labels(factory) == ["2x4"]


def test_inputs_that_read_values_are_drawn_for_real():
    def inputs(rng):
        drawn = rng.normal(8, 4)
        return drawn[drawn[:, 0] == drawn[:, 0]]

    assert labels(lambda te_module: linear_pair(te_module, inputs=inputs)) == ["8x4"]


# Labels


def test_a_label_is_the_shape_of_the_first_input():
    def inputs(rng, batch, seq):
        return {"mask": None, "x": rng.uniform(batch, seq, 4), "index": rng.integers(7, high=3)}

    def factory(te_module, **_):
        return linear_pair(te_module, inputs=inputs)

    assert labels(factory, [{"batch": 2, "seq": 3}, {"batch": 1, "seq": 5}]) == ["2x3x4", "1x5x4"]


def test_a_tensor_without_dimensions_is_labelled_scalar():
    assert labels(lambda te_module: linear_pair(te_module, inputs=lambda rng: rng.normal().clone())) == ["scalar"]


def test_sizes_of_one_shape_are_told_apart_by_the_entries_in_which_they_differ():
    def factory(te_module, hidden, **_):
        return linear_pair(te_module, hidden)

    sizes = [
        {"hidden": 4, "ffn": 8, "eps": 1e-6, "batch": 2},
        {"hidden": 4, "ffn": 16, "eps": 1e-6, "batch": 2},
        {"hidden": 4, "ffn": 16, "eps": 1e-6, "batch": 2, "act": "a/b"},
        {"hidden": 8, "ffn": 16, "eps": 1e-6, "batch": 2},
    ]
    assert labels(factory, sizes) == ["2x4-ffn8", "2x4-ffn16", "2x4-ffn16-acta_b", "2x8"]


def test_labels_stay_unique_where_values_are_written_alike():
    found = labels(lambda te_module, shape: linear_pair(te_module), [{"shape": (1, 2)}, {"shape": [1, 2]}])
    assert len(set(found)) == 2


# Mistakes


def test_a_mistake_names_the_case_its_place_and_the_size():
    found = complaint(lambda te_module, hidden: None, [{"hidden": 4}])
    assert found.startswith(f"{Path(__file__).resolve()}:7: pair 'my_case', size (hidden=4): ")


def test_a_factory_that_raises_is_told_with_the_line_in_its_file():
    def factory(te_module):
        return linear_pair(te_module, candidate=te_module.Linear(4, 4, no_such_argument=1))

    line = factory.__code__.co_firstlineno + 1
    assert f"the factory raised TypeError in line {line}: " in complaint(factory)


def test_a_factory_must_return_a_pair():
    assert "must return a parity.Pair, not None" in complaint(lambda te_module: None)


@pytest.mark.parametrize("role", ["reference", "candidate"])
def test_both_parts_of_a_pair_must_be_modules(role):
    assert f"the {role} must be a torch.nn.Module, not the class Linear; call it" in complaint(
        lambda te_module: linear_pair(te_module, **{role: nn.Linear})
    )


def test_a_module_is_not_compared_with_itself():
    def factory(te_module):
        module = nn.Linear(4, 4, bias=False)
        return linear_pair(te_module, reference=module, candidate=module)

    assert "would be compared with itself" in complaint(factory)


@pytest.mark.parametrize("role", ["inputs", "call_reference", "call_candidate"])
def test_what_is_called_must_be_a_function(role):
    assert f"{role} must be a function, not Tensor" in complaint(
        lambda te_module: linear_pair(te_module, **{role: torch.ones(2)})
    )


def test_inputs_may_ask_only_for_sizes_that_there_are():
    assert "asks for 'seq'" in complaint(
        lambda te_module: linear_pair(te_module, inputs=lambda rng, seq: rng.normal(seq))
    )


def test_inputs_that_raise_are_told():
    found = complaint(lambda te_module: linear_pair(te_module, inputs=lambda rng: rng.normal(2) + torch.ones(3)))
    assert "inputs raised RuntimeError in line" in found


def test_inputs_must_return_a_tensor():
    assert "inputs must return at least one tensor, not dict" in complaint(
        lambda te_module: linear_pair(te_module, inputs=lambda rng: {"mask": None})
    )


def test_a_weight_map_is_checked_with_frozen_parameters_too():
    def factory(te_module):
        pair = linear_pair(te_module, candidate=te_module.Linear(4, 4, bias=True))
        pair.candidate.requires_grad_(False)
        return pair

    assert 'TE parameter "bias" (4,) is filled by no entry' in complaint(factory)


def test_each_problem_of_a_weight_map_stands_on_its_own_line():
    lines = complaint(lambda te_module: linear_pair(te_module, weights={"wieght": "weight"})).splitlines()
    assert lines[0].endswith("pair 'my_case':")
    assert lines[1].startswith('  "wieght": "weight": there is no reference parameter "wieght"')
    assert lines[2].startswith('  reference parameter "weight" (4, 4) is used by no entry')


# What a weight map may not name, and what a reference may not be


class Parts(nn.Module):
    """Two layers that share a weight, and a buffer."""

    def __init__(self, first: nn.Module, second: nn.Module) -> None:
        super().__init__()
        self.a, self.b = first, second
        self.b.weight = self.a.weight
        self.register_buffer("table", torch.ones(4))


def parts_pair(te_module, weights: dict[str, str]) -> Pair:
    layers = [te_module.Linear(4, 4, bias=False) for _ in range(2)]
    reference = Parts(*(nn.Linear(4, 4, bias=False) for _ in range(2)))
    return linear_pair(te_module, reference=reference, candidate=Parts(*layers), weights=weights)


def test_the_second_name_of_a_tied_parameter_is_told_with_the_first():
    told = complaint(lambda te_module: parts_pair(te_module, {"b.weight": "a.weight"}))
    assert '"b.weight" is not a reference parameter of its own: it is tied to "a.weight"; map that' in told
    told = complaint(lambda te_module: parts_pair(te_module, {"a.weight": "b.weight"}))
    assert '"b.weight" is not a TE parameter of its own: it is tied to "a.weight"' in told


def test_a_buffer_in_a_map_is_called_a_buffer():
    told = complaint(lambda te_module: parts_pair(te_module, {"a.weight": "a.weight", "table": "table"}))
    assert '"table" is not a reference parameter of its own: it is a buffer, and buffers are not mapped' in told


def test_a_reference_of_te_s_modules_is_refused():
    told = complaint(lambda te_module: linear_pair(te_module, reference=te_module.Linear(4, 4, bias=False)))
    assert "the reference must be plain PyTorch, which runs in FP64, but it is TransformerEngine's Linear" in told
    assert "exchanged" not in told


def test_a_reference_and_a_candidate_that_are_exchanged_are_told():
    def exchanged(te_module):
        reference = nn.Sequential(te_module.Linear(4, 4, bias=False))
        return linear_pair(te_module, reference=reference, candidate=nn.Sequential(nn.Linear(4, 4, bias=False)))

    told = complaint(exchanged)
    assert "its 0 is TransformerEngine's Linear; did you swap reference and candidate?" in told


# Modules whose weights cannot be compared are refused when their pair is checked, with advice what to do instead.


class Rotated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)
        self.phases = nn.Parameter(torch.ones(2, dtype=torch.complex64))


@pytest.mark.parametrize(
    ("module", "complaint"),
    [
        (None, "the reference must be a torch.nn.Module, not None"),
        (nn.Linear, "the reference must be a torch.nn.Module, not the class Linear; call it to make one"),
        (nn.Sequential(nn.LazyLinear(4)), "the reference's 0.weight has no shape before the first call"),
        (Rotated(), "the reference's phases holds complex numbers"),
    ],
    ids=["none", "class", "lazy", "complex"],
)
def test_it_is_refused_by_name(module, complaint):
    with pytest.raises(UserError, match=complaint):
        check_module("reference", module)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_torchscript_whose_parameters_are_copies_is_refused():
    scripted = nn.Sequential(torch.jit.script(nn.Linear(2, 2)))
    with pytest.raises(UserError, match="the reference's 0 is compiled by TorchScript"):
        check_module("reference", scripted)


def test_a_lazy_module_that_was_called_once_is_accepted():
    module = nn.LazyLinear(4)
    module(torch.zeros(1, 2))
    check_module("reference", module)


# Parameters that a port leaves to plain PyTorch layers are distinguished from those in TE's modules.


FP8 = Rounding(torch.bfloat16, e4m3, e4m3, e5m2)


def bf16(x):
    return x.bfloat16().float()


def pair(candidate, weights):
    return Pair(reference=nn.Identity(), candidate=candidate, inputs=lambda rng: (), weights=weights)


def test_parameters_of_te_s_modules_of_their_parts_and_of_classes_derived_from_them_are_inside():
    modules = te.kernels("cpu").te

    class Derived(modules.Linear):
        """A user's own subclass."""

    candidate = nn.ModuleDict({
        "layer": modules.TransformerLayer(32, 64, 2, fuse_qkv_params=True),
        "derived": Derived(32, 32),
        "router": nn.Linear(32, 4),
        "operation": modules.ops.Linear(32, 32),
    })  # fmt: skip
    names = ["layer.self_attention.layernorm_qkv.weight", "derived.weight", "router.weight", "operation.weight"]
    assert parameters_outside_te(pair(candidate, {name: name for name in names})) == {"router.weight"}


def test_a_weight_that_an_embedding_shares_with_te_s_head_is_inside():
    candidate = nn.ModuleDict(
        {"embedding": nn.Embedding(16, 8), "head": te.kernels("cpu").te.Linear(8, 16, bias=False)}
    )
    candidate["head"].weight = candidate["embedding"].weight
    assert parameters_outside_te(pair(candidate, {"embedding.weight": "embedding.weight"})) == set()


def test_a_weight_that_lies_partly_in_te_is_inside():
    candidate = nn.ModuleDict({"inside": te.kernels("cpu").te.Linear(8, 8), "outside": nn.Linear(8, 8)})
    weights = {parity.stack("a", "b"): parity.stack("inside.weight", "outside.weight")}
    assert parameters_outside_te(pair(candidate, weights)) == set()


def test_a_plain_layer_multiplies_what_is_stored_forward_and_backward():
    x, weight = torch.randn(4, 32, requires_grad=True), torch.randn(16, 32, requires_grad=True)
    cotangent = torch.randn(4, 16)
    with rounded(FP8, [weight], plain=[weight]) as phase:
        y = F.linear(x, weight)
        phase.begin_backward()
        of_x, of_weight = torch.autograd.grad(y, (x, weight), cotangent)
    assert torch.equal(y, bf16(bf16(x) @ bf16(weight).t()))
    assert torch.equal(of_x, bf16(bf16(cotangent) @ bf16(weight)))
    torch.testing.assert_close(of_weight, bf16(bf16(cotangent).t() @ bf16(x)), rtol=0, atol=0)


def test_a_layer_of_te_s_beside_it_is_rounded_as_before():
    x, weights = torch.randn(4, 32), [torch.randn(16, 32) for _ in range(2)]
    with rounded(FP8, weights):
        expected = F.linear(x, weights[1])
    with rounded(FP8, weights, plain=weights[:1]):
        F.linear(x, weights[0])
        assert torch.equal(F.linear(x, weights[1]), expected)
