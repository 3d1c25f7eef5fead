"""The place where a candidate departs from its reference is named, and nothing right, whatever rounding hides."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from ports import compared, in_turn, tells, tells_only, twins
from torch import Tensor, nn

import parity
from lab.corpus.small import normal
from parity.case.case import Rng

WIDTH = 64


def disturbed(y: Tensor, share: float = 0.3) -> Tensor:
    """Return a tensor disturbed in a way that matches no known mistake."""
    return y + share * (3.0 * y.roll(7, -1)).sin()


class Wrong(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return disturbed(x.tanh())


class Ladder(nn.Module):
    """Two linear layers, the second called twice, beside ``carried`` times the input.

    ``wrong`` names the call after which, or ``act`` for the module in which, a port computes something arbitrary.
    """

    def __init__(self, linear: Any, carried: float, wrong: str = "", share: float = 0.3) -> None:
        super().__init__()
        self.fc1, self.fc2 = linear(WIDTH, WIDTH), linear(WIDTH, WIDTH)
        self.act = Wrong() if wrong == "act" else nn.Tanh()
        self.carried, self.wrong, self.share = carried, wrong, share

    def forward(self, x: Tensor) -> Tensor:
        y = self.disturbed("fc1", self.fc1(x))
        y = self.disturbed("tanh", self.act(y))
        y = self.disturbed("fc2", self.fc2(y))
        y = self.fc2(y.tanh())
        return self.carried * x + self.disturbed("sum", y)

    def disturbed(self, after: str, y: Tensor) -> Tensor:
        return disturbed(y, self.share) if after == self.wrong else y


def departures(result: parity.Result) -> list[str]:
    """Return the messages about the place of a failure that nothing explains."""
    tells(result, "unexplained")
    return [finding.message for finding in result.findings if finding.title == "first-divergence"]


class Within(nn.Module):
    """A ladder, as a model within the module that is compared."""

    def __init__(self, linear: Any, **options: Any) -> None:
        super().__init__()
        self.model = Ladder(linear, **options)

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x)


def ladders(
    wrong: str, precision: str = "fp32", carried: float = 0.0, share: float = 0.3, kind: type[nn.Module] = Ladder
) -> str:
    right = dict(carried=carried)
    (message,) = departures(twins(kind, dict(wrong=wrong, share=share), normal((32, WIDTH)), precision, right))
    return message


@pytest.mark.parametrize(
    ("wrong", "precision", "share", "named"),
    [
        ("fc1", "fp32", 0.3, "'linear' of fc1"),
        ("fc1", "bf16", 0.3, "'linear' of fc1"),
        ("fc1", "fp32", 0.02, "'linear' of fc1"),  # so what follows is nearly right
        ("act", "fp32", 0.3, "after the 1st 'tanh' of act"),
        ("act", "bf16", 0.3, "the result of the 1st 'tanh' of act"),
        ("fc2", "fp32", 0.3, "'linear' of fc2"),
    ],
)
def test_only_the_call_at_which_a_port_departs_is_named_though_all_that_follows_differs(wrong, precision, share, named):
    message = ladders(wrong, precision, share=share)
    assert message.startswith("the candidate departs from the reference ")
    assert named in message
    assert "6 of 7 stages of the forward pass agree" in message


@pytest.mark.parametrize(
    ("wrong", "before"), [("fc1", "fc1"), ("tanh", "act"), ("fc2", "fc2")], ids=["fc1", "tanh", "fc2"]
)
def test_a_right_submodule_before_what_is_wrong_is_not_to_be_compared_alone(wrong, before):
    assert f"compare {before} alone" not in ladders(wrong)


def test_a_module_that_is_nearly_all_of_the_pair_is_not_to_be_compared_alone():
    assert ladders("sum", carried=100.0, kind=Within).endswith("look at what the candidate computes there")


@pytest.mark.parametrize(("wrong", "is_later"), [("fc2", False), ("sum", True)])
def test_a_later_call_of_a_submodule_is_told_from_its_first(wrong, is_later):
    assert ("'linear' of fc2 (call 2)" in ladders(wrong, "bf16", carried=5.0)) == is_later


def test_right_submodules_whose_rounding_a_sum_hides_are_not_named():
    message = ladders("sum", carried=100.0)
    assert message.startswith("the candidate departs from the reference at the 1st 'add' of the module: ")
    assert "fc" not in message


class Faint(nn.Module):
    """Tanh, a module that adds ``faint`` times an arbitrary function to small rows, RMSNorm and a linear layer.

    Returns a loss if ``scored``.
    """

    def __init__(self, linear: Any, faint: float = 0.0, scored: bool = False) -> None:
        super().__init__()
        self.act, self.dims = nn.Tanh(), Dims(faint)
        self.norm, self.fc = nn.RMSNorm(WIDTH, eps=1e-5), linear(WIDTH, WIDTH, bias=False)
        self.scored = scored

    def forward(self, x: Tensor) -> Tensor:
        y = self.fc(self.norm(self.dims(self.act(x))))
        return F.cross_entropy(y, torch.arange(len(y)) % WIDTH).view(1) if self.scored else y


class Dims(nn.Module):
    def __init__(self, faint: float) -> None:
        super().__init__()
        self.faint = faint

    def forward(self, x: Tensor) -> Tensor:
        is_small = x.square().mean(-1, keepdim=True).sqrt() < 0.1
        return x + self.faint * is_small * (300 * x).sin() * x.roll(7, -1)


@pytest.mark.parametrize(
    ("faint", "scored"),
    [
        (0.5, False),
        (5.0, True),  # another eps would explain this number, with drawn gradients that the port does not have
    ],
)
def test_what_only_the_probing_inputs_show_is_named_by_what_is_computed_of_these(faint, scored):
    port, right = dict(faint=faint, scored=scored), dict(scored=scored)
    (message,) = departures(twins(Faint, port, normal((32, WIDTH)), "fp32", right))
    assert message.startswith("the candidate departs from the reference in dims, between the 1st 'tanh' of act, ")
    assert "and the 1st 'add' of dims: " in message
    assert "nearly all of it at index 5, 19 of the 32 in dimension 0" in message  # the small rows


class Rotated(nn.Module):
    """Two linear layers with a rotation of all channels of 4 heads between them, so that the unrotated rest is empty.

    ``wrong`` disturbs the second half of the rows, and sets the others to zero.
    """

    def __init__(self, linear: Any, wrong: bool = False) -> None:
        super().__init__()
        self.fc1, self.act, self.fc2 = linear(WIDTH, WIDTH), nn.Tanh(), linear(WIDTH, WIDTH)
        self.wrong = wrong

    def forward(self, x: Tensor) -> Tensor:
        heads = self.fc1(x).unflatten(-1, (4, 16))
        first, second, rest = heads[..., :8], heads[..., 8:16], heads[..., 16:]
        y = torch.cat((-second, first, rest), -1).flatten(1)
        y = disturbed(y) * (torch.arange(len(y)) >= len(y) // 2)[:, None] if self.wrong else y
        return self.fc2(self.act(y))


def test_what_is_wrong_between_submodules_is_named_by_the_calls_around_it():
    """The values of which it is computed include one without elements."""
    (message,) = departures(twins(Rotated, dict(wrong=True), normal((32, WIDTH)), "fp32"))
    assert message.startswith(
        "the candidate departs from the reference in the module, between the 1st 'linear' of fc1, "
    )
    assert "and the 1st 'cat' of the module: " in message


# A router decides which expert gets a token, so what it reads has no effect to first order.


class Routed(nn.Module):
    """Layers of four experts, of which a router of the normed tokens picks one. In the layers in ``raw``, the router
    reads tokens that are not normed.
    """

    def __init__(self, linear: Any, norm: Any, layers: int = 1, raw: tuple[int, ...] = ()) -> None:
        super().__init__()
        self.raw = raw
        self.norms = nn.ModuleList(norm(WIDTH) for _ in range(layers))
        self.routers = nn.ModuleList(nn.Linear(WIDTH, 4, bias=False) for _ in range(layers))
        self.experts = nn.ModuleList(linear(WIDTH, WIDTH) for _ in range(4 * layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer, (norm, router) in enumerate(zip(self.norms, self.routers, strict=True)):
            h = norm(x)
            logits = router((x if layer in self.raw else h).flatten(0, 1)).view(*x.shape[:-1], 4)
            weight, chosen = logits.softmax(-1).max(-1, keepdim=True)
            for number in range(4):
                x = x + (chosen == number) * weight * self.experts[4 * layer + number](h)
        return x


@pytest.mark.parametrize(
    ("layers", "raw", "told"),
    [
        (1, (0,), "to the 1st 'linear' of routers.0, as the reference does, not the input of the module that"),
        (2, (0, 1), "to the 1st 'linear' of routers.0 and to 1 more like it, as the reference does, not"),
        (2, (1,), "to the 1st 'linear' of routers.1, as the reference does, not the result of the"),
    ],
)
def test_what_a_router_reads_instead_is_told(layers, raw, told):
    result = compared(
        lambda: Routed(nn.Linear, nn.RMSNorm, layers),
        lambda te: Routed(te.Linear, te.RMSNorm, layers, raw),
        lambda rng: 0.5 + rng.normal(2, 24, WIDTH),
    )
    tells_only(result, "operation", told)


# Attention with padded tokens that are hidden everywhere.

HEADS, SEQ = 4, 16


class PaddedAttention(nn.Module):
    """Self-attention whose padded tokens are hidden everywhere, and a linear layer after it.

    Args:
        linear: the class of linear layers.
        core: computes ``[batch, seq, heads, head_dim]``; may leave anything in padded queries.
        wrong: the submodule after which a port computes something arbitrary.
        reads_padding: whether what attention leaves in padded queries is added to the other tokens.
    """

    def __init__(self, linear: Any, core: nn.Module, wrong: str = "", reads_padding: bool = False) -> None:
        super().__init__()
        self.qkv, self.out = linear(WIDTH, 3 * WIDTH), linear(WIDTH, WIDTH)
        self.core, self.act, self.fc = core, nn.Tanh(), linear(WIDTH, WIDTH)
        self.wrong, self.reads_padding = wrong, reads_padding

    def forward(self, x: Tensor, tokens: Tensor) -> Tensor:
        q, k, v = (one.unflatten(-1, (HEADS, -1)) for one in self.qkv(x).chunk(3, -1))
        y = self.disturbed("core", self.core(q, k, v, tokens))
        y = self.out(y + y.mean(1, keepdim=True) if self.reads_padding else y)
        y = self.disturbed("act", self.act(self.disturbed("out", y)))
        return self.fc(y) * tokens[..., None].to(y.dtype)

    def disturbed(self, after: str, y: Tensor) -> Tensor:
        return disturbed(y) if after == self.wrong else y


class PlainCore(nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor, tokens: Tensor) -> Tensor:
        q, k, v = (one.transpose(1, 2) for one in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, tokens[:, None, None]).transpose(1, 2).flatten(2)


class FusedCore(nn.Module):
    """TE's attention, which leaves zeros in padded queries."""

    def __init__(self, te: Any) -> None:
        super().__init__()
        self.fused = te.DotProductAttention(
            HEADS, WIDTH // HEADS, qkv_format="bshd", attn_mask_type="padding", attention_dropout=0.0
        )

    def forward(self, q: Tensor, k: Tensor, v: Tensor, tokens: Tensor) -> Tensor:
        return self.fused(q, k, v, attention_mask=~tokens[:, None, None])


def in_padded(wrong: str, precision: str, reads_padding: bool = False) -> list[str]:
    def inputs(rng: Rng) -> tuple[Tensor, Tensor]:
        return rng.normal(4, SEQ, WIDTH), torch.arange(SEQ) < rng.integers(4, low=SEQ // 2, high=SEQ)[:, None]

    result = compared(
        lambda: PaddedAttention(nn.Linear, PlainCore(), "", reads_padding),
        lambda te: PaddedAttention(te.Linear, FusedCore(te), wrong, reads_padding),
        inputs,
        precision,
    )
    assert result.status == "failed"
    return [finding.message for finding in result.findings if finding.title == "first-divergence"]


@in_turn(
    ("wrong", "named", "agrees"),
    [
        ("core", "scaled_dot_product_attention", "out"),
        ("out", "linear", "qkv"),
        ("act", "tanh", "core"),
    ],
)
def test_attention_that_leaves_zeros_where_nobody_reads_is_right(wrong, named, agrees, precision):
    (message,) = in_padded(wrong, precision)
    assert f"{named!r} of {wrong}" in message
    assert f"of {agrees}" not in message


def test_attention_that_leaves_zeros_which_are_read_is_not():
    (message,) = in_padded("", "bf16", reads_padding=True)
    assert "between the 1st 'linear' of qkv and the 1st 'scaled_dot_product_attention' of core: " in message
    assert "7 of 8 stages of the forward pass agree" in message


# Sides whose layers are given other rows, though both return the same tokens.


class Batch(nn.Module):
    """Linear layers with tanh between them, which are given a batch and its positions in a ``layout``: padded, packed,
    packed and filled up with zeros, or in two halves.

    ``wrong`` names the layer after which a port computes something arbitrary.
    """

    def __init__(self, linear: Any, layout: str, wrong: str = "", lengths: tuple[int, ...] = (SEQ, 5, 11, 9)) -> None:
        super().__init__()
        self.lengths = torch.tensor(lengths)
        self.positions = nn.Embedding(SEQ, WIDTH)
        self.fc1, self.fc2, self.fc3 = linear(WIDTH, WIDTH), linear(WIDTH, WIDTH), linear(WIDTH, WIDTH)
        self.layout, self.wrong = layout, wrong

    def forward(self, x: Tensor) -> Tensor:
        number = torch.arange(SEQ)
        tokens = number < self.lengths[:, None]
        if self.layout in ("packed", "filled"):
            packed = x[tokens] + self.positions(number.expand(4, SEQ)[tokens])
            more = 7 if self.layout == "filled" else 0
            return self.layers(F.pad(packed, (0, 0, 0, more)))[: len(packed)]
        x = x + self.positions(number)
        if self.layout == "halves":
            return torch.cat([self.layers(half) for half in x.chunk(2)])[tokens]
        return self.layers(x)[tokens]

    def layers(self, x: Tensor) -> Tensor:
        y = self.disturbed("fc1", self.fc1(x)).tanh()
        return self.fc3(self.disturbed("fc2", self.fc2(y)).tanh())

    def disturbed(self, after: str, y: Tensor) -> Tensor:
        return disturbed(y) if after == self.wrong else y


@pytest.mark.parametrize(
    ("right", "port"),
    [("padded", "packed"), ("padded", "filled"), ("packed", "padded"), ("halves", "padded"), ("padded", "padded")],
)
@in_turn(("wrong", "agrees"), [("fc2", "fc1"), ("fc1", "fc3")])
def test_rows_that_only_one_side_computes_are_left_out(right, port, wrong, agrees, precision):
    result = compared(
        lambda: Batch(nn.Linear, right), lambda te: Batch(te.Linear, port, wrong), normal((4, SEQ, WIDTH)), precision
    )
    (message,) = departures(result)
    assert wrong in message
    assert agrees not in message


def test_no_layer_is_named_if_rows_cannot_be_told_apart():
    """If all rows of a batch are equal and one is left out, nothing tells which one it is."""
    lengths = (SEQ, 0, 11, 9)
    result = compared(
        lambda: Batch(nn.Linear, "padded", "", lengths),
        lambda te: Batch(te.Linear, "packed", "fc1", lengths),
        lambda rng: torch.zeros(4, SEQ, WIDTH),
    )
    assert not any("fc" in message for message in departures(result))


class Cached(nn.Module):
    """Two linear layers, the result of the first of which is appended to an empty cache, as transformers does."""

    def __init__(self, linear: Any, wrong: bool = False) -> None:
        super().__init__()
        self.fc1, self.fc2, self.wrong = linear(WIDTH, WIDTH), linear(WIDTH, WIDTH), wrong

    def forward(self, x: Tensor) -> Tensor:
        y = torch.cat((x.new_empty(0), self.fc1(x)), -2)
        return self.fc2(disturbed(y) if self.wrong else y)


def test_a_tensor_that_is_appended_to_an_empty_one_breaks_no_search():
    result = twins(Cached, dict(wrong=True), normal((2, 16, WIDTH)), "fp32")
    (message,) = departures(result)
    assert "'linear' of fc1" in message
    assert result.notes == ()


def test_what_no_mistake_explains_is_said_to_be_unexplained():
    result = compared(
        lambda: nn.Linear(128, 256),
        lambda te: te.Linear(128, 256),
        normal((2, 32, 128)),
        "fp32",
        call_candidate=lambda module, x: module(x) + 0.1 * torch.sin(x[..., :1]),
    )
    (message,) = departures(result)
    assert "after the 1st 'linear' of the module" in message
    assert {finding.title for finding in result.findings} == {"unexplained", "first-divergence"}
