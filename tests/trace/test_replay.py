"""A replay of a recorded forward pass computes the same as the changed module, or says that the module has to run."""

import pytest
import torch
from torch import nn

from parity.mistakes.under import Replay
from parity.trace.calls import Misfit, edited, tracing
from parity.trace.trace import edit


class Layers(nn.Module):
    """Two linear layers, and a function between them."""

    def __init__(self, between):
        super().__init__()
        self.first, self.second, self.between = nn.Linear(4, 4), nn.Linear(4, 4), between

    def forward(self, x):
        return self.second(self.between(self.first(x)))


def _adds_in_place(x):
    y = x.clone()
    y.add_(1.0)
    y[:, 2] = 0.0
    return y


def _swaps(x):
    first, second = x.chunk(2, -1)
    return torch.cat((second, first), -1)


def _writes_through_a_view(x):
    y = x.clone()
    y[:, :2].mul_(2.0)
    return y


def _decides(x):
    return x if x.sum() > 1e6 else 2.0 * x


def _selects(x):
    return x[x[:, 0] > 0.0]


def recorded(module, x):
    with torch.no_grad(), tracing(module) as trace:
        module(x)
    return Replay(trace, {"output": trace.calls[-1].outputs[0]}), trace


def made(module, changed, x):
    """Return what the module computes under an edit, and its replay."""
    replay, trace = recorded(module, x)
    call = next(call for call in trace.calls if call.site[0] == changed)
    edits = [edit(call, (), lambda was: -3.0 * was)]
    with torch.no_grad(), edited(module, edits):
        right = module(x)
    with torch.no_grad():
        return right, replay.outputs(replay.changed(edits, {}))["output"], replay


@pytest.mark.parametrize("between", [torch.tanh, _adds_in_place, _swaps])
def test_a_replay_is_what_the_module_computes(between):
    module, x = Layers(between), torch.randn(3, 4)
    right, replayed, _ = made(module, "first", x)
    assert torch.equal(replayed, right)


def test_only_what_a_change_reaches_is_computed_again():
    module, x = Layers(torch.tanh), torch.randn(3, 4)
    assert [made(module, name, x)[2].made for name in ("first", "second")] == [2, 0]


def test_a_replay_reads_other_parameters():
    module, x = Layers(torch.tanh), torch.randn(3, 4)
    replay, _ = recorded(module, x)
    other = torch.randn(4, 4)
    with torch.no_grad():
        replayed = replay.outputs(replay.changed((), {"second.weight": other}))["output"]
        module.second.weight.copy_(other)
        assert torch.equal(replayed, module(x))


@pytest.mark.parametrize("between", [_writes_through_a_view, _decides, _selects])
def test_a_module_has_to_run_if_it_may_make_other_calls(between):
    torch.manual_seed(0)
    with pytest.raises(Misfit):
        made(Layers(between), "first", torch.randn(8, 4))


def test_what_a_change_adds_to_another_is_computed_alone():
    module, x = Layers(torch.tanh), torch.randn(3, 4)
    replay, trace = recorded(module, x)
    first, between, second = (edit(call, (), lambda was: -3.0 * was) for call in trace.calls)
    other = {"second.weight": torch.randn(4, 4)}
    with torch.no_grad():
        known = replay.changed([first, between], other)
        before = replay.made
        added = replay.changed([first, between, second], other, beside=known)
        assert replay.made == before
        assert torch.equal(replay.outputs(added)["output"], -3.0 * replay.outputs(known)["output"])
        with edited(module, [first, between, second]):
            module.second.weight.copy_(other["second.weight"])
            assert torch.equal(replay.outputs(added)["output"], module(x))
