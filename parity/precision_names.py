"""The precisions' names, for whoever need not know what they mean, and so need not import torch."""

PRECISION_NAMES = ("fp32", "bf16", "fp16", "fp8_delayed", "fp8_current", "fp8_block", "mxfp8", "nvfp4")
