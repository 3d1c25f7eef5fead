"""What the sources of FLOP formulas claim, computed again from the components of ``parity.flops``."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from parity import flops
from parity.flops import LayerSizes, Recomputation
from parity.studies.tables import Claim

_DAY = 86400.0
_AS_ROUNDED = 0.05  # of a figure with two digits


@dataclass(frozen=True)
class Model:
    """A language model in training.

    Attributes:
        layer: sizes of each layer, batch included.
        layers: how many.
        vocabulary: width of the logits.
    """

    layer: LayerSizes
    layers: int
    vocabulary: int

    def products(self, recomputation: Recomputation) -> int:
        """FLOPs of a step in matrix products."""
        components = flops.in_products(flops.layer(self.layer))
        of_layer = flops.total(components.values()) + flops.recomputed(components, recomputation)
        logits = flops.logits(self.layer.tokens, self.layer.hidden, self.vocabulary)
        return self.layers * of_layer + flops.total([logits])


# Narayanan et al., table 1, the row of 174.6 billion parameters, trained at batch size 1536 (section 5.1).
GPT3 = Model(LayerSizes(1536, 2048, 12288, 96, 96, 128, 4 * 12288), 96, 51200)
# PaLM 540B: A. Chowdhery et al., arXiv 2204.02311, table 1. One sequence.
PALM = Model(LayerSizes(1, 2048, 18432, 48, 1, 256, 4 * 18432, gated=True, rms=True), 118, 256000)
# A llama of 7 billion parameters, but with the gate at the width of 4 h.
WIDE_LLAMA = Model(LayerSizes(1, 4096, 4096, 32, 32, 128, 4 * 4096, gated=True, rms=True), 32, 32000)


def narayanan_layer(sizes: LayerSizes) -> int:
    """24 B s h^2 + 4 B s^2 h, forward (arXiv 2104.04473, appendix)."""
    return 24 * sizes.tokens * sizes.hidden**2 + 4 * sizes.tokens * sizes.seq * sizes.hidden


def narayanan_step(model: Model) -> int:
    """96 B s l h^2 (1 + s / (6 h) + V / (16 l h)), with whole layers recomputed (ibid., equation 3), as integers."""
    sizes, layers = model.layer, model.layers
    terms = 96 * layers * sizes.hidden**2 + 16 * layers * sizes.seq * sizes.hidden + 6 * sizes.hidden * model.vocabulary
    return sizes.tokens * terms


def megatron_deepspeed_step(model: Model, recomputation: Recomputation) -> float:
    """What Megatron-DeepSpeed reports since its pull request 283 (``megatron/training.py``).

    That is equation 3 with 24 or 32 as coefficient and 4 or 3 as factor, both in front of the same brackets.
    """
    sizes, layers = model.layer, model.layers
    coefficient = 32 if sizes.gated else 24
    factor = 4 if recomputation == "full" else 3
    brackets = 1 + sizes.seq / (6 * sizes.hidden) + model.vocabulary / (16 * layers * sizes.hidden)
    return coefficient * factor * sizes.tokens * layers * sizes.hidden**2 * brackets


def palm_parameters(model: Model) -> int:
    """Weights of the products; PaLM's embedding and logits share theirs, and its norms' are few."""
    one_token = replace(model.layer, batch=1, seq=1)
    of_layer = flops.in_products(flops.layer(one_token))
    weights = sum(each.forward // 2 for name, each in of_layer.items() if name not in ("scores", "context"))
    return model.layers * weights + model.layer.hidden * model.vocabulary


def claims() -> Iterator[Claim]:
    """Each source's figure and ours."""
    yield from _of_narayanan()
    yield from _of_the_gate()
    yield _of_megatron_lm()
    yield _of_palm()


def _of_narayanan() -> Iterator[Claim]:
    source = "Narayanan et al., arXiv 2104.04473"
    of_layer = sum(each.forward for each in flops.in_products(flops.layer(GPT3.layer)).values())
    expected = narayanan_layer(GPT3.layer)
    yield Claim(
        f"{source}, appendix",
        f"a layer's forward pass: 24 B s h² + 4 B s² h, for their 175B model {expected:,}",
        f"{of_layer:,}",
        _equal(of_layer, expected),
        "the same products, added up one by one",
    )
    step, equation = GPT3.products("full"), narayanan_step(GPT3)
    yield Claim(
        f"{source}, equation 3",
        f"a step with whole layers recomputed: 96 B s l h² (1 + s/6h + V/16lh) = {equation:,}",
        f"{step:,}",
        _equal(step, equation),
        "layers count four times (forward, again, two backward), logits three times",
    )
    days = step * 300e9 / GPT3.layer.tokens / (1024 * 140e12) / _DAY
    yield Claim(
        f"{source}, section 5.1",
        "300 billion tokens on 1024 GPUs at 140 TFLOP/s each: 34 days",
        f"{days:.1f} days",
        f"to {abs(days / 34 - 1):.1%}" if abs(days / 34 - 1) < _AS_ROUNDED else _equal(days, 34),
        "they take 8 T P / (n X), which leaves out attention's scores and context: "
        f"{8 * 300e9 * 175e9 / (1024 * 140e12) / _DAY:.1f} days",
    )


def _of_the_gate() -> Iterator[Claim]:
    source = "Megatron-DeepSpeed (BigScience), pull request 283"
    sizes = WIDE_LLAMA.layer
    forward = flops.in_products(flops.layer(sizes))
    weights = sum(each.forward for name, each in forward.items() if name not in ("scores", "context"))
    unit = sizes.tokens * sizes.hidden**2
    yield Claim(
        source,
        "24 B s h² become 32 B s h² a layer and pass with a gate at the same width",
        f"{weights / unit:g} B s h²",
        _equal(weights, 32 * unit),
        "the gate is one more product of 8 B s h²",
    )
    reasons: dict[Recomputation, str] = {
        "full": "32 stands in front of the brackets, so attention's and the logits' share grow by 4/3 as well, though "
        "the gate changes neither",
        "none": "attention's share is 4/3 of what it should be; the logits' is right, because the 3/4 that it loses "
        "with the factor cancels the 4/3",
    }
    for recomputation, why in reasons.items():
        theirs, ours = megatron_deepspeed_step(WIDE_LLAMA, recomputation), WIDE_LLAMA.products(recomputation)
        yield Claim(
            f"{source}, the code, recomputation {recomputation}",
            f"a step of a gated 32-layer model (h 4096, s 4096, V 32000): {theirs:.4g}",
            f"{ours:.4g}",
            _equal(ours, theirs),
            why,
        )


def _of_megatron_lm() -> Claim:
    seq = 4096
    exact = flops.visible_pairs(seq, seq, causal=True)
    return Claim(
        "Megatron-LM, `num_floating_point_operations`",
        f"a causal mask leaves s² / 2 pairs: {seq * seq // 2:,} at s = {seq}",
        f"s (s + 1) / 2 = {exact:,}",
        "but for 1 / s" if 2 * exact == seq * seq + seq else _equal(exact, seq * seq // 2),
        "a token sees itself, too",
    )


def _of_palm() -> Claim:
    tokens_a_second, chips, peak = 238.3e3, 6144, 275e12
    per_token = PALM.products("none") / PALM.layer.tokens
    parameters = palm_parameters(PALM)
    used = [tokens_a_second * each / (chips * peak) for each in (per_token, 6 * parameters)]
    return Claim(
        "PaLM, arXiv 2204.02311, appendix B",
        "6 N + 12 L H Q T FLOPs a token, of 540.35 billion parameters; utilisation 46.2 %, without attention 45.7 %",
        f"{parameters / 1e9:.2f} billion; {100 * used[0]:.1f} %, {100 * used[1]:.1f} %",
        "to all digits" if [round(100 * each, 1) for each in used] == [46.2, 45.7] else "no",
        "all pairs counted as if there were no causal mask, nothing for recomputation: the sum of our components",
    )


def _equal(ours: float, theirs: float) -> str:
    return "exactly" if ours == theirs else f"no: ours is {100 * (ours / theirs - 1):+.2g} %"
