"""Calibration: randomly drawn models, the errors measured on them, and the command."""

from __future__ import annotations

import dataclasses
import textwrap
from pathlib import Path

import pytest

import parity
from parity import te
from parity.case import registry
from parity.case.validate import check_case
from parity.judge import limits
from parity.judge.limits import FEWEST_TENSORS, Law, Table
from parity.measuring import calibration, right_ports
from parity.measuring.calibration import Measured, Sample, Settings, draw, laws, make_table, measure
from parity.measuring.hosts import HOSTS
from parity.measuring.right_ports import MODELS
from parity.te import PRECISIONS
from parity.user_error import UserError

# Randomly drawn models, on which false alarms are counted.


def drawn(position: int) -> list:
    """Return the hosts, the lines or the end of every model."""
    return [case.factory.args[position] for case in MODELS.values()]


def test_a_number_always_draws_the_same_model():
    assert [right_ports._draw_model(number).factory.args for number in range(3)] == [
        case.factory.args for case in list(MODELS.values())[:3]
    ]


def test_every_block_line_and_end_is_in_some_model():
    assert {host for hosts in drawn(0) for host in hosts} == {*right_ports._QUANTIZED, *right_ports._NORMS}
    assert {line for lines in drawn(1) for line in lines} == set(right_ports._LINES)
    assert set(drawn(2)) == {*right_ports._ENDS, *right_ports._LOSSES}


def test_every_model_has_a_block_that_recipes_quantize():
    assert all(set(hosts) & set(right_ports._QUANTIZED) for hosts in drawn(0))
    assert all(HOSTS[host].runs_at("fp8_current") for host in right_ports._QUANTIZED)


@pytest.mark.parametrize(("name", "seed"), [("model_006", 101), ("model_012", 101), ("model_055", 100)])
def test_the_lines_between_a_models_blocks_round_as_a_users_do(name, seed):
    size = right_ports.drawn(MODELS[name], PRECISIONS["bf16"], seed)
    (result,) = parity.compare(dataclasses.replace(MODELS[name], sizes=(size,)), ["bf16"], seeds=[seed])
    assert result.passed, result.findings


# Samples of faithful ports, and laws from them.


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
    samples = draw(case, checked, PRECISIONS["fp32"], 3, kernels, draws=0)  # at this seed one value crosses the kink
    slices = [sample.value for sample in samples if sample.kind == "weight gradient" and sample.statistic == "slice"]
    assert 0.5 < max(slices) < 1.5


# Measuring many cases.


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


def test_a_port_that_raises_is_left_out_and_told_and_the_others_are_measured(tmp_path):
    file = tmp_path / "pairs_to_calibrate.py"
    file.write_text(textwrap.dedent(PAIRS))
    measured = measure(Settings((str(file),), ("fp32",), (0,), 0, "cpu"), None)
    assert list(map(str, measured.left_out)) == ["raises_at_5 at 5x16 in fp32, seed 0: ValueError: not five rows"]
    assert {sample.case.split()[0] for sample in measured.samples} == {"runs", "raises_at_5"}


LINEARS = """
    import parity
    from torch import nn


    def linear(width):
        def factory(te, **_):
            return parity.Pair(
                nn.Linear(width, 48), te.Linear(width, 48), weights={n: n for n in ("weight", "bias")},
                inputs=lambda rng, batch: rng.normal(batch, width),
                call_candidate=lambda module, x: FACTOR * module(x),
            )
        return factory


    for i in range(9):
        parity.pair(f"linear{i}", sizes=[dict(batch=16 + 8 * i)], precisions=["bf16"])(linear(32 + 16 * i))
"""


def linears(tmp_path, factor):
    """Return settings that measure nine Linears, each with a port that is off by a factor."""
    file = tmp_path / f"linears_times_{str(factor).replace('.', '_')}.py"
    file.write_text(textwrap.dedent(LINEARS).replace("FACTOR", str(factor)))
    return Settings((str(file),), ("bf16",), (0,), 0, "cpu")


@pytest.mark.parametrize("factor", [1.3, 0.98])
def test_ports_that_are_all_off_by_a_factor_are_refused_and_nothing_is_written(tmp_path, factor):
    output, report = tmp_path / "table.json", tmp_path / "table.md"
    with pytest.raises(UserError) as told:
        make_table(linears(tmp_path, factor), None, output, report)
    text = str(told.value)
    assert "would lie far outside of the packaged ones" in text
    assert "norm of outputs in bf16" in text or "gain of outputs in bf16" in text
    assert "linear" in text.split("farthest off are ")[1]
    assert all(word in text for word in ("a wrong port would look the same", "parity run", "--accept-wider"))
    assert text.endswith("table.json: it is not written")
    assert not output.exists()
    assert not report.exists()


def test_right_ports_are_not_refused_however_few_they_are(tmp_path, capsys):
    make_table(linears(tmp_path, 1.0), 1, tmp_path / "table.json", None)
    assert "bf16: 20 limits, " in capsys.readouterr().out
    assert "accepted" not in (tmp_path / "table.json").read_text()


def samples(ratio, precision="bf16", statistic="norm"):
    """Return samples of twelve tensors of three pairs; the last pair's errors are ``ratio`` times the expected ones."""
    return [
        Sample(f"pair{i // 4} 2x16", precision, "output", f"tensor{i}", "te", 0, statistic, ratio if i >= 8 else 1.0)
        for i in range(12)
    ]


@pytest.fixture
def measured(monkeypatch):
    """Return the list that a measurement returns, without running anything."""
    found = []
    monkeypatch.setattr(calibration, "_check_enough", lambda settings: None)
    monkeypatch.setattr(calibration, "measure", lambda settings, workers: Measured(list(found)))
    return found


SETTINGS = Settings((), ("bf16",), (0,), 0, "cpu")


def test_a_table_that_is_there_already_stays_as_it_is_where_the_new_one_is_refused(tmp_path, measured):
    output = tmp_path / "table.json"
    limits.save(Table({("bf16", "output", "norm"): Law(0.0, 0.1, 40, 40, 1.1)}, {}), output)
    before = output.read_text()
    measured += samples(30.0)
    with pytest.raises(
        UserError, match=r"farthest off is pair2 \(norm of tensor\d+ in bf16 is 30, .*: it stays as it is$"
    ):
        make_table(SETTINGS, 1, output, None)
    assert output.read_text() == before


def test_what_was_accepted_is_told_and_stays_in_the_table(tmp_path, measured, capsys):
    output = tmp_path / "table.json"
    measured += samples(3.0)
    make_table(SETTINGS, 1, output, tmp_path / "table.md", accept_wider=True)
    accepted = limits.load(output).provenance["bf16"]["accepted"]
    assert accepted.startswith("1 limit far outside of the packaged ones, up to ")
    assert f"accepted: {accepted}" in capsys.readouterr().out
    assert accepted in (tmp_path / "table.md").read_text()
    (found,) = limits.compared(limits.load(output))
    assert (found.wider, found.accepted) == (1, accepted)


def test_limits_that_the_packaged_table_lacks_are_told_and_not_refused(tmp_path, measured, capsys):
    measured += samples(3.0, statistic="curl") + samples(1.0)
    make_table(SETTINGS, 1, tmp_path / "table.json", None)
    assert "1 limit that the packaged table has no law for, compared with nothing" in capsys.readouterr().out


def test_limits_that_are_much_tighter_are_told(tmp_path, measured, capsys, monkeypatch):
    packaged = limits.packaged()
    wide = {key: Law(3.0, 0.1, 400, 400, 30.0) for key in packaged.laws}
    monkeypatch.setattr(limits, "packaged", lambda: Table(wide, {}))
    measured += samples(1.0)
    make_table(SETTINGS, 1, tmp_path / "table.json", None)
    assert "1 less than 1/2 as wide: what passes by the packaged ones may fail" in capsys.readouterr().out


def test_limits_that_would_pass_everything_are_refused_even_where_wider_ones_are_accepted(tmp_path, measured):
    measured += samples(1e6)
    with pytest.raises(
        UserError, match=r"'norm' of the kind 'output' in bf16 would be .*, where everything would pass"
    ):
        make_table(SETTINGS, 1, tmp_path / "table.json", None, accept_wider=True)
    assert not (tmp_path / "table.json").exists()
