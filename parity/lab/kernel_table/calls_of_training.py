"""Make the calls of optimizers and of losses."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from parity.lab.kernel_table.bench import DTYPES, Bench, KernelCall

# Fused optimizers over three steps, and the kernels on lists of tensors that gradient clipping and scaling use.


_LENGTHS = (5000, 33, 70000)  # more than one chunk, and less than one vector
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
        run = partial(_step, optimizer="FusedAdam", dtype=dtype, options={"lr": 0.01, "weight_decay": 0.1, **options})
        yield KernelCall("Optimizers", "FusedAdam", variant, _SHAPES, run)
    for variant, options in _SGDS.items():
        run = partial(_step, optimizer="FusedSGD", dtype=torch.float32, options={"lr": 0.01, **options})
        yield KernelCall("Optimizers", "FusedSGD", variant, _SHAPES, run)
    for text, dtype in DTYPES.items():
        yield KernelCall("Optimizers", "multi_tensor_l2norm", text, _SHAPES, partial(_norm, dtype=dtype))
        yield KernelCall("Optimizers", "multi_tensor_unscale_l2norm", text, _SHAPES, partial(_unscaled, dtype=dtype))
        yield KernelCall("Optimizers", "multi_tensor_scale", text, _SHAPES, partial(_scale, dtype=dtype))
        yield KernelCall("Optimizers", "multi_tensor_scale_tensor", text, _SHAPES, partial(_scale_by, dtype=dtype))
    for power in (False, True):
        variant = "power-of-two scales" if power else "any scale"
        name = "multi_tensor_compute_scale_and_scale_inv"
        yield KernelCall("Optimizers", name, variant, "64 amaxes", partial(_scales, power=power))


def _tensors(bench: Bench, dtype: torch.dtype) -> list[Tensor]:
    return [bench.normal(length, dtype=dtype) for length in _LENGTHS]


def _flag(bench: Bench) -> Tensor:
    return torch.zeros(1, dtype=torch.int32, device=bench.device)


def _step(bench: Bench, optimizer: str, dtype: torch.dtype, options: Mapping[str, Any]) -> Mapping[str, Any]:
    parameters = [nn.Parameter(tensor) for tensor in _tensors(bench, dtype)]
    gradients = [_tensors(bench, dtype) for _ in range(_STEPS)]
    module = importlib.import_module("transformer_engine.pytorch.optimizers")
    made = getattr(module, optimizer)(parameters, **options)
    for entry in gradients:
        for parameter, gradient in zip(parameters, entry, strict=True):
            parameter.grad = gradient
        made.step()
    results: dict[str, Any] = {"parameter": torch.cat([parameter.detach() for parameter in parameters])}
    states = [made.state[parameter] for parameter in parameters]
    for name in states[0] if options.get("momentum") != 0.0 else ():  # without momentum its buffer is not written
        values = [state[name] for state in states]
        if all(isinstance(value, Tensor) and value.numel() > 1 for value in values):
            results[name] = torch.cat([value.flatten() for value in values])
    return results


def _norm(bench: Bench, dtype: torch.dtype) -> Mapping[str, Any]:
    total, each = bench.tex.multi_tensor_l2norm(_CHUNK, _flag(bench), [_tensors(bench, dtype)], True)
    return {"norm": total, "norms": each}


def _unscaled(bench: Bench, dtype: torch.dtype) -> Mapping[str, Any]:
    inverse = bench.fixed([0.37], torch.float32)
    tensors = [_tensors(bench, dtype)]
    total, each = bench.tex.multi_tensor_unscale_l2norm(_CHUNK, _flag(bench), tensors, inverse, True)
    return {"norm": total, "norms": each}


def _scale(bench: Bench, dtype: torch.dtype) -> Mapping[str, Any]:
    tensors = _tensors(bench, dtype)
    scaled = [torch.empty_like(tensor) for tensor in tensors]
    bench.tex.multi_tensor_scale(_CHUNK, _flag(bench), [tensors, scaled], 0.37)
    return {"scaled": torch.cat(scaled)}


def _scale_by(bench: Bench, dtype: torch.dtype) -> Mapping[str, Any]:
    tensors = _tensors(bench, dtype)
    scaled = [torch.empty_like(tensor) for tensor in tensors]
    factor = bench.fixed([0.37], torch.float32)
    bench.tex.multi_tensor_scale_tensor(_CHUNK, _flag(bench), [tensors, scaled], factor)
    return {"scaled": torch.cat(scaled)}


def _scales(bench: Bench, power: bool) -> Mapping[str, Any]:
    amaxes = list(bench.wide(64, 1).abs())
    scales, inverses = ([torch.empty_like(amax) for amax in amaxes] for _ in range(2))
    kernel = bench.tex.multi_tensor_compute_scale_and_scale_inv
    kernel(_CHUNK, _flag(bench), [amaxes, scales, inverses], 448.0, power, 0.0)
    return {"scale": torch.cat(scales), "scale_inv": torch.cat(inverses)}


# Cross-entropy by TE's Triton kernels, which overwrite the logits by their gradient.


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
