"""The small models are the same in both forms."""

from __future__ import annotations

import pytest
import torch

from parity import te
from parity.lab.studies.training import (
    ARCHITECTURES,
    TEXT,
    VOCABULARY,
    Size,
    batches,
    initial_weights,
    load,
    load_candidate,
)
from parity.te import Kernels

SIZE = Size(VOCABULARY, seq=32, hidden=64, layers=2, heads=4, groups=2, ffn=192)


@pytest.fixture(scope="module")
def kernels() -> Kernels:
    return te.kernels("cpu")


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_te_s_model_computes_what_the_plain_one_does(name: str, kernels: Kernels) -> None:
    architecture = ARCHITECTURES[name]
    initial = initial_weights(architecture, SIZE, 3, torch.bfloat16)
    reference, candidate = architecture.reference(SIZE), architecture.candidate(SIZE, kernels)
    load(reference, initial)
    load_candidate(candidate, architecture, SIZE, initial)
    tokens = batches(0, 1, 2, SIZE.seq)[0][:, :-1]
    plain, ported = reference(tokens), candidate(tokens)
    assert ((plain - ported).norm() / plain.norm()).item() < 2e-3  # TF32


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_a_byte_does_not_see_what_comes_after_it(name: str) -> None:
    torch.manual_seed(0)
    model = ARCHITECTURES[name].reference(SIZE)
    tokens = batches(0, 1, 1, SIZE.seq)[0][:, :-1]
    changed = tokens.clone()
    changed[:, 20:] = 0
    torch.testing.assert_close(model(tokens)[:, :20], model(changed)[:, :20])


def test_initial_weights_are_exact_in_bf16_and_follow_the_seed() -> None:
    first, again, other = (initial_weights(ARCHITECTURES["llama"], SIZE, seed, torch.bfloat16) for seed in (0, 0, 1))
    for name, weight in first.items():
        assert torch.equal(weight, weight.bfloat16().float())
        assert torch.equal(weight, again[name])
        assert weight.dim() == 1 or not torch.equal(weight, other[name])


def test_batches_are_windows_of_the_text_with_the_next_byte_as_target() -> None:
    for batch in batches(seed=5, steps=3, batch=2, seq=16):
        assert batch.shape == (2, 17)
        for window in batch:
            assert bytes(window.tolist()).decode() in TEXT
