"""Draws the report of the study ``flops``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import torch
from matplotlib.figure import Figure

from parity import flops
from parity.flops import Flops, LayerSizes
from parity.studies import tables
from parity.studies.flops import claims
from parity.studies.flops.study import Count, Run, Settings

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
    "mlp norm": ("4 B s h", "ditto"),
}
_GROUPS = {
    "projections": ("query", "key", "value", "output"),
    "scores and context": ("scores", "context"),
    "MLP": ("gate", "up", "down"),
    "norms": ("attention norm", "mlp norm"),
}

_INTRODUCTION = """\
How many floating-point operations does a layer take? Every throughput in TFLOP/s is a time and this number, so one that
is off by a third makes a GPU look a third faster. `parity/flops.py` gives it component by component. An addition or a
multiplication is one operation: a product of `[m, k]` and `[k, n]` takes 2 m k n. B is the batch, s the sequence's
length, h the hidden size, d the width of a head, f the width inside the MLP, V the vocabulary. The backward pass of a
product is two products, so twice as much. Biases, activations, softmax, RoPE and residual additions are left out, as in
every source: for each of them a token costs some multiple of h (or a score some constant), for a product h²."""

_CASES = """\
`torch.utils.flop_counter` counts the matrix products that a module calls, and nothing else. It cannot see into TE's
compiled kernels, so it watches the plain module of each case, forward and backward. The last column is what a kernel
does that leaves out what a causal mask or a window hides, which TE's fused attention is; the plain modules compute it
and throw it away."""


def write(found: Mapping[Run, Count], settings: Settings, folder: Path) -> Path:
    """Write ``flops.md`` and ``flops.png`` into the folder; returns the report's path."""
    _plot(settings).savefig(folder / "flops.png", dpi=110)
    path = folder / "flops.md"
    path.write_text("\n\n".join(_sections(found, settings)) + "\n", encoding="utf-8")
    return path


def llama(settings: Settings) -> LayerSizes:
    """The layer that is taken apart: gated at 4 h, RMSNorm, grouped-query attention, causal."""
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
    yield _of_the_gate(sizes)
    yield "## Causal masks and recomputation"
    yield _of_recomputation(sizes)
    yield "## Claims"
    yield tables.claims(claims.claims())
    yield "## Every case of the default suite"
    yield _CASES
    yield _by_case(found)
    yield "Made by `parity study flops`."


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
    return tables.texts(rows, ["component", "formula, forward", "forward", "backward", "share", "source"])


def _of_the_gate(sizes: LayerSizes) -> str:
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
    table = tables.numbers(rows, ["B s h², forward", "projections", "MLP", "together"])
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
        f"{tables.numbers(rows, headers)}\n\nA causal kernel computes (s + 1) / 2 s of the pairs. Selective "
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
    return tables.texts(rows, headers)


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
