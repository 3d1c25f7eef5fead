"""The mistake that an error resembles most."""

from types import SimpleNamespace

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from parity.judge.directions import Direction, coefficient, found_by_filter, resemblance
from parity.judge.statistics import Component
from parity.mistakes.hypothesis import Hypothesis
from parity.numerics.errors import Summed
from parity.result import Check, Errors, TensorResult


def draw(seed):
    return torch.randn(8, 64, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@given(st.integers(0, 1000), st.lists(st.sampled_from([0.0, 0.05, 0.3, 1.0]), min_size=1, max_size=6))
def test_the_likeliest_mistake_is_the_one_that_judging_every_mistake_finds(seed, contained):
    changes = [Summed(draw(seed + i)) for i in range(len(contained))]
    known = [Direction(SimpleNamespace(name=str(i)), {"output": change}) for i, change in enumerate(changes)]
    noise, golden = draw(seed + 10), Summed(draw(seed + 11))
    error = Summed(noise + sum(share * change.values for share, change in zip(contained, changes, strict=True)))
    models = [Summed(draw(seed + 12)), Summed(draw(seed + 13))]

    found = resemblance("output", error, models, golden, models[0].norm, known)

    values = [Component(error, models, change, golden, models[0].norm).value for change in changes]
    close = [i for i, value in enumerate(values) if abs(value) >= 0.9 * max(map(abs, values))]
    likeliest = min(close, key=lambda i: abs(coefficient(error, changes[i]) - 1.0))
    assert (found.value, found.where) == (values[likeliest], str(likeliest))


def test_an_output_that_no_mistake_changes_resembles_none():
    error, golden = Summed(draw(0)), Summed(draw(1))
    known = [Direction(SimpleNamespace(name="other"), {"output[1]": Summed(draw(2))})]
    assert resemblance("output[0]", error, [error], golden, error.norm, known) is None


def test_a_mistake_that_another_output_lacks_is_none():
    """Few numbers may look like anything; an output of many that was made of the same tokens knows better."""
    mistake = Hypothesis("norm-statistics", "norm statistics in bf16", "take them in FP32", nn.Identity())
    known = [Direction(mistake, {})]
    errors = Errors(0.1, 0.1, 1.0, 1.0, 20.0, 1.0)

    def output(name: str, value: float, coefficient: float) -> TensorResult:
        check = Check("mistake", value, 5.7, mistake.name, coefficient)
        return TensorResult(name, "output", (2, 128), errors, errors, 0.0, 0.0, checks=(check,), margin=check.margin)

    of_few, of_many = output("mean", 6.4, 0.74), output("tokens", 1.8, 0.16)
    assert list(found_by_filter([of_few], known))
    assert not list(found_by_filter([of_few, of_many], known))
