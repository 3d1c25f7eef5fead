"""What kernels do that leans is taken out of an error along its own direction, and nothing else is."""

from __future__ import annotations

import pytest
import torch

from parity.judge.judge import grant
from parity.numerics.errors import Summed

GENERATOR = torch.Generator().manual_seed(0)
GOLDEN = torch.randn(64, 64, generator=GENERATOR, dtype=torch.float64)
BASE = 1e-4 * torch.randn(64, 64, generator=GENERATOR, dtype=torch.float64)
CHANGE = -7e-4 * GOLDEN
ELSEWHERE = 1e-3 * torch.randn(64, 64, generator=GENERATOR, dtype=torch.float64)


def granted_to(error: torch.Tensor):
    return grant(Summed(error), Summed(BASE), [Summed(BASE + CHANGE)])


@pytest.mark.parametrize("share", [0.3, 1.0, 1.2])
def test_share_of_the_change_is_taken_out(share):
    found = granted_to(BASE + share * CHANGE)
    assert found is not None
    assert found.coefficient == pytest.approx(share, rel=1e-6)
    torch.testing.assert_close(found.left.values, BASE)
    assert found.norm == pytest.approx(share * CHANGE.norm().item(), rel=1e-6)


@pytest.mark.parametrize(
    ("error", "why"),
    [
        (BASE, "the kernels do nothing of the kind"),
        (torch.zeros_like(BASE), "the kernels are more accurate"),
        (BASE - CHANGE, "it leans the other way"),
        (BASE + 30 * CHANGE, "it leans far more than such kernels do"),
        (torch.full_like(BASE, torch.nan), "it is not finite"),
    ],
)
def test_nothing_is_granted(error, why):
    assert granted_to(error) is None, why


def test_mistake_elsewhere_stays_whole():
    found = granted_to(BASE + CHANGE + ELSEWHERE)
    assert found is not None
    assert found.left.norm == pytest.approx((BASE + ELSEWHERE).norm().item(), rel=0.05)


def test_expected_errors_grow_by_a_part_of_the_change_alone():
    found = granted_to(BASE + CHANGE)
    assert found is not None
    for model in found.models:
        assert model.norm <= BASE.norm().item() + 0.3 * CHANGE.norm().item()


def test_few_elements_are_compared_with_the_base():
    error, base = torch.tensor(0.011, dtype=torch.float64), torch.tensor(0.001, dtype=torch.float64)
    found = grant(Summed(error), Summed(base), [Summed(base + 0.01)])
    assert found is not None
    assert found.left.values.item() == pytest.approx(0.001)
