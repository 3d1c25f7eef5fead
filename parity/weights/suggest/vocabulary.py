"""Names that models give their parameters and their numbers of heads, read from ``vocabulary.toml``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Annotated, Literal

from pydantic import ConfigDict, Field

from parity.data_files import read_toml

Part = Literal[
    "query",
    "key",
    "value",
    "attention_out",
    "gate",
    "up",
    "down",
    "router",
    "embedding",
    "position_embedding",
    "head",
]
NormPart = Literal["query_norm", "key_norm", "attention_norm", "mlp_norm", "cross_norm", "final_norm"]
# Paths are read in lower case and without numbers, so a name with capitals or dots would never be found.
Names = Annotated[tuple[Annotated[str, Field(pattern="^[a-z][a-z0-9_]*$")], ...], Field(min_length=1)]
_NO_OTHER_KEYS = ConfigDict(extra="forbid")


@dataclass(frozen=True)
class Layer:
    """Names of one kind of linear layer or embedding, and what it computes: several parts if it is fused."""

    __pydantic_config__ = _NO_OTHER_KEYS

    parts: tuple[Part, ...]
    names: Names


@dataclass(frozen=True)
class Places:
    """Words in a parameter's path that show which module it is a part of."""

    __pydantic_config__ = _NO_OTHER_KEYS

    attention: Names
    cross_attention: Names
    mlp: Names
    te_cross_attention: Names
    last_layer: Names


@dataclass(frozen=True)
class Attributes:
    """Attributes of modules that hold a head's width, or how many groups or heads there are."""

    __pydantic_config__ = _NO_OTHER_KEYS

    head_dim: tuple[str, ...]
    groups: tuple[str, ...]
    heads: tuple[str, ...]


@dataclass(frozen=True)
class Vocabulary:
    """The names of the file, which says what each section is for.

    Raises:
        ValueError: if a name stands twice in a section where it can have only one meaning.
    """

    __pydantic_config__ = _NO_OTHER_KEYS

    kinds: Mapping[Literal["weight", "bias"], Names]
    layers: tuple[Layer, ...]
    norms: Mapping[NormPart, Names]
    places: Places
    attributes: Attributes

    def __post_init__(self) -> None:
        by_layer = [layer.names for layer in self.layers]
        for section, entries in (("kinds", self.kinds.values()), ("layers", by_layer), ("norms", self.norms.values())):
            for name, count in Counter(chain.from_iterable(entries)).items():
                if count > 1:
                    raise ValueError(f"{section}: {name!r} stands there {count} times, but can have only one meaning")


VOCABULARY = read_toml(Path(__file__).with_suffix(".toml"), Vocabulary)
