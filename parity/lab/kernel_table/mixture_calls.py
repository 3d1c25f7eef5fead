"""Mixtures of experts: routing, moving tokens to experts and back, padding, and the loss that balances experts."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from parity.lab.kernel_table.bench import DTYPES, Bench, KernelCall

_TOKENS, _EXPERTS, _CHOSEN, _HIDDEN = 256, 16, 4, 128
_SIZES, _PADDED_SIZES = (100, 7, 0, 149), (112, 16, 0, 160)
_SHAPES = f"[{_TOKENS}, {_HIDDEN}], {_CHOSEN} of {_EXPERTS} experts"
_ROUTING_SHAPES = f"[{_TOKENS}, {_EXPERTS}], {_CHOSEN} chosen"


def calls() -> Iterator[KernelCall]:
    for text, dtype in DTYPES.items():
        for kind in ("mask", "index"):
            run = partial(_permute, kind=kind, dtype=dtype)
            yield KernelCall("Mixture of experts", "moe_permute, moe_unpermute", f"{text}, {kind} map", _SHAPES, run)
        run = partial(_permute_with_probs, dtype=dtype)
        yield KernelCall("Mixture of experts", "moe_permute_with_probs", text, _SHAPES, run)
        run = partial(_sort_chunks, dtype=dtype)
        yield KernelCall("Mixture of experts", "moe_sort_chunks_by_index_with_probs", text, _SHAPES, run)
        run = partial(_pad, dtype=dtype)
        sizes = f"{list(_SIZES)} rows to {list(_PADDED_SIZES)}"
        yield KernelCall("Mixture of experts", "fused_multi_row_padding, _unpadding", text, sizes, run)
        for function in ("softmax", "sigmoid", "sqrtsoftplus"):
            run = partial(_route, function=function, dtype=dtype)
            name = "fused_topk_with_score_function"
            yield KernelCall("Mixture of experts", name, f"{text}, {function}", _ROUTING_SHAPES, run)
            run = partial(_scores, function=function, dtype=dtype)
            name = "fused_compute_score_for_moe_aux_loss"
            yield KernelCall("Mixture of experts", name, f"{text}, {function}", _ROUTING_SHAPES, run)
    for text in ("FP32", "BF16"):
        for graph_safe in (False, True):
            run = partial(_auxiliary_loss, dtype=DTYPES[text], graph_safe=graph_safe)
            variant = f"{text}, the number of tokens in a tensor" if graph_safe else text
            yield KernelCall("Mixture of experts", "fused_moe_aux_loss", variant, _ROUTING_SHAPES, run)


def _choices(bench: Bench) -> Tensor:
    """INT64 ``[tokens, chosen]``: experts, no two alike for a token."""
    return bench.orders(_TOKENS, _EXPERTS)[:, :_CHOSEN].contiguous()


def _mask(choices: Tensor) -> Tensor:
    empty = torch.zeros(_TOKENS, _EXPERTS, dtype=torch.int32, device=choices.device)
    return empty.scatter(1, choices, 1)


def _permute(bench: Bench, kind: str, dtype: torch.dtype) -> Mapping[str, Any]:
    """There and back, with probabilities that merge a token's rows."""
    choices = _choices(bench)
    x, grad = (bench.normal(_TOKENS, _HIDDEN, dtype=dtype) for _ in range(2))
    x.requires_grad_()
    probs = bench.normal(_TOKENS, _EXPERTS if kind == "mask" else _CHOSEN).abs().requires_grad_()
    routing = _mask(choices) if kind == "mask" else choices.int()
    rows, row_id_map = bench.te.moe_permute(x, routing, num_out_tokens=_TOKENS * _CHOSEN, map_type=kind)
    shape = {"restore_shape": x.shape} if kind == "mask" else {}
    merged = bench.te.moe_unpermute(rows, row_id_map, merging_probs=probs, map_type=kind, **shape)
    dx, dprobs = torch.autograd.grad(merged, (x, probs), grad)
    return {"rows": rows.detach(), "merged": merged.detach(), "dx": dx, "dprobs": dprobs}


def _permute_with_probs(bench: Bench, dtype: torch.dtype) -> Mapping[str, Any]:
    x = bench.normal(_TOKENS, _HIDDEN, dtype=dtype).requires_grad_()
    mask = _mask(_choices(bench))
    probs = (bench.normal(_TOKENS, _EXPERTS).abs() * mask).requires_grad_()
    count = _TOKENS * _CHOSEN
    rows, row_probs, _ = bench.te.moe_permute_with_probs(x, probs, mask, num_out_tokens=count)
    grads = bench.normal(count, _HIDDEN, dtype=dtype), bench.normal(count)
    dx, dprobs = torch.autograd.grad((rows, row_probs), (x, probs), grads)
    return {"rows": rows.detach(), "row probs": row_probs.detach(), "dx": dx, "dprobs": dprobs}


def _sort_chunks(bench: Bench, dtype: torch.dtype) -> Mapping[str, Any]:
    x = bench.normal(_TOKENS, _HIDDEN, dtype=dtype).requires_grad_()
    probs = bench.normal(_TOKENS).abs()
    sizes, order = bench.fixed(_SIZES, torch.int32), bench.fixed((2, 0, 3, 1), torch.int32)
    rows, row_probs = bench.te.moe_sort_chunks_by_index_with_probs(x, probs, sizes, order)
    (dx,) = torch.autograd.grad(rows, x, bench.normal(_TOKENS, _HIDDEN, dtype=dtype))
    return {"rows": rows.detach(), "row probs": row_probs.detach(), "dx": dx}


def _pad(bench: Bench, dtype: torch.dtype) -> Mapping[str, Any]:
    x = bench.normal(sum(_SIZES), _HIDDEN, dtype=dtype)
    padded = torch.empty(sum(_PADDED_SIZES), _HIDDEN, dtype=dtype, device=bench.device)
    back = torch.empty_like(x)
    bench.tex.fused_multi_row_padding(x, padded, list(_SIZES), list(_PADDED_SIZES))
    bench.tex.fused_multi_row_unpadding(padded, back, list(_PADDED_SIZES), list(_SIZES))
    return {"padded": padded, "unpadded": back}


def _router() -> Any:
    return importlib.import_module("transformer_engine.pytorch.router")


def _logits(bench: Bench, dtype: torch.dtype) -> Tensor:
    """No two alike for a token in any dtype, so that who is chosen does not hang on the last bit."""
    return (bench.orders(_TOKENS, _EXPERTS) / 4 - 2).to(dtype).requires_grad_()


def _route(bench: Bench, function: str, dtype: torch.dtype) -> Mapping[str, Any]:
    logits = _logits(bench, dtype)
    topk = _router().fused_topk_with_score_function
    probs, routing_map = topk(logits, _CHOSEN, False, None, None, 2.5, function, None)
    (gradient,) = torch.autograd.grad(probs, logits, bench.normal(_TOKENS, _EXPERTS, dtype=probs.dtype))
    return {"probs": probs.detach(), "routing map": routing_map, "gradient": gradient}


def _scores(bench: Bench, function: str, dtype: torch.dtype) -> Mapping[str, Any]:
    logits = _logits(bench, dtype)
    routing_map, scores = _router().fused_compute_score_for_moe_aux_loss(logits, _CHOSEN, function)
    (gradient,) = torch.autograd.grad(scores, logits, bench.normal(_TOKENS, _EXPERTS, dtype=scores.dtype))
    return {"scores": scores.detach(), "routing map": routing_map, "gradient": gradient}


def _auxiliary_loss(bench: Bench, dtype: torch.dtype, graph_safe: bool) -> Mapping[str, Any]:
    probs = bench.normal(_TOKENS, _EXPERTS, dtype=dtype).abs().requires_grad_()
    counts = bench.integers(_EXPERTS, high=9, dtype=torch.int64)
    tokens = bench.fixed([_TOKENS], torch.int64)[0] if graph_safe else _TOKENS
    loss = _router().fused_moe_aux_loss(probs, counts, tokens, _EXPERTS, _CHOSEN, 0.01)
    (gradient,) = torch.autograd.grad(loss, probs)
    return {"loss": loss.detach(), "gradient": gradient}
