"""Golden is FP64 throughout, even where the reference asks for FP32, and is computed where FP64 is faster."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import parity
from parity.numerics import golden
from parity.numerics.golden import in_blocks_and_one_by_one, in_fp64, seconds_of_gemm

# Golden is FP64 throughout, even where the reference asks for FP32.


te = parity.te.kernels("cpu").te
X = torch.randn(4, 8, dtype=torch.float64)


@pytest.mark.parametrize(
    "compute",
    [
        lambda x: x.float(),
        lambda x: x.to(torch.float32),
        lambda x: x.to(dtype=torch.float32),
        lambda x: x.type(torch.float32),
        lambda x: F.softmax(x, -1, dtype=torch.float32),
        lambda x: x.sum(-1, dtype=torch.float32),
        lambda x: F.layer_norm(x.float(), (8,)),
    ],
)
def test_what_is_asked_for_in_fp32_is_computed_in_fp64(compute):
    with in_fp64():
        found = compute(X)
    assert found.dtype is torch.float64
    assert torch.allclose(found, compute(X).double(), rtol=1e-5, atol=1e-6)
    assert not torch.equal(found, compute(X).double())


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.zeros(3),
        lambda: torch.full((3,), 0.1),
        lambda: torch.arange(3).float() / 7,
        lambda: torch.ones(3, dtype=torch.float32),
    ],
)
def test_numbers_that_the_reference_makes_join_fp64(make):
    with in_fp64():
        assert make().dtype is torch.float64


def test_numbers_that_the_reference_draws_are_those_of_fp32():
    plain = torch.randn(16, generator=torch.Generator().manual_seed(3))
    with in_fp64():
        wide = torch.randn(16, generator=torch.Generator().manual_seed(3))
    assert torch.equal(wide, plain.double())


def test_half_precision_and_integers_are_left_to_the_reference():
    with in_fp64():
        assert X.to(torch.bfloat16).dtype is torch.bfloat16
        assert X.long().dtype is torch.int64
        assert torch.arange(3).dtype is torch.int64


def test_what_the_reference_holds_in_fp32_stays_as_it_is():
    held = torch.full((8,), 0.1)
    with in_fp64():
        assert (held * 2).dtype is torch.float32
        assert (held * X).dtype is torch.float64


def test_a_gradient_goes_through_such_a_cast_that_the_backward_pass_makes_again():
    x = X.clone().requires_grad_()
    with in_fp64():
        loss = checkpoint(lambda x: (x.float() ** 2).sum(), x, use_reentrant=False)
        torch.autograd.backward(loss)
    assert torch.equal(x.grad, 2 * X)


class NormInFp32(nn.Module):
    """A norm written to compute in FP32, because it must not run in half precision."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.bias = nn.Parameter(torch.zeros(width))

    def forward(self, x):
        return F.layer_norm(x.float(), (x.shape[-1],), self.weight.float(), self.bias.float()).type_as(x)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_reference_that_computes_in_fp32_has_an_expected_error(precision):
    pair = parity.Pair(
        NormInFp32(1024),
        te.LayerNorm(1024, eps=1e-5),
        weights={"weight": "weight", "bias": "bias"},
        inputs=lambda rng: rng.normal(64, 1024),
    )
    for result in parity.compare(pair, [precision], seeds=range(3)):
        assert result.passed
        assert all(tensor.expected.relative_l2 > 0 for tensor in result.tensors if tensor.name != "bias")
        assert not result.notes


class Checkpointed(nn.Module):
    def __init__(self, use_reentrant: bool) -> None:
        super().__init__()
        self.norm, self.linear = NormInFp32(32), nn.Linear(32, 32)
        self.use_reentrant = use_reentrant

    def forward(self, x):
        return checkpoint(lambda x: self.linear(self.norm(x)), x, use_reentrant=self.use_reentrant)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_reference_with_checkpoints_is_compared(use_reentrant):
    pair = parity.Pair(
        Checkpointed(use_reentrant),
        te.LayerNormLinear(32, 32, eps=1e-5),
        weights={f"norm.{name}": f"layer_norm_{name}" for name in ("weight", "bias")}
        | {f"linear.{name}": name for name in ("weight", "bias")},
        inputs=lambda rng: rng.normal(16, 32),
        fill=True,
    )
    assert [result.status for result in parity.compare(pair, ["fp32", "bf16"])] == ["passed", "passed"]


# References that multiply all experts in one call of PyTorch, which has no FP64 kernel.


ROWS, WIDTH, EXPERTS = (32, 0, 16), 64, 3

needs_grouped_mm = pytest.mark.skipif(not hasattr(F, "grouped_mm"), reason="this PyTorch has no grouped_mm")


class Experts(nn.Module):
    """A mixture's experts, stored and multiplied as in transformers."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(EXPERTS, WIDTH, WIDTH) / WIDTH**0.5)  # [expert, out, in]

    def forward(self, x: Tensor) -> Tensor:
        ends = torch.tensor(ROWS, device=x.device).cumsum(0).int()
        return F.grouped_mm(x, self.weight.transpose(-2, -1), offs=ends)


@needs_grouped_mm
def test_products_one_by_one_are_the_grouped_product():
    x, experts = torch.randn(sum(ROWS), WIDTH), Experts()
    expected = experts(x)
    with in_blocks_and_one_by_one():
        torch.testing.assert_close(experts(x), expected)
        torch.testing.assert_close(experts.double()(x.double()).float(), expected)


@needs_grouped_mm
def test_rows_of_no_expert_are_zero():
    x = torch.randn(sum(ROWS) + 4, WIDTH)
    with in_blocks_and_one_by_one():
        assert not Experts()(x)[-4:].any()


@needs_grouped_mm
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16", "fp8_current", "fp8_block"])
def test_a_reference_with_grouped_products_is_compared(precision):
    def factory(te, **_):
        return parity.Pair(
            Experts(),
            te.GroupedLinear(EXPERTS, WIDTH, WIDTH, bias=False),
            weights={"weight": parity.experts(*(f"weight{i}" for i in range(EXPERTS)))},
            inputs=lambda rng: rng.normal(sum(ROWS), WIDTH),
            call_candidate=lambda module, x: module(x, list(ROWS)),
        )

    results = parity.compare(parity.Case("grouped", factory, sizes=({},)), [precision], seeds=range(3))
    assert [(result.status, result.reason) for result in results] == [("passed", "")] * 3


# Golden is computed on the device where FP64 is faster.


GPU, CPU = torch.device("cuda", 0), torch.device("cpu")


@pytest.fixture
def forgets_its_choice() -> Iterator[None]:
    golden.golden_device.cache_clear()
    yield
    golden.golden_device.cache_clear()


@pytest.mark.usefixtures("forgets_its_choice")
@pytest.mark.parametrize(
    ("of_gpu", "of_cpu", "device", "said"),
    [(0.0001, 0.04, GPU, "GPU: "), (0.02, 0.004, CPU, "CPU: ")],
    ids=["as on an H100", "as on an L4 beside many cores"],
)
def test_the_faster_of_gpu_and_cpu_computes_golden(
    of_gpu: float, of_cpu: float, device: torch.device, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(golden, "seconds_of_gemm", {GPU: of_gpu, CPU: of_cpu}.__getitem__)
    chosen = golden.golden_device(GPU)
    assert chosen.device == device
    assert chosen.reason.startswith(said)
    assert f"{1e3 * of_gpu:.2g} ms on the GPU, {1e3 * of_cpu:.2g} ms on the CPU" in chosen.reason


@pytest.mark.usefixtures("forgets_its_choice")
def test_a_process_measures_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(golden, "seconds_of_gemm", lambda device: float(len(asked.append(device) or asked)))
    assert golden.golden_device(GPU) is golden.golden_device(GPU)
    assert asked == [GPU, CPU]


@pytest.mark.usefixtures("forgets_its_choice")
def test_without_a_gpu_nothing_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(golden, "seconds_of_gemm")
    assert golden.golden_device(CPU) == golden.GoldenDevice(CPU, "CPU")


@pytest.mark.usefixtures("forgets_its_choice")
def test_a_gemm_takes_time() -> None:
    assert 0 < seconds_of_gemm(CPU) < 60
