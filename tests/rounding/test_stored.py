"""What was rounded is known as such, as long as it is what it was."""

import torch

from parity.numerics.storing import Stored


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
    for _ in range(1000):  # the allocator gives the same memory out again
        x = torch.randn(256)
        assert x not in stored
        memory.add(x.data_ptr())
        stored.add(x)
        del x
    assert len(memory) < 1000
