"""How many heads of what width a module's attention has, which no shape tells."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import nn

# As modules of TE, Hugging Face and Meta call them.
_HEAD_DIM = ("hidden_size_per_attention_head", "hidden_size_per_attention_head_k", "head_dim", "attention_head_size")
_GROUPS = ("num_gqa_groups", "num_key_value_heads", "num_kv_heads", "n_kv_heads")
_HEADS = ("num_attention_heads", "num_heads", "n_heads", "n_head")
_USUAL_HEAD_DIMS = (128, 64, 32, 256, 192, 160, 112, 96, 80, 48, 16)


@dataclass(frozen=True)
class Geometry:
    """Numbers that the modules give for their attention, each without repetitions and the candidate's first.

    Attributes:
        head_dims: channels of a head.
        groups: key and value heads.
    """

    head_dims: tuple[int, ...]
    groups: tuple[int, ...]

    def layouts(self, query_rows: int | None, key_rows: int | None, all_rows: int) -> Iterator[tuple[int, int]]:
        """``(groups, head_dim)`` that fit the rows of query, key and value.

        Args:
            query_rows: None where they are fused.
            key_rows: ditto.
            all_rows: of query, key and value together.
        """
        for head_dim in self.head_dims or _USUAL_HEAD_DIMS:
            for groups in self._groups(key_rows, all_rows, head_dim):
                rest = all_rows - 2 * groups * head_dim
                if rest > 0 and rest % (groups * head_dim) == 0 and query_rows in (None, rest):
                    yield groups, head_dim

    def _groups(self, key_rows: int | None, all_rows: int, head_dim: int) -> Sequence[int]:
        if key_rows is not None:
            return (key_rows // head_dim,) if key_rows % head_dim == 0 and key_rows >= head_dim else ()
        as_many_as_heads = all_rows // 3 // head_dim
        return tuple(dict.fromkeys((*self.groups, as_many_as_heads, 1))) if as_many_as_heads else ()


def geometry_of(candidate: nn.Module, reference: nn.Module) -> Geometry:
    """What the two modules say of their attention, in attributes that are numbers."""
    modules = (*candidate.modules(), *reference.modules())
    return Geometry(_numbers(modules, _HEAD_DIM), _numbers(modules, (*_GROUPS, *_HEADS)))


def _numbers(modules: Sequence[nn.Module], names: Sequence[str]) -> tuple[int, ...]:
    found = [getattr(module, name, None) for module in modules for name in names]
    return tuple(dict.fromkeys(n for n in found if isinstance(n, int) and not isinstance(n, bool) and n > 0))
