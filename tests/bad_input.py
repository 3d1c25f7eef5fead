"""Build one-layer pairs with unusual inputs, weights or modules, and check what their results say."""

from __future__ import annotations

import pytest
from torch import nn

import parity
from parity.report import failure
from parity.report.record import Item
from parity.result import Result, from_json, to_json
from parity.te import PRECISIONS, why_unavailable

te = parity.te.kernels("cpu").te
HERE = [name for name, precision in PRECISIONS.items() if why_unavailable(precision, parity.te.kernels()) is None]
FP8 = [name for name in HERE if PRECISIONS[name].recipe is not None]
TOKENS, WIDTH = 16, 32
IDENTITY = {"weight": "weight", "bias": "bias"}
every_precision = pytest.mark.parametrize("precision", HERE)


def linear(**fields) -> parity.Pair:
    return parity.Pair(
        **{
            "reference": nn.Linear(WIDTH, WIDTH),
            "candidate": te.Linear(WIDTH, WIDTH),
            "inputs": lambda rng: rng.normal(TOKENS, WIDTH),
            "weights": IDENTITY,
            "fill": True,
            **fields,
        }
    )


def mlp(inputs) -> parity.Pair:
    return parity.Pair(
        reference=parity.reference.SwiGLUMLP(WIDTH, 2 * WIDTH),
        candidate=te.LayerNormMLP(WIDTH, 2 * WIDTH, normalization="RMSNorm", activation="swiglu", bias=False),
        inputs=inputs,
        weights={
            "norm.weight": "layer_norm_weight",
            parity.stack("gate_proj.weight", "up_proj.weight"): "fc1_weight",
            "down_proj.weight": "fc2_weight",
        },
        fill=True,
    )


def both(call) -> dict:
    """Return the fields of a pair that calls both modules through the same function."""
    return {"call_reference": call, "call_candidate": call}


def result_of(pair: parity.Pair, precision: str = "fp32", diagnose: bool = True) -> Result:
    (result,) = parity.compare(pair, [precision], diagnose=diagnose)
    assert from_json(to_json(result)) == result
    if not result.passed:
        assert "Traceback" not in failure.message(Item((result,)))
    return result


def findings(result: Result) -> set[str]:
    return {finding.code for finding in result.findings}


def assert_says(result: Result, status: str, *words: str) -> None:
    told = " ".join((result.reason, *result.notes, *(finding.message for finding in result.findings)))
    assert result.status == status, (result.status, told)
    assert all(word in told for word in words), told


class Wrapped(nn.Module):
    """A base class of modules that contain a layer under the name ``layer``."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer


WRAPPED = {"layer.weight": "layer.weight", "layer.bias": "layer.bias"}


def wrapped(kind: type[Wrapped], weights: dict | None = None, **fields) -> parity.Pair:
    return linear(
        reference=kind(nn.Linear(WIDTH, WIDTH)),
        candidate=kind(te.Linear(WIDTH, WIDTH)),
        weights={**WRAPPED, **(weights or {})},
        **fields,
    )
