"""What a computation takes on the nominal machine is counted."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from parity.passes.nominal_clock import Clock, OutOfTime, Work, work_of

TOKENS, WIDTH, OUT = 6, 8, 5


def test_products_and_what_they_return_are_counted():
    x, weight = torch.randn(TOKENS, WIDTH), torch.randn(OUT, WIDTH)
    work = work_of(lambda: torch.mm(x, weight.T).relu())
    assert (work.flops, work.elements) == (2 * TOKENS * WIDTH * OUT, 2 * TOKENS * OUT)


def test_convolutions_are_counted():
    image, kernel = torch.randn(1, 3, 8, 8), torch.randn(4, 3, 3, 3)
    assert work_of(lambda: F.conv2d(image, kernel)).flops == 2 * 4 * 6 * 6 * 3 * 3 * 3


def test_a_view_is_an_operation_without_elements_of_its_own():
    x = torch.randn(TOKENS, WIDTH)
    assert work_of(lambda: x.t()[:3]) == Work(operations=2)


def test_a_part_of_the_batch_takes_less_but_as_many_operations():
    work = Work(operations=100, flops=10**9, elements=10**6)
    assert work.seconds(0.0) < work.seconds(0.25) < work.seconds(1.0)
    assert Work(operations=100).seconds(0.0) == Work(operations=100).seconds(1.0)


def test_a_clock_advances_by_passes_and_by_what_else_is_computed():
    forward, other = Work(operations=10, flops=10**9), Work(flops=10**8)
    clock = Clock(forward=forward)
    clock.advance(3.0)
    clock.spend(other)
    assert clock.seconds == 3.0 * forward.seconds() + other.seconds()


def test_a_limit_of_real_time_lets_no_pass_begin_that_comes_after_it():
    clock = Clock(forward=Work(operations=10))
    with clock.limited_to(1e-9):
        with pytest.raises(OutOfTime):
            clock.advance(1.0)
        assert clock.ended
    assert clock.seconds == 0.0


def test_a_limit_of_real_time_ends_with_its_context_and_0_is_none():
    clock = Clock(forward=Work(operations=10))
    with clock.limited_to(1e-9):
        assert clock.is_over()
    for seconds in (0.0, 1e9):
        with clock.limited_to(seconds):
            clock.advance(1.0)
            assert not clock.ended
