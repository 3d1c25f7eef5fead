"""A replay of a recorded forward pass computes the same as the changed module, or says that the module has to run."""

import operator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from parity.mistakes.replay import Replay
from parity.trace.calls import Misfit, edited, tracing, writes
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


# Code that writes to a tensor, without a function whose name ends with an underscore.


OPERATORS = [name for name in dir(Tensor) if name.startswith("__i") and hasattr(operator, f"__{name[3:]}")]


def _writes_by(name):
    """Return a function that reads a tensor, changes it with an in-place operator, and reads it again."""

    def between(x):
        y = 1.0 + x.abs() if name == "__itruediv__" else (8.0 * x).int()
        before = 3 * y
        getattr(operator, name)(y, 2)
        return 0.5 * (before - y)

    return between


def _writes_by_an_argument(x):
    y = x.clone()
    before = 3.0 * y
    F.relu(y, inplace=True)
    return before - y


def _replaces_the_data(x):
    y = x.clone()
    before = 3.0 * y
    y.data = x.square()
    return before - y


@pytest.mark.parametrize("between", [*map(_writes_by, OPERATORS), _writes_by_an_argument, _replaces_the_data])
def test_a_replay_reads_a_tensor_before_and_after_it_is_written_to(between):
    module, x = Layers(between), torch.randn(16, 4)
    replay, trace = recorded(module, x)
    for call in trace.calls:
        edits = [] if call.name == "data" else [edit(call, (), lambda was: -3 * was)]
        with torch.no_grad(), edited(module, edits):
            right = module(x)
        with torch.no_grad():
            assert torch.equal(replay.outputs(replay.changed(edits, {}))["output"], right), call.described


def test_functions_that_write_are_told_by_their_names():
    assert {"__iadd__", "__ior__", "__ilshift__", "__itruediv__"} <= set(OPERATORS)
    assert all(writes(getattr(Tensor, name)) for name in ("__iadd__", "__ior__", "__ixor__", "__setitem__", "add_"))
    others = ("__invert__", "__index__", "__int__", "__iter__", "__init__", "__add__", "__radd__", "__getitem__", "add")
    assert not any(writes(getattr(Tensor, name)) for name in others)
    assert writes(Tensor.data.__set__)
    assert not any(writes(one) for one in (Tensor.data.__get__, Tensor.grad.__set__, Tensor.requires_grad.__set__))


@pytest.mark.parametrize("function", [lambda x: F.relu(x, inplace=True), lambda x: x.sigmoid_(), lambda x: x.mul_(2.0)])
def test_an_edit_of_what_a_call_writes_has_a_gradient(function):
    module, x = Layers(lambda x: function(x)), torch.randn(16, 4)
    _, trace = recorded(module, x)
    right = Layers(lambda x: -3.0 * function(x))
    right.load_state_dict(module.state_dict())
    with edited(module, [edit(trace.calls[1], (), lambda was: -3.0 * was)]):
        module(x).sum().backward()
    right(x).sum().backward()
    assert torch.equal(module.first.weight.grad, right.first.weight.grad)


def test_a_tensor_that_is_first_seen_as_a_call_writes_to_it_has_two_numbers():
    x = torch.randn(3)
    before = x.clone()
    with torch.no_grad(), tracing(Layers(torch.tanh)) as trace:
        x.mul_(2.0)
    [call] = trace.calls
    assert torch.equal(trace.tensor(call.inputs[0]), before)
    assert torch.equal(trace.tensor(call.outputs[0]), x)
