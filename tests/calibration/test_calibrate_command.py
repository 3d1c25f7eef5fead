"""Measuring many cases."""

import textwrap

import pytest

from parity import registry
from parity.calibration.command import Settings, measure

PAIRS = """
    import parity
    from torch import nn


    class Raises(nn.Linear):
        def forward(self, x):
            if len(x) == 5:
                raise ValueError("not five rows")
            return super().forward(x)


    def linear(module):
        def factory(te, **_):
            return parity.Pair(
                nn.Linear(16, 16), module(16, 16), weights={n: n for n in ("weight", "bias")},
                inputs=lambda rng, batch: rng.normal(batch, 16),
            )
        return factory


    runs = parity.pair("runs", sizes=[dict(batch=2)], precisions=["fp32"])(linear(nn.Linear))
    raises = parity.pair("raises_at_5", sizes=[dict(batch=5), dict(batch=3)], precisions=["fp32"])(linear(Raises))
"""


@pytest.fixture(autouse=True)
def _no_pairs_stay():
    before = registry.cases()
    yield
    registry.restore(before)


def test_a_port_that_raises_is_left_out_and_told_and_the_others_are_measured(tmp_path):
    file = tmp_path / "pairs_to_calibrate.py"
    file.write_text(textwrap.dedent(PAIRS))
    measured = measure(Settings((str(file),), ("fp32",), (0,), 0, "cpu"), 1)
    assert list(map(str, measured.left_out)) == ["raises_at_5 at 5x16 in fp32, seed 0: ValueError: not five rows"]
    assert {sample.case.split()[0] for sample in measured.samples} == {"runs", "raises_at_5"}
