"""The rounding model, operation by operation."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import parity
from parity.numerics.formats import PARTS, Rounding, e4m3, e5m2, largest, tf32
from parity.numerics.freedom import FUSED, UNFUSED
from parity.numerics.plain import Casts, step_by_step
from parity.numerics.rounding import rounded
from parity.numerics.storing import OperandsRead, Stored

BF16 = Rounding(torch.bfloat16)
FP32 = Rounding(torch.float32, tf32, tf32, tf32)
FP8 = Rounding(torch.bfloat16, e4m3, e4m3, e5m2)


def bf16(x):
    return x.bfloat16().float()


def test_a_linear_layer_rounds_operands_and_result():
    x, weight = torch.randn(4, 64), torch.randn(8, 64)
    with rounded(BF16):
        y = F.linear(x, weight)
    assert torch.equal(y, bf16(bf16(x) @ bf16(weight).t()))


def test_a_bias_is_added_before_the_one_rounding_of_the_result():
    x, weight, bias = torch.randn(4, 64), torch.randn(8, 64), torch.randn(8)
    with rounded(BF16):
        y = F.linear(x, weight, bias)
    assert torch.equal(y, bf16(torch.addmm(bias, bf16(x), bf16(weight).t())))


def test_attention_is_spared_tf32_and_fp8():
    a, b = torch.randn(3, 4, 64), torch.randn(3, 64, 8)
    with rounded(FP32):
        assert torch.equal(a @ b, torch.bmm(a, b))
    with rounded(FP8):
        assert torch.equal(a @ b, bf16(torch.bmm(bf16(a), bf16(b))))


@pytest.mark.parametrize("rounding", [FP32, BF16, FP8])
def test_stacked_experts_that_a_batched_product_reads_are_a_linear_layer_each(rounding):
    x, stacked, dy = (torch.randn(*shape) for shape in ((3, 16, 64), (3, 64, 8), (3, 16, 8)))
    apart = [(x[i].clone().requires_grad_(), stacked[i].clone().requires_grad_()) for i in range(3)]
    x.requires_grad_()
    stacked.requires_grad_()
    with rounded(rounding, [stacked, *(weight for _, weight in apart)]) as phase:
        y = x @ stacked
        each = [own @ weight for own, weight in apart]
        phase.begin_backward()
        y.backward(dy)
        for output, gradient in zip(each, dy, strict=True):
            output.backward(gradient)
    assert torch.equal(y, torch.stack(each))
    assert torch.equal(x.grad, torch.stack([own.grad for own, _ in apart]))
    assert torch.equal(stacked.grad, torch.stack([weight.grad for _, weight in apart]))


def test_gradients_are_rounded_to_their_own_format_in_the_backward_pass():
    x, weight, dy = (torch.randn(*shape) for shape in ((16, 64), (8, 64), (16, 8)))
    x.requires_grad_()
    weight.requires_grad_()
    with rounded(FP8, [weight]) as phase:
        y = F.linear(x, weight)
        phase.begin_backward()
        y.backward(dy)
    dy_read, x_read = e5m2(bf16(dy), amax=largest(dy)), e4m3(bf16(x.detach()), amax=largest(x.detach()))
    weight_read = e4m3(bf16(weight.detach()))  # its scale comes from the stored values
    assert torch.equal(x.grad, bf16(dy_read @ weight_read))
    assert torch.equal(weight.grad, bf16(dy_read.t() @ x_read))


@pytest.mark.parametrize("freedom", [FUSED, UNFUSED])
def test_a_fused_kernel_takes_a_tensors_scale_before_it_stores_the_tensor(freedom):
    x, weight = torch.full((4, 64), 55.9996), torch.eye(64)
    with rounded(FP8, [weight], freedom=freedom):
        y = F.linear(x, weight)
    # The stored value is 56; the scale comes from the computed or from the stored value.
    assert torch.equal(y, bf16(e4m3(bf16(x), amax=torch.tensor(55.9996 if freedom is FUSED else 56.0))))


def test_unfused_code_stores_cosines_of_angles_but_not_the_angles():
    positions = torch.arange(4000.0, 4016.0)
    angles, cosines = positions * 0.3, (positions * 0.3).cos()
    with rounded(BF16, freedom=UNFUSED):
        stored_angles, stored_cosines = positions * 0.3, angles.cos()
    assert torch.equal(stored_angles, angles)
    assert torch.equal(stored_cosines, bf16(cosines))


def test_a_residual_sum_is_stored_and_a_broadcast_sum_is_not():
    x, y, row = torch.randn(4, 8), torch.randn(4, 8), torch.randn(8)
    with rounded(BF16):
        assert torch.equal(x + y, bf16(torch.add(x.double(), y.double()).float()))
        assert not torch.equal(x + row, bf16(x + row))


def test_pointwise_code_between_gemms_stays_in_fp32_where_it_is_fused():
    x = torch.randn(4, 64)
    exact = F.silu(F.rms_norm(x, (64,)))
    with rounded(BF16, freedom=FUSED):
        assert torch.equal(F.silu(F.rms_norm(x, (64,))), exact)
    with rounded(BF16, freedom=UNFUSED):
        assert torch.equal(F.silu(x.clone().requires_grad_()), bf16(F.silu(x)))


def test_angles_that_depend_on_no_activation_are_not_rounded():
    positions, frequencies = torch.arange(64.0)[:, None], torch.rand(1, 8)
    with rounded(BF16, freedom=UNFUSED):
        angles = positions * frequencies
    assert torch.equal(angles, positions * frequencies)


def test_scaled_dot_product_attention_is_taken_apart():
    query, key, value = (torch.randn(1, 2, 16, 32) for _ in range(3))
    exact = F.scaled_dot_product_attention(query.double(), key.double(), value.double())
    with rounded(BF16):
        rough = F.scaled_dot_product_attention(query, key, value)
    assert 1e-4 < ((rough - exact).norm() / exact.norm()).item() < 1e-2


@pytest.mark.parametrize(("rounding", "low", "high"), [(FP32, 1e-4, 1e-3), (BF16, 1e-3, 1e-2), (FP8, 1e-2, 1e-1)])
def test_the_expected_error_of_an_mlp_is_of_the_formats_size(rounding, low, high):
    mlp = nn.Sequential(nn.Linear(128, 256), nn.SiLU(), nn.Linear(256, 128))
    x = torch.randn(64, 128)
    with rounded(rounding):
        y = mlp(x)
    exact = mlp.double()(x.double())
    assert low < ((y - exact).norm() / exact.norm()).item() < high


def alone(rounding, *parts):
    return dataclasses.replace(rounding, parts=frozenset(parts))


def test_each_rounding_of_a_linear_layer_can_be_made_alone():
    x, weight = torch.randn(4, 64), torch.randn(8, 64)
    expected = {
        "inputs": F.linear(e4m3(bf16(x), amax=largest(x)), weight),
        "weights": F.linear(x, e4m3(bf16(weight))),
        "storage": bf16(F.linear(x, weight)),
        "gradients": F.linear(x, weight),
        "attention": F.linear(x, weight),
    }
    for part in PARTS:
        with rounded(alone(FP8, part), [weight]):
            assert torch.equal(F.linear(x, weight), expected[part]), part


def test_roundings_of_attention_are_a_part_of_their_own():
    a, b = torch.randn(3, 4, 64), torch.randn(3, 64, 8)
    with rounded(alone(BF16, "attention")):
        assert torch.equal(a @ b, bf16(torch.bmm(bf16(a), bf16(b))))
    with rounded(alone(BF16, *(PARTS - {"attention"}))):
        assert torch.equal(a @ b, torch.bmm(a, b))


def test_without_any_part_nothing_is_rounded():
    x, weight = torch.randn(4, 64), torch.randn(8, 64)
    with rounded(alone(FP8), [weight]):
        y = F.linear(x, weight) + x[:, :8]
    assert torch.equal(y, F.linear(x, weight) + x[:, :8])


def test_weights_that_te_quantizes_as_one_share_their_scale():
    # With one term in each sum, GEMMs of other sizes give the same bits.
    x, small, large = torch.eye(64), torch.randn(8, 64), 3.3 * torch.randn(8, 64)
    together = torch.cat((small, large))
    with rounded(FP8, [small, large], scaled_together=[[small, large]]):
        apart = F.linear(x, small), F.linear(x, large)
    with rounded(FP8, [together]):
        as_one = F.linear(x, together)
    assert torch.equal(torch.cat(apart, -1), as_one)


@pytest.mark.parametrize("freedom", [FUSED, UNFUSED])
def test_a_norm_gives_the_scale_of_what_it_stores(freedom):
    x, weight = torch.full((4, 64), 55.9996), torch.eye(64)
    with rounded(FP8, [weight], freedom=freedom):
        normalized = x * (x.square().mean(-1, keepdim=True) / 55.9996**2).rsqrt()
        y = F.linear(normalized, weight)
    assert torch.equal(y, bf16(e4m3(bf16(x), amax=torch.tensor(56.0))))


def test_a_flash_kernel_stores_probabilities_before_it_divides_them_by_their_sum():
    scores, value = torch.randn(1, 2, 8, 8), torch.randn(1, 2, 8, 16)
    with rounded(BF16, freedom=FUSED):
        context = scores.softmax(-1) @ value
    unnormalized = (scores - scores.amax(-1, keepdim=True)).exp()
    expected = bf16(unnormalized) @ bf16(value) / unnormalized.sum(-1, keepdim=True)
    assert torch.allclose(context, bf16(expected), rtol=2**-7)
    assert (context == bf16(expected)).float().mean() > 0.95


def test_a_sink_that_is_the_largest_of_its_row_shifts_what_probabilities_are_rounded_to():
    """All keys score 0 and the sink 1: a flash kernel stores exp(-1) of each, not 1."""
    scores, sinks, values = torch.zeros(1, 1, 4, 4), torch.ones(1, 1, 4, 1), torch.ones(1, 1, 4, 8)
    with rounded(BF16, [], FUSED):
        probabilities = torch.cat((scores, sinks), -1).softmax(-1)[..., :-1]
        context = probabilities @ values
    stored = bf16(torch.tensor(-1.0).exp()) / torch.tensor(-1.0).exp()
    expected = bf16(4 * stored / (4 + torch.tensor(1.0).exp()))
    torch.testing.assert_close(context, expected.expand_as(context), rtol=0, atol=0)


@pytest.mark.parametrize("sinks", [0, 1])
def test_a_flash_kernel_takes_the_mean_gradient_of_a_row_from_its_stored_output(sinks):
    """With one key, both terms of the score's gradient nearly cancel, so the rest shows how O was rounded."""
    score, value, dy = torch.zeros(1, 1, 1, 1, requires_grad=True), torch.randn(1, 1, 1, 64), torch.randn(1, 1, 1, 64)
    with rounded(BF16, [], FUSED) as phase:
        probability = torch.cat((score, torch.full((1, 1, 1, sinks), 0.7)), -1).softmax(-1)[..., :1]
        context = probability @ value
        phase.begin_backward()
        context.backward(dy)
    p, v, d = 1 / (1 + sinks * math.exp(0.7)), bf16(value), bf16(dy)
    unnormalized = torch.tensor(math.exp(-0.7 * sinks))  # the sink is the largest of its row
    stored = bf16(unnormalized) / unnormalized * p
    expected = p * ((d * v).sum() - (d * bf16(stored * v)).sum())
    # 64 products of about 1 are summed twice: FP32's own roundings leave a few millionths, those of O ten thousandths.
    torch.testing.assert_close(score.grad.flatten(), expected.view(1), rtol=1e-4, atol=1e-5)


def test_passes_with_one_rounding_share_what_they_read_of_weights():
    x, weight, read = torch.randn(4, 64), torch.randn(8, 64), OperandsRead()
    results, casts = [], []
    for freedom in (FUSED, UNFUSED):
        with rounded(FP8, [weight], freedom, weights_read=read):
            results.append(F.linear(x, weight))
        casts.append(len(read._kept))
    with rounded(FP8, [weight], UNFUSED):
        alone = F.linear(x, weight)
    assert casts == [1, 1]
    assert torch.equal(results[1], alone)


def test_a_stored_tensor_that_was_written_to_is_rounded_again():
    x, weight = bf16(torch.randn(4, 64)), bf16(torch.randn(64, 64))
    with rounded(BF16, [weight]):
        hidden = F.linear(x, weight)
        hidden.mul_(1.0 + 2.0**-10)
        y = F.linear(hidden, weight)
    assert not torch.equal(hidden, bf16(hidden))
    assert torch.equal(y, bf16(F.linear(bf16(hidden), weight)))


@pytest.mark.parametrize("freedom", [FUSED, UNFUSED])
def test_a_product_with_a_table_of_relative_positions_is_stored_where_scores_may_stay_in_a_kernel(freedom):
    queries, table = torch.randn(3, 4, 64, requires_grad=True), torch.randn(8, 64, requires_grad=True)
    with rounded(BF16, [table], freedom):
        bias = queries @ table[:3].unsqueeze(2).expand(3, 64, 1)
    assert torch.equal(bias, bf16(bias))


def _biased(scores, *biases):
    for bias in biases:
        scores = scores + bias
    return scores


@pytest.mark.parametrize(("freedom", "stored"), [(FUSED, lambda x: x), (UNFUSED, bf16)])
def test_a_kernel_is_given_two_biases_of_scores_as_their_stored_sum(freedom, stored):
    q, k = torch.randn(3, 4, 64), torch.randn(3, 64, 4)
    rows, columns = torch.randn(3, 4, 1, requires_grad=True), torch.randn(3, 1, 4, requires_grad=True)
    with rounded(BF16, freedom=freedom):
        scores = q @ k
        biased = _biased(scores, rows, columns)
    assert torch.equal(biased, stored(scores + bf16(bf16(rows) + bf16(columns))))


def test_a_mask_that_is_added_to_scores_is_no_bias_to_round():
    q, k, mask = torch.randn(3, 4, 64), torch.randn(3, 64, 4), torch.randn(4, 4)
    with rounded(BF16, freedom=FUSED):
        masked = _biased(q @ k, mask)
    assert torch.equal(masked, bf16(q) @ bf16(k) + mask)


# Casts to FP32 and back round in an FP32 run of the reference as they do in a 16-bit run.


DTYPES = [torch.bfloat16, torch.float16]


def rms_norm(x: Tensor) -> Tensor:
    """Return the norm of Hugging Face's Llama."""
    dtype = x.dtype
    wide = x.to(torch.float32)
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(dtype)


LINES: dict[str, Callable[[Tensor], Tensor]] = {
    "float and type_as": lambda x: (x.float() * 0.3).type_as(x),
    "float alone": lambda x: x.float().exp(),
    "to FP32 and back": rms_norm,
    "twice": lambda x: rms_norm(rms_norm(x)),
    "softmax in FP32": lambda x: F.softmax(x, -1, dtype=torch.float32).to(x.dtype),
    "cross-entropy in FP32": lambda x: F.cross_entropy(x.float(), torch.arange(len(x)), reduction="none"),
    "a part of FP32 values": lambda x: x.float()[1:].sin().type_as(x),
    "like a tensor in FP32": lambda x: x.to(x.float()).cos().type_as(x),
    "back by keyword": lambda x: (x.float() + 0.1).to(dtype=x.dtype),
    "a device is no dtype": lambda x: (x.float().to("cpu") * 3.3).type_as(x),
}


def run(line: Callable[[Tensor], Tensor], x: Tensor) -> tuple[Tensor, Tensor]:
    """Return a line's result and the gradient of its input, in FP32."""
    x = x.clone().requires_grad_()
    output = line(x)
    weights = torch.linspace(0.3, 1.7, output.numel()).bfloat16().to(output.dtype)
    (gradient,) = torch.autograd.grad(output, x, weights.view(output.shape))
    return output.detach().float(), gradient.float()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("line", LINES.values(), ids=LINES)
def test_lines_that_compute_in_fp32_give_the_bits_that_they_give_in_the_dtype(line, dtype):
    x = torch.randn(16, 16, generator=torch.Generator().manual_seed(0)).to(dtype)
    with Casts(lambda y: y.to(dtype).float(), alone=nullcontext):
        modelled = run(line, x.float())
    for got, right in zip(modelled, run(line, x), strict=True):
        assert torch.equal(got, right)


def test_without_it_the_model_rounds_neither_values_nor_gradients():
    x = torch.randn(16, 16, generator=torch.Generator().manual_seed(0)).bfloat16()
    for got, right in zip(run(rms_norm, x.float()), run(rms_norm, x), strict=True):
        assert not torch.equal(got, right)


def test_a_table_without_a_gradient_is_left_as_it_is():
    angles = torch.linspace(0.0, 3.0, 16)
    with Casts(lambda y: y.bfloat16().float(), alone=nullcontext):
        assert torch.equal(angles.float().cos().to(torch.float32), angles.cos())


# A rounded tensor is recognised as long as it does not change.


def test_a_rounded_tensor_and_its_views_are_known():
    stored, x = Stored(), torch.randn(3, 4)
    assert x not in stored
    stored.add(x)
    assert x in stored
    assert x.t() in stored
    assert x.view(2, 6) in stored


def test_a_tensor_that_was_written_to_is_not():
    stored, x = Stored(), torch.randn(3, 4)
    stored.add(x)
    x.t().add_(1.0)
    assert x not in stored


def test_a_tensor_in_the_memory_of_one_that_is_gone_is_not():
    stored, memory = Stored(), set()
    for _ in range(1000):  # the allocator reuses the memory
        x = torch.randn(256)
        assert x not in stored
        memory.add(x.data_ptr())
        stored.add(x)
        del x
    assert len(memory) < 1000


# Recurrent layers that a port keeps are expected to round at each step.


class Tagger(nn.Module):
    """A recurrent layer, which TE does not have, and a linear one."""

    def __init__(self, recurrent, linear):
        super().__init__()
        self.recurrent, self.linear = recurrent(64, 64, batch_first=True), linear(64, 64)

    def forward(self, x):
        return self.linear(self.recurrent(x)[0])


def tagger(recurrent, scale=1.0):
    def factory(te, **_):
        reference = Tagger(recurrent, nn.Linear)
        return parity.Pair(
            reference,
            Tagger(recurrent, te.Linear),
            weights={name: name for name, _ in reference.named_parameters()},
            inputs=lambda rng, batch, seq: rng.normal(batch, seq, 64),
            call_candidate=lambda module, x: module(scale * x),
        )

    return parity.Case("tagger", factory, sizes=(dict(batch=16, seq=16),))


@pytest.mark.parametrize("recurrent", [nn.LSTM, nn.GRU, nn.RNN])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16", "fp8_current"])
def test_right_ports_pass(recurrent, precision):
    results = parity.compare(tagger(recurrent), [precision], seeds=range(2))
    assert {result.status for result in results} == {"passed"}


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_a_wrong_factor_is_told(precision):
    (result,) = parity.compare(tagger(nn.LSTM, scale=1.03125), [precision], diagnose=False)
    assert result.status == "failed"


class Names(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.seen = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.add(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def test_an_lstm_is_called_by_its_steps_inside_and_as_before_outside():
    lstm, x = nn.LSTM(8, 8), torch.randn(3, 2, 8)
    with Names() as outside:
        whole, _ = lstm(x)
    with step_by_step(), Names() as inside:
        steps, _ = lstm(x)
    with Names() as again:
        lstm(x)
    assert {"mm", "addmm"} & inside.seen
    assert "mkldnn_rnn_layer" not in inside.seen
    assert outside.seen == again.seen
    torch.testing.assert_close(steps, whole)


class CheckpointedLstm(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(8, 8)

    def forward(self, x):
        return checkpoint(lambda x: self.lstm(x)[0], x, use_reentrant=False)


def test_an_lstm_that_a_checkpoint_runs_again_is_called_by_its_steps_again():
    x = torch.randn(3, 2, 8, requires_grad=True)
    with step_by_step(), Names() as inside:
        CheckpointedLstm()(x).sum().backward()
    assert x.grad is not None
    assert "mkldnn_rnn_layer" not in inside.seen


def test_an_lstm_that_raises_leaves_pytorchs_setting_as_it_was():
    before = torch.backends.mkldnn.enabled
    with step_by_step(), pytest.raises(RuntimeError):
        nn.LSTM(8, 8)(torch.randn(3, 2, 9))
    assert torch.backends.mkldnn.enabled is before
