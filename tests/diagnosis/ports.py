"""Share helpers among the tests of this folder: comparisons and checks of findings.

The tests use small modules that a reference and its port share: each is built with the class of its linear layers,
PyTorch's or TE's, and with the mistake of the port. A row of a test's table holds the mistake, the finding's title, and
a phrase that its message must contain. The title for a correct port is ``passed``.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from typing import Any

import pytest
from torch import nn

import parity
from lab.corpus.decoder import Options, decoder
from lab.corpus.small import Host

FP32_AND_BF16 = pytest.mark.parametrize("precision", ["fp32", "bf16"])


def in_turn(names: tuple[str, ...], rows: Iterable[tuple[Any, ...]]) -> pytest.MarkDecorator:
    """Parametrize by these names and ``precision``, with rows alternately in BF16 and FP32.

    For long tables of similar rows that take long to run. The search does not depend on the precision, only the size of
    the errors does, and such a table covers both.
    """
    both = itertools.cycle(("bf16", "fp32"))
    made = [
        pytest.param(*row.values, precision, marks=row.marks, id=row.id) if hasattr(row, "marks") else (*row, precision)
        for row, precision in zip(rows, both, strict=False)
    ]
    return pytest.mark.parametrize((*names, "precision"), made)


def compared(
    reference: Callable[[], nn.Module],
    port: Callable[[Any], nn.Module],
    inputs: Callable[..., Any],
    precision: str = "bf16",
    weights: Any = None,
    *,
    call_reference: Callable[..., Any] | None = None,
    call_candidate: Callable[..., Any] | None = None,
    evaluation: bool = False,
    probe: Any = True,
    **options: Any,
) -> parity.Result:
    """Compare a reference with a port.

    Args:
        reference: makes the plain module.
        port: makes the port from the ``te`` module that it is given.
        inputs: draws the inputs of both.
        precision: the precision of the comparison.
        weights: the pair's map, or a function from a parameter's name to the left side of its entry; default: itself.
        call_reference, call_candidate, evaluation: passed to the pair.
        probe: passed to the case.
        options: passed to ``parity.compare``.
    """

    calls = dict(call_reference=call_reference, call_candidate=call_candidate, evaluation=evaluation)
    host = Host("port", reference, port, inputs, weights=weights, options=calls, probe=probe)
    (result,) = parity.compare(host.case(), [precision], **options)
    return result


def twins(
    module: Callable[..., nn.Module],
    wrong: dict[str, Any],
    inputs: Callable[..., Any],
    precision: str = "bf16",
    right: dict[str, Any] | None = None,
    **options: Any,
) -> parity.Result:
    """Compare a module of PyTorch's linear layers with the same module of TE's, built with the port's mistake."""
    right = right or {}
    return compared(
        lambda: module(nn.Linear, **right),
        lambda te: module(te.Linear, **right | wrong),
        inputs,
        precision,
        **options,
    )


def tells(result: parity.Result, title: str, phrase: str = "") -> None:
    """Check that the first finding has this title and phrase; a phrase with a full stop must end the message."""
    if title == "passed":
        assert result.passed, result.findings or result.reason
        return
    assert result.status == "failed", result.reason
    first = result.findings[0]
    assert first.title == title, first
    assert phrase in f"{first.message}.", first


def tells_only(result: parity.Result, title: str, phrase: str = "") -> None:
    """Check that the only finding has this title and phrase."""
    tells(result, title, phrase)
    assert len(result.findings) == (title != "passed"), result.findings


def decoders(
    reference: Options, precision: str, seq: int = 16, mapped: Callable[[str], Any] = lambda name: name, **port: Any
) -> parity.Result:
    """Compare a decoder with a port that differs in some options.

    Args:
        reference: the options of the reference.
        precision: the precision of the comparison.
        seq: the number of tokens in a sequence.
        mapped: makes the left side of the weight map's entry for a name.
        port: the options that the port gets wrong.
    """
    host = decoder("port", seq, mapped, **vars(reference))
    (result,) = parity.compare(host.case(**port), [precision])
    return result
