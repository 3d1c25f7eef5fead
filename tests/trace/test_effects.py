"""Test side effects of calls: ports that remember something between calls, and outputs that are detached."""

from __future__ import annotations

import pytest
import torch
from bad_input import WIDTH, Wrapped, assert_says, linear, result_of, te, wrapped
from torch import Tensor, nn

import parity
from parity.judge.candidate import by_recalling
from parity.passes.all_passes import Recalled
from parity.trace.effects import detached_by_candidate_alone

# A port that keeps something from one call to the next is found, with probing inputs and without.


HIDDEN = 64
WEIGHTS = {"layer.weight": "layer.weight", "layer.bias": "layer.bias"}


class Layer(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).tanh()


class FirstOutput(Layer):
    """A layer that always returns its first output."""

    kept = None

    def forward(self, x):
        if self.kept is None:
            self.kept = super().forward(x)
        return self.kept


class FirstOutputDetached(FirstOutput):
    def forward(self, x):
        return super().forward(x) if self.kept is None else self.kept.detach() + 0 * super().forward(x)


class FirstMask(Layer):
    """A layer that drops the elements that were negative in its first input."""

    mask = None

    def forward(self, x):
        self.mask = x > 0 if self.mask is None else self.mask
        return super().forward(x * self.mask)


class Masked(Layer):
    def forward(self, x):
        return super().forward(x * (x > 0))


class Doubles(Layer):
    """A layer whose second call returns twice the right output."""

    calls = 0

    def forward(self, x):
        self.calls += 1
        return super().forward(x) * (2 if self.calls == 2 else 1)


class FirstIsHalf(Layer):
    """A layer whose first call returns half of the right output."""

    calls = 0

    def forward(self, x):
        self.calls += 1
        return super().forward(x) * (0.5 if self.calls == 1 else 1)


class GrowsInAList(Layer):
    """A layer with a cache that is never emptied."""

    def __init__(self, layer):
        super().__init__(layer)
        self.seen = []

    def forward(self, x):
        self.seen.append(x.detach())
        return super().forward(x + sum(self.seen[:-1]))


class AfterBackward(Layer):
    """A layer whose backward pass changes the outputs of later calls."""

    factor = 1.0

    def forward(self, x):
        out = super().forward(x) * self.factor
        if out.requires_grad:
            out.register_hook(lambda _: setattr(self, "factor", 1.5))
        return out


LAST = []


class OutsideOfAttributes(Layer):
    def forward(self, x):
        LAST.append(1)
        return super().forward(x) + (0.5 if len(LAST) > 1 else 0)


def compared(candidate, precision, probe, reference=Layer, inputs=lambda rng: rng.normal(32, HIDDEN), diagnose=True):
    def factory(te, **_):
        LAST.clear()
        return parity.Pair(reference(nn.Linear(HIDDEN, HIDDEN)), candidate(te.Linear(HIDDEN, HIDDEN)), inputs, WEIGHTS)

    case = parity.Case("layer", factory, sizes=({},), probe=probe)
    (result,) = parity.compare(case, [precision], diagnose=diagnose)
    return result


STATES = [
    (FirstOutput, "kept"),
    (FirstOutputDetached, "kept"),
    (FirstMask, "mask"),
    (Doubles, "calls"),
    (GrowsInAList, "seen"),
    (OutsideOfAttributes, ""),
]


@pytest.mark.parametrize("probe", [True, False], ids=["probing", "not probing"])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp8_current"])
@pytest.mark.parametrize(("candidate", "attribute"), STATES)
def test_what_a_port_remembers_is_told_by_name(candidate, attribute, precision, probe):
    result = compared(candidate, precision, probe, Masked if candidate is FirstMask else Layer)
    assert result.status == "failed"
    (found,) = result.findings
    assert (found.code, found.title) == ("PAR273", "state-between-calls")
    where = f" in {attribute}" if attribute else ""
    assert found.message.startswith(f"the candidate remembers its last call{where}: when it is called again, ")


@pytest.mark.parametrize("candidate", [AfterBackward, FirstIsHalf])
def test_without_probing_inputs_so_is_what_other_calls_alone_show(candidate):
    result = compared(candidate, "bf16", probe=False)
    assert result.status == "failed"
    assert result.margin <= 1
    assert result.findings[0].title == "state-between-calls"
    assert "its output changes by" in result.findings[0].message


@pytest.mark.parametrize("candidate", [FirstMask, GrowsInAList, OutsideOfAttributes])
def test_with_scales_of_the_passes_before_it_fails_as_well(candidate):
    reference = Masked if candidate is FirstMask else Layer
    result = compared(candidate, "fp8_delayed", probe=False, reference=reference, diagnose=False)
    assert result.status == "failed"


def test_where_a_backward_pass_meets_the_graph_of_a_call_before_it_is_said_what_that_means():
    result = compared(FirstOutput, "fp8_delayed", probe=False)
    assert result.status == "error"
    assert "the module reuses a tensor from an earlier call, together with its graph" in result.reason


class KeepsTables(Layer):
    """A layer that keeps tables that depend on no input."""

    table = None
    calls = 0

    def forward(self, x):
        self.calls += 1
        if self.table is None:
            self.table = torch.arange(HIDDEN, device=x.device) / HIDDEN
        return super().forward(x + self.table.to(x.dtype))


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp8_delayed", "fp8_current", "fp8_block"])
@pytest.mark.parametrize("probe", [True, False], ids=["probing", "not probing"])
def test_what_changes_no_output_may_be_remembered(precision, probe):
    assert compared(KeepsTables, precision, probe, reference=KeepsTables).passed


def test_weights_that_a_call_trains_are_no_state():
    """Allow an optimizer's step in the forward pass, since each call starts from the weights given to both modules."""

    class Halving(Layer):
        def forward(self, x):
            with torch.no_grad():
                self.layer.weight.mul_(0.5)
            return super().forward(x)

    class Halved(Layer):
        def forward(self, x):
            weight = self.layer.weight - 0.5 * self.layer.weight.detach()
            return nn.functional.linear(x, weight, self.layer.bias).tanh()

    assert compared(Halving, "bf16", probe=False, reference=Halved).passed


def test_other_inputs_are_drawn_as_the_users_are():
    """Use a layer that only takes probabilities, which probing inputs would not be."""

    class OfProbabilities(Layer):
        def forward(self, x):
            assert 0.1 <= x.min() <= x.max() < 0.9
            return super().forward(x.log())

    def inputs(rng):
        return rng.uniform(32, HIDDEN, low=0.2, high=0.8)

    assert compared(OfProbabilities, "bf16", False, OfProbabilities, inputs).passed


def test_inputs_that_are_always_the_same_are_given_again():
    fixed = torch.randn(32, HIDDEN)
    assert compared(Layer, "bf16", False, inputs=lambda rng: fixed).passed
    assert not compared(Doubles, "bf16", False, inputs=lambda rng: fixed).passed


def test_inputs_whose_shapes_are_drawn_are_given_again():
    sizes = []

    def inputs(rng):
        sizes.append(int(rng.integers(1, low=1, high=100)))
        return rng.normal(sizes[-1], HIDDEN)

    assert compared(Layer, "bf16", False, inputs=inputs).passed
    assert len(set(sizes)) > 1


def test_a_port_that_is_wrong_in_each_call_is_no_matter_of_state():
    class Halved(Layer):
        def forward(self, x):
            return 0.5 * super().forward(x)

    for probe in (True, False):
        result = compared(Halved, "bf16", probe)
        assert result.status == "failed"
        assert "state-between-calls" not in {found.title for found in result.findings}


def test_a_pass_without_calls_around_it_says_nothing():
    assert by_recalling(Recalled(), ()) == ()


# A reference that remembers its last call has no golden value, and the error names what it remembers.


class Counting(Wrapped):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__(layer)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.layer(x) * self.calls


class Growing(Wrapped):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__(layer)
        self.seen: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(self.layer(x))
        return torch.cat(self.seen)


class Remembering(Wrapped):
    """A layer that keeps a table which would be the same in every call."""

    table: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.table is None:
            self.table = torch.arange(WIDTH, device=x.device)
        return self.layer(x) + self.table.to(x.dtype) / WIDTH


def test_a_number_that_each_call_changes_is_named():
    assert_says(result_of(wrapped(Counting)), "error", "the reference remembers its last call in calls")


def test_a_list_that_each_call_makes_longer_is_named():
    assert_says(result_of(wrapped(Growing)), "error", "the reference remembers its last call in seen")


def test_the_attribute_of_a_part_is_named_with_the_part():
    nested = dict(
        reference=nn.Sequential(Counting(nn.Linear(WIDTH, WIDTH))),
        candidate=nn.Sequential(Counting(te.Linear(WIDTH, WIDTH))),
        weights={"0.layer.weight": "0.layer.weight", "0.layer.bias": "0.layer.bias"},
    )
    assert_says(result_of(linear(**nested)), "error", "in 0.calls")


def test_a_table_that_is_made_once_and_kept_is_no_mistake():
    assert_says(result_of(wrapped(Remembering)), "passed")


class MadeInFirstCall(nn.Module):
    def __init__(self, kind: type[nn.Module]) -> None:
        super().__init__()
        self.kind = kind

    def forward(self, x: Tensor) -> Tensor:
        if not hasattr(self, "layer"):
            self.layer = self.kind(WIDTH, WIDTH).to(x)
        return self.layer(x)


def test_parameters_that_the_first_call_makes_are_named():
    pair = linear(reference=MadeInFirstCall(nn.Linear), candidate=MadeInFirstCall(te.Linear), weights={})
    assert_says(result_of(pair), "error", "creates its parameter layer.weight in its first call")


# An output through which no gradient flows is noticed, even if its share of the gradients is below rounding.


class WithLoss(nn.Module):
    """A layer with a small loss beside its result, like a router's."""

    def __init__(self, layer: nn.Module, change=lambda loss: loss) -> None:
        super().__init__()
        self.layer, self.change = layer, change

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.layer(x)
        return y, self.change(1e-6 * y.float().square().mean().to(y.dtype))


def compared_detached(change, of_reference=lambda loss: loss):
    def factory(te, **_):
        return parity.Pair(
            WithLoss(nn.Linear(64, 64), of_reference),
            WithLoss(te.Linear(64, 64), change),
            inputs=lambda rng: rng.normal(32, 64),
            weights={"layer.weight": "layer.weight", "layer.bias": "layer.bias"},
        )

    return parity.compare(parity.Case("with_loss", factory, sizes=({},)), ["fp32", "bf16"])


@pytest.mark.parametrize("change", [Tensor.detach, lambda loss: torch.tensor(loss.item()).to(loss)])
def test_a_loss_that_is_detached_beside_other_outputs_is_an_error(change):
    for result in compared_detached(change):
        assert result.status == "error"
        assert result.reason.startswith("output[1] of the candidate has no gradient, but the reference's has one")


def test_one_that_the_reference_detaches_too_is_right():
    assert {result.status for result in compared_detached(Tensor.detach, of_reference=Tensor.detach)} == {"passed"}


def test_one_that_the_reference_alone_detaches_is_right():
    assert {result.status for result in compared_detached(lambda loss: loss, of_reference=Tensor.detach)} == {"passed"}


def test_several_are_told_together():
    assert detached_by_candidate_alone([], ["output[0]", "output[2]"]).startswith(
        "output[0], output[2] of the candidate have no gradient"
    )


# PyTorch's own lookups are no change to it.


def test_an_operator_that_is_first_looked_up_in_a_call_stays_though_it_is_called_like_a_builtin():
    """C++ points to what it has looked up; if that is removed, the next call of the operator crashes the process."""

    class Counting(Layer):
        def forward(self, x):
            return super().forward(x) + 0 * torch.ops.aten.divmod.int(7, 2)[0]

    assert "divmod" not in vars(torch.ops.aten)
    pair = parity.Pair(
        Layer(nn.Linear(64, 64)), Counting(te.Linear(64, 64)), weights=WEIGHTS, inputs=lambda rng: rng.normal(32, 64)
    )
    (result,) = parity.compare(parity.Case("counting", lambda te: pair, sizes=({},)), ["fp32"])
    assert "divmod" in vars(torch.ops.aten), result
