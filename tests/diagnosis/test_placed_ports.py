"""The hosts of the placed ports are right, and the places of their mistakes exist in their references."""

from __future__ import annotations

from itertools import chain

import pytest
import torch

import parity
from lab.corpus.placed import Placed
from lab.corpus.placed_ports import BY_FAMILY
from parity import te
from parity.case.case import Rng, draw_inputs
from parity.mistakes.codes import CODES
from parity.trace.calls import tracing

ROWS = tuple(chain.from_iterable(BY_FAMILY.values()))
BY_HOST: dict[str, list[Placed]] = {}
for row in ROWS:
    BY_HOST.setdefault(row.port.host, []).append(row)


@pytest.mark.parametrize("host", BY_HOST)
def test_a_right_host_passes(host: str):
    (result,) = parity.compare(BY_HOST[host][0].port.right, ["bf16"], diagnose=False)
    assert result.passed, result.reason


@pytest.mark.parametrize("host", BY_HOST)
def test_places_are_calls_of_the_reference(host: str):
    pair = BY_HOST[host][0].port.right.build(te.kernels("cpu").te, {})
    inputs = draw_inputs(pair, {}, Rng(0))
    with torch.no_grad(), tracing(pair.reference) as trace:
        pair.reference(*(inputs if isinstance(inputs, tuple) else (inputs,)))
    for row in BY_HOST[host]:
        found = {call.site[2] for call in trace.calls if row.is_at(call.site)}
        assert found == row.calls, row.port.name
        assert not all(row.is_at(call.site) for call in trace.calls)


def test_no_two_rows_have_a_name_and_all_titles_exist():
    assert len({row.port.key for row in ROWS}) == len(ROWS)
    assert {title for row in ROWS for title in row.port.titles} <= set(CODES)
    assert all(row.port.titles for row in ROWS)
