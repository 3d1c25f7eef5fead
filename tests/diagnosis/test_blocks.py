"""The weight map of a block whose norm TE has twice."""

from __future__ import annotations

import parity
from lab.corpus.small_ports.blocks import ATTENTION, MLP, PARALLEL
from parity.weights.suggest.proposal import python


def test_the_map_that_fills_both_norms_is_suggested():
    suggestion = parity.suggest_map(PARALLEL.case(weights={}))
    assert suggestion.error <= suggestion.limit
    for kind in ("weight", "bias"):
        copies = f'parity.copies("0.{ATTENTION}layer_norm_{kind}", "0.{MLP}layer_norm_{kind}")'
        assert f'"0.ln_1.{kind}": {copies}' in python(suggestion.weights)
