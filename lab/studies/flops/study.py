"""Count the FLOPs of each component of a layer, and compare the formulas with PyTorch's counter on every case.

The formulas are those of ``parity.measuring.flops``. ``torch.utils.flop_counter`` counts the matrix products of each
case's reference in a forward and a backward pass. The two numbers must be equal.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from lab.studies import reporting
from lab.studies.reporting import Claim
from parity import cases as built_in
from parity import te
from parity.case import registry
from parity.case.case import Case, Pair, Rng, Size, draw_inputs
from parity.measuring import flops
from parity.measuring.flops import Flops, LayerSizes, Recomputation
from parity.passes import one_pass
from parity.progress import followed
from parity.te import Kernels
from parity.user_error import UserError


@dataclass(frozen=True)
class Settings:
    """Options of the study.

    Attributes:
        batch, seq, hidden, heads, groups: sizes of the llama layer that the report breaks down.
        vocabulary: width of the logits that follow the last layer.
        seqs: sequence lengths over which the components' shares are plotted.
    """

    batch: int = 1
    seq: int = 4096
    hidden: int = 4096
    heads: int = 32
    groups: int = 8
    vocabulary: int = 32000
    seqs: tuple[int, ...] = (512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)


FULL = Settings()
QUICK = Settings(seqs=(1024, 8192, 65536))


@dataclass(frozen=True)
class Run:
    """A case at one size.

    Attributes:
        case: its name.
        size: the case's size, as text.
    """

    case: str
    size: str


@dataclass(frozen=True)
class Count:
    """FLOPs of a case's reference in matrix products, forward and backward.

    Attributes:
        counted: the count of ``torch.utils.flop_counter``.
        computed: the result of ``parity.measuring.flops``.
        skipping: the same for a kernel that skips what a mask or window hides, as TE's fused attention does.
    """

    counted: int
    computed: int
    skipping: int


Counts = Mapping[Run, Count]


def measured(settings: Settings, folder: Path) -> tuple[Mapping[Run, Count], Settings]:
    """Count every case. There is no record, because counting takes seconds.

    Returns:
        The arguments of ``write``, except the folder.

    Raises:
        UserError: if heads do not divide the hidden size, or groups do not divide heads.
    """
    _check(settings)
    kernels = te.kernels()
    cases = followed(list(suite()), "counting")
    return {_run(*entry): count(*entry, kernels) for entry in cases}, settings


def count(case: Case, size: Size, kernels: Kernels) -> Count:
    """Count the FLOPs of a case's reference with PyTorch's counter and with the formulas."""
    pair = case.build(kernels.te, size)
    inputs = draw_inputs(pair, size, Rng(0))
    tensors = inputs if isinstance(inputs, tuple) else (inputs,)
    dense, skipping = (_in_products(pair, tensors, skips_hidden) for skips_hidden in (False, True))
    return Count(_counted(pair, inputs), dense, skipping)


def _counted(pair: Pair, inputs: Any) -> int:
    names = one_pass.positional_names(pair.reference, pair.call_reference, inputs)
    with FlopCounterMode(display=False) as counter:
        one_pass.run(pair.reference, pair.call_reference, inputs, names, _ones)
    return counter.get_total_flops()


def _ones(outputs: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: torch.ones_like(output) for name, output in outputs.items()}


def _in_products(pair: Pair, inputs: tuple[Tensor, ...], skips_hidden: bool) -> int:
    components = flops.components(pair.reference, *inputs, skips_hidden=skips_hidden)
    return flops.total(flops.in_products(components).values())


_BUILT_IN = Path(next(iter(built_in.__path__))).resolve()


def suite() -> Iterator[tuple[Case, Size]]:
    """Yield the built-in cases at each size. Other packages' cases may have modules that the formulas do not cover."""
    for case in registry.load_entry_points():
        if case.path.resolve().parent == _BUILT_IN:
            yield from ((case, size) for size in case.sizes)


def _run(case: Case, size: Size) -> Run:
    return Run(case.name, ", ".join(f"{name} {value}" for name, value in size.items()))


def _check(settings: Settings) -> None:
    if settings.hidden % settings.heads or settings.heads % settings.groups:
        raise UserError(
            f"heads={settings.heads} must divide hidden={settings.hidden}, and groups={settings.groups} the heads"
        )


# Claims of the sources of FLOP formulas, recomputed from the components of ``parity.measuring.flops``.


_DAY = 86400.0
_AS_ROUNDED = 0.05  # the relative difference that counts as agreement with a figure of two digits


@dataclass(frozen=True)
class Model:
    """A language model in training.

    Attributes:
        layer: sizes of each layer, including the batch.
        layers: number of layers.
        vocabulary: width of the logits.
    """

    layer: LayerSizes
    layers: int
    vocabulary: int

    def products(self, recomputation: Recomputation) -> int:
        """Return the FLOPs of a training step's matrix products."""
        components = flops.in_products(flops.layer(self.layer))
        of_layer = flops.total(components.values()) + flops.recomputed(components, recomputation)
        logits = flops.logits(self.layer.tokens, self.layer.hidden, self.vocabulary)
        return self.layers * of_layer + flops.total([logits])


# Narayanan et al., table 1, the row of 174.6 billion parameters, trained at batch size 1536 (section 5.1).
GPT3 = Model(LayerSizes(1536, 2048, 12288, 96, 96, 128, 4 * 12288), 96, 51200)
# PaLM 540B: A. Chowdhery et al., arXiv 2204.02311, table 1. One sequence.
PALM = Model(LayerSizes(1, 2048, 18432, 48, 1, 256, 4 * 18432, gated=True, rms=True), 118, 256000)
# A llama of 7 billion parameters, but with a gated MLP that is 4 h wide.
WIDE_LLAMA = Model(LayerSizes(1, 4096, 4096, 32, 32, 128, 4 * 4096, gated=True, rms=True), 32, 32000)


def narayanan_layer(sizes: LayerSizes) -> int:
    """Return the FLOPs of a forward pass, 24 B s h^2 + 4 B s^2 h (arXiv 2104.04473, appendix)."""
    return 24 * sizes.tokens * sizes.hidden**2 + 4 * sizes.tokens * sizes.seq * sizes.hidden


def narayanan_step(model: Model) -> int:
    """Return 96 B s l h^2 (1 + s / (6 h) + V / (16 l h)), which includes recomputed layers (ibid., equation 3)."""
    sizes, layers = model.layer, model.layers
    terms = 96 * layers * sizes.hidden**2 + 16 * layers * sizes.seq * sizes.hidden + 6 * sizes.hidden * model.vocabulary
    return sizes.tokens * terms


def megatron_deepspeed_step(model: Model, recomputation: Recomputation) -> float:
    """Return the FLOPs that Megatron-DeepSpeed reports since its pull request 283 (``megatron/training.py``).

    This is equation 3 with a coefficient of 24 or 32 and a factor of 4 or 3, both in front of the same brackets.
    """
    sizes, layers = model.layer, model.layers
    coefficient = 32 if sizes.gated else 24
    factor = 4 if recomputation == "full" else 3
    brackets = 1 + sizes.seq / (6 * sizes.hidden) + model.vocabulary / (16 * layers * sizes.hidden)
    return coefficient * factor * sizes.tokens * layers * sizes.hidden**2 * brackets


def palm_parameters(model: Model) -> int:
    """Count the weights of the matrix products. PaLM's embedding and logits share weights, and its norms have few."""
    one_token = replace(model.layer, batch=1, seq=1)
    of_layer = flops.in_products(flops.layer(one_token))
    weights = sum(each.forward // 2 for name, each in of_layer.items() if name not in ("scores", "context"))
    return model.layers * weights + model.layer.hidden * model.vocabulary


def claims() -> Iterator[Claim]:
    """Yield each source's claim, next to our figure."""
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


_FORMULAS = {
    "query": ("2 B s h · heads d", "Narayanan et al., appendix"),
    "key": ("2 B s h · groups d", "ibid.; groups: Megatron-LM, `num_floating_point_operations`"),
    "value": ("2 B s h · groups d", "ibid."),
    "scores": ("2 B · heads d · pairs", "Narayanan et al., appendix; pairs: counted"),
    "context": ("2 B · heads d · pairs", "ibid."),
    "output": ("2 B s h · heads d", "Narayanan et al., appendix"),
    "gate": ("2 B s h f", "Megatron-DeepSpeed, pull request 283"),
    "up": ("2 B s h f", "Narayanan et al., appendix"),
    "down": ("2 B s h f", "ibid."),
    "attention norm": ("4 B s h", "counted from RMSNorm's definition; backward 9 (LayerNorm: 7 and 13)"),
    "mlp norm": ("4 B s h", "as the attention's norm"),
}
_GROUPS = {
    "projections": ("query", "key", "value", "output"),
    "scores and context": ("scores", "context"),
    "MLP": ("gate", "up", "down"),
    "norms": ("attention norm", "mlp norm"),
}

_INTRODUCTION = """\
How many floating-point operations does a layer take? Every throughput in TFLOP/s is a time and this number, so one that
is off by a third makes a GPU look a third faster. `parity/measuring/flops.py` gives it by component. An addition or
a multiplication is one operation: a product of `[m, k]` and `[k, n]` takes 2 m k n. B is the batch, s the sequence's
length, h the hidden size, d the width of a head, f the width inside the MLP, V the vocabulary. The backward pass of a
product is two products, so twice as much. Biases, activations, softmax, RoPE and residual additions are left out, as in
every source: for each of them a token costs some multiple of h (or a score some constant), for a product h²."""

_CASES = """\
`torch.utils.flop_counter` counts the matrix products that a module calls, and nothing else. It cannot see into TE's
compiled kernels, so it watches the plain module of each case, forward and backward. The last column is what a kernel
does that leaves out what a causal mask or a window hides, which TE's fused attention is; the plain modules compute it
and throw it away."""


def write(found: Mapping[Run, Count], settings: Settings, folder: Path) -> Path:
    """Write ``flops.md`` and ``flops.png`` into the folder, and return the report's path."""
    _plot(settings).savefig(folder / "flops.png", dpi=110)
    return reporting.written(folder / "flops.md", _sections(found, settings))


def llama(settings: Settings) -> LayerSizes:
    """Return the sizes of the layer that the report breaks down: gated at 4 h, RMSNorm, GQA, causal."""
    return LayerSizes(
        batch=settings.batch,
        seq=settings.seq,
        hidden=settings.hidden,
        heads=settings.heads,
        groups=settings.groups,
        head_dim=settings.hidden // settings.heads,
        ffn=4 * settings.hidden,
        gated=True,
        rms=True,
        causal=True,
    )


def _sections(found: Mapping[Run, Count], settings: Settings) -> Iterator[str]:
    equal = sum(count.counted == count.computed for count in found.values())
    yield "# FLOPs, in the open"
    yield f"**{equal} of {len(found)} cases: the formulas and PyTorch's counter agree to the last operation.**"
    yield _INTRODUCTION
    yield f"Counted with torch {torch.__version__}; a count is the same on any device."
    yield "## A layer, component by component"
    sizes = llama(settings)
    yield (
        f"RMSNorm, {sizes.heads} heads in {sizes.groups} groups, a gated MLP with f = 4 h, causal: batch {sizes.batch},"
        f" s = {sizes.seq}, h = {sizes.hidden}. Counts are in GFLOP. Logits come once a model, after the last layer; "
        f"here V = {settings.vocabulary}."
    )
    yield _by_component(sizes, settings.vocabulary)
    yield "![Share of each component over the sequence's length](flops.png)"
    yield "## What a gate costs: 24 becomes 32"
    yield _gate_section(sizes)
    yield "## Causal masks and recomputation"
    yield _of_recomputation(sizes)
    yield "## Claims"
    yield reporting.claims(claims())
    yield "## Every case of the default suite"
    yield _CASES
    yield _by_case(found)


def _by_component(sizes: LayerSizes, vocabulary: int) -> str:
    rows = []
    components = flops.layer(sizes)
    whole = flops.total(components.values())
    for name, each in components.items():
        formula, source = _FORMULAS[name]
        share = f"{100 * flops.total([each]) / whole:.2g} %"
        rows.append([name, formula, _giga(each.forward), _giga(each.backward), share, source])
    sums = [sum(getattr(each, direction) for each in components.values()) for direction in ("forward", "backward")]
    rows.append(["**all of a layer**", "", *map(_giga, sums), "100 %", ""])
    logits = flops.logits(sizes.tokens, sizes.hidden, vocabulary)
    source = "Narayanan et al., appendix: 6 B s h V with both passes"
    rows.append(["logits", "2 B s h V", _giga(logits.forward), _giga(logits.backward), "", source])
    return reporting.texts(rows, ["component", "formula, forward", "forward", "backward", "share", "source"])


def _gate_section(sizes: LayerSizes) -> str:
    plain = replace(sizes, groups=sizes.heads, gated=False, causal=False)
    variants = {
        "plain MLP, f = 4 h": plain,
        "gated MLP, f = 4 h": replace(plain, gated=True),
        "gated MLP, f = 8 h / 3": replace(plain, gated=True, ffn=round(8 * sizes.hidden / 3)),
    }
    rows = []
    for name, each in variants.items():
        forward = {key: value.forward for key, value in flops.layer(each).items()}
        unit = each.tokens * each.hidden**2
        coefficients = [sum(forward.get(key, 0) for key in _GROUPS[group]) / unit for group in ("projections", "MLP")]
        rows.append([name, *(f"{value:.4g}" for value in (*coefficients, sum(coefficients)))])
    table = reporting.numbers(rows, ["B s h², forward", "projections", "MLP", "together"])
    return (
        f"{table}\n\nThe gate is a third product as wide as the other two. Shazeer (arXiv 2002.05202) therefore "
        "narrows the MLP to two thirds, which makes it cost what a plain one does (to the last digit only if h is a "
        "multiple of 3). A throughput computed with 24 for a model that has its gate at full width is a quarter too "
        "low."
    )


def _of_recomputation(sizes: LayerSizes) -> str:
    rows = []
    for causal in (False, True):
        components = flops.in_products(flops.layer(replace(sizes, causal=causal)))
        step = flops.total(components.values())
        again = [flops.recomputed(components, kind) for kind in ("none", "selective", "full")]
        pairs = flops.visible_pairs(sizes.seq, sizes.seq, causal)
        rows.append(
            [
                "causal" if causal else "all pairs",
                f"{pairs / sizes.seq**2:.4f}",
                *(_giga(step + more) for more in again),
            ]
        )
    headers = ["attention computes", "of the pairs", "step, GFLOP", "+ selective recomputation", "+ full recomputation"]
    return (
        f"{reporting.numbers(rows, headers)}\n\nA causal kernel computes (s + 1) / 2 s of the pairs. Selective "
        "recomputation repeats scores and context (Korthikanti et al., arXiv 2205.05198), full recomputation the whole "
        "forward pass. A model's utilisation (PaLM's MFU) counts the step alone; that of the hardware counts what it "
        "repeats, too."
    )


def _by_case(found: Mapping[Run, Count]) -> str:
    rows = [
        [
            f"`{run.case}`",
            run.size,
            f"{count.counted:,}",
            f"{count.computed:,}",
            "exactly" if count.counted == count.computed else "no",
            "the same" if count.skipping == count.computed else f"{count.skipping:,}",
        ]
        for run, count in found.items()
    ]
    headers = ["case", "size", "PyTorch's counter", "our formulas", "agree", "skipping hidden pairs"]
    return reporting.texts(rows, headers)


def _giga(count: int) -> str:
    return f"{count / 1e9:,.2f}"


def _plot(settings: Settings) -> Figure:
    figure = Figure(figsize=(9.2, 4.0), layout="constrained")
    axes = figure.subplots(1, 2, sharey=True)
    for axis, causal in zip(axes, (False, True), strict=True):
        layers = [flops.layer(replace(llama(settings), seq=seq, causal=causal)) for seq in settings.seqs]
        shares = [[_share(layer, names) for layer in layers] for names in _GROUPS.values()]
        axis.stackplot(settings.seqs, shares, labels=list(_GROUPS), alpha=0.85)
        axis.set(title="causal" if causal else "all pairs", xlabel="sequence length, tokens", xscale="log", ylim=(0, 1))
    axes[0].set_ylabel("share of a layer's FLOPs")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=len(_GROUPS))
    return figure


def _share(layer: Mapping[str, Flops], names: tuple[str, ...]) -> float:
    chosen = [layer[name] for name in names if name in layer]
    return flops.total(chosen) / flops.total(layer.values())
