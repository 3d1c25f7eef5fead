"""Prove a port on a checkpoint, and print the verdict on each block and on the end."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from tabulate import tabulate
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from parity import shown, te
from parity.case import registry
from parity.case.case import Rng, draw_inputs
from parity.case.validate import with_buffers_alone
from parity.cli.conversion import parse_size
from parity.plugin.options import parse_backend, parse_precision
from parity.proof.logits import Apart
from parity.proof.proof import Proof, Proven, prove
from parity.report.failure import causes_and_figures
from parity.report.numbers import plural, short
from parity.report.record import Item
from parity.te import precision_named, why_refused
from parity.user_error import UserError
from parity.weights.conversion import checkpoint, manifest
from parity.weights.conversion.conversion import Direction, planned_conversion

_HEADERS = ("", "block", "inherited", "expected", "added", "expected", "margin")


def prove_checkpoint(
    source: Path,
    converted: Path | None,
    target: str,
    precision: str,
    size: str,
    ids: Path | None,
    text: Path | None,
    prefix: Sequence[str],
    te_prefix: Sequence[str],
    ignore: Sequence[str],
    within: str,
    seconds: float,
    backend: str,
) -> bool:
    """Print the verdict on each block of a port, and return whether all are right.

    Args:
        source: the reference's checkpoint, a path that ``checkpoint.read`` can read.
        converted: the candidate's; None to convert the reference's by the pair's map.
        target: ``my_pairs.py::my_model``, or only the file if it declares one pair.
        precision: a key of ``PRECISIONS``.
        size: as for ``parity convert``.
        ids: a file of token ids; None for the text's, or else those of the pair's own inputs.
        text: a file of text, for the tokenizer in ``source``.
        prefix, te_prefix, ignore: as for ``parity convert``.
        within: the entry of ``source`` that holds the model; empty for all of it.
        seconds: how long the search for the first wrong block's cause may take, 0 for no limit.
        backend: ``auto``, ``gpu`` or ``cpu``.

    Raises:
        UserError: if an argument is not as above, the checkpoints do not fit the pair, or a module raises.
    """
    precision = parse_precision(precision)
    at, kernels, case = precision_named(precision), te.kernels(parse_backend(backend)), registry.only(target)
    if reason := why_refused(at, kernels):
        raise UserError(f"-p {precision}: {reason}")
    if at.warmup_passes:
        raise UserError(f"-p {precision} scales by earlier passes, of which a proof has none; try fp8_current")
    chosen = parse_size(case, size) or case.sizes[0]

    def read(path: Path, to: Direction, within: str = "") -> Mapping[str, Tensor]:
        old = checkpoint.read(path, within)
        manifest.check_content(checkpoint.files_of(path))
        named = prefix, te_prefix, ignore
        return planned_conversion(case, old, to, chosen, None, *named, copy=False, backend=parse_backend(backend)).given

    weights = read(source, "te", within), None if converted is None else read(converted, "reference")
    pair = with_buffers_alone(case, kernels.te, chosen)
    inputs = draw_inputs(pair, chosen, Rng(0))
    if ids is not None or text is not None:
        inputs = _with_ids(inputs, _read_ids(ids) if ids is not None else _tokenize_text(source, text))
    proof = prove(pair, *weights, inputs, case, at, kernels, seconds)
    print(shown.text("\n".join(_list_lines(proof))))
    return not proof.wrong


def _with_ids(inputs: Any, ids: Tensor) -> Any:
    """Return the pair's inputs with other ids in place of the first tensor of whole numbers."""
    leaves, shape = tree_flatten(inputs)
    place = next((i for i, x in enumerate(leaves) if isinstance(x, Tensor) and not x.is_floating_point()), None)
    if place is None:
        raise UserError("the pair's inputs have no whole numbers that --ids or --text could replace")
    leaves[place] = ids
    return tree_unflatten(leaves, shape)


def _read_ids(path: Path) -> Tensor:
    """Return ids ``[batch, seq]`` of a tensor that ``torch.save`` wrote, of JSON, or of a text with a row in each line.

    Raises:
        UserError: if the file has no such ids.
    """
    try:
        if path.suffix == ".pt":
            found = torch.load(path, weights_only=True)
        elif path.suffix == ".json":
            found = torch.tensor(json.loads(path.read_text(encoding="utf-8")))
        else:
            rows = path.read_text(encoding="utf-8").replace(",", " ").splitlines()
            found = torch.tensor([[int(one) for one in row.split()] for row in rows if row.strip()])
    except Exception as error:  # PyTorch's unpickler raises anything for a damaged file
        raise UserError(f"--ids {path} cannot be read: {shown.raised(error)}") from None
    ids = found[None] if isinstance(found, Tensor) and found.dim() == 1 else found
    if not isinstance(ids, Tensor) or ids.dim() != 2 or not ids.numel() or ids.is_floating_point() or ids.min() < 0:
        raise UserError(f"--ids {path} must hold whole numbers from 0, in rows of one length, one for each sequence")
    return ids.long()


def _tokenize_text(source: Path, text: Path | None) -> Tensor:
    assert text is not None
    try:
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(source, local_files_only=True)
        ids: Tensor = tokenizer(text.read_text(encoding="utf-8"), return_tensors="pt")["input_ids"]
    except Exception as error:  # transformers raises anything
        raise UserError(f"--text needs the tokenizer in {source}, or give --ids: {shown.raised(error)}") from None
    return ids


# What is printed.


def _list_lines(proof: Proof) -> Iterator[str]:
    rows = [_make_row(step) for step in proof.steps]
    yield from tabulate(rows, _HEADERS, "plain", disable_numparse=True).splitlines()
    yield ""
    yield from tabulate(
        list(_list_ends(proof)), ("at the end", "port", "expected"), "plain", disable_numparse=True
    ).splitlines()
    for step in (step for step in proof.wrong if step.result is not None):
        assert step.result is not None
        yield ""
        yield from causes_and_figures(Item((step.result,)))
    yield ""
    blocks = [step for step in proof.steps if step.result is not None]
    right = sum(step.passed for step in blocks)
    yield f"{right} of {plural(len(blocks), 'block')} add no more error than their precision costs"
    if proof.wrong:
        yield f"the port departs from the reference first {_say_where(proof.wrong[0])}"


def _say_where(step: Proven) -> str:
    return step.place if step.result is None else f"in {step.place}"


def _make_row(step: Proven) -> tuple[str, ...]:
    added = ("–", "–", "–")
    if step.added is not None:
        added = (short(step.added.errors.relative_l2), short(step.added.expected.relative_l2), short(step.added.margin))
    return ("" if step.passed else "✗", step.place, short(step.inherited), short(step.expected_before), *added)


def _list_ends(proof: Proof) -> Iterator[tuple[str, str, str]]:
    yield "relative error of the output", short(proof.inherited), short(proof.expected)
    if proof.logits is not None:
        both = proof.logits.computed, proof.logits.expected
        told = {
            "KL divergence, mean": [short(one.mean) for one in both],
            "KL divergence, largest": [short(one.largest) for one in both],
            "top-1 agreement": [f"{one.agreement:.2%}" for one in both],
            f"perplexity, more than {proof.logits.perplexity:.4g}": [_format_signed(one) for one in both],
        }
        for name, (port, expected) in told.items():
            yield name, port, expected


def _format_signed(apart: Apart) -> str:
    return f"{apart.perplexity:+.2g}"
