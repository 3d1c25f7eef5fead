"""What a planted bug is."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType

from parity.case import Case, Pair

Plant = Callable[[Pair, ModuleType], Pair]

# Precisions by what they have in common, for bugs that only some of them can have.
STORED_IN_16_BITS = ("bf16", "fp16", "fp8_delayed", "fp8_current", "fp8_block", "mxfp8", "nvfp4")
QUANTIZED = ("fp8_delayed", "fp8_current", "fp8_block", "mxfp8", "nvfp4")
ONE_SCALE_A_TENSOR = ("fp8_delayed", "fp8_current")


@dataclass(frozen=True)
class Bug:
    """A mistake that people make when they port a module.

    Attributes:
        name: unique in the catalogue, e.g. ``gate-up-swapped``.
        summary: what was done wrong, in a sentence.
        hosts: names of the pairs in ``parity.zoo.hosts`` where it is planted; in each it changes the result.
        plant: called with a freshly built pair and ``transformer_engine.pytorch``; returns the pair with the mistake in
            its candidate's module, weight map or call. It may be called under ``meta_build.without_memory``.
        finding: title of the finding that names the mistake.
        precisions: where it is not the identity; None for each.
    """

    name: str
    summary: str
    hosts: tuple[str, ...]
    plant: Plant
    finding: str
    precisions: tuple[str, ...] | None = None

    def occurs_at(self, precision: str) -> bool:
        """Whether the mistake can be made at a precision."""
        return self.precisions is None or precision in self.precisions


def planted(bug: Bug, host: Case) -> Case:
    """The host's case with the mistake in its candidate.

    The case keeps the host's name, since the reference and so the expected error are the host's.
    """
    return dataclasses.replace(host, factory=lambda te, **size: bug.plant(host.build(te, size), te))
