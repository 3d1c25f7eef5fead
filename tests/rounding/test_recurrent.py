"""Recurrent layers that a port keeps are expected to round at each of their steps."""

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import parity
from parity.numerics.plain import step_by_step


class Tagger(nn.Module):
    """A recurrent layer, which TE has none of, and a linear one."""

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
    (result,) = parity.compare(tagger(nn.LSTM, scale=1.03125), [precision])
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
