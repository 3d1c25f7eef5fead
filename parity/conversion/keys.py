"""Name what a checkpoint holds as a module names it: prefixes, further names of tied parameters, patterns to ignore."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from torch import Tensor, nn

from parity.case.map_check import other_names
from parity.case.transfer import parameter_shapes
from parity.case.weight_map import Shape
from parity.user_error import UserError

# What a module's state dict holds. TE's modules have a key ``_extra_state`` each, see ``parity.conversion.plan``.


EXTRA_STATE = "_extra_state"


@dataclass(frozen=True)
class Layout:
    """Hold what a module's state dict holds, by name.

    Attributes:
        kind: ``reference`` or ``TE``.
        order: every key that has a tensor, in the module's order.
        parameters: shapes of the parameters, tied ones under their first name.
        tied: further names of tied parameters, with their first.
        buffers: the persistent buffers.
        states: keys of what TE's modules hold beside parameters and buffers.
    """

    kind: str
    order: tuple[str, ...]
    parameters: Mapping[str, Shape]
    tied: Mapping[str, str]
    buffers: Mapping[str, Tensor]
    states: tuple[str, ...]

    def further(self, name: str) -> list[str]:
        """Return all names that a parameter has, the first one first."""
        return [name, *(other for other, first in self.tied.items() if first == name)]


def layout_of(kind: str, module: nn.Module) -> Layout:
    """Return what a module's state dict holds, whether the module has values or not."""
    held = module.state_dict(keep_vars=True)
    others = other_names(module)
    return Layout(
        kind,
        tuple(name for name, value in held.items() if isinstance(value, Tensor)),
        parameter_shapes(module),
        {name: first for name, first in others.tied.items() if name in held},
        {name: value for name, value in held.items() if name in others.buffers},
        tuple(name for name, value in held.items() if is_extra_state(name) and isinstance(value, Tensor)),
    )


def is_extra_state(key: str) -> bool:
    """Return whether a key is that of a module's extra state."""
    return key.rpartition(".")[2] == EXTRA_STATE


# A checkpoint's keys may begin otherwise than the module's names, as if the module is a part of the model.


@dataclass(frozen=True)
class Prefixes:
    """Exchange beginnings of a checkpoint's keys for what the module's names have in their place.

    Attributes:
        pairs: of both; the longest that fits counts, and a name that none fits stays as it is.
    """

    pairs: tuple[tuple[str, str], ...] = ()

    def inside(self, key: str) -> str:
        """Return a checkpoint's key as the module names it."""
        return _exchanged(key, self.pairs)

    def outside(self, name: str) -> str:
        """Return a module's name as the checkpoint has it."""
        return _exchanged(name, [(inner, outer) for outer, inner in self.pairs])


def prefixes(texts: str | Sequence[str], argument: str) -> Prefixes:
    """Read ``"model."``, which the module's names lack, or ``"model.layers.3.=layer."``.

    Raises:
        UserError: if a text is none, or two of them begin alike.
    """
    given = [texts] if isinstance(texts, str) else list(texts)
    for text in given:
        if not isinstance(text, str) or text.count("=") > 1 or text in ("", "="):
            raise UserError(
                f'{argument} is what keys of the checkpoint begin with, such as "model.", or "model.layers.3.=layer." '
                f"with what the module's names begin with in its place, not {text!r}"
            )
    pairs = tuple((outer, inner) for outer, _, inner in (text.partition("=") for text in given))
    for side in zip(*pairs, strict=True):
        twice = [text for text, count in Counter(side).items() if count > 1]
        if twice:
            raise UserError(f"{argument} has {twice[0]!r} twice on one side, so that one name would become two")
    return Prefixes(pairs)


def _exchanged(name: str, pairs: Iterable[tuple[str, str]]) -> str:
    fitting = [pair for pair in pairs if name.startswith(pair[0])]
    before, after = max(fitting, key=lambda pair: len(pair[0]), default=("", ""))
    return after + name[len(before) :]


_LOOKED_AT = 20  # names, since each is compared with every key that ends like it


def suggested_prefix(keys: Iterable[str], names: Sequence[str]) -> str | None:
    """Return the prefix under which the keys are most of the names, as ``prefixes`` reads it; None if there is none."""
    looked_at = names[:_LOOKED_AT]
    by_end: dict[str, list[str]] = {}
    for key in keys:
        by_end.setdefault(_end(key), []).append(key)
    found: Counter[tuple[str, str]] = Counter()
    for name in looked_at:
        found.update({_beginnings(key, name) for key in by_end.get(_end(name), ())})
    if not found:
        return None
    (outer, inner), count = max(found.items(), key=lambda entry: (entry[1], -len("".join(entry[0]))))
    if 2 * count < len(looked_at) or not (outer or inner):
        return None
    return f"{outer}={inner}" if inner else outer


def _end(name: str) -> str:
    return name.rpartition(".")[2]


def _beginnings(key: str, name: str) -> tuple[str, str]:
    """Return what is before the parts with which both end."""
    ours, theirs = key.split("."), name.split(".")
    while ours and theirs and ours[-1] == theirs[-1]:
        ours.pop()
        theirs.pop()
    return "".join(f"{part}." for part in ours), "".join(f"{part}." for part in theirs)


@dataclass(frozen=True)
class Ignored:
    """Hold keys that may be left out, as patterns of a shell."""

    patterns: tuple[str, ...] = ()

    def __contains__(self, key: str) -> bool:
        return any(fnmatchcase(key, pattern) for pattern in self.patterns)


def ignored(patterns: str | Sequence[str]) -> Ignored:
    """Return the patterns, of which a text is one.

    Raises:
        UserError: if one is no text.
    """
    given = (patterns,) if isinstance(patterns, str) else tuple(patterns)
    if not all(isinstance(pattern, str) and pattern for pattern in given):
        raise UserError(f'ignore takes patterns of keys, such as "*.inv_freq", not {patterns!r}')
    return Ignored(given)
