"""A comparison says which known mistakes it would have passed: real ports with these pass, and with the others fail."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from parity import te
from parity.api import compare
from parity.case.case import Case, Pair
from parity.case.validate import check_case
from parity.coverage import Tried, missed, try_mistakes
from parity.judge.limits import packaged
from parity.judge.request import Request
from parity.te import PRECISIONS
from parity.user_error import UserError

HIDDEN, HEADS = 32, 2


class Block(nn.Module):
    """A norm, capped attention in a window, and a clamped MLP.

    Args:
        scores: multiplies the projections of queries and keys.
        inner: multiplies what enters the activation.
        changes: other settings than the reference's.
    """

    def __init__(self, scores: float, inner: float, **changes: Any) -> None:
        super().__init__()
        own = {"eps": 1e-6, "inside": True, "cap": 50.0, "window": 8, "gelu": "none", "limit": 2.0, "least": -2.0}
        self.settings: dict[str, Any] = own | changes
        self.gain = nn.Parameter(torch.rand(HIDDEN) + 0.5)
        self.query, self.key, self.value, self.up, self.down = (nn.Linear(HIDDEN, HIDDEN, bias=False) for _ in range(5))
        with torch.no_grad():
            for layer, factor in ((self.query, scores), (self.key, scores), (self.up, inner)):
                layer.weight.mul_(factor)

    def forward(self, x: Tensor) -> Tensor:
        of = self.settings
        if of["inside"]:
            normed = F.rms_norm(x, (HIDDEN,), self.gain, of["eps"])
        else:
            normed = self.gain * x / (x.square().mean(-1, keepdim=True).sqrt() + of["eps"])
        query, key, value = (
            layer(normed).unflatten(-1, (HEADS, -1)).transpose(1, 2) for layer in (self.query, self.key, self.value)
        )
        scores = query @ key.transpose(-1, -2) / 4.0
        if math.isfinite(of["cap"]):
            scores = of["cap"] * torch.tanh(scores / of["cap"])
        places = torch.arange(x.shape[1])
        hidden = places[None, :] > places[:, None]
        if of["window"]:
            hidden = hidden | (places[:, None] - places[None, :] > of["window"])
        weights = scores.masked_fill(hidden, -math.inf).softmax(-1)
        context = (weights @ value).transpose(1, 2).flatten(2)
        inner = F.gelu(self.up(context), approximate=of["gelu"]).clamp(of["least"], of["limit"])
        result: Tensor = self.down(inner)
        return result


IDLE = {"size": 100.0, "seq": 8, "scores": 0.05, "inner": 0.05}
BINDS = {"size": 1e-2, "seq": 24, "scores": 12.0, "inner": 8.0}
WRONG = {
    "norm eps=1e-05": {"eps": 1e-5},
    "norm eps outside the root, not inside": {"inside": False},
    "softcap missing": {"cap": math.inf},
    "softcap 30": {"cap": 30.0},
    "window": {"window": 0},
    "activation gelu (tanh)": {"gelu": "tanh"},
    "clamp missing": {"limit": math.inf, "least": -math.inf},
    "clamp to at most 2": {"least": -math.inf},
}
"""Each mistake by its name in the catalogue, as settings of ``Block``."""


def case_of(size: float, seq: int, scores: float, inner: float, **changes: Any) -> Case:
    def factory(te: Any) -> Pair:
        reference = Block(scores, inner)
        return Pair(
            reference=reference,
            candidate=Block(scores, inner, **changes),
            weights={name: name for name, _ in reference.named_parameters()},
            inputs=lambda rng: size * rng.normal(2, seq, HIDDEN),
        )

    return Case("block", factory, sizes=({},), probe=False, path=Path(__file__))  # whose rows would differ in size


def request_of(case: Case, precision: str = "fp32") -> Request:
    kernels = te.kernels("cpu")
    (checked,) = check_case(case, kernels.te)
    return Request(case, checked, PRECISIONS[precision], 0, kernels, packaged())


@functools.cache
def tried_at(which: Literal["idle", "binds"]) -> list[Tried]:
    return try_mistakes(request_of(case_of(**(IDLE if which == "idle" else BINDS))))


def names(tried: Iterable[Tried]) -> set[str]:
    """Return the mistakes' names, those in windows as one, since one that is longer than the sequence has no width."""
    return {"window" if one.mistake.title == "window" else one.mistake.name for one in tried}


@pytest.mark.parametrize("name", WRONG)
def test_a_mistake_that_is_listed_passes_and_one_that_is_not_fails(name: str) -> None:
    for at, which in ((IDLE, "idle"), (BINDS, "binds")):
        is_listed = name in names(missed(tried_at(which)))
        assert is_listed == (which == "idle" or name == "clamp to at most 2")  # no GELU is less than -0.17
        (result,) = compare(case_of(**at, **WRONG[name]), ["fp32"], diagnose=False)
        assert result.passed == is_listed


def test_what_binds_nowhere_changes_no_bit() -> None:
    idle = {one.mistake.name: one for one in missed(tried_at("idle"))}
    assert idle["clamp missing"].is_idle
    assert idle["clamp missing"].effect == 0.0
    assert idle["clamp missing"].place == "1st 'clamp' of the module"
    assert 0.0 < idle["norm eps outside the root, not inside"].effect < 1.0


def unshown_by(case: Case, precision: str = "fp32", **options: Any) -> str:
    (result,) = compare(case, [precision], diagnose=False, **options)
    assert result.passed
    beginning = "this run could not have shown: "
    return next((note.removeprefix(beginning) for note in result.notes if note.startswith(beginning)), "")


@pytest.mark.parametrize("which", ["idle", "binds"])
def test_a_comparison_tells_by_itself_of_bounds_that_nothing_reaches_and_coverage_lists_them(
    which: Literal["idle", "binds"],
) -> None:
    told = unshown_by(case_of(**(IDLE if which == "idle" else BINDS)))
    first = "condition left out, 2nd 'gt' of the module, softcap missing, clamp missing"
    assert told == (first if which == "idle" else "clamp to at most 2")
    listed = [one.mistake.name for one in missed(tried_at(which))]
    assert all(name in told for name in listed if name in ("softcap missing", "clamp missing"))
    assert told.rpartition(", ")[2] in listed


def test_a_pair_accepts_what_its_inputs_do_not_reach() -> None:
    accepting = replace(case_of(**IDLE), accepts=("softcap", "window"))
    assert unshown_by(accepting) == "clamp missing"


class Clamped(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).clamp(-4.0, 4.0)


def test_what_probing_inputs_or_weights_reach_is_shown() -> None:
    def factory(te: Any) -> Pair:
        modules = Clamped(HIDDEN, HIDDEN), Clamped(HIDDEN, HIDDEN)
        return Pair(*modules, lambda rng: rng.normal(8, HIDDEN), {"weight": "weight", "bias": "bias"})

    clamped = Case("clamped", factory, sizes=({},), path=Path(__file__))
    assert unshown_by(replace(clamped, probe=False), "bf16") == "clamp missing"
    assert unshown_by(clamped, "bf16") == ""

    block = replace(case_of(size=1.0, seq=24, scores=1.0, inner=1.0), probe=True)
    assert "clamp missing" in unshown_by(block, "bf16")
    assert "clamp missing" not in unshown_by(block, "bf16", probe_weights=True)


def test_a_mistake_that_fails_is_off_by_more_than_its_limit() -> None:
    assert all(one.margin > 1.0 for one in tried_at("binds") if one.is_shown)


def test_a_cap_that_the_reference_lacks_is_no_mistake_in_its_operations() -> None:
    case = Case(
        "uncapped",
        lambda te: Pair(
            reference=nn.Linear(HIDDEN, HIDDEN),
            candidate=nn.Linear(HIDDEN, HIDDEN),
            weights={"weight": "weight", "bias": "bias"},
            inputs=lambda rng: rng.normal(8, HIDDEN),
        ),
        sizes=({},),
        path=Path(__file__),
    )
    tried = try_mistakes(request_of(case))
    assert "bias missing" in names(tried)
    assert not missed(tried)


def test_a_pair_that_cannot_run_is_an_error() -> None:
    def factory(te: Any) -> Pair:
        return Pair(
            reference=nn.Linear(4, 4),
            candidate=Raises(4, 4),
            weights={"weight": "weight", "bias": "bias"},
            inputs=lambda rng: rng.normal(2, 4),
        )

    class Raises(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            raise RuntimeError("it is not ready")

    case = Case("raises", factory, sizes=({},), path=Path(__file__))
    with pytest.raises(UserError, match=r"raises .* cannot be compared.*it is not ready"):
        try_mistakes(request_of(case))
