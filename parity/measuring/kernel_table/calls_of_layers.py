"""Define the calls of a layer's other kernels: norms, activations, mixtures, optimizers, losses, hyper-connections."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from parity.measuring.kernel_table.bench import DTYPES, E5M2, Bench, KernelCall

# LayerNorm and RMSNorm, forward and backward. The backward pass takes the statistics of the same kernels' forward pass.


_NORM_ROWS, _NORM_COLUMNS, _EPSILON = 256, 1024, 1e-5
_NORM_SHAPES = f"[{_NORM_ROWS}, {_NORM_COLUMNS}]"


def norms() -> Iterator[KernelCall]:
    for norm in ("layernorm", "rmsnorm"):
        for text, dtype in DTYPES.items():
            for centered in (False, True):
                variant = f"{text}, gamma - 1" if centered else text
                forward = partial(_norm_forward, norm=norm, dtype=dtype, centered=centered, quantizer=None)
                backward = partial(_norm_backward, norm=norm, dtype=dtype, centered=centered)
                yield KernelCall("Norms", f"{norm}_fwd", variant, _NORM_SHAPES, forward)
                yield KernelCall("Norms", f"{norm}_bwd", variant, _NORM_SHAPES, backward)
        if norm == "rmsnorm":
            for text, dtype in DTYPES.items():
                yield KernelCall(
                    "Norms", "rmsnorm_bwd_add", text, _NORM_SHAPES, partial(_norm_backward_and_add, dtype=dtype)
                )
        for quantizer in ("fp8_delayed", "fp8_current", "mxfp8"):
            run = partial(_norm_forward, norm=norm, dtype=torch.bfloat16, centered=False, quantizer=quantizer)
            yield KernelCall("Norms", f"{norm}_fwd", f"BF16 to {quantizer}", _NORM_SHAPES, run, quantizer)


def _norm_forward(
    bench: Bench, norm: str, dtype: torch.dtype, centered: bool, quantizer: str | None
) -> Mapping[str, Any]:
    x, gamma, beta, _ = _norm_inputs(bench, dtype)
    caster = bench.quantizer(quantizer) if quantizer else None
    results = _call_norm_kernel(bench, norm, (x, gamma, beta), caster, dtype, centered)
    return dict(zip(("z", "mu", "rsigma"), results, strict=True))


def _norm_backward(bench: Bench, norm: str, dtype: torch.dtype, centered: bool) -> Mapping[str, Any]:
    x, gamma, beta, dz = _norm_inputs(bench, dtype)
    _, mu, rsigma = _call_norm_kernel(bench, norm, (x, gamma, beta), None, dtype, centered)
    statistics = (mu, rsigma) if norm == "layernorm" else (rsigma,)
    results = getattr(bench.tex, f"{norm}_bwd")(dz, x, *statistics, gamma, 0, centered)
    return dict(zip(("dx", "dgamma", "dbeta"), results, strict=False))


def _norm_backward_and_add(bench: Bench, dtype: torch.dtype) -> Mapping[str, Any]:
    x, gamma, beta, dz = _norm_inputs(bench, dtype)
    _, _, rsigma = _call_norm_kernel(bench, "rmsnorm", (x, gamma, beta), None, dtype, False)
    residual = bench.normal(_NORM_ROWS, _NORM_COLUMNS, dtype=dtype)
    results = bench.tex.rmsnorm_bwd_add(dz, x, residual, rsigma, gamma, 0, False)
    return dict(zip(("dx", "dgamma"), results, strict=True))


def _norm_inputs(bench: Bench, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    x, dz = (bench.normal(_NORM_ROWS, _NORM_COLUMNS, dtype=dtype, scale=2.0) for _ in range(2))
    gamma, beta = (bench.normal(_NORM_COLUMNS, dtype=dtype) for _ in range(2))
    return x, gamma, beta, dz


def _call_norm_kernel(
    bench: Bench, norm: str, inputs: tuple[torch.Tensor, ...], quantizer: Any, dtype: torch.dtype, centered: bool
) -> Any:
    taken = inputs if norm == "layernorm" else inputs[:2]
    kernel = getattr(bench.tex, f"{norm}_fwd")
    return kernel(*taken, _EPSILON, None, quantizer, bench.dtype(dtype), 0, centered)


# Activations and their gradients, plain and gated, in each dtype; some also to FP8, or with a bias gradient.


_ROWS, _COLUMNS = 256, 512
_PLAIN = ("gelu", "qgelu", "relu", "srelu", "silu")
_GATED = ("glu", "geglu", "qgeglu", "reglu", "sreglu", "swiglu", "clamped_swiglu", "situglu")
_SCALED = {"srelu": 1, "swiglu": 2, "situglu": 2, "clamped_swiglu": 2}  # the input's width over the result's
_TO_FP8 = ("gelu", "swiglu")
_WITH_BIAS = ("gelu", "silu", "relu", "qgelu", "srelu")


def activations() -> Iterator[KernelCall]:
    for text, dtype in DTYPES.items():
        for name in (*_PLAIN, *_GATED):
            yield _define_activation(name, text, partial(_call_activation, name=name, dtype=dtype))
            yield _define_activation(
                _gradient_of(name), text, partial(_call_activation_gradient, name=name, dtype=dtype)
            )
        for name in _SCALED:
            yield _define_activation(f"scaled_{name}", text, partial(_call_scaled_activation, name=name, dtype=dtype))
    for quantizer in ("fp8_delayed", "fp8_current", "mxfp8"):
        for name in _TO_FP8:
            for kernel, run in ((name, _call_activation), (_gradient_of(name), _call_activation_gradient)):
                bound = partial(run, name=name, dtype=torch.bfloat16, quantizer=quantizer)
                yield _define_activation(kernel, f"BF16 to {quantizer}", bound, quantizer)
        for name in _WITH_BIAS:
            run = partial(_with_bias, name=name, quantizer=quantizer)
            yield _define_activation(f"dbias_d{name}", f"BF16 to {quantizer}", run, quantizer)


def _define_activation(kernel: str, variant: str, run: Any, quantizer: str | None = None) -> KernelCall:
    return KernelCall("Activations", kernel, variant, f"{_ROWS} rows, {_COLUMNS} results each", run, quantizer)


def _gradient_of(name: str) -> str:
    return "clamped_dswiglu" if name == "clamped_swiglu" else f"d{name}"


def _draw_input(bench: Bench, name: str, dtype: torch.dtype) -> torch.Tensor:
    return bench.normal(_ROWS, 2 * _COLUMNS if name in _GATED else _COLUMNS, dtype=dtype, scale=3.0)


def _call_activation(bench: Bench, name: str, dtype: torch.dtype, quantizer: str | None = None) -> Mapping[str, Any]:
    caster = bench.quantizer(quantizer) if quantizer else None
    return {"result": getattr(bench.tex, name)(_draw_input(bench, name, dtype), caster)}


def _call_activation_gradient(
    bench: Bench, name: str, dtype: torch.dtype, quantizer: str | None = None
) -> Mapping[str, Any]:
    x, grad = _draw_input(bench, name, dtype), bench.normal(_ROWS, _COLUMNS, dtype=dtype)
    caster = bench.quantizer(quantizer, E5M2) if quantizer else None
    return {"gradient": getattr(bench.tex, _gradient_of(name))(grad, x, caster)}


def _call_scaled_activation(bench: Bench, name: str, dtype: torch.dtype) -> Mapping[str, Any]:
    """Call an activation that scales each row, such as by its router's probability, forward and backward."""
    x, grad = bench.normal(_ROWS, _SCALED[name] * _COLUMNS, dtype=dtype), bench.normal(_ROWS, _COLUMNS, dtype=dtype)
    scales = bench.normal(_ROWS).abs()
    result = getattr(bench.tex, f"scaled_{name}")(x, scales, None)
    gradient, scale_gradient = getattr(bench.tex, f"scaled_{_gradient_of(name)}")(grad, x, scales, None)
    return {"result": result, "gradient": gradient, "scale gradient": scale_gradient}


def _with_bias(bench: Bench, name: str, quantizer: str) -> Mapping[str, Any]:
    x, grad = _draw_input(bench, name, torch.bfloat16), bench.normal(_ROWS, _COLUMNS, dtype=torch.bfloat16)
    kernel = getattr(bench.tex, f"dbias_d{name}")
    bias_gradient, gradient = kernel(grad, x, bench.quantizer(quantizer, E5M2))
    return {"bias gradient": bias_gradient, "gradient": gradient}


# Mixtures of experts: routing, moving tokens to experts and back, padding, and the loss that balances the experts.


_TOKENS, _EXPERTS, _CHOSEN, _HIDDEN = 256, 16, 4, 128
_SIZES, _PADDED_SIZES = (100, 7, 0, 149), (112, 16, 0, 160)
_MOVING_SHAPES = f"[{_TOKENS}, {_HIDDEN}], {_CHOSEN} of {_EXPERTS} experts"
_ROUTING_SHAPES = f"[{_TOKENS}, {_EXPERTS}], {_CHOSEN} chosen"


def mixtures() -> Iterator[KernelCall]:
    for text, dtype in DTYPES.items():
        for kind in ("mask", "index"):
            run = partial(_permute_tokens, kind=kind, dtype=dtype)
            yield KernelCall(
                "Mixture of experts", "moe_permute, moe_unpermute", f"{text}, {kind} map", _MOVING_SHAPES, run
            )
        run = partial(_permute_with_probs, dtype=dtype)
        yield KernelCall("Mixture of experts", "moe_permute_with_probs", text, _MOVING_SHAPES, run)
        run = partial(_sort_chunks, dtype=dtype)
        yield KernelCall("Mixture of experts", "moe_sort_chunks_by_index_with_probs", text, _MOVING_SHAPES, run)
        run = partial(_pad_rows, dtype=dtype)
        sizes = f"{list(_SIZES)} rows to {list(_PADDED_SIZES)}"
        yield KernelCall("Mixture of experts", "fused_multi_row_padding, _unpadding", text, sizes, run)
        for function in ("softmax", "sigmoid", "sqrtsoftplus"):
            run = partial(_route_tokens, function=function, dtype=dtype)
            name = "fused_topk_with_score_function"
            yield KernelCall("Mixture of experts", name, f"{text}, {function}", _ROUTING_SHAPES, run)
            run = partial(_score_experts, function=function, dtype=dtype)
            name = "fused_compute_score_for_moe_aux_loss"
            yield KernelCall("Mixture of experts", name, f"{text}, {function}", _ROUTING_SHAPES, run)
    for text in ("FP32", "BF16"):
        for graph_safe in (False, True):
            run = partial(_auxiliary_loss, dtype=DTYPES[text], graph_safe=graph_safe)
            variant = f"{text}, the number of tokens in a tensor" if graph_safe else text
            yield KernelCall("Mixture of experts", "fused_moe_aux_loss", variant, _ROUTING_SHAPES, run)


def _draw_choices(bench: Bench) -> Tensor:
    """Return INT64 ``[tokens, chosen]``: for each token, different experts."""
    return bench.orders(_TOKENS, _EXPERTS)[:, :_CHOSEN].contiguous()


def _make_routing_mask(choices: Tensor) -> Tensor:
    empty = torch.zeros(_TOKENS, _EXPERTS, dtype=torch.int32, device=choices.device)
    return empty.scatter(1, choices, 1)


def _permute_tokens(bench: Bench, kind: str, dtype: torch.dtype) -> Mapping[str, Any]:
    """Send tokens to experts and back, merging a token's rows by probabilities."""
    choices = _draw_choices(bench)
    x, grad = (bench.normal(_TOKENS, _HIDDEN, dtype=dtype) for _ in range(2))
    x.requires_grad_()
    probs = bench.normal(_TOKENS, _EXPERTS if kind == "mask" else _CHOSEN).abs().requires_grad_()
    routing = _make_routing_mask(choices) if kind == "mask" else choices.int()
    rows, row_id_map = bench.te.moe_permute(x, routing, num_out_tokens=_TOKENS * _CHOSEN, map_type=kind)
    shape = {"restore_shape": x.shape} if kind == "mask" else {}
    merged = bench.te.moe_unpermute(rows, row_id_map, merging_probs=probs, map_type=kind, **shape)
    dx, dprobs = torch.autograd.grad(merged, (x, probs), grad)
    return {"rows": rows.detach(), "merged": merged.detach(), "dx": dx, "dprobs": dprobs}


def _permute_with_probs(bench: Bench, dtype: torch.dtype) -> Mapping[str, Any]:
    x = bench.normal(_TOKENS, _HIDDEN, dtype=dtype).requires_grad_()
    mask = _make_routing_mask(_draw_choices(bench))
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


def _pad_rows(bench: Bench, dtype: torch.dtype) -> Mapping[str, Any]:
    x = bench.normal(sum(_SIZES), _HIDDEN, dtype=dtype)
    padded = torch.empty(sum(_PADDED_SIZES), _HIDDEN, dtype=dtype, device=bench.device)
    back = torch.empty_like(x)
    bench.tex.fused_multi_row_padding(x, padded, list(_SIZES), list(_PADDED_SIZES))
    bench.tex.fused_multi_row_unpadding(padded, back, list(_PADDED_SIZES), list(_SIZES))
    return {"padded": padded, "unpadded": back}


def _import_router() -> Any:
    return importlib.import_module("transformer_engine.pytorch.router")


def _draw_logits(bench: Bench, dtype: torch.dtype) -> Tensor:
    """Return logits that differ for each token in any dtype, so that the choice does not depend on the last bit."""
    return (bench.orders(_TOKENS, _EXPERTS) / 4 - 2).to(dtype).requires_grad_()


def _route_tokens(bench: Bench, function: str, dtype: torch.dtype) -> Mapping[str, Any]:
    logits = _draw_logits(bench, dtype)
    topk = _import_router().fused_topk_with_score_function
    probs, routing_map = topk(logits, _CHOSEN, False, None, None, 2.5, function, None)
    (gradient,) = torch.autograd.grad(probs, logits, bench.normal(_TOKENS, _EXPERTS, dtype=probs.dtype))
    return {"probs": probs.detach(), "routing map": routing_map, "gradient": gradient}


def _score_experts(bench: Bench, function: str, dtype: torch.dtype) -> Mapping[str, Any]:
    logits = _draw_logits(bench, dtype)
    routing_map, scores = _import_router().fused_compute_score_for_moe_aux_loss(logits, _CHOSEN, function)
    (gradient,) = torch.autograd.grad(scores, logits, bench.normal(_TOKENS, _EXPERTS, dtype=scores.dtype))
    return {"scores": scores.detach(), "routing map": routing_map, "gradient": gradient}


def _auxiliary_loss(bench: Bench, dtype: torch.dtype, graph_safe: bool) -> Mapping[str, Any]:
    probs = bench.normal(_TOKENS, _EXPERTS, dtype=dtype).abs().requires_grad_()
    counts = bench.integers(_EXPERTS, high=9, dtype=torch.int64)
    tokens = bench.fixed([_TOKENS], torch.int64)[0] if graph_safe else _TOKENS
    loss = _import_router().fused_moe_aux_loss(probs, counts, tokens, _EXPERTS, _CHOSEN, 0.01)
    (gradient,) = torch.autograd.grad(loss, probs)
    return {"loss": loss.detach(), "gradient": gradient}


# Fused optimizers over three steps, and the kernels on lists of tensors that are used to clip and scale gradients.


_LENGTHS = (5000, 33, 70000)  # one is longer than a chunk, one shorter than a vector
_STEPS, _CHUNK = 3, 2048 * 32
_SHAPES = f"tensors of {', '.join(map(str, _LENGTHS))}"
_BF16 = torch.bfloat16
_ADAMS: dict[str, tuple[torch.dtype, dict[str, Any]]] = {
    "FP32, AdamW": (torch.float32, dict()),
    "FP32, Adam": (torch.float32, dict(adam_w_mode=False)),
    "FP32, capturable": (torch.float32, dict(capturable=True)),
    "BF16, FP32 master weights": (_BF16, dict(master_weights=True)),
    "BF16, FP32 master weights, capturable": (_BF16, dict(master_weights=True, capturable=True)),
    "BF16, remainders": (_BF16, dict(master_weights=True, store_param_remainders=True)),
    "BF16, FP16 moments": (_BF16, dict(master_weights=True, exp_avg_dtype=torch.float16)),
}
_SGDS: dict[str, dict[str, Any]] = {
    "FP32": dict(momentum=0.0),
    "FP32, momentum": dict(momentum=0.9, weight_decay=0.1),
    "FP32, Nesterov": dict(momentum=0.9, nesterov=True),
}


def optimizers() -> Iterator[KernelCall]:
    for variant, (dtype, options) in _ADAMS.items():
        run = partial(
            _run_optimizer, optimizer="FusedAdam", dtype=dtype, options={"lr": 0.01, "weight_decay": 0.1, **options}
        )
        yield KernelCall("Optimizers", "FusedAdam", variant, _SHAPES, run)
    for variant, options in _SGDS.items():
        run = partial(_run_optimizer, optimizer="FusedSGD", dtype=torch.float32, options={"lr": 0.01, **options})
        yield KernelCall("Optimizers", "FusedSGD", variant, _SHAPES, run)
    for text, dtype in DTYPES.items():
        yield KernelCall("Optimizers", "multi_tensor_l2norm", text, _SHAPES, partial(_compute_norms, dtype=dtype))
        yield KernelCall(
            "Optimizers", "multi_tensor_unscale_l2norm", text, _SHAPES, partial(_compute_unscaled_norms, dtype=dtype)
        )
        yield KernelCall("Optimizers", "multi_tensor_scale", text, _SHAPES, partial(_scale_tensors, dtype=dtype))
        yield KernelCall("Optimizers", "multi_tensor_scale_tensor", text, _SHAPES, partial(_scale_by, dtype=dtype))
    for power in (False, True):
        variant = "power-of-two scales" if power else "any scale"
        name = "multi_tensor_compute_scale_and_scale_inv"
        yield KernelCall("Optimizers", name, variant, "64 amaxes", partial(_compute_scales, power=power))


def _draw_tensors(bench: Bench, dtype: torch.dtype) -> list[Tensor]:
    return [bench.normal(length, dtype=dtype) for length in _LENGTHS]


def _make_flag(bench: Bench) -> Tensor:
    return torch.zeros(1, dtype=torch.int32, device=bench.device)


def _run_optimizer(bench: Bench, optimizer: str, dtype: torch.dtype, options: Mapping[str, Any]) -> Mapping[str, Any]:
    parameters = [nn.Parameter(tensor) for tensor in _draw_tensors(bench, dtype)]
    gradients = [_draw_tensors(bench, dtype) for _ in range(_STEPS)]
    module = importlib.import_module("transformer_engine.pytorch.optimizers")
    made = getattr(module, optimizer)(parameters, **options)
    for entry in gradients:
        for parameter, gradient in zip(parameters, entry, strict=True):
            parameter.grad = gradient
        made.step()
    results: dict[str, Any] = {"parameter": torch.cat([parameter.detach() for parameter in parameters])}
    states = [made.state[parameter] for parameter in parameters]
    for name in states[0] if options.get("momentum") != 0.0 else ():  # without momentum, the buffer is not written
        values = [state[name] for state in states]
        if all(isinstance(value, Tensor) and value.numel() > 1 for value in values):
            results[name] = torch.cat([value.flatten() for value in values])
    return results


def _compute_norms(bench: Bench, dtype: torch.dtype) -> Mapping[str, Any]:
    total, each = bench.tex.multi_tensor_l2norm(_CHUNK, _make_flag(bench), [_draw_tensors(bench, dtype)], True)
    return {"norm": total, "norms": each}


def _compute_unscaled_norms(bench: Bench, dtype: torch.dtype) -> Mapping[str, Any]:
    inverse = bench.fixed([0.37], torch.float32)
    tensors = [_draw_tensors(bench, dtype)]
    total, each = bench.tex.multi_tensor_unscale_l2norm(_CHUNK, _make_flag(bench), tensors, inverse, True)
    return {"norm": total, "norms": each}


def _scale_tensors(bench: Bench, dtype: torch.dtype) -> Mapping[str, Any]:
    tensors = _draw_tensors(bench, dtype)
    scaled = [torch.empty_like(tensor) for tensor in tensors]
    bench.tex.multi_tensor_scale(_CHUNK, _make_flag(bench), [tensors, scaled], 0.37)
    return {"scaled": torch.cat(scaled)}


def _scale_by(bench: Bench, dtype: torch.dtype) -> Mapping[str, Any]:
    tensors = _draw_tensors(bench, dtype)
    scaled = [torch.empty_like(tensor) for tensor in tensors]
    factor = bench.fixed([0.37], torch.float32)
    bench.tex.multi_tensor_scale_tensor(_CHUNK, _make_flag(bench), [tensors, scaled], factor)
    return {"scaled": torch.cat(scaled)}


def _compute_scales(bench: Bench, power: bool) -> Mapping[str, Any]:
    amaxes = list(bench.wide(64, 1).abs())
    scales, inverses = ([torch.empty_like(amax) for amax in amaxes] for _ in range(2))
    kernel = bench.tex.multi_tensor_compute_scale_and_scale_inv
    kernel(_CHUNK, _make_flag(bench), [amaxes, scales, inverses], 448.0, power, 0.0)
    return {"scale": torch.cat(scales), "scale_inv": torch.cat(inverses)}


# Cross-entropy by TE's Triton kernels, which overwrite the logits with their gradient.


_BATCH, _SEQUENCE, _VOCABULARY = 2, 64, 1000
_DTYPES = {"FP32": torch.float32, "BF16": torch.bfloat16}


def losses() -> Iterator[KernelCall]:
    for text, dtype in _DTYPES.items():
        for smoothing in (0.0, 0.1):
            run = partial(_cross_entropy, dtype=dtype, smoothing=smoothing)
            variant = f"{text}, label smoothing {smoothing}"
            shapes = str([_BATCH, _SEQUENCE, _VOCABULARY])
            yield KernelCall("Losses", "parallel_cross_entropy", variant, shapes, run)


def _cross_entropy(bench: Bench, dtype: torch.dtype, smoothing: float) -> Mapping[str, Any]:
    logits = bench.normal(_BATCH, _SEQUENCE, _VOCABULARY, dtype=dtype, scale=3.0).requires_grad_()
    target = bench.integers(_BATCH, _SEQUENCE, high=_VOCABULARY, dtype=torch.int64)
    loss = bench.te.parallel_cross_entropy(logits.clone(), target, smoothing, False, None)
    (gradient,) = torch.autograd.grad(loss, logits, bench.normal(*loss.shape, dtype=loss.dtype))
    return {"loss": loss.detach(), "gradient": gradient}


# TE's manifold hyper-connections, which are Triton kernels: forward, and backward to each input.


_MHC_SEQUENCE, _MHC_BATCH, _CHANNELS, _STREAMS = 64, 2, 96, 4
_MHC_TOKENS, _FEATURES = _MHC_SEQUENCE * _MHC_BATCH, _CHANNELS * _STREAMS
_MIXING = _STREAMS * (_STREAMS + 2)  # numbers that mix the streams of a token; TE pads them to _PADDED
_PADDED = 32
_STREAM_SHAPES = f"{_MHC_TOKENS} tokens, {_STREAMS} streams of {_CHANNELS}"
_X_AND_WEIGHTS = {
    "FP32": (torch.float32, torch.float32),
    "BF16": (torch.bfloat16, torch.bfloat16),
    "BF16, FP32 weights": (torch.bfloat16, torch.float32),
}


def hyper_connections() -> Iterator[KernelCall]:
    """Yield calls of the five functions, with weights in the dtype of x, and with FP32 weights for x in BF16."""
    for text, (dtype, of_weights) in _X_AND_WEIGHTS.items():
        for suffix, use_tf32 in (("", True), (", without TF32", False)):
            for name, draw in (
                ("projection", _draw_projection), ("aggregate", _draw_aggregation), ("expand_combine", _draw_expansion)
            ):  # fmt: skip
                inputs = partial(draw, dtype=dtype, of_weights=of_weights)
                yield _hyper_connection(name, f"{text}{suffix}", inputs, use_tf32=use_tf32)
        inputs = partial(_draw_projection, dtype=dtype, of_weights=of_weights, is_normed=True)
        yield _hyper_connection("projection", f"{text}, norm weight", inputs)
        if dtype == of_weights:
            yield _hyper_connection("scale", text, partial(_draw_scaling, dtype=dtype))
            for suffix, recompute in (("", True), (", history kept", False)):
                yield _hyper_connection(
                    "sinkhorn", f"{text}{suffix}", partial(_stream_logits, dtype=dtype), recompute_hist=recompute
                )


def _hyper_connection(
    name: str, variant: str, draw: Callable[[Bench], dict[str, Tensor]], **options: Any
) -> KernelCall:
    if name != "projection":
        options["n"] = _STREAMS
    run = partial(_forward_and_backward, name=f"mhc_fused_{name}", draw=draw, options=options)
    return KernelCall("Hyper-connections", f"mhc_fused_{name}", variant, _STREAM_SHAPES, run)


def _forward_and_backward(
    bench: Bench, name: str, draw: Callable[[Bench], dict[str, Tensor]], options: Mapping[str, Any]
) -> Mapping[str, Tensor]:
    inputs = {key: value.requires_grad_() for key, value in draw(bench).items()}
    made = getattr(importlib.import_module("transformer_engine.pytorch.triton.mhc"), name)(**inputs, **options)
    outputs = made if isinstance(made, tuple) else (made,)
    incoming = [bench.normal(*output.shape, dtype=output.dtype) for output in outputs]
    gradients = torch.autograd.grad(outputs, [*inputs.values()], incoming)
    results = {f"output {number}": output.detach() for number, output in enumerate(outputs)}
    return results | {f"gradient of {key}": gradient for key, gradient in zip(inputs, gradients, strict=True)}


def _draw_projection(
    bench: Bench, dtype: torch.dtype, of_weights: torch.dtype, is_normed: bool = False
) -> dict[str, Tensor]:
    inputs = {
        "x": bench.normal(_MHC_TOKENS, _FEATURES, dtype=dtype),
        "phi": bench.normal(_MIXING, _FEATURES, dtype=of_weights, scale=0.05),
    }
    return inputs | ({"norm_weight": bench.normal(_FEATURES, dtype=dtype)} if is_normed else {})


def _draw_scaling(bench: Bench, dtype: torch.dtype) -> dict[str, Tensor]:
    return {
        "H": bench.normal(_MHC_TOKENS, _PADDED, dtype=dtype),
        "alpha": bench.normal(3, dtype=dtype),
        "beta": bench.normal(1, _MIXING, dtype=dtype),
        "ms": bench.normal(_MHC_TOKENS, dtype=dtype).abs() + 0.5,
    }


def _stream_logits(bench: Bench, dtype: torch.dtype) -> dict[str, Tensor]:
    return {"H_res": bench.normal(_MHC_SEQUENCE, _MHC_BATCH, _STREAMS, _STREAMS, dtype=dtype, scale=2.0)}


def _draw_aggregation(bench: Bench, dtype: torch.dtype, of_weights: torch.dtype) -> dict[str, Tensor]:
    return {
        "x": _draw_streams(bench, dtype),
        "H_pre": bench.normal(_MHC_SEQUENCE, _MHC_BATCH, _STREAMS, dtype=of_weights),
    }


def _draw_expansion(bench: Bench, dtype: torch.dtype, of_weights: torch.dtype) -> dict[str, Tensor]:
    return {
        "f": bench.normal(_MHC_SEQUENCE, _MHC_BATCH, _CHANNELS, dtype=dtype),
        "bias": bench.normal(_CHANNELS, dtype=dtype),
        "H_post": bench.normal(_MHC_SEQUENCE, _MHC_BATCH, _STREAMS, dtype=of_weights),
        "x": _draw_streams(bench, dtype),
        "H_res": bench.normal(_MHC_SEQUENCE, _MHC_BATCH, _STREAMS, _STREAMS, dtype=of_weights),
    }


def _draw_streams(bench: Bench, dtype: torch.dtype) -> Tensor:
    return bench.normal(_MHC_SEQUENCE, _MHC_BATCH, _CHANNELS, _STREAMS, dtype=dtype)
