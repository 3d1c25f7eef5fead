"""FLOPs in the open: each component of a layer apart, and the formulas next to PyTorch's counter on every case.

The formulas are those of ``parity.lab.flops``. ``torch.utils.flop_counter`` watches the reference of each case in a
forward and a backward pass and counts its matrix products; both numbers have to be equal.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from parity import cases as built_in
from parity import te
from parity.case import registry
from parity.case.case import Case, Pair, Rng, Size, draw_inputs
from parity.lab import flops
from parity.passes import one_pass
from parity.progress import followed
from parity.te import Kernels
from parity.user_error import UserError


@dataclass(frozen=True)
class Settings:
    """Options of the study.

    Attributes:
        batch, seq, hidden, heads, groups: sizes of the layers that the report takes apart; ``groups`` of the llama.
        vocabulary: width of the logits that follow the last layer.
        seqs: lengths over which the components' shares are plotted.
    """

    batch: int = 1
    seq: int = 4096
    hidden: int = 4096
    heads: int = 32
    groups: int = 8
    vocabulary: int = 32000
    seqs: tuple[int, ...] = (512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)


FULL = Settings()
QUICK = Settings(seqs=(1024, 8192, 65536))


@dataclass(frozen=True)
class Run:
    """A case at one size.

    Attributes:
        case: its name.
        size: as the case declares it.
    """

    case: str
    size: str


@dataclass(frozen=True)
class Count:
    """FLOPs of a case's reference in matrix products, forward and backward.

    Attributes:
        counted: by ``torch.utils.flop_counter``.
        computed: by ``parity.lab.flops``.
        skipping: computed for a kernel that leaves out what a mask or window hides, as TE's fused attention does.
    """

    counted: int
    computed: int
    skipping: int


Counts = Mapping[Run, Count]


def measured(settings: Settings, folder: Path) -> tuple[Mapping[Run, Count], Settings]:
    """Count every case; there is no record, since counting takes seconds.

    Returns:
        What ``report.write`` is given, but for the folder.

    Raises:
        UserError: for sizes that do not divide.
    """
    _check(settings)
    kernels = te.kernels()
    cases = followed(list(suite()), "counting")
    return {_run(*entry): count(*entry, kernels) for entry in cases}, settings


def count(case: Case, size: Size, kernels: Kernels) -> Count:
    """Count a case's reference in both ways."""
    pair = case.build(kernels.te, size)
    inputs = draw_inputs(pair, size, Rng(0))
    tensors = inputs if isinstance(inputs, tuple) else (inputs,)
    dense, skipping = (_in_products(pair, tensors, skips_hidden) for skips_hidden in (False, True))
    return Count(_counted(pair, inputs), dense, skipping)


def _counted(pair: Pair, inputs: Any) -> int:
    names = one_pass.positional_names(pair.reference, pair.call_reference, inputs)
    with FlopCounterMode(display=False) as counter:
        one_pass.run(pair.reference, pair.call_reference, inputs, names, _ones)
    return counter.get_total_flops()


def _ones(outputs: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: torch.ones_like(output) for name, output in outputs.items()}


def _in_products(pair: Pair, inputs: tuple[Tensor, ...], skips_hidden: bool) -> int:
    components = flops.components(pair.reference, *inputs, skips_hidden=skips_hidden)
    return flops.total(flops.in_products(components).values())


_BUILT_IN = Path(next(iter(built_in.__path__))).resolve()


def suite() -> Iterator[tuple[Case, Size]]:
    """Yield the built-in cases; those of other packages may have modules of their own."""
    for case in registry.load_entry_points():
        if case.path.resolve().parent == _BUILT_IN:
            yield from ((case, size) for size in case.sizes)


def _run(case: Case, size: Size) -> Run:
    return Run(case.name, ", ".join(f"{name} {value}" for name, value in size.items()))


def _check(settings: Settings) -> None:
    if settings.hidden % settings.heads or settings.heads % settings.groups:
        raise UserError(
            f"heads={settings.heads} must divide hidden={settings.hidden}, and groups={settings.groups} the heads"
        )
