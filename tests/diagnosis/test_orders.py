"""Outputs that are right but in another place: moved, reversed, exchanged, or read from another layer's cache."""

from __future__ import annotations

from collections.abc import Callable
from itertools import cycle

import pytest
import torch.nn.functional as F
from torch import Tensor, nn

import parity
from parity.case.case import Case, Pair
from parity.result import Result


def compared(change: Callable[[Tensor], Tensor], of_inputs: bool, precision: str) -> Result:
    """Compare a norm and a linear layer whose port moves rows of its outputs, or of its inputs."""

    def call(module: nn.Module, x: Tensor) -> Tensor:
        return module(change(x)) if of_inputs else change(module(x))

    def factory(te):
        return Pair(
            nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 48)),
            te.LayerNormLinear(64, 48),
            inputs=lambda rng: rng.normal(8, 20, 64),
            weights={
                "0.weight": "layer_norm_weight",
                "0.bias": "layer_norm_bias",
                "1.weight": "weight",
                "1.bias": "bias",
            },
            call_candidate=call,
        )

    (result,) = parity.compare(Case("moved", factory, sizes=({},)), [precision])
    return result


MOVED: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "positions one early": (
        lambda x: x.roll(-1, 1),
        "dimension 1 is shifted by 1: index 0 has what belongs to index 1",
    ),
    "positions two late": (
        lambda x: F.pad(x[:, :-2], (0, 0, 2, 0)),
        "dimension 1 is shifted by 2: index 2 has what belongs to index 0",
    ),
    "a batch in reverse": (lambda x: x.flip(0), "dimension 0 is in reverse"),
    "a batch that was sorted": (
        lambda x: x[[0, 2, 1, 3, 4, 5, 6, 7]],
        "along dimension 0, index 1 has what belongs to index 2, index 2 has what belongs to index 1",
    ),
    "columns in reverse": (lambda x: x.flip(-1), "dimension 2 is in reverse"),
}


@pytest.mark.parametrize(
    ("change", "told", "precision"),
    [(*row, precision) for row, precision in zip(MOVED.values(), cycle(("bf16", "fp8_current")), strict=False)],
    ids=MOVED,
)
def test_rows_in_another_order_are_told(change, told, precision):
    result = compared(change, False, precision)
    assert [found.title for found in result.findings] == ["rows-exchanged"]
    assert f"output: {told}" in result.findings[0].message


def test_inputs_in_another_order_show_in_the_outputs():
    result = compared(lambda x: x.roll(1, 1), True, "bf16")
    assert [found.title for found in result.findings] == ["rows-exchanged"]


def test_rows_that_are_wrong_as_well_are_not_told_as_moved():
    result = compared(lambda x: 1.1 * x.roll(1, 1), False, "bf16")
    assert "rows-exchanged" not in [found.title for found in result.findings]


WIDTH, HEADS = 64, 4


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        return x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


@pytest.mark.parametrize(("numbers", "titles"), [((1, 2), []), ((1, 1), ["cache-shared"])])
def test_layers_that_share_a_cache_are_told(numbers, titles):
    def factory(te):
        layers = [
            te.MultiheadAttention(
                *(WIDTH, HEADS),
                attn_mask_type="padding_causal",
                qkv_format="bshd",
                fuse_qkv_params=True,
                qkv_weight_interleaved=False,
                attention_dropout=0.0,
                layer_number=number,
            )
            for number in numbers
        ]

        def step(module: nn.Module, x: Tensor, **given: object) -> Tensor:
            for layer in module.children():
                x = x + layer(x, **given)
            return x

        return Pair(
            nn.Sequential(Attention(), Attention()),
            nn.ModuleList(layers),
            inputs=lambda rng: rng.normal(8, 12, WIDTH),
            weights={
                f"{i}.{left}.{kind}": f"{i}.{right}.{kind}"
                for i in range(2)
                for left, right in (("qkv", "qkv"), ("out", "proj"))
                for kind in ("weight", "bias")
            },
            call_candidate=parity.Decoding(kv_heads=HEADS, head_dim=WIDTH // HEADS, prompt=5, step=step),
            evaluation=True,
        )

    (result,) = parity.compare(Case("cached", factory, sizes=({},)), ["bf16"])
    assert [found.title for found in result.findings] == titles
    assert result.passed == (not titles)
