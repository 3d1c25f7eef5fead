"""TransformerEngine's kernels on a CPU: a ``transformer_engine_torch`` in PyTorch, and a loader for TE's Python.

A page stands for one of TE's ``csrc/extensions`` and is named after it. It imports nothing of parity but this room:

==================================================  ====================================================================
page                                                stands for, in TransformerEngine 2.20.2
==================================================  ====================================================================
``activation``                                      ``activation.cpp``, and of ``bias.cpp`` the fused activations
``attention`` on ``flash``, ``flash_fp8`` and       ``attention.cpp``: cuDNN's fused attention, and the KV cache
``attention_problem``
``cast`` on ``formats``: ``float8``, ``mxfp8``,     ``cast.cpp``, ``transpose.cpp``, ``bias.cpp``, and
``block_scaling``, ``nvfp4``; ``swizzle``           ``csrc/quantizer.cpp``
``context_parallel``                                ``attention.cpp``: packed sequences of which each rank has chunks
``dropout``                                         ``dropout.cpp``
``gemm`` on ``tensor_cores``, ``kernel_choices``    ``gemm.cpp``; what other GPUs' kernels may do instead
``multi_tensor``                                    ``multi_tensor``: Adam, SGD, norms and scales of lists of tensors
``normalization``                                   ``normalization.cpp``
``partial_cast``                                    ``fp8_partial_cast.cpp``, ``nvfp4_2d_partial_cast.cpp``
``recipe``                                          ``recipe.cpp``, ``swizzle.cpp``
``rope``                                            ``apply_rope.cpp``
``router``                                          ``router.cpp``, ``permutation.cpp``, ``padding.cpp``
``softmax``                                         ``softmax.cpp``
``extension``, ``enums``, ``versions``              ``pybind.cpp``, ``misc.cpp``, as each version of TE has them
``triton``, ``mhc``                                 the functions of TE's Python that launch Triton kernels, and those
                                                    of these kernels that TE's own functions launch
``cuda``                                            ``torch.cuda``, of one emulated GPU
``distributed``                                     ``torch.distributed``, of ranks that talk by gloo
``graphs``                                          ``torch.cuda.CUDAGraph``: work that is recorded and done again
``loading``                                         how TE's Python, and a user's script, are read to mean the CPU
==================================================  ====================================================================
"""

from __future__ import annotations


class UserError(Exception):
    """A mistake in a user's pair, file, arguments or environment; says what is wrong, where, and what to do."""

    __module__ = "parity"  # as users import it, and read it in tracebacks
