"""Rows of a reference's values that none of its outputs reads, such as those of padded queries.

There a port may have what it likes: TE's attention leaves zeros, and what is computed of them is other numbers, too.
"""

from __future__ import annotations

import torch
from torch import Tensor

from parity.diagnosis.divergence.columns import MOSTLY, Columns
from parity.diagnosis.divergence.noise import Place
from parity.diagnosis.hypothesis import Hypothesis
from parity.diagnosis.trial import outputs_under
from parity.diagnosis.walk import agree
from parity.prepare import Prepared
from parity.watching.trace import Trace, Value, edit


class UnreadRows:
    """Those that a candidate leaves zero somewhere, and what it computes of them.

    Args:
        prepared: what is compared.
        trace: of the reference in FP64.
        columns: of its values.
    """

    def __init__(self, prepared: Prepared, trace: Trace, columns: Columns) -> None:
        self._prepared = prepared
        self._made = {
            (value.site, value.position, value.returned): (call, value)
            for call in trace.calls
            if isinstance(value := call.result, Value)
        }
        self._columns = columns
        self._zero: dict[torch.Size, Tensor] = {}  # the rows that are zero somewhere, by the shape of all rows
        self._tried: dict[tuple[Place, bytes], bool] = {}

    def hide_what_differs(self, x: Tensor) -> bool:
        """Whether a candidate's value is the reference's but for rows that no output reads."""
        zero = ~x.any(-1)
        zero = zero | self._zero.get(zero.shape, torch.zeros_like(zero))
        if not zero.any() or zero.all() or (self._columns.share(x, ~zero) or 0.0) < MOSTLY:
            return False
        hidden = any(self._is_unread(place, zero) for place in self._columns.holders(x, ~zero))
        if hidden:
            self._zero[zero.shape] = zero
        return hidden

    def _is_unread(self, place: Place, rows: Tensor) -> bool:
        """Whether the reference returns the same if these rows of the value are zeros."""
        key = place, rows.cpu().numpy().tobytes()
        if key not in self._tried:
            self._tried[key] = place in self._made and self._returns_the_same(place, rows)
        return self._tried[key]

    def _returns_the_same(self, place: Place, rows: Tensor) -> bool:
        call, _ = self._made[place]

        def without(was: Tensor) -> Tensor:
            # In the order of the candidate's rows, or with batch and sequence exchanged.
            exchanged = rows.dim() == 2 and rows.shape != was.shape[:-1] == rows.T.shape
            hidden = (rows.T if exchanged else rows).reshape(was.shape[:-1])
            return was.masked_fill(hidden.unsqueeze(-1), 0.0)

        assumed = Hypothesis("", "rows of zeros", "", self._prepared.reference, (edit(call, (), without),))
        outputs = outputs_under(self._prepared, (assumed,), torch.float64)
        golden = self._prepared.golden.outputs
        return outputs is not None and all(agree(outputs[name], x) for name, x in golden.items())
