"""Plain PyTorch modules as a model's author writes them; each runs in FP64 after ``.double()``."""

from parity.reference.activation import GATES, POINTWISE
from parity.reference.attention import Attention, CoreAttention
from parity.reference.layer import GPTLayer, LlamaLayer
from parity.reference.mlp import MLP, GatedMLP, SwiGLUMLP
from parity.reference.norm import NormLinear
from parity.reference.rope import RotaryEmbedding, rotate_halves, rotate_interleaved

__all__ = [
    "GATES",
    "MLP",
    "POINTWISE",
    "Attention",
    "CoreAttention",
    "GPTLayer",
    "GatedMLP",
    "LlamaLayer",
    "NormLinear",
    "RotaryEmbedding",
    "SwiGLUMLP",
    "rotate_halves",
    "rotate_interleaved",
]
