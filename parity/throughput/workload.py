"""What is timed: a case at a size."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from parity import registry
from parity.case import Case
from parity.declaring.built_in import folder as built_in_folder
from parity.user_error import UserError

# The built-in cases that are timed by default, the most telling first, at the sizes of an 8-billion-parameter Llama
# (A. Grattafiori et al., "The Llama 3 Herd of Models", arXiv 2407.21783, table 3); the GPT layer is as wide.
_LLAMA = dict(hidden=4096, ffn=14336, heads=32, groups=8)
_LARGE: dict[str, list[dict[str, int]]] = {
    "transformer_layer_llama": [dict(batch=1, seq=4096, **_LLAMA), dict(batch=1, seq=8192, **_LLAMA)],
    "layernorm_mlp_swiglu": [dict(batch=2, seq=4096, hidden=4096, ffn=14336)],
    "linear": [dict(batch=2, seq=4096, in_features=4096, out_features=14336)],
    "attention_causal_gqa": [dict(batch=2, seq=4096, heads=32, groups=8, head_dim=128)],
    "multihead_attention_separate_qkv": [dict(batch=1, seq=4096, hidden=4096, heads=32, groups=8)],
    "layernorm_linear": [dict(batch=2, seq=4096, in_features=4096, out_features=6144)],
    "transformer_layer_gpt": [dict(batch=1, seq=4096, hidden=4096, ffn=16384, heads=32)],
    "rmsnorm": [dict(batch=2, seq=4096, hidden=4096)],
    "layernorm": [dict(batch=2, seq=4096, hidden=4096)],
}


@dataclass(frozen=True)
class Workload:
    """A case at one size, named so that another process finds it.

    Attributes:
        file: that declares the case.
        case: its name.
        size: the factory's keyword arguments.
    """

    file: Path
    case: str
    size: Mapping[str, Any]

    @property
    def size_text(self) -> str:
        """``batch 1, seq 4096``."""
        return ", ".join(f"{name} {value}" for name, value in self.size.items()) or "-"

    @property
    def name(self) -> str:
        """``linear (batch 1, seq 4096)``."""
        return f"{self.case} ({self.size_text})"

    def load(self) -> Case:
        """The case, from its file.

        Raises:
            UserError: as ``registry.load_case``.
        """
        return registry.load_case(self.file, self.case)


def built_in(large: bool) -> list[Workload]:
    """The default workloads: at large sizes, or at those that the cases are compared at."""
    files = sorted(built_in_folder().glob("[!_]*.py"))
    cases = {case.name: case for file in files for case in registry.load_file(file)}
    return [
        Workload(cases[name].path, name, size)
        for name, sizes in _LARGE.items()
        for size in (sizes if large else cases[name].sizes)
    ]


def declared(cases: Iterable[Case]) -> list[Workload]:
    """Cases at the sizes that they declare."""
    return [Workload(case.path, case.name, size) for case in cases for size in case.sizes]


def select(workloads: Iterable[Workload], keyword: str) -> list[Workload]:
    """Those whose name contains one of the words of the keyword, which are separated by commas; an empty one is in all.

    Raises:
        UserError: if none does.
    """
    found = list(workloads)
    words = [word.strip() for word in keyword.split(",")]
    chosen = [workload for workload in found if any(word in workload.name for word in words)]
    if not chosen:
        raise UserError(f"no workload contains {keyword!r} in its name, such as {found[0].name!r}")
    return chosen
