"""Share helpers among the tests of this folder: comparisons, checks of findings, and a small decoder.

The tests use small modules that a reference and its port share: each is built with the class of its linear layers,
PyTorch's or TE's, and with the mistake of the port. A row of a test's table holds the mistake, the finding's title, and
a phrase that its message must contain. The title for a correct port is ``passed``.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import parity

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
        call_reference: passed to the pair.
        call_candidate: passed to the pair.
        probe: passed to the case.
        options: passed to ``parity.compare``.
    """

    def factory(te: Any, **_: Any) -> parity.Pair:
        plain = reference()
        if isinstance(weights, Mapping):
            given = weights
        else:
            given = {weights(name) if weights else name: name for name, _ in plain.named_parameters()}
        calls = dict(call_reference=call_reference, call_candidate=call_candidate)
        return parity.Pair(plain, port(te), inputs, given, **calls)

    (result,) = parity.compare(parity.Case("port", factory, sizes=({},), probe=probe), [precision], **options)
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


def normal(*shapes: tuple[int, ...]) -> Callable[[Any], Any]:
    """Return a function that draws one tensor of each shape."""

    def inputs(rng: Any) -> Any:
        drawn = tuple(rng.normal(*shape) for shape in shapes)
        return drawn if len(drawn) > 1 else drawn[0]

    return inputs


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


# A small decoder, which returns logits or a loss.

VOCABULARY, HIDDEN, HEADS, HEAD_DIM, FFN, BATCH = 96, 64, 4, 16, 128, 2


def frequencies(base: float = 10_000.0) -> Tensor:
    return base ** (-torch.arange(0, HEAD_DIM, 2, dtype=torch.float64) / HEAD_DIM)


@dataclass(frozen=True)
class Options:
    """Hold what a reference or its port computes.

    ``roped``: the layers that rotate, or None for all. ``bases``: each layer's RoPE base, instead of ``frequency``.
    ``scales``: a factor of each layer's softmax scale.
    ``branch``: a factor of the results of attention and MLP. ``from_norm``: attention's result is added to its normed
    input. ``mlp_sum``: the MLP's result is added. ``normed``: the last norm is also applied after this many layers.
    ``softcap``, ``logits_cap``: infinite for no cap.
    """

    layers: int = 1
    loss: bool = True
    reduction: str = "mean"
    embedding: float = 1.0
    branch: float = 1.0
    roped: tuple[int, ...] | None = None
    frequency: Callable[[], Tensor] = frequencies
    bases: tuple[float, ...] | None = None
    scales: tuple[float, ...] | None = None
    from_norm: bool = False
    mlp_sum: bool = True
    final_norm: bool = True
    normed: int = 0
    skipped: tuple[int, ...] = ()
    shift: int = 0
    softcap: float = math.inf
    logits_cap: float = math.inf


def capped(x: Tensor, cap: float) -> Tensor:
    return x if math.isinf(cap) else cap * torch.tanh(x / cap)


def turned(x: Tensor, frequency: Tensor, positions: Tensor) -> Tensor:
    """Return ``[batch, heads, seq, head_dim]`` rotated by halves; positions are ``[seq]`` or ``[batch, seq]``."""
    angles = positions.double()[..., None] * frequency
    angles = angles[:, None] if positions.dim() > 1 else angles
    cos, sin = (torch.cat((table, table), -1).to(x.dtype) for table in (angles.cos(), angles.sin()))
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat((-second, first), -1) * sin


class Layer(nn.Module):
    def __init__(self, linear: Any, norm: Any, options: Options, number: int) -> None:
        super().__init__()
        self.options, self.number = options, number
        self.norm1, self.norm2 = norm(HIDDEN), norm(HIDDEN)
        self.q, self.k, self.v, self.out = (linear(HIDDEN, HIDDEN, bias=False) for _ in range(4))
        self.up, self.down = linear(HIDDEN, FFN, bias=False), linear(FFN, HIDDEN, bias=False)

    def attention(self, x: Tensor) -> Tensor:
        options, seq = self.options, x.shape[1]
        q, k, v = (layer(x).unflatten(-1, (HEADS, HEAD_DIM)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        if options.roped is None or self.number in options.roped:
            frequency = frequencies(options.bases[self.number]) if options.bases else options.frequency()
            q, k = (turned(one, frequency, torch.arange(seq)) for one in (q, k))
        k, v = k.roll(options.shift, 2), v.roll(options.shift, 2)
        scale = options.scales[self.number] if options.scales else 1.0
        scores = q @ k.transpose(-1, -2) * (scale / math.sqrt(HEAD_DIM))
        scores = capped(scores, options.softcap)
        scores = scores.masked_fill(torch.ones(seq, seq, dtype=torch.bool).triu(1), -math.inf)
        return self.out((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))

    def forward(self, x: Tensor) -> Tensor:
        options = self.options
        if self.number in options.skipped:
            return x
        normed = self.norm1(x)
        attended = self.attention(normed)
        x = (normed if options.from_norm else x) + (attended if options.branch == 1.0 else options.branch * attended)
        y = self.down(F.silu(self.up(self.norm2(x))))
        y = y if options.branch == 1.0 else options.branch * y
        return x + y if options.mlp_sum else y


class LanguageModel(nn.Module):
    def __init__(self, linear: Any, norm: Any, options: Options) -> None:
        super().__init__()
        self.options = options
        self.tokens = nn.Embedding(VOCABULARY, HIDDEN)
        self.layers = nn.ModuleList(Layer(linear, norm, options, number) for number in range(options.layers))
        self.norm = norm(HIDDEN)
        self.head = linear(HIDDEN, VOCABULARY, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        options, x = self.options, self.tokens(ids)
        x = x if options.embedding == 1.0 else x * options.embedding
        for number, layer in enumerate(self.layers):
            x = layer(x)
            x = self.norm(x) if number < options.normed else x
        logits = capped(self.head(self.norm(x) if options.final_norm else x), options.logits_cap)
        if not options.loss:
            return logits
        logits = logits.float() if logits.dtype is not torch.float64 else logits
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten(), reduction=options.reduction)


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
    return compared(
        lambda: LanguageModel(nn.Linear, lambda width: nn.RMSNorm(width, eps=1e-5), reference),
        lambda te: LanguageModel(te.Linear, te.RMSNorm, replace(reference, **port)),
        lambda rng: rng.integers(BATCH, seq, high=VOCABULARY),
        precision,
        mapped,
    )


class Expert(nn.Module):
    """An MLP of two layers, 64 to 96 channels and back, without biases."""

    def __init__(self, linear: Any, act: Any) -> None:
        super().__init__()
        self.act, self.up, self.down = act, linear(64, 96, bias=False), linear(96, 64, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.act(self.up(x)))
