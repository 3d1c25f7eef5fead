"""Bugs planted in the packaged hosts (``parity.measuring.hosts``), by subject."""

from __future__ import annotations

from lab.corpus.planted_bugs import attention, layer, training, weights
from lab.corpus.planting import Bug

BY_SUBJECT: dict[str, tuple[Bug, ...]] = {
    "weights": weights.BUGS,
    "norm": layer.NORM_BUGS,
    "activation": layer.ACTIVATION_BUGS,
    "rope": attention.ROPE_BUGS,
    "attention": attention.ATTENTION_BUGS,
    "layer": layer.LAYER_BUGS,
    "mixture": layer.MIXTURE_BUGS,
    "training": training.TRAINING_BUGS,
    "optimizer": training.OPTIMIZER_BUGS,
    "quantization": training.QUANTIZATION_BUGS,
}
