"""Say how far log-probabilities of tokens are off, in the numbers that trainers of language models watch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from parity.mistakes.catalogue import calls_of
from parity.mistakes.log_probs import returned_log_probs
from parity.passes.all_passes import Tensors
from parity.passes.prepare import Prepared, size_in_bytes

# A logarithm of a probability that is 1 may be rounded to either side of 0.
_ROUNDING = 1e-6


def log_prob_outputs(prepared: Prepared) -> tuple[str, ...]:
    """Return the names of the outputs that are log-probabilities of tokens, kept for the next precision."""

    outputs = {name: x for name, x in prepared.golden.outputs.items() if x.dim() and _has_one_sign(x)}

    def names() -> tuple[str, ...]:
        if not outputs:
            return ()
        calls = prepared.cache.get("calls", lambda: calls_of(prepared), lambda one: size_in_bytes(one.trace.tensors))
        return returned_log_probs(calls.trace, outputs)

    return prepared.cache.get("log probs", names)


def _has_one_sign(x: Tensor) -> bool:
    """Return whether numbers are all negative or all positive, but for roundings, as log-probabilities are."""
    return bool((x < _ROUNDING).all()) or bool((x > -_ROUNDING).all())


def told(names: Sequence[str], candidate: Tensors, golden: Tensors, models: Sequence[Tensors]) -> Iterator[str]:
    """Yield a sentence for each output of log-probabilities.

    The ratio of probabilities is the reference's over the candidate's, as a trainer's over its engine's, and KL is the
    average of ``ratio - 1 - log(ratio)`` over the tokens (Schulman's k3). Tokens whose golden log-probability is 0 are
    padding, and are left out.

    Args:
        names: of the outputs.
        candidate, golden: all tensors.
        models: the rounding model's, which tell what rounding alone makes.
    """
    for name in names:
        right, computed = golden["output", name].double(), candidate["output", name]
        counts = right != 0
        if computed.shape != right.shape or not bool(counts.any()):
            continue
        sign = -1.0 if bool((right[counts] > 0).all()) else 1.0  # a loss of each token is a negative log-probability
        off = sign * (computed.double() - right) * counts
        if not bool(off.isfinite().all()):
            continue
        of_models = [sign * (model["output", name].double() - right) * counts for model in models]
        at = ", ".join(str(index) for index in np.unravel_index(int(off.abs().argmax()), off.shape))
        ratios = (-off[counts]).exp()
        yield (
            f"log-probabilities of {name} are off by {_mean(off, counts):.2g} on average, and rounding alone makes "
            f"{_span(_mean(one, counts) for one in of_models)}; by up to {off.abs().max():.2g}, at [{at}], and by "
            f"rounding {_span(float(one.abs().max()) for one in of_models)}; ratios of probabilities are "
            f"{ratios.min():.4g} to {ratios.max():.4g}; KL {_kl(off[counts]):.2g}, by rounding "
            f"{_span(_kl(one[counts]) for one in of_models)}{_of_their_dtype(computed, right, counts)}"
        )


def _mean(off: Tensor, counts: Tensor) -> float:
    return off[counts].abs().mean().item()


def _kl(off: Tensor) -> float:
    """Return the average of ``ratio - 1 - log(ratio)``, with the ratio ``exp(-off)``."""
    return (torch.expm1(-off) + off).mean().item()


def _span(values: Iterator[float]) -> str:
    """Return one number, or the least and the largest."""
    told = sorted(f"{value:.2g}" for value in values)
    return " to ".join(dict.fromkeys((told[0], told[-1])))


def _of_their_dtype(computed: Tensor, right: Tensor, counts: Tensor) -> str:
    """Say what log-probabilities lose that are returned in 16 bits; return an empty text for others."""
    if computed.dtype not in (torch.bfloat16, torch.float16):
        return ""
    lost = (right.to(computed.dtype).double() - right)[counts].abs().mean().item()
    name = str(computed.dtype).removeprefix("torch.")
    return f"; that they are returned in {name} alone makes {lost:.2g} on average, which FP32 would not"
