"""Whether TransformerEngine's compiled kernels are installed; importing neither them nor torch."""

from __future__ import annotations

from importlib import util
from pathlib import Path


def is_installed() -> bool:
    """Whether there is a module ``transformer_engine_torch``, on its own or, as in a build from source, inside TE."""
    return util.find_spec("transformer_engine_torch") is not None or _is_shipped_inside()


def _is_shipped_inside() -> bool:
    spec = util.find_spec("transformer_engine")
    roots = spec.submodule_search_locations if spec else None
    return any(any(Path(root).glob("**/transformer_engine_torch*.so")) for root in roots or ())
