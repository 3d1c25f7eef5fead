"""How each subtle mistake would change golden: the directions in which a matched filter looks for it.

Rounding errors point everywhere; a mistake's error points where the mistake sends it. Their component along that
direction averages the noise of all elements out, so a mistake shows that is far smaller than the noise of each.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache

import torch
from torch import Tensor

from parity.diagnosis import subtle_hypotheses
from parity.execute import outputs_of
from parity.prepare import Prepared, cast

Directions = Mapping[str, Mapping[str, Tensor]]
"""By a mistake's name and the output's: how the mistake changes golden, FP64."""


@lru_cache(maxsize=2)
def directions(prepared: Prepared) -> Directions:
    """The directions of every subtle mistake that could be made with the reference; kept for the next precision."""
    prepared.reference.double()
    inputs = cast(prepared.inputs, torch.float64)
    found = {}
    for hypothesis in subtle_hypotheses(prepared):
        with hypothesis.context(), torch.no_grad():
            outputs = outputs_of(prepared.reference, prepared.call, inputs)
        found[hypothesis.name] = {name: outputs[name] - golden for name, golden in prepared.golden.outputs.items()}
    return found
