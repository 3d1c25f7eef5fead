"""List ports that are known to be right and draw sizes for them, to fit limits and to count false alarms."""

from __future__ import annotations

import random

from parity.case import registry
from parity.case.case import Case, Size
from parity.lab.calibration.drawn_models import MODELS
from parity.lab.zoo.catalogue import HOSTS
from parity.te import Precision

# Sizes that nobody chose: a right port must pass at any.


# A recipe's blocks divide the dimensions of its GEMMs: 32 serves each but the blocks of 128, which TE fills up.
QUANTIZED_MULTIPLE = 32
_WIDTHS = ("width", "out", "hidden", "ffn", "vocabulary", "in_features", "out_features")
_HEADS = (1, 2, 4, 6, 8)
_HEAD_DIMS = (16, 32, 64)
# A host that splits its batch asks for a certain one.
_LARGEST_FREE_BATCH = 8


def drawn(case: Case, precision: Precision, seed: int) -> Size:
    """Return a size of a case for a seed: one for all recipes, and one for the other precisions, which share golden."""
    quantized = precision.recipe is not None
    return like(case.sizes[0], quantized, random.Random(f"{case.name} {seed} {quantized}"))


def like(size: Size, quantized: bool, rng: random.Random) -> dict[str, int]:
    """Return a size like another, with every dimension drawn anew.

    Args:
        size: batch, seq, heads, groups, head_dim, seq_kv, hidden and other widths, each optional; the rest stays.
        quantized: whether the dimensions of GEMMs must be multiples of ``QUANTIZED_MULTIPLE``.
        rng: of the draw.

    Returns:
        A size whose groups divide its heads, whose hidden dimension is a multiple of its heads, and that has no fewer
        keys than queries.
    """
    multiple = QUANTIZED_MULTIPLE if quantized else 1
    found = dict(size)
    # Drawn for every size, so that the same seed gives the same widths whatever else a size has.
    batch = rng.randint(1, 4) if found.get("batch", 0) <= _LARGEST_FREE_BATCH else found["batch"]
    seq = multiple * rng.randint(1, 5) if quantized else rng.randint(2, 160)
    found |= {name: value for name, value in (("batch", batch), ("seq", seq)) if name in size}
    for width in _WIDTHS:
        if width in size:
            found[width] = multiple * rng.randint(1, 12) if quantized else 4 * rng.randint(4, 96)
    if "heads" in size:
        found["heads"] = rng.choice(_HEADS)
        head_dim = rng.choice([dim for dim in _HEAD_DIMS if dim % multiple == 0])
        if "head_dim" in size:
            found["head_dim"] = head_dim
        if "hidden" in size:
            found["hidden"] = found["heads"] * head_dim
    if "groups" in size:
        found["groups"] = rng.choice([groups for groups in _HEADS if found["heads"] % groups == 0])
    if "seq_kv" in size:
        found["seq_kv"] = found["seq"] + 16 * rng.randint(1, 4)
    return found


# Ports that are known to be right: what limits are fitted to, and false alarms counted on.


# Stand, in the place of a file, for the right ports into which the zoo plants its bugs, and for models drawn at random,
# to which no limit is fitted.
ZOO = "parity.lab.zoo.hosts"
DRAWN_MODELS = "parity.lab.calibration.drawn_models"
_OURS = {ZOO: HOSTS, DRAWN_MODELS: MODELS}
# What is expected of these is known only once the port is seen (``parity.comparison``), so that no limit is fitted to
# them: Adam's first steps divide gradients by their own magnitude, so that rounding may decide a whole step; and it may
# decide which expert a token goes to.
_UNFIT = ("trained_linear", "mixture")


def cases(file: str) -> list[Case]:
    """Return those of a file, or the one that a pytest id names.

    Raises:
        UserError: as ``registry.load``.
    """
    return list(_OURS[file].values()) if file in _OURS else registry.load(file)


def fitted(file: str) -> list[Case]:
    """Return those of ``cases`` that limits are fitted to.

    Raises:
        UserError: as ``registry.load``.
    """
    return [case for case in cases(file) if file not in _OURS or case.name not in _UNFIT]


def case(file: str, name: str) -> Case:
    """Return one of these, by its name.

    Raises:
        UserError: as ``registry.load_case``.
    """
    return _OURS[file][name] if file in _OURS else registry.load_case(file.partition("::")[0], name)
