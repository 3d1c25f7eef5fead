"""Propose texts that compare a submodule with its counterpart, in which the failure may be as well."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from os.path import commonprefix  # of lists as well
from typing import Any

import torch
from torch import Tensor, nn

from parity.case.case import Pair, Rng, Size, draw_inputs
from parity.case.weight_map import Side, WeightMap, describe, names, renamed
from parity.minimize.edits import Source
from parity.passes.one_pass import as_arguments

_PART = "part"
_TEXT = """{rest}

import parity


@{declaration}
def {part}(te, **size):
    whole = {factory}(te, **size)
    return parity.Pair(
        reference=whole.reference.get_submodule("{reference}"),
        candidate=whole.candidate.get_submodule("{candidate}"),
        weights={{
            {weights}
        }},
        inputs=lambda rng: ({inputs},),
        fill=whole.fill,
        evaluation=whole.evaluation,
    )
"""


def with_a_part(source: Source, name: str, pair: Pair, size: Size) -> Iterator[str]:
    """Yield texts that compare only a submodule with its counterpart, the smallest first.

    The counterpart has the weights to which the map gives those of the submodule, and no others. Inputs are drawn in
    the shapes that the submodule gets in the whole reference.

    Args:
        source: the text.
        name: the name of the pair that it declares.
        pair: that pair, built at this size.
        size: the size.
    """
    call = source.declaration(name)
    for factory in source.tree.body:
        if not isinstance(factory, ast.FunctionDef) or call not in factory.decorator_list or factory.name == _PART:
            continue
        assert call is not None
        start, end = source.span(call)
        inputs = _list_drawn_inputs(pair, draw_inputs(pair, size, Rng(0)))
        parts = sorted(_list_counterparts(pair), key=lambda part: (len(part[2]), -len(part[0])))
        for reference, candidate, weights in parts:
            entries = (": ".join(describe(side, "parity.") for side in entry) for entry in weights.items())
            if inputs.get(reference) and len(weights) < len(pair.weights):
                yield _TEXT.format(
                    rest=source.replaced({(start - 1, end): ""}),
                    declaration=source.of(call),
                    part=_PART,
                    factory=factory.name,
                    reference=reference,
                    candidate=candidate,
                    weights=",\n            ".join(entries),
                    inputs=inputs[reference],
                )


def _list_counterparts(pair: Pair) -> Iterator[tuple[str, str, WeightMap]]:
    """Yield names of a submodule of the reference and of one of the candidate, with the map between them.

    Either both are the innermost modules with these weights, or both hold them under the same names. Otherwise one may
    do something around the weights that the other leaves to a module around it.
    """
    for name, _ in pair.reference.named_modules():
        own = {left: right for left, right in pair.weights.items() if name and _has_parameters(left, name)}
        innermost = [_find_innermost(side) for side in (own.keys(), own.values())]
        for other in dict.fromkeys(filter(None, (innermost[1], name))):
            both = {a: b for a, b in pair.weights.items() if _has_parameters(a, name) or _has_parameters(b, other)}
            is_whole = all(
                _has_parameters(a, name, every=True) and _has_parameters(b, other, every=True) for a, b in both.items()
            )
            below = {_rename_below(a, name): _rename_below(b, other) for a, b in both.items()}
            if own and is_whole and ([name, other] == innermost or all(a == b for a, b in below.items())):
                yield name, other, below


def _find_innermost(sides: Iterable[Side]) -> str:
    """Return the name of the innermost module that has all of these parameters."""
    return ".".join(commonprefix([one.split(".")[:-1] for side in sides for one in names(side)]))  # noqa: RUF071


def _has_parameters(side: Side, module: str, every: bool = False) -> bool:
    return (all if every else any)(one.startswith(f"{module}.") for one in names(side))


def _rename_below(side: Side, module: str) -> Side:
    return renamed(side, lambda one: one.removeprefix(f"{module}."))


def _list_drawn_inputs(pair: Pair, inputs: Any) -> dict[str, str]:
    """Return the expressions that draw inputs like those of the reference's submodules, by the submodule's name.

    Such an expression is empty for a submodule that is given anything but tensors, or something by keyword.
    """
    found: dict[str, str] = {}

    def watch(name: str, module: nn.Module) -> None:
        def note(_: nn.Module, given: tuple[object, ...], named: dict[str, object]) -> None:
            is_drawn = not named and all(isinstance(x, Tensor) for x in given)
            found.setdefault(
                name, ", ".join(_write_draw(x) for x in given if isinstance(x, Tensor)) if is_drawn else ""
            )

        module.register_forward_pre_hook(note, with_kwargs=True)

    for name, module in pair.reference.named_modules():
        watch(name, module)
    positional, named = as_arguments(inputs)
    with torch.no_grad():
        (pair.call_reference or nn.Module.__call__)(pair.reference, *positional, **named)
    return found


def _write_draw(value: Tensor) -> str:
    shape = ", ".join(map(str, value.shape))
    if value.is_floating_point():
        return f"rng.normal({shape}, std={value.std(correction=0).item():.2g})"
    return f"rng.integers({shape}, high={int(value.max()) + 1}){'.bool()' * (value.dtype is torch.bool)}"
