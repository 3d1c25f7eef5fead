"""Models drawn at random, on which false alarms are counted."""

import dataclasses

import pytest

import parity
from parity.lab.calibration import drawn_models, right_ports
from parity.lab.calibration.drawn_models import MODELS
from parity.lab.zoo.catalogue import HOSTS
from parity.te import PRECISIONS


def drawn(position: int) -> list:
    """Hosts, lines or the end of every model."""
    return [case.factory.args[position] for case in MODELS.values()]


def test_a_number_always_draws_the_same_model():
    assert [drawn_models._drawn(number).factory.args for number in range(3)] == [
        case.factory.args for case in list(MODELS.values())[:3]
    ]


def test_every_block_line_and_end_is_in_some_model():
    assert {host for hosts in drawn(0) for host in hosts} == {*drawn_models._QUANTIZED, *drawn_models._NORMS}
    assert {line for lines in drawn(1) for line in lines} == set(drawn_models._LINES)
    assert set(drawn(2)) == {*drawn_models._ENDS, *drawn_models._LOSSES}


def test_every_model_has_a_block_that_recipes_quantize():
    assert all(set(hosts) & set(drawn_models._QUANTIZED) for hosts in drawn(0))
    assert all(HOSTS[host].runs_at("fp8_current") for host in drawn_models._QUANTIZED)


@pytest.mark.parametrize(("name", "seed"), [("model_006", 101), ("model_012", 101), ("model_055", 100)])
def test_the_lines_between_a_models_blocks_round_as_a_users_do(name, seed):
    size = right_ports.drawn(MODELS[name], PRECISIONS["bf16"], seed)
    (result,) = parity.compare(dataclasses.replace(MODELS[name], sizes=(size,)), ["bf16"], seeds=[seed])
    assert result.passed, result.findings
