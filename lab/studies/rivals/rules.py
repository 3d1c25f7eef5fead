"""The rules by which other projects accept a port of a language model, from its logits and its loss.

Each returns whether it rejects the port. Thresholds are the projects' defaults, read in their sources on 2026-11-30.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class Scores:
    """What a model returns for ids ``[batch, seq]``.

    Attributes:
        logits: ``[batch, seq, vocabulary]``, in FP64.
        loss: the mean negative log-probability of the next token.
    """

    logits: Tensor
    loss: float


@dataclass(frozen=True)
class Compared:
    """Hold what the rules see: the port, the reference in FP64, and the reference as plain PyTorch computes it.

    Attributes:
        port: the port at the precision.
        exact: the reference in FP64.
        plain: the reference in the precision's dtype, BF16 under a recipe.
    """

    port: Scores
    exact: Scores
    plain: Scores


def last_token_rejects(compared: Compared) -> bool:
    """Megatron-Bridge, ``examples/conversion/compare_hf_and_megatron/compare.py``: cosine 0.99, and the same token."""
    port, plain = (scores.logits[0, -1] for scores in (compared.port, compared.plain))
    return not (F.cosine_similarity(port, plain, dim=0) >= 0.99 and port.argmax() == plain.argmax())


def wide_tolerances_reject(compared: Compared) -> bool:
    """BioNeMo's recipes, ``tests/common/test_modeling_common.py``: logits within 2.0, the loss within 0.01."""
    port, plain = compared.port, compared.plain
    logits = (port.logits - plain.logits).abs() <= 2.0 + 1e-4 * plain.logits.abs()
    return not (bool(logits.all()) and abs(port.loss - plain.loss) <= 1e-2 + 1e-3 * abs(plain.loss))


def divergence_rejects(compared: Compared) -> bool:
    """NeMo Automodel, ``tests/functional_tests/checkpoint_robustness``: a token's KL divergence of at most 5e-3."""
    port, plain = (scores.logits.log_softmax(-1) for scores in (compared.port, compared.plain))
    return not F.kl_div(port, plain, reduction="none", log_target=True).sum(-1).max().item() <= 5e-3


def ratio_rejects(compared: Compared) -> bool:
    """AWS Neuron, ``vllm_neuron/accuracy/logit_validation.py``: 1.5 times the plain error, for each token."""
    port, plain = ((scores.logits - compared.exact.logits).flatten(0, -2) for scores in (compared.port, compared.plain))
    norms = (2, torch.inf)
    return not all(bool((port.norm(p, dim=-1) < 1.5 * plain.norm(p, dim=-1)).all()) for p in norms)


def cosine_and_largest_reject(compared: Compared) -> bool:
    """Huawei's msprobe, ``core/compare``: a cosine of 0.99 or a largest error of 1e-3; never below 0.9 or above 1."""
    port, plain = (scores.logits.flatten() for scores in (compared.port, compared.plain))
    cosine, largest = F.cosine_similarity(port, plain, dim=0).item(), (port - plain).abs().max().item()
    return not (cosine >= 0.9 and largest <= 1.0 and (cosine >= 0.99 or largest <= 1e-3))


RULES: Mapping[str, Callable[[Compared], bool]] = {
    "cosine 0.99 and the next token (Megatron-Bridge)": last_token_rejects,
    "logits within 2.0, loss within 0.01 (BioNeMo recipes)": wide_tolerances_reject,
    "KL divergence 5e-3 (Automodel)": divergence_rejects,
    "1.5 times the error of plain BF16 (Neuron)": ratio_rejects,
    "cosine 0.99 or largest error 1e-3 (msprobe)": cosine_and_largest_reject,
}
