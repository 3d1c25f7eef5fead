"""Count rejections of correct ports."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parity.case import registry
from parity.measuring import false_alarms, record
from parity.measuring.false_alarms import DRAWN, Outcome, Plan, Port
from parity.measuring.hosts import HOSTS
from parity.measuring.right_ports import QUANTIZED_MULTIPLE, like
from parity.plugin.options import parse_seeds

PAIRS = """
import parity
from torch import nn

@parity.pair("right", sizes=[dict(batch=2, seq=32, width=32)], precisions=("fp32", "bf16", "fp8_current"))
def right(te, width, **_):
    return parity.Pair(
        reference=nn.Linear(width, width),
        candidate=te.Linear(width, width),
        weights={"weight": "weight", "bias": "bias"},
        inputs=lambda rng, batch, seq: rng.normal(batch, seq, width),
    )

@parity.pair("scaled", sizes=[dict(batch=2, seq=32, width=32)], precisions=("bf16",))
def scaled(te, width, **_):
    return parity.Pair(
        reference=nn.Linear(width, width),
        candidate=te.Linear(width, width),
        weights={"weight": "weight", "bias": "bias"},
        inputs=lambda rng, batch, seq: rng.normal(batch, seq, width),
        call_candidate=lambda module, x: 1.1 * module(x),
    )
"""


@given(st.sampled_from([size for case in HOSTS.values() for size in case.sizes]), st.booleans(), st.integers())
def test_a_drawn_size_is_one_that_attention_and_recipes_take(size, quantized, seed):
    found = like(size, quantized, random.Random(seed))
    assert found.keys() == size.keys()
    assert all(value >= 1 for value in found.values())
    assert found.get("heads", 1) % found.get("groups", 1) == 0
    if "seq_kv" in size:
        assert found["seq_kv"] >= found["seq"]
    if "hidden" in size and "heads" in size:
        assert found["hidden"] % found["heads"] == 0
    if quantized:
        widths = ("seq", "hidden", "ffn", "width", "out", "vocabulary")
        assert all(found[name] % QUANTIZED_MULTIPLE == 0 for name in widths if name in size)


def test_none_of_three_hundred_leaves_one_percent_likely():
    assert false_alarms.upper_bound(0, 300) == pytest.approx(0.01, rel=0.01)  # the rule of three


def test_a_range_of_seeds_includes_its_ends():
    assert parse_seeds("100-102") == (100, 101, 102)
    assert parse_seeds("1,7-8") == (1, 7, 8)
    assert parse_seeds("0") == parse_seeds("0,") == (0,)
    assert parse_seeds("3") == (0, 1, 2)


@pytest.fixture(scope="module")
def compared(tmp_path_factory):
    folder = tmp_path_factory.mktemp("alarms")
    file = folder / "right_ports.py"
    file.write_text(PAIRS)
    plan = Plan((str(file),), ("fp32", "bf16", "fp8_current"), (100,), own=1, backend="cpu")
    declared = registry.cases()
    outcomes = false_alarms.run(plan, folder / "alarms.jsonl", workers=1)
    yield folder, plan, outcomes
    registry.restore(declared)


def test_every_precision_is_compared_at_its_own_and_at_a_drawn_size(compared):
    _, _, outcomes = compared
    ports = {(port.case, port.precision, port.size) for port in outcomes}
    assert len(outcomes) == len(ports) == 2 * (3 + 1)
    assert {port.size for port in outcomes} == {0, DRAWN}


def test_a_right_port_raises_no_alarm_and_a_scaled_one_does(compared):
    _, _, outcomes = compared
    assert {port.case for port, outcome in outcomes.items() if outcome.alarms} == {"scaled"}
    assert all(outcome.statistics > outcome.tensors > 0 for outcome in outcomes.values())


def test_the_report_counts_alarms_and_lists_them(compared):
    folder, _, outcomes = compared
    false_alarms.write_report(outcomes, "cpu", folder / "alarms.md")
    text = (folder / "alarms.md").read_text()
    assert "`scaled[bf16-2x32x32]`, seed 100: output" in text
    assert "emulated" in text
    assert (folder / "alarms.png").exists()


def test_what_is_recorded_is_not_compared_again(compared, monkeypatch):
    folder, plan, outcomes = compared
    monkeypatch.setattr(record, "processes", _NoPool)
    assert false_alarms.run(plan, folder / "alarms.jsonl", workers=1) == outcomes


class _NoPool:
    def __init__(self, *_, **__):
        pass

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def submit(self, *_):
        raise AssertionError("nothing is missing")


def test_a_port_without_a_verdict_is_listed_with_its_reason(tmp_path):
    port = Port("pairs.py", "mlp", "bf16", 100, 0)
    false_alarms.write_report({port: Outcome("error", "2x3", 0, 0, {}, (), "it raised")}, "cpu", tmp_path / "alarms.md")
    assert "- `mlp` in `bf16`: it raised (1 times)" in (tmp_path / "alarms.md").read_text()
