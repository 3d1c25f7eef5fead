"""Another activation than the reference's, or the right one with other constants."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from parity.lab.zoo.planting import Bug, Plant, constructed_with, edited


def _gelu_tanh(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


def _quick_gelu(x: Tensor) -> Tensor:
    return x * torch.sigmoid(1.702 * x)


def _with_activation(activation: object) -> Plant:
    def edit(module: nn.Module) -> None:
        module.activation = activation  # type: ignore[assignment]

    return edited(edit)


def _clamped(**params: float) -> Plant:
    """TE's default is a limit of 7 and an alpha of 1.702, as gpt-oss has them."""
    return constructed_with(activation_params={"limit": 7.0, "alpha": 1.702, **params})


def _bug(name: str, summary: str, host: str, plant: Plant) -> Bug:
    return Bug(name, summary, (host,), plant, "activation")


BUGS = (
    _bug(
        "gelu-tanh-for-erf",
        "GELU is TE's tanh approximation where the reference has PyTorch's default.",
        "erf_gelu_mlp",
        _with_activation(_gelu_tanh),
    ),
    _bug("quick-gelu-for-erf", "GELU is the sigmoid approximation.", "erf_gelu_mlp", _with_activation(_quick_gelu)),
    _bug("quick-gelu-for-gelu", "activation='qgelu' for 'gelu'.", "gelu_mlp", constructed_with(activation="qgelu")),
    _bug("silu-for-gelu", "activation='silu' for 'gelu'.", "gelu_mlp", constructed_with(activation="silu")),
    _bug("relu-for-gelu", "activation='relu' for 'gelu'.", "gelu_mlp", constructed_with(activation="relu")),
    _bug("geglu-for-swiglu", "activation='geglu' for 'swiglu'.", "swiglu_mlp", constructed_with(activation="geglu")),
    _bug(
        "sigmoid-for-silu-gate",
        "activation='glu' for 'swiglu': the gate itself is not multiplied in.",
        "swiglu_mlp",
        constructed_with(activation="glu"),
    ),
    _bug(
        "swiglu-not-clamped",
        "activation='swiglu' for 'clamped_swiglu'.",
        "clamped_swiglu_mlp",
        constructed_with(activation="swiglu"),
    ),
    _bug("swiglu-limit-wrong", "The clamped SwiGLU's limit is 10 for 7.", "clamped_swiglu_mlp", _clamped(limit=10.0)),
    _bug("swiglu-alpha-wrong", "The clamped SwiGLU's alpha is 1 for 1.702.", "clamped_swiglu_mlp", _clamped(alpha=1.0)),
)
