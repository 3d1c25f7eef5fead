"""Samples of faithful ports, and laws from them."""

from pathlib import Path

from parity import te
from parity.case import registry
from parity.case.validate import check_case
from parity.judge.limits import FEWEST_TENSORS
from parity.lab.calibration.measure import Sample, draw, laws
from parity.te import PRECISIONS

CASES = Path(__file__).parents[2] / "cases"


def test_laws_are_kept_apart_by_precision_kind_and_statistic():
    def sample(precision, statistic, i):
        return Sample("case", precision, "output", f"tensor {i}", "te", 0, statistic, 1.0)

    found = laws(sample(p, s, i) for p in ("bf16", "fp32") for s in ("norm", "gain") for i in range(FEWEST_TENSORS))
    assert set(found) == {(p, "output", s) for p in ("bf16", "fp32") for s in ("norm", "gain")}


def test_a_value_that_rounding_takes_across_a_kink_widens_no_law():
    kernels = te.kernels("cpu")
    case = registry.load_case(CASES / "mlp.py", "layernorm_mlp_relu")
    (checked,) = check_case(case, kernels.te)
    samples = draw(case, checked, PRECISIONS["fp32"], 3, kernels, draws=0)  # a seed at which one value crosses
    slices = [sample.value for sample in samples if sample.kind == "weight gradient" and sample.statistic == "slice"]
    assert 0.5 < max(slices) < 1.5
