"""List the items of a case: each of its sizes, precisions and ways is compared by itself."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from types import ModuleType

from parity.case import validate
from parity.case.case import SWITCHES_OVER_RANKS, Case
from parity.case.validate import CheckedSize
from parity.ranks.layout import Degrees
from parity.result import Switch, item_name, label_of_way
from parity.te import Precision
from parity.te.attention_backend import AttentionBackend


@dataclass(frozen=True)
class Item:
    """What an item compares.

    Attributes:
        case: the case.
        checked: one of its sizes.
        precision: the precision.
        attention: the attention backend that TE must use; None if it can choose.
        steps: for how many steps the pair is trained; 0 for a single pass.
        switch: how it is trained.
        ranks: the ranks over which the candidate is computed; None for one process.
        decoding: whether the candidate decodes what the pair calls it with, see ``parity.passes.decoded``.
    """

    case: Case
    checked: CheckedSize
    precision: Precision
    attention: AttentionBackend | None
    steps: int
    switch: Switch
    ranks: Degrees | None
    decoding: bool = False

    @property
    def name(self) -> str:
        """The item's id without its file."""
        label = label_of_way(self.checked.label, self.steps, self.switch, self.ranks.label if self.ranks else "")
        return item_name(self.case.name, self.precision.name, label, self.attention or "")


DEFAULT_STEPS = 3
"""For how many steps a pair is trained that declares none, if a run asks for trainings."""


def items_of(
    case: Case,
    te: ModuleType,
    precisions: Sequence[Precision],
    attention: str = "auto",
    steps: int | None = None,
    training: bool = False,
    decoding: bool = False,
) -> Iterator[Item]:
    """Yield items by size, precision and attention backend, so that those that share a golden value follow each other.

    Args:
        case: the case.
        te: the module ``transformer_engine.pytorch``.
        precisions: those that are asked for.
        attention: the attention backends that are asked for.
        steps: for how many steps pairs are trained; None for as many as the case says.
        training: whether a pair is trained for ``DEFAULT_STEPS`` if neither says how many.
        decoding: whether the pair is compared once more, with a candidate that decodes.

    Raises:
        UserError: if the two sides of the case do not fit together at one of its sizes.
    """
    chosen = [precision for precision in precisions if case.runs_at(precision.name)]
    trained = steps if steps is not None else case.steps or training * DEFAULT_STEPS
    alone: list[tuple[int, Switch]] = [(0, "")]
    alone += [(trained, switch) for switch in ("", *case.switches)] if trained else []
    over_ranks = [(steps, switch) for steps, switch in alone if switch in ("", *SWITCHES_OVER_RANKS)]
    ways: list[tuple[int, Switch, Degrees | None]] = [(*way, None) for way in alone]
    ways += [(*way, ranks) for ranks in case.ranks for way in over_ranks]
    for checked in validate.check_case(case, te) if chosen else ():
        forced = validate.attention_of(case, checked, attention)
        for precision, backend, way in itertools.product(chosen, forced, ways):
            yield Item(case, checked, precision, backend, *way)
        sequences = replace(checked, label=label_of_way(checked.label, decoding=True))
        for precision, backend in itertools.product(chosen, forced) if decoding else ():
            yield Item(case, sequences, precision, backend, 0, "", None, decoding=True)
