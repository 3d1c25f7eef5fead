"""Weight maps: they produce TE's layouts, are exact both ways, and also map gradients."""

from __future__ import annotations

from itertools import count

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from parity.case import transfer
from parity.case.map_check import check_map
from parity.case.transfer import separate_norms
from parity.case.weight_map import (
    Shape,
    Side,
    WeightMap,
    constant,
    copies,
    experts,
    interleaved_qkv,
    names,
    rearrange,
    reorder,
    rope_halves,
    separated_qkv,
    shape_of,
    shift,
    stack,
    transpose,
    under,
)

SIZES = [1, 2, 3, 4, 6, 8, 12, 16]
Shapes = dict[str, Shape]


def divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]


@st.composite
def sides(draw: st.DrawFn, shape: Shape, shapes: Shapes, options: frozenset[str], depth: int = 3) -> Side:
    """Draw a random side that packs to ``shape``, and add the shapes of its parameters to ``shapes``."""

    def part(of_shape: Shape) -> Side:
        return draw(sides(of_shape, shapes, options, depth - 1))

    rows, *rest = shape
    fused = [(g, d) for g in divisors(rows) for d in divisors(rows // g) if rows >= 3 * g * d]
    possible = {
        "name": True,
        "constant": True,
        "shift": depth,
        "transpose": depth and len(shape) > 1,
        "experts": depth and len(shape) > 1 and rows <= 4,
        "stack": depth and rows > 1,
        "reorder": depth and rows % 2 == 0,
        "qkv": depth and fused,
        "separated": depth and fused,
        "rope": depth and rows % 2 == 0,
        "rearrange": depth,
        "copies": depth,
    }
    kind = draw(st.sampled_from([name for name, allowed in possible.items() if allowed and name in options]))
    if kind == "constant":
        return constant(2.0, *shape)
    if kind == "shift":
        return shift(part(shape), draw(st.sampled_from([-1.0, 0.5])))
    if kind == "transpose":
        return transpose(part((*shape[:-2], shape[-1], shape[-2])))
    if kind == "experts":
        return experts(*(part(tuple(rest)) for _ in range(rows)))
    if kind == "stack":
        first = draw(st.integers(1, rows - 1))
        return stack(part((first, *rest)), part((rows - first, *rest)))
    if kind == "reorder":
        blocks = draw(st.sampled_from(divisors(rows)))
        return reorder(part(shape), tuple(draw(st.permutations(range(blocks)))))
    if kind == "rearrange":
        axes = [f"axis{i}" for i in range(len(rest))]
        pattern = f"{' '.join(axes[::-1])} (a b) -> (b a) {' '.join(axes)}"
        return rearrange(part((*rest[::-1], rows)), pattern, a=draw(st.sampled_from(divisors(rows))))
    if kind == "copies":
        return copies(part(shape), part(shape))
    if kind == "rope":
        head_dim = draw(st.sampled_from([d for d in divisors(rows) if d % 2 == 0]))
        return rope_halves(part(shape), head_dim=head_dim, rotary_dim=draw(st.sampled_from(range(2, head_dim + 1, 2))))
    if kind in ("qkv", "separated"):
        groups, head_dim = draw(st.sampled_from(fused))
        if kind == "separated":
            return separated_qkv(part(shape), groups=groups, head_dim=head_dim)
        key = (groups * head_dim, *rest)
        query = (rows - 2 * groups * head_dim, *rest)
        return interleaved_qkv(part(query), part(key), part(key), groups=groups, head_dim=head_dim)
    name = f"p{len(shapes)}"
    shapes[name] = shape
    return name


MOVES = frozenset({"name", "transpose", "experts", "stack", "reorder", "qkv", "separated", "rope", "rearrange"})


@st.composite
def maps(draw: st.DrawFn, extra: frozenset[str] = frozenset()) -> tuple[WeightMap, Shapes, Shapes]:
    """Draw a random map of one to three entries, with the shapes of both sides' parameters."""
    reference: Shapes = {}
    candidate: Shapes = {}
    entries = {}
    for _ in range(draw(st.integers(1, 3))):
        shape = tuple(draw(st.lists(st.sampled_from(SIZES), min_size=1, max_size=3)))
        left = draw(sides(shape, reference, MOVES | (extra - {"copies"})))
        entries[left] = draw(sides(shape, candidate, MOVES | (extra - {"constant"})))
    return entries, reference, candidate


def random_tensors(shapes: Shapes, seed: int, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    """Return random multiples of 1/16 from -4 to 4: exact in every dtype, with exact sums and products in FP64."""
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randint(-64, 65, s, generator=generator).to(dtype) / 16 for name, s in shapes.items()}


def assert_same(left: dict[str, Tensor], right: dict[str, Tensor]) -> None:
    assert left.keys() == right.keys()
    for name in left:
        torch.testing.assert_close(left[name], right[name], rtol=0, atol=0)


def numbered(*shape: int) -> Tensor:
    start = next(_numbers) * 10_000
    return torch.arange(start, start + torch.Size(shape).numel(), dtype=torch.float64).view(shape)


_numbers = count()


# Laws


@given(maps(frozenset({"shift", "constant", "copies"})), st.integers(0, 99))
def test_mapping_to_the_candidate_and_back_changes_no_bit(drawn, seed):
    entries, reference, candidate = drawn
    check_map(entries, reference, candidate)
    tensors = random_tensors(reference, seed)
    there = transfer.to_candidate(entries, tensors, candidate)
    assert {name: tuple(tensor.shape) for name, tensor in there.items()} == candidate
    assert_same(transfer.to_reference(entries, there, reference), tensors)


@given(maps(frozenset({"shift"})), st.integers(0, 99))
def test_mapping_to_the_reference_and_back_changes_no_bit(drawn, seed):
    entries, reference, candidate = drawn
    tensors = random_tensors(candidate, seed)
    there = transfer.to_reference(entries, tensors, reference)
    assert {name: tuple(tensor.shape) for name, tensor in there.items()} == reference
    assert_same(transfer.to_candidate(entries, there, candidate), tensors)


@settings(max_examples=25)
@given(maps(), st.sampled_from([torch.float32, torch.bfloat16, torch.float16, torch.int64]))
def test_terms_that_only_move_elements_keep_every_dtype(drawn, dtype):
    entries, reference, candidate = drawn
    tensors = random_tensors(reference, 0, torch.float64)
    tensors = {name: (tensor * 16).to(dtype) for name, tensor in tensors.items()}
    there = transfer.to_candidate(entries, tensors, candidate)
    assert {tensor.dtype for tensor in there.values()} == {dtype}
    assert_same(transfer.to_reference(entries, there, reference), tensors)


@given(maps(frozenset({"shift", "constant", "copies"})), st.integers(0, 99))
def test_gradients_move_as_autograd_moves_them(drawn, seed):
    entries, reference, candidate = drawn
    assume(reference)
    tensors = {name: tensor.requires_grad_() for name, tensor in random_tensors(reference, seed).items()}
    gradients = random_tensors(candidate, seed + 1)
    there = transfer.to_candidate(entries, tensors, candidate)
    loss = torch.stack([(there[name] * gradients[name]).sum() for name in there]).sum()
    loss.backward()
    moved = transfer.gradients_to_reference(entries, gradients, reference)
    assert_same(moved, {name: tensor.grad for name, tensor in tensors.items()})


@given(st.floats(2.0**-29, 2.0**52, width=32), st.sampled_from([-1.0, 1.0]))
def test_a_shift_in_fp64_is_exact_for_fp32_values_down_to_its_stated_limit(magnitude, sign):
    value = torch.tensor([sign * magnitude], dtype=torch.float64)
    there = transfer.to_candidate({shift("w", by=-1.0): "v"}, {"w": value}, {"v": (1,)})
    assert transfer.to_reference({shift("w", by=-1.0): "v"}, there, {"w": (1,)})["w"].item() == sign * magnitude


def test_a_shift_loses_bits_of_fp32_values_below_its_stated_limit():
    value = torch.tensor([-(2.0**-31) * (1 + 2.0**-23)], dtype=torch.float64)
    there = transfer.to_candidate({shift("w", by=-1.0): "v"}, {"w": value}, {"v": (1,)})
    assert transfer.to_reference({shift("w", by=-1.0): "v"}, there, {"w": (1,)})["w"].item() != value.item()


# Layouts


def packed(term: Side, **tensors: Tensor) -> Tensor:
    """Return the tensor that TE gets from a term on the left side of a map."""
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    shape = shape_of(term, shapes)
    return transfer.to_candidate({term: "te"}, tensors, {"te": shape})["te"]


def test_stack_puts_the_gate_in_the_first_half_of_fc1():
    gate, up = numbered(6, 4), numbered(6, 4)
    first, second = packed(stack("gate", "up"), gate=gate, up=up).chunk(2)
    assert torch.equal(first, gate)
    assert torch.equal(second, up)


def test_stack_takes_parts_of_unequal_size():
    fused = packed(stack("q", "k", dim=-1), q=numbered(2, 8), k=numbered(2, 2))
    assert fused.shape == (2, 10)


@pytest.mark.parametrize(("heads", "groups"), [(8, 8), (8, 2), (8, 1)], ids=["MHA", "GQA", "MQA"])
@pytest.mark.parametrize("trailing", [(5,), ()], ids=["weight", "bias"])
def test_interleaved_qkv_holds_each_groups_queries_then_its_key_then_its_value(heads, groups, trailing):
    head_dim, per_group = 4, heads // groups
    query = numbered(groups, per_group, head_dim, *trailing)
    key, value = numbered(groups, head_dim, *trailing), numbered(groups, head_dim, *trailing)
    term = interleaved_qkv("q", "k", "v", groups=groups, head_dim=head_dim)
    fused = packed(term, q=query.flatten(0, 2), k=key.flatten(0, 1), v=value.flatten(0, 1))
    viewed = fused.view(groups, per_group + 2, head_dim, *trailing)
    assert torch.equal(viewed[:, :per_group], query)
    assert torch.equal(viewed[:, per_group], key)
    assert torch.equal(viewed[:, per_group + 1], value)


def test_separated_qkv_undoes_interleaved_qkv():
    tensors = {"q": numbered(16, 3), "k": numbered(8, 3), "v": numbered(8, 3)}
    term = separated_qkv(interleaved_qkv("q", "k", "v", groups=2, head_dim=4), groups=2, head_dim=4)
    assert torch.equal(packed(term, **tensors), torch.cat(list(tensors.values())))


def test_a_fused_conv1d_weight_fills_separate_query_key_and_value():
    fused = numbered(3, 12)
    entries = {transpose("c_attn.weight"): stack("q", "k", "v")}
    filled = transfer.to_candidate(entries, {"c_attn.weight": fused}, dict.fromkeys("qkv", (4, 3)))
    for i, name in enumerate("qkv"):
        assert torch.equal(filled[name], fused[:, 4 * i : 4 * i + 4].T)


@pytest.mark.parametrize("rotary_dim", [8, 4])
def test_rope_halves_lets_the_halves_form_rotate_what_the_interleaved_form_did(rotary_dim):
    heads, head_dim, hidden = 2, 8, 5
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(heads * head_dim, hidden, generator=generator, dtype=torch.float64)
    x = torch.randn(hidden, generator=generator, dtype=torch.float64)
    angles = torch.randn(rotary_dim // 2, generator=generator, dtype=torch.float64)
    permuted = packed(rope_halves("w", head_dim=head_dim, rotary_dim=rotary_dim), w=weight)
    query, moved = (weight @ x).view(heads, head_dim), (permuted @ x).view(heads, head_dim)
    half = rotary_dim // 2
    pairs = torch.complex(query[:, 0:rotary_dim:2], query[:, 1:rotary_dim:2]) * torch.exp(1j * angles)
    halves = torch.complex(moved[:, :half], moved[:, half:rotary_dim]) * torch.exp(1j * angles)
    torch.testing.assert_close(halves, pairs)
    assert torch.equal(moved[:, rotary_dim:], query[:, rotary_dim:])


def test_reorder_exchanges_up_and_gate():
    up_gate = numbered(6, 4)
    assert torch.equal(packed(reorder("w", (1, 0)), w=up_gate), torch.cat([up_gate[3:], up_gate[:3]]))


def test_reorder_takes_block_i_from_position_order_i():
    blocks = numbered(3)
    assert torch.equal(packed(reorder("w", (2, 0, 1)), w=blocks), blocks[[2, 0, 1]])


def test_rearrange_puts_alternate_rows_in_halves():
    gate, up = numbered(3, 4), numbered(3, 4)
    alternate = torch.stack([gate, up], 1).flatten(0, 1)
    fused = packed(rearrange("w", "(ffn two) hidden -> (two ffn) hidden", two=2), w=alternate)
    assert torch.equal(fused, torch.cat([gate, up]))


def test_rearrange_gives_a_weight_another_shape_and_its_own_back():
    entries, conv = {rearrange("conv", "out c h w -> out (c h w)"): "linear"}, numbered(6, 3, 2, 2)
    there = transfer.to_candidate(entries, {"conv": conv}, {"linear": (6, 12)})
    assert there["linear"].shape == (6, 12)
    assert torch.equal(transfer.to_reference(entries, there, {"conv": (6, 3, 2, 2)})["conv"], conv)


def test_rearrange_takes_leading_dimensions_as_they_come():
    entries = {rearrange("w", "... (a b) -> ... b a", a=2): "v"}
    there = transfer.to_candidate(entries, {"w": numbered(5, 4, 6)}, {"v": (5, 4, 3, 2)})
    assert transfer.to_reference(entries, there, {"w": (5, 4, 6)})["w"].shape == (5, 4, 6)


def test_copies_hold_the_same_and_their_gradients_add_up():
    entries = {"norm": copies("first", "second")}
    shapes = {"first": (3,), "second": (3,)}
    there = transfer.to_candidate(entries, {"norm": numbered(3)}, shapes)
    assert torch.equal(there["first"], there["second"])
    gradients = {"first": torch.ones(3), "second": torch.full((3,), 2.0)}
    assert transfer.gradients_to_reference(entries, gradients, {"norm": (3,)})["norm"].tolist() == [3.0] * 3


def test_experts_fill_one_parameter_each():
    fused = numbered(2, 4, 3)
    entries = {transpose("experts.weight"): experts("weight0", "weight1")}
    filled = transfer.to_candidate(entries, {"experts.weight": fused}, {"weight0": (3, 4), "weight1": (3, 4)})
    assert torch.equal(filled["weight1"], fused[1].T)


def test_shift_by_minus_one_makes_a_zero_centered_gamma():
    assert packed(shift("w", by=-1.0), w=torch.tensor([1.0, 1.5])).tolist() == [0.0, 0.5]


def test_constant_fills_what_the_reference_lacks_in_the_dtype_of_the_rest():
    entries = {stack("q", constant(0.0, 2), "v"): "bias", constant(0.0, 3): "other", constant(1.0, 3): "gain"}
    tensors = {name: torch.ones(2, dtype=torch.bfloat16) for name in "qv"}
    shapes = {"bias": (6,), "other": (3,), "gain": (3,)}
    check_map(entries, dict.fromkeys("qv", (2,)), shapes)
    filled = transfer.to_candidate(entries, tensors, shapes)
    assert filled["bias"].tolist() == [1, 1, 0, 0, 1, 1]
    assert filled["other"].tolist() == [0, 0, 0]
    assert filled["gain"].tolist() == [1, 1, 1]
    assert {tensor.dtype for tensor in filled.values()} == {torch.bfloat16}


def test_a_layers_map_serves_it_within_a_model():
    layer = {stack("gate", "up"): "fc1_weight", constant(0.0, 4): "fc1_bias"}
    weight_map = under(layer, "layers.0.", "decoder.0.") | under(layer, "layers.1.")
    assert [tuple(names(side)) for side in weight_map] == [
        ("layers.0.gate", "layers.0.up"),
        (),
        ("layers.1.gate", "layers.1.up"),
        (),
    ]
    assert list(weight_map.values()) == [
        f"{prefix}fc1_{kind}" for prefix in ("decoder.0.", "layers.1.") for kind in ("weight", "bias")
    ]


def test_gradients_that_are_not_there_leave_their_entry_out():
    entries = {"a": "x", stack("b", "c"): "y"}
    moved = transfer.gradients_to_reference(entries, {"x": torch.ones(2)}, {"a": (2,), "b": (1,), "c": (1,)})
    assert list(moved) == ["a"]


def test_a_gradient_that_lacks_its_sibling_is_an_error():
    with pytest.raises(KeyError, match="z"):
        transfer.gradients_to_reference({"a": stack("x", "z")}, {"x": torch.ones(2)}, {"a": (4,)})


# A norm of which TE has several copies is computed and differentiated once for each of them.


WEIGHTS = {
    "ln.weight": copies("attention.layer_norm_weight", "mlp.layer_norm_weight"),
    "ln.bias": copies("attention.layer_norm_bias", "mlp.layer_norm_bias"),
    "query.weight": "attention.weight",
    stack("gate.weight", "up.weight"): "mlp.fc1_weight",
}


class Noting(nn.Linear):
    """A linear layer that keeps its last input."""

    def forward(self, x: Tensor) -> Tensor:
        self.given = x
        return super().forward(x)


class Parallel(nn.Module):
    """Three layers that read one norm."""

    def __init__(self) -> None:
        super().__init__()
        self.ln = nn.LayerNorm(8)
        self.query, self.gate, self.up = (Noting(8, 8, bias=False) for _ in range(3))

    @property
    def read(self) -> list[Tensor]:
        """Return the last input of each layer."""
        return [self.query.given, self.gate.given, self.up.given]

    def forward(self, x: Tensor) -> Tensor:
        normed = self.ln(x)
        return x + self.query(normed) + self.gate(normed) * self.up(normed)


def run(module: nn.Module, x: Tensor) -> list[Tensor]:
    x = x.clone().requires_grad_()
    y = module(x)
    return [y, *torch.autograd.grad(y.square().sum(), [x, *module.parameters()])]


def test_layers_of_one_te_module_share_a_norm_that_others_do_not_read():
    module, x = Parallel(), torch.randn(3, 8)
    with separate_norms(module, WEIGHTS):
        module(x)
    query, gate, up = module.read
    assert gate is up
    assert query is not gate
    module(x)
    assert module.read[0] is module.read[1] is module.read[2]


def test_nothing_else_changes():
    module, x = Parallel().double(), torch.randn(3, 8, dtype=torch.float64)
    plain = run(module, x)
    with separate_norms(module, WEIGHTS):
        separate = run(module, x)
    torch.testing.assert_close(separate, plain, rtol=1e-12, atol=1e-12)


def test_each_pass_has_norms_of_its_own():
    module = Parallel().double()
    with separate_norms(module, WEIGHTS):
        for seed in (0, 1):
            x = torch.randn(3, 8, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
            module(x)
            torch.testing.assert_close(module.read[1], module.read[0])
