"""What 16-bit weights cost a step of an optimizer is expected, and noted; the corpus has the mistakes."""

from __future__ import annotations

import pytest
import torch
from ports import compared
from torch import nn
from torch.optim import Adam, AdamW

import parity
from lab.corpus.small_ports.optimizers import ADAM, DECAY, IN, INPUTS, LR, OUT, Trained, fused

BFLOAT16 = torch.bfloat16


@pytest.mark.parametrize(
    ("kind", "port", "precision"),
    [
        (AdamW, {}, "fp16"),
        (Adam, dict(adam_w_mode=False), "bf16"),
        (AdamW, dict(master_weights=True, store_param_remainders=True), "bf16"),
        (AdamW, dict(master_weights=True, master_weight_dtype=torch.float16), "fp16"),
        (AdamW, dict(exp_avg_dtype=BFLOAT16, exp_avg_sq_dtype=BFLOAT16), "bf16"),
        (AdamW, dict(exp_avg_dtype=torch.float16, exp_avg_sq_dtype=torch.float16), "fp16"),
    ],
)
def test_right_steps_on_16_bit_weights_pass(kind, port, precision):
    (result,) = parity.compare(fused("right", kind, DECAY, port).case(), [precision])
    assert result.passed, result.findings


def test_what_weights_of_16_bits_lose_is_noted():
    (result,) = parity.compare(ADAM.case(), ["bf16"])
    assert "the port's optimizer keeps weights in bfloat16, so the rounding of its steps is expected" in result.notes


def test_pytorchs_own_optimizer_may_step_on_16_bit_weights():
    steps = lambda parameters: AdamW(parameters, lr=LR, **DECAY)  # noqa: E731
    result = compared(
        lambda: Trained(nn.Linear(IN, OUT), steps), lambda te: Trained(te.Linear(IN, OUT), steps), INPUTS, "bf16"
    )
    assert result.passed, result.findings
