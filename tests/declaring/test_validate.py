"""Cases are checked before anything runs: built without memory, with mistakes told by case, place and size."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import parity
from parity.case.case import Case, Pair
from parity.case.validate import check_case, without_memory
from parity.user_error import UserError

te = parity.te.kernels("cpu").te
Factory = Callable[..., Any]
IDENTITY = {"weight": "weight"}


def case_of(factory: Factory, sizes: Sequence[dict[str, Any]] = ({},)) -> Case:
    return Case("my_case", factory, sizes, path=Path(__file__).resolve(), line=7)


def labels(factory: Factory, sizes: Sequence[dict[str, Any]] = ({},)) -> list[str]:
    return [checked.label for checked in check_case(case_of(factory, sizes), te)]


def complaint(factory: Factory, sizes: Sequence[dict[str, Any]] = ({},)) -> str:
    with pytest.raises(UserError) as caught:
        check_case(case_of(factory, sizes), te)
    return str(caught.value)


def linear_pair(te, hidden=4, **changes: Any) -> Pair:
    return Pair(
        **{
            "reference": nn.Linear(hidden, hidden, bias=False),
            "candidate": te.Linear(hidden, hidden, bias=False),
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
        lambda: te.Linear(16, 16),
        lambda: te.LayerNorm(16),
        lambda: te.RMSNorm(16),
        lambda: te.LayerNormLinear(16, 16),
        lambda: te.LayerNormMLP(16, 32, activation="swiglu", normalization="RMSNorm"),
        lambda: te.GroupedLinear(2, 16, 16),
        lambda: te.MultiheadAttention(16, 2, num_gqa_groups=1, fuse_qkv_params=True),
        lambda: te.TransformerLayer(16, 32, 2, device="cpu"),
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

    def factory(te, hidden):
        pair = linear_pair(te, hidden)
        built.append(pair)
        return pair

    check_case(case_of(factory, [{"hidden": 4}, {"hidden": 8}]), te)
    assert [{p.device.type for p in pair.candidate.parameters()} for pair in built] == [{"meta"}, {"meta"}]


def test_a_factory_that_reads_values_is_built_for_real():
    def factory(te):
        assert torch.ones(2).sum().item() == 2
        return linear_pair(te)

    assert labels(factory) == ["2x4"]


def test_inputs_that_read_values_are_drawn_for_real():
    def inputs(rng):
        drawn = rng.normal(8, 4)
        return drawn[drawn[:, 0] == drawn[:, 0]]

    assert labels(lambda te: linear_pair(te, inputs=inputs)) == ["8x4"]


# Labels


def test_a_label_is_the_shape_of_the_first_input():
    def inputs(rng, batch, seq):
        return {"mask": None, "x": rng.uniform(batch, seq, 4), "index": rng.integers(7, high=3)}

    def factory(te, **_):
        return linear_pair(te, inputs=inputs)

    assert labels(factory, [{"batch": 2, "seq": 3}, {"batch": 1, "seq": 5}]) == ["2x3x4", "1x5x4"]


def test_a_tensor_without_dimensions_is_labelled_scalar():
    assert labels(lambda te: linear_pair(te, inputs=lambda rng: rng.normal().clone())) == ["scalar"]


def test_sizes_of_one_shape_are_told_apart_by_the_entries_in_which_they_differ():
    def factory(te, hidden, **_):
        return linear_pair(te, hidden)

    sizes = [
        {"hidden": 4, "ffn": 8, "eps": 1e-6, "batch": 2},
        {"hidden": 4, "ffn": 16, "eps": 1e-6, "batch": 2},
        {"hidden": 4, "ffn": 16, "eps": 1e-6, "batch": 2, "act": "a/b"},
        {"hidden": 8, "ffn": 16, "eps": 1e-6, "batch": 2},
    ]
    assert labels(factory, sizes) == ["2x4-ffn8", "2x4-ffn16", "2x4-ffn16-acta_b", "2x8"]


def test_labels_stay_unique_where_values_are_written_alike():
    found = labels(lambda te, shape: linear_pair(te), [{"shape": (1, 2)}, {"shape": [1, 2]}])
    assert len(set(found)) == 2


# Mistakes


def test_a_mistake_names_the_case_its_place_and_the_size():
    found = complaint(lambda te, hidden: None, [{"hidden": 4}])
    assert found.startswith(f"{Path(__file__).resolve()}:7: pair 'my_case', size (hidden=4): ")


def test_a_factory_that_raises_is_told_with_the_line_in_its_file():
    def factory(te):
        return linear_pair(te, candidate=te.Linear(4, 4, no_such_argument=1))

    line = factory.__code__.co_firstlineno + 1
    assert f"the factory raised TypeError in line {line}: " in complaint(factory)


def test_a_factory_must_return_a_pair():
    assert "must return a parity.Pair, not None" in complaint(lambda te: None)


@pytest.mark.parametrize("role", ["reference", "candidate"])
def test_both_parts_of_a_pair_must_be_modules(role):
    assert f"the {role} must be a torch.nn.Module, not type" in complaint(
        lambda te: linear_pair(te, **{role: nn.Linear})
    )


def test_a_module_is_not_compared_with_itself():
    def factory(te):
        module = nn.Linear(4, 4, bias=False)
        return linear_pair(te, reference=module, candidate=module)

    assert "compares it with itself" in complaint(factory)


@pytest.mark.parametrize("role", ["inputs", "call_reference", "call_candidate"])
def test_what_is_called_must_be_a_function(role):
    assert f"{role} must be a function, not Tensor" in complaint(lambda te: linear_pair(te, **{role: torch.ones(2)}))


def test_inputs_may_ask_only_for_sizes_that_there_are():
    assert "asks for 'seq'" in complaint(lambda te: linear_pair(te, inputs=lambda rng, seq: rng.normal(seq)))


def test_inputs_that_raise_are_told():
    found = complaint(lambda te: linear_pair(te, inputs=lambda rng: rng.normal(2) + torch.ones(3)))
    assert "inputs raised RuntimeError in line" in found


def test_inputs_must_return_a_tensor():
    assert "inputs returned no tensor but dict" in complaint(
        lambda te: linear_pair(te, inputs=lambda rng: {"mask": None})
    )


def test_a_weight_map_is_checked_with_frozen_parameters_too():
    def factory(te):
        pair = linear_pair(te, candidate=te.Linear(4, 4, bias=True))
        pair.candidate.requires_grad_(False)
        return pair

    assert 'TE parameter "bias" (4,) is filled by no entry' in complaint(factory)


def test_each_problem_of_a_weight_map_stands_on_its_own_line():
    lines = complaint(lambda te: linear_pair(te, weights={"wieght": "weight"})).splitlines()
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


def parts_pair(te, weights: dict[str, str]) -> Pair:
    layers = [te.Linear(4, 4, bias=False) for _ in range(2)]
    reference = Parts(*(nn.Linear(4, 4, bias=False) for _ in range(2)))
    return linear_pair(te, reference=reference, candidate=Parts(*layers), weights=weights)


def test_the_second_name_of_a_tied_parameter_is_told_with_the_first():
    told = complaint(lambda te: parts_pair(te, {"b.weight": "a.weight"}))
    assert '"b.weight" is not a reference parameter of its own: it is tied to "a.weight"; map that' in told
    told = complaint(lambda te: parts_pair(te, {"a.weight": "b.weight"}))
    assert '"b.weight" is not a TE parameter of its own: it is tied to "a.weight"' in told


def test_a_buffer_in_a_map_is_called_a_buffer():
    told = complaint(lambda te: parts_pair(te, {"a.weight": "a.weight", "table": "table"}))
    assert '"table" is not a reference parameter of its own: it is a buffer, and buffers are not mapped' in told


def test_a_reference_of_te_s_modules_is_refused():
    told = complaint(lambda te: linear_pair(te, reference=te.Linear(4, 4, bias=False)))
    assert "the reference must be plain PyTorch, which runs in FP64, but it is TransformerEngine's Linear" in told
    assert "exchanged" not in told


def test_a_reference_and_a_candidate_that_are_exchanged_are_told():
    def exchanged(te):
        reference = nn.Sequential(te.Linear(4, 4, bias=False))
        return linear_pair(te, reference=reference, candidate=nn.Sequential(nn.Linear(4, 4, bias=False)))

    told = complaint(exchanged)
    assert "its 0 is TransformerEngine's Linear; are reference and candidate exchanged?" in told
