"""TE's ``FusedAdam`` and ``FusedSGD``, and the kernels on lists of tensors, against ``torch.optim`` and formulas."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from parity import te
from te_on_cpu.multi_tensor import (
    multi_tensor_adam,
    multi_tensor_adam_capturable,
    multi_tensor_compute_scale_and_scale_inv,
    multi_tensor_l2norm,
    multi_tensor_scale,
    multi_tensor_sgd,
    multi_tensor_unscale_l2norm,
)

TE = te.kernels("cpu").te
FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
SHAPES = [(5, 7), (3,), (2, 2, 2)]


def optimizers() -> Any:
    te.kernels("cpu")
    from transformer_engine.pytorch import optimizers as module

    return module


def parameters(dtype: torch.dtype = FP32, held_in: torch.dtype | None = None) -> list[torch.nn.Parameter]:
    """Return parameters rounded to a dtype, which may be held in a wider one."""
    rng = torch.Generator().manual_seed(0)
    return [torch.nn.Parameter(torch.randn(shape, generator=rng).to(dtype).to(held_in or dtype)) for shape in SHAPES]


def steps(count: int, *groups: list[torch.nn.Parameter]) -> Any:
    """Give all groups the same gradients, ``count`` times."""
    rng = torch.Generator().manual_seed(1)
    for _ in range(count):
        for aligned in zip(*groups, strict=True):
            grad = torch.randn(aligned[0].shape, generator=rng).to(aligned[0].dtype)
            for parameter in aligned:
                parameter.grad = grad.to(parameter.dtype)
        yield


def assert_all_close(ours: list[Any], theirs: list[Any], rtol: float = 1e-5, atol: float = 1e-6) -> None:
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a.detach().float(), b.detach().float(), rtol=rtol, atol=atol)


@pytest.mark.parametrize("capturable", [False, True])
@pytest.mark.parametrize("decoupled", [True, False])
@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_fused_adam_steps_as_torch_does(decay: float, decoupled: bool, capturable: bool) -> None:
    ours, theirs = parameters(), parameters()
    options: dict[str, Any] = {"lr": 0.02, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": decay}
    fused = optimizers().FusedAdam(ours, adam_w_mode=decoupled, capturable=capturable, **options)
    torch_class = torch.optim.AdamW if decoupled else torch.optim.Adam
    # TE's AdamW adds the decay to the update, torch's shrinks the parameter first: the same, up to rounding.
    plain = torch_class(theirs, **options)
    for _ in steps(6, ours, theirs):
        fused.step()
        plain.step()
        assert_all_close(ours, theirs)


@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("capturable", [False, True])
def test_master_weights_keep_what_half_precision_parameters_lose(dtype: torch.dtype, capturable: bool) -> None:
    ours, exact = parameters(dtype), parameters(dtype, held_in=FP32)
    fused = optimizers().FusedAdam(ours, lr=1e-4, master_weights=True, capturable=capturable)
    plain = torch.optim.AdamW(exact, lr=1e-4, weight_decay=0.0)
    for _ in steps(8, ours, exact):
        fused.step()
        plain.step()
    masters = [fused.get_unscaled_state(p, "master_param") for p in ours]
    assert_all_close(masters, exact)
    for parameter, master in zip(ours, masters, strict=True):
        assert torch.equal(parameter, master.to(dtype))


def test_parameters_and_remainders_hold_the_bits_of_fp32_master_weights() -> None:
    plain, split = parameters(BF16), parameters(BF16)
    make = optimizers().FusedAdam
    with_master = make(plain, lr=1e-3, master_weights=True)
    with_remainder = make(split, lr=1e-3, master_weights=True, store_param_remainders=True)
    for _ in steps(8, plain, split):
        with_master.step()
        with_remainder.step()
    for p, q in zip(plain, split, strict=True):
        remainder = with_remainder.state[q]["master_param"]
        bits = (q.detach().view(torch.int16).int() << 16) + remainder.int()
        assert remainder.dtype == torch.int16
        assert torch.equal(bits.view(FP32), with_master.state[p]["master_param"])


def test_without_master_weights_each_step_rounds_the_parameters() -> None:
    ours, expected = parameters(BF16), parameters(BF16, held_in=FP32)
    fused = optimizers().FusedAdam(ours, lr=1e-2, weight_decay=0.0)
    plain = torch.optim.AdamW(expected, lr=1e-2, weight_decay=0.0)
    for _ in steps(4, ours, expected):
        fused.step()
        plain.step()
        for parameter in expected:
            parameter.data = parameter.data.to(BF16).float()
        assert_all_close(ours, expected, rtol=2.0**-8)


@pytest.mark.parametrize("options", [{}, {"master_weights": True}, {"exp_avg_dtype": BF16, "exp_avg_sq_dtype": FP16}])
def test_adam_resumes_from_its_state_dict(options: dict[str, Any]) -> None:
    dtype = BF16 if "master_weights" in options else FP32
    straight, interrupted = parameters(dtype), parameters(dtype)
    make = optimizers().FusedAdam
    one, two = make(straight, **options), make(interrupted, **options)
    for i, _ in enumerate(steps(6, straight, interrupted)):
        if i == 3:
            state = two.state_dict()
            two = make(interrupted, **options)
            two.load_state_dict(state)
        one.step()
        two.step()
    for a, b in zip(straight, interrupted, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("dtype", [FP32, FP16])
@pytest.mark.parametrize(
    ("momentum", "dampening", "decay", "nesterov"),
    [(0.0, 0.0, 0.1, False), (0.9, 0.0, 0.0, False), (0.9, 0.3, 0.1, False), (0.9, 0.0, 0.1, True)],
)
def test_fused_sgd_steps_as_torch_does(
    dtype: torch.dtype, momentum: float, dampening: float, decay: float, nesterov: bool
) -> None:
    ours, theirs = parameters(dtype), parameters(dtype, held_in=FP32)
    options: dict[str, Any] = {
        "lr": 0.05, "momentum": momentum, "dampening": dampening, "weight_decay": decay, "nesterov": nesterov
    }  # fmt: skip
    fused, plain = optimizers().FusedSGD(ours, **options), torch.optim.SGD(theirs, **options)
    for _ in steps(5, ours, theirs):
        fused.step()
        plain.step()
        assert_all_close(ours, theirs, rtol=1e-5 if dtype == FP32 else 1e-2, atol=1e-6 if dtype == FP32 else 1e-2)


def test_sgd_without_a_kernel_for_the_dtypes_is_te_s_error() -> None:
    tensors = [[torch.zeros(2, dtype=BF16)]] * 3
    with pytest.raises(RuntimeError, match=r"no SGD kernel for torch\.bfloat16 gradients"):
        multi_tensor_sgd(1, torch.zeros(1, dtype=torch.int32), tensors, 0, 0, 0, 0.1, False, False, False, 1.0)


def test_a_raised_flag_skips_capturable_adam_and_sgd() -> None:
    raised, tensors = torch.ones(1, dtype=torch.int32), [[torch.ones(3)] for _ in range(4)]
    lr, one = torch.tensor(0.1), torch.ones(1)
    multi_tensor_adam_capturable(1, raised, tensors, lr, 0.9, 0.99, 1e-8, one.int(), 1, 1, 0.0, one)
    multi_tensor_sgd(1, raised, tensors[:3], 0.1, 0.9, 0.0, 0.1, False, True, False, 1.0)
    assert all(torch.equal(tensor, torch.ones(3)) for (tensor,) in tensors)


def test_capturable_adam_unscales_the_gradients_in_place() -> None:
    lists = [[torch.full((3,), 8.0)], [torch.ones(3)], [torch.zeros(3)], [torch.zeros(3)]]
    expected = [[torch.full((3,), 2.0)], [torch.ones(3)], [torch.zeros(3)], [torch.zeros(3)]]
    flag, step = torch.zeros(1, dtype=torch.int32), torch.ones(1, dtype=torch.int32)
    common = (0.9, 0.99, 1e-8)
    multi_tensor_adam_capturable(1, flag, lists, torch.tensor(0.1), *common, step, 1, 1, 0.0, torch.tensor([0.25]))
    multi_tensor_adam(1, flag, expected, 0.1, *common, 1, 1, 1, 0.0)
    assert all(torch.equal(a, b) for (a,), (b,) in zip(lists, expected, strict=True))


def test_fp8_parameters_are_casts_of_their_master_weights() -> None:
    from transformer_engine.common.recipe import DelayedScaling

    torch.manual_seed(0)
    with TE.quantized_model_init(recipe=DelayedScaling()):
        module = TE.Linear(32, 16, bias=False, params_dtype=FP32, device="cpu")
    start = module.weight.dequantize()
    fused = optimizers().FusedAdam(module.parameters(), lr=0.01, master_weights=True)
    x = torch.randn(16, 32)
    for _ in range(2):
        with TE.autocast(recipe=DelayedScaling()):
            module(x).square().sum().backward()
        fused.step()
        fused.zero_grad()
    master = fused.get_unscaled_state(module.weight, "master_param")
    scale_inv = module.weight._scale_inv
    codes = (master / scale_inv).clamp(-448, 448).to(torch.float8_e4m3fn)
    assert torch.equal(module.weight._data.view(torch.float8_e4m3fn).float(), codes.float())
    assert not torch.equal(module.weight.dequantize(), start)


lists_of_tensors = st.lists(st.lists(st.integers(0, 6), max_size=2), min_size=1, max_size=4)


@settings(max_examples=40)
@given(lists_of_tensors, st.sampled_from([FP32, BF16, FP16]))
def test_norm_of_a_list_is_that_of_its_tensors_laid_end_to_end(shapes: list[list[int]], dtype: torch.dtype) -> None:
    tensors = [torch.randn(shape).to(dtype) for shape in shapes]
    flag = torch.zeros(1, dtype=torch.int32)
    total, each = multi_tensor_l2norm(1, flag, [tensors], True)
    scaled, none = multi_tensor_unscale_l2norm(1, flag, [tensors], torch.tensor([4.0]), False)
    exact = torch.cat([t.double().reshape(-1) for t in tensors]).norm()
    torch.testing.assert_close(total.double(), exact.view(1), rtol=1e-6, atol=0)
    torch.testing.assert_close(scaled.double(), 4 * exact.view(1), rtol=1e-6, atol=0)
    torch.testing.assert_close(each.double(), torch.stack([t.double().norm() for t in tensors]), rtol=1e-6, atol=0)
    assert none.numel() == 0
    assert not flag.item()


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_infinities_and_nans_raise_the_flag(bad: float) -> None:
    source, target = torch.tensor([1.0, bad]), torch.zeros(2, dtype=BF16)
    kernels: list[Callable[[Tensor], Any]] = [
        lambda flag: multi_tensor_scale(1, flag, [[source], [target]], 0.5),
        lambda flag: multi_tensor_l2norm(1, flag, [[source]]),
    ]
    for kernel in kernels:
        flag = torch.zeros(1, dtype=torch.int32)
        kernel(flag)
        assert flag.item() == 1
    assert target[0] == 0.5


def test_fp8_scales_take_each_amax_to_the_limit() -> None:
    amax, scale, scale_inv = [torch.tensor([5.0]), torch.tensor([0.0])], torch.empty(2, 1), torch.empty(2, 1)
    for power_of_two, expected in ((False, 89.6), (True, 64.0)):
        multi_tensor_compute_scale_and_scale_inv(
            1, torch.zeros(1), [amax, list(scale), list(scale_inv)], 448.0, power_of_two, 0.0
        )
        assert torch.equal(scale.view(-1), torch.tensor([expected, 1.0]))
        assert torch.equal(scale_inv, scale.reciprocal())
