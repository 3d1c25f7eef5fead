"""Test TE's process-wide state, the attention kernel that it runs, and the meaning of precisions' names."""

from __future__ import annotations

import copy
import dataclasses
import importlib
import logging
import math
import os
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import parity
from parity import te
from parity.api import compare
from parity.case.case import Case, Pair
from parity.case.validate import CheckedSize, attention_of, check_case
from parity.comparison import compare_at
from parity.judge.limits import packaged
from parity.reference import CoreAttention
from parity.result import Result
from parity.settings import PRECISION_NAMES
from parity.te import PRECISIONS, state, why_refused, why_unavailable
from parity.te.attention_backend import NotOffered, attention_backends, has_attention
from parity.te.devices import classify, cuda_works
from parity.user_error import UserError
from te_on_cpu import cuda

# TE's state from earlier modules does not affect comparisons, and comparisons leave none behind.


KERNELS = te.kernels("cpu")
DELAYED = PRECISIONS["fp8_delayed"]


@pytest.fixture
def manager() -> Any:
    from transformer_engine.pytorch.quantization import FP8GlobalStateManager

    return FP8GlobalStateManager


def buffers(manager: Any) -> int:
    """Return the number of tensors whose amaxes TE keeps."""
    kept = getattr(manager, "quantization_state", manager).global_amax_buffer
    return sum(len(tensors) for tensors in kept.values())


def run_linear() -> nn.Module:
    linear: nn.Module = KERNELS.te.Linear(32, 32, params_dtype=torch.bfloat16)
    with DELAYED.autocast(KERNELS):
        linear(torch.ones(32, 32, dtype=torch.bfloat16))
    return linear


def compared(candidate: Any) -> str:
    case = Case(
        "linear",
        lambda te, width: Pair(
            nn.Linear(width, width),
            candidate(te, width),
            inputs=lambda rng, width: rng.normal(32, width),
            weights={"weight": "weight", "bias": "bias"},
        ),
        sizes=(dict(width=32),),
        path=Path("pairs.py"),
    )
    (checked,) = check_case(case, KERNELS.te)
    return compare_at(case, checked, DELAYED, 0, KERNELS, packaged()).status


def test_modules_that_ran_before_are_unknown_inside_and_known_again_after(manager: Any) -> None:
    with state.fresh_quantization():
        run_linear()
        once = buffers(manager)
        run_linear()
        assert buffers(manager) == 2 * once > 0
        with state.fresh_quantization():
            assert buffers(manager) == 0
            run_linear()
        assert buffers(manager) == 2 * once


def test_comparisons_leave_no_buffers_behind(manager: Any) -> None:
    before = buffers(manager)
    assert compared(lambda te, width: te.Linear(width, width)) == "passed"
    assert buffers(manager) == before


def test_a_candidate_that_raises_inside_of_its_own_recipe_leaves_fp8_switched_off(manager: Any) -> None:
    class Raises(nn.Module):
        def __init__(self, te: Any, width: int) -> None:
            super().__init__()
            self.linear = te.Linear(width, width)
            self.weight, self.bias = self.linear.weight, self.linear.bias

        def forward(self, x: Tensor) -> Tensor:
            DELAYED.autocast(KERNELS).__enter__()  # and never left
            raise ValueError("of the candidate's own")

    assert compared(Raises) == "error"
    assert not manager.is_fp8_enabled()


class Deep(nn.Module):
    """Consecutive layers, and the mean square of their output."""

    def __init__(self, linear: Any, layers: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(linear(64, 64, bias=False) for _ in range(layers)))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x).square().mean()


def deep(layers: int, scale: float = 1.0) -> Case:
    def factory(te: Any, **_: Any) -> Pair:
        reference = Deep(nn.Linear, layers)
        return Pair(
            reference,
            Deep(te.Linear, layers),
            inputs=lambda rng, tokens: rng.normal(tokens, 64),
            weights={name: name for name, _ in reference.named_parameters()},
            call_candidate=lambda module, x: scale * module(x),
        )

    return Case("deep", factory, sizes=(dict(tokens=1024),), path=Path("pairs.py"))


@pytest.mark.parametrize("layers", [2, 6])
def test_small_gradients_are_judged_when_every_layer_has_its_scale(layers: int) -> None:
    (right,) = parity.compare(deep(layers), ["fp8_delayed"])
    (wrong,) = parity.compare(deep(layers, scale=1.1), ["fp8_delayed"], diagnose=False)
    assert (right.status, wrong.status) == ("passed", "failed")


def passes_of(layers: int, tokens: int, scale: float) -> int:
    passes: list[int] = []
    torch.manual_seed(0)
    with state.fresh_quantization():
        module = Deep(KERNELS.te.Linear, layers).bfloat16()

        def once() -> None:
            passes.append(len(passes))
            with DELAYED.autocast(KERNELS):
                loss = scale * module(torch.ones(tokens, 64, dtype=torch.bfloat16))
            loss.backward()

        state.settled(once, DELAYED.warmup_passes)
    return len(passes)


def test_a_layer_more_takes_a_pass_more_where_gradients_are_too_small_for_a_scale_of_1() -> None:
    small = [passes_of(layers, tokens=32, scale=1e-9) for layers in (4, 5)]
    assert small[1] == small[0] + 1
    assert small[0] > 1 + DELAYED.warmup_passes


def test_scales_that_fit_take_no_pass_more() -> None:
    assert passes_of(1, tokens=32, scale=1e6) == 1 + DELAYED.warmup_passes


def test_where_scales_move_the_numbers_of_the_next_layer_each_takes_a_pass_more_at_the_most() -> None:
    assert passes_of(4, tokens=32, scale=1e6) <= 1 + DELAYED.warmup_passes + 4


def test_without_a_warm_up_one_pass_is_enough() -> None:
    passes: list[int] = []
    state.settled(lambda: passes.append(0), 0)
    assert passes == [0]


@pytest.mark.parametrize(
    ("last", "passes"),
    [(1.5, 4), (1.02, 3), (0.6, 3)],
    ids=[
        "what would saturate has its scale first",
        "rounding saturates as well",
        "a smaller number needs no other scale",
    ],
)
def test_a_pass_counts_whose_largest_number_its_scale_holds(last: float, passes: int) -> None:
    magnitudes: list[float] = []
    with state.fresh_quantization():
        linear = KERNELS.te.Linear(32, 32, params_dtype=torch.bfloat16)

        def once() -> None:
            magnitudes.append(1.0 if len(magnitudes) < DELAYED.warmup_passes else last)
            with DELAYED.autocast(KERNELS):
                linear(magnitudes[-1] * torch.ones(32, 32, dtype=torch.bfloat16)).sum().backward()

        state.settled(once, DELAYED.warmup_passes)
    assert len(magnitudes) == passes


class CopiedEachPass(nn.Module):
    """A layer with a copy that each pass makes anew, as in a pass that takes steps of an optimizer."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + 0.0 * copy.deepcopy(self.layer)(x)


def test_a_candidate_whose_modules_are_new_in_each_pass_warms_up_as_long_as_another() -> None:
    passes = []

    class Counted(CopiedEachPass):
        def forward(self, x: Tensor) -> Tensor:
            passes.append(x)
            return super().forward(x)

    case = Case(
        "copied",
        lambda te, width: Pair(
            CopiedEachPass(nn.Linear(width, width)),
            Counted(te.Linear(width, width)),
            inputs=lambda rng, width: rng.normal(32, width),
            weights={"layer.weight": "layer.weight", "layer.bias": "layer.bias"},
        ),
        sizes=(dict(width=32),),
        path=Path("pairs.py"),
    )
    (checked,) = check_case(case, KERNELS.te)
    assert compare_at(case, checked, DELAYED, 0, KERNELS, packaged()).status == "passed"
    assert len(passes) < 50


# TE's process-wide caches do not affect comparisons: verdicts do not depend on what ran before.


HEADS, HEAD_DIM, SEQUENCE = 4, 32, 24


def slopes(times: float) -> Tensor:
    return times * torch.tensor([2.0 ** (-8 / HEADS * (i + 1)) for i in range(HEADS)])


class Alibi(nn.Module):
    """Causal attention with ``times`` ALiBi's usual slopes; its arguments are ``[batch, sequence, heads, dim]``."""

    def __init__(self, times: float) -> None:
        super().__init__()
        self.times = times

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        places = torch.arange(q.shape[1], device=q.device)
        distance = (places[None, :] - places[:, None]).to(q.dtype)
        scores = torch.einsum("bihd,bjhd->bhij", q, k) / math.sqrt(HEAD_DIM)
        scores = scores + slopes(self.times).to(q)[:, None, None] * distance
        return torch.einsum("bhij,bjhd->bihd", scores.masked_fill(distance > 0, -torch.inf).softmax(-1), v).flatten(2)


def verdict(reference_times: float, given: float | None) -> str:
    """Return the verdict on a port that gives TE ``given`` times the usual slopes, or lets TE use its own."""

    def factory(te, **_):
        more = {} if given is None else dict(alibi_slopes=slopes(given))
        return parity.Pair(
            Alibi(reference_times),
            te.DotProductAttention(HEADS, HEAD_DIM, qkv_format="bshd", attention_dropout=0.0, attn_mask_type="causal"),
            lambda rng, batch: tuple(rng.normal(batch, SEQUENCE, HEADS, HEAD_DIM) for _ in range(3)),
            call_candidate=lambda module, *x: module(*x, core_attention_bias_type="alibi", **more),
        )

    (result,) = parity.compare(parity.Case("alibi", factory, sizes=(dict(batch=2),)), ["fp32"], diagnose=False)
    return result.status


def test_slopes_that_a_port_forgets_do_not_come_from_the_port_before() -> None:
    assert verdict(0.25, given=0.25) == "passed"
    assert verdict(0.25, given=None) == "failed"
    assert verdict(1.0, given=None) == "passed"


@pytest.mark.parametrize(
    ("module", "name"),
    [(module, name) for module, names in state._CACHES.items() for name in names] + [state._ALIBI],
)
def test_a_cache_holds_nothing_of_before_inside_and_the_same_again_after(module: str, name: str) -> None:
    te.kernels("cpu")
    importlib.import_module(module)
    cache = state._find_cache(module, name)
    if cache is None:
        pytest.skip("this version of TE has no such cache")
    before = cache.copy()
    with state._replace_cache_content(cache, {"_alibi_slopes": 1} if isinstance(cache, dict) else [1]):
        content = cache.copy()
        with state.fresh_caches():
            assert not any(cache.values() if isinstance(cache, dict) else cache)
        assert cache == content
    assert cache == before


def test_how_an_earlier_port_was_checkpointed_is_forgotten() -> None:
    te.kernels("cpu")
    from transformer_engine.pytorch import distributed

    with state.fresh_caches():
        distributed._USE_REENTRANT_ACTIVATION_RECOMPUTE = False
        with state.fresh_caches():
            assert distributed.use_reentrant_activation_recompute()
        assert not distributed.use_reentrant_activation_recompute()


# The attention kernel that TransformerEngine runs is seen, forced, or refused with TE's reason.


@pytest.fixture(scope="module")
def te_module() -> ModuleType:
    return te.kernels("cpu").te


def attend(te_module: ModuleType, dtype: torch.dtype = torch.bfloat16) -> None:
    module = te_module.DotProductAttention(2, 64, qkv_format="bshd", attention_dropout=0.0)
    module(*(torch.randn(2, 16, 2, 64, dtype=dtype) for _ in range(3)))


def attention_pair(te_module: ModuleType) -> parity.Pair:
    return parity.Pair(
        reference=CoreAttention(causal=True),
        candidate=te_module.DotProductAttention(2, 64, qkv_format="bshd", attention_dropout=0.0),
        inputs=lambda rng: tuple(rng.normal(2, 16, 2, 64) for _ in range(3)),
    )


def case(attention: tuple[str, ...] = ()) -> Case:
    return Case("core", attention_pair, sizes=({},), attention=attention)  # type: ignore[arg-type]


def by_item(results: list[Result]) -> dict[str, tuple[str, str]]:
    return {result.item: (result.status, result.attention) for result in results}


def test_the_backend_that_ran_is_seen_with_its_kernel(te_module: ModuleType) -> None:
    with attention_backends() as ran:
        attend(te_module)
        attend(te_module, torch.float32)
        attend(te_module)
    assert list(ran) == ["fused (F16_arbitrary_seqlen)", "unfused"]


@pytest.mark.parametrize("backend", ["fused", "unfused"])
def test_a_forced_backend_runs_though_te_has_picked_before(backend: str, te_module: ModuleType) -> None:
    attend(te_module)
    with attention_backends(backend) as ran:  # type: ignore[arg-type]
        attend(te_module)
    assert [name.split()[0] for name in ran] == [backend]
    with attention_backends() as ran:
        attend(te_module)
    assert [name.split()[0] for name in ran] == ["fused"]


def test_what_te_does_not_offer_is_refused_with_its_reason(te_module: ModuleType) -> None:
    with (
        pytest.raises(NotOffered, match="flash attention here: flash-attn is not installed"),
        attention_backends("flash"),
    ):
        attend(te_module)
    with (
        pytest.raises(NotOffered, match=r"fused attention here: Disabling FusedAttention.*float32"),
        attention_backends("fused"),
    ):
        attend(te_module, torch.float32)


def test_another_error_of_the_module_stays_what_it_is(te_module: ModuleType) -> None:
    with pytest.raises(ValueError, match="mine"), attention_backends("fused"):
        raise ValueError("mine")


def test_environment_and_log_are_left_as_they_were(te_module: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NVTE_FUSED_ATTN", "0")
    monkeypatch.delenv("NVTE_UNFUSED_ATTN", raising=False)
    attend(te_module)
    logger = logging.getLogger("DotProductAttention")
    before = logger.level, list(logger.handlers), logger.propagate
    with pytest.raises(NotOffered), attention_backends("flash"):
        attend(te_module)
    assert os.environ["NVTE_FUSED_ATTN"] == "0"
    assert "NVTE_UNFUSED_ATTN" not in os.environ
    assert (logger.level, logger.handlers, logger.propagate) == before


def test_a_module_has_attention_where_te_picks_a_backend(te_module: ModuleType) -> None:
    assert has_attention(nn.Sequential(te_module.MultiheadAttention(64, 1)))
    assert not has_attention(te_module.Linear(16, 16))
    assert not has_attention(nn.MultiheadAttention(16, 1))


def test_collection_knows_which_cases_have_attention(te_module: ModuleType) -> None:
    assert [checked.has_attention for checked in check_case(case(), te_module)] == [True]


@pytest.mark.parametrize(
    ("demanded", "asked", "forced"),
    [
        ((), "auto", [None]),
        (("fused", "unfused"), "auto", ["fused", "unfused"]),
        (("fused", "unfused"), "flash", ["flash"]),
        ((), "all", ["flash", "fused", "unfused"]),
    ],
)
def test_the_run_asks_for_backends_or_else_the_case_does(
    demanded: tuple[str, ...], asked: str, forced: list[str | None]
) -> None:
    assert list(attention_of(case(demanded), CheckedSize({}, "", has_attention=True), asked)) == forced
    assert list(attention_of(case(demanded), CheckedSize({}, "", has_attention=False), asked)) == [None]


def test_an_unknown_backend_is_refused() -> None:
    with pytest.raises(UserError, match="'cudnn', but must be one of auto, flash, fused, unfused, all"):
        attention_of(case(), CheckedSize({}, ""), "cudnn")
    with pytest.raises(UserError, match="unknown attention backend 'cudnn'; there are flash, fused, unfused"):
        parity.pair("any", attention=["cudnn"])(lambda te: None)


def test_each_backend_is_an_item_and_one_that_is_not_offered_is_skipped() -> None:
    results = compare(case(), ["bf16"], backend="cpu", attention="all")
    assert by_item(results) == {
        "core[bf16-2x16x2x64-flash]": ("skipped", ""),
        "core[bf16-2x16x2x64-fused]": ("passed", "fused (F16_arbitrary_seqlen)"),
        "core[bf16-2x16x2x64-unfused]": ("passed", "unfused"),
    }
    assert "flash-attn is not installed" in results[0].reason


def test_what_te_chose_is_in_the_result() -> None:
    assert by_item(compare(case(), ["fp32"], backend="cpu")) == {"core[fp32-2x16x2x64]": ("passed", "unfused")}


# The meaning of precisions' names.


RECIPES = [precision for precision in PRECISIONS.values() if precision.recipe is not None]


@pytest.fixture(scope="module")
def kernels():
    return te.kernels()


@pytest.mark.parametrize("precision", RECIPES, ids=lambda precision: precision.name)
def test_a_recipe_is_the_one_that_te_uses_in_the_context(precision, kernels):
    if why_unavailable(precision, kernels) is not None:
        pytest.skip("the GPU at hand does not run it")
    from transformer_engine.pytorch.quantization import FP8GlobalStateManager

    with precision.autocast(kernels):
        assert FP8GlobalStateManager.get_fp8_recipe() == precision.new_recipe()
    assert not FP8GlobalStateManager.is_fp8_enabled()


def test_without_a_recipe_te_computes_in_the_dtype(kernels):
    from transformer_engine.pytorch.quantization import FP8GlobalStateManager

    with PRECISIONS["bf16"].autocast(kernels):
        assert not FP8GlobalStateManager.is_fp8_enabled()


@pytest.mark.parametrize("name", ["mxfp8", "nvfp4"])
def test_what_a_hopper_cannot_run_has_te_s_reason(name, kernels):
    if kernels.backend == "gpu":
        pytest.skip("describes the emulated Hopper")
    assert "10.0 or higher" in why_unavailable(PRECISIONS[name], kernels)


def test_bf16_needs_an_ampere(kernels):
    def no_bf16():
        return False

    old = dataclasses.replace(kernels, te=type("te", (), {"is_bf16_available": staticmethod(no_bf16)}))
    assert "8.0" in why_unavailable(PRECISIONS["bf16"], old)
    assert why_unavailable(PRECISIONS["fp16"], old) is None


def test_every_precision_stores_in_its_own_dtype():
    for precision in PRECISIONS.values():
        assert precision.rounding.storage == precision.dtype
        assert precision.dtype in (torch.float32, torch.bfloat16, torch.float16)


def test_the_names_are_known_without_the_precisions():
    assert tuple(PRECISIONS) == PRECISION_NAMES


# What exceptions say about the device.


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
        torch.AcceleratorError("CUDA error: out of memory"),
        RuntimeError("[enforce fail at alloc_cpu.cpp:124] DefaultCPUAllocator: can't allocate memory: you tried to"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    ],
)
def test_memory_may_run_out(error: Exception) -> None:
    assert classify(error, lambda: True) == "out of memory"


@pytest.mark.parametrize(
    "error",
    [
        torch.AcceleratorError("CUDA error: an illegal memory access was encountered"),
        torch.AcceleratorError("CUDA error: device-side assert triggered"),
        RuntimeError("/te/common/gemm.cu:12 in function f: CUDA Error: misaligned address"),
    ],
)
def test_a_kernel_may_break_the_context(error: Exception) -> None:
    assert classify(error, lambda: True) == "broken"


def test_an_error_that_does_not_tell_is_the_devices_if_cuda_answers_no_more() -> None:
    error = RuntimeError("cuDNN Error: CUDNN_STATUS_EXECUTION_FAILED")
    assert classify(error, lambda: False) == "broken"
    assert classify(error, lambda: True) == ""


@pytest.mark.parametrize(
    "error", [ValueError("misaligned address"), RuntimeError("mat1 and mat2 cannot be multiplied")]
)
def test_the_modules_own_errors_are_not_the_devices(error: Exception) -> None:
    assert classify(error) == ""


def test_a_broken_context_is_seen_by_asking_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    assert cuda_works()

    def fails() -> None:
        raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(torch.cuda, "synchronize", fails)
    assert not cuda_works()


def test_what_pytorch_says_of_an_impossible_allocation_is_lack_of_memory() -> None:
    with pytest.raises(RuntimeError) as raised:
        torch.empty(2**60, dtype=torch.uint8)
    assert classify(raised.value) == "out of memory"


def test_the_gpu_that_a_refusal_names_runs_the_precision(kernels):
    if kernels.backend == "gpu":
        pytest.skip("describes emulated GPUs")
    for gpu in cuda.GPUS.values():
        with cuda.emulated(gpu):
            refused = {name: why_refused(precision, kernels) for name, precision in PRECISIONS.items()}
        for name, told in refused.items():
            named = re.findall(r"PARITY_EMULATED_GPU=(\w+)", told or "")
            with cuda.emulated(cuda.GPUS[named[0]] if told else gpu):
                assert why_unavailable(PRECISIONS[name], kernels) is None
