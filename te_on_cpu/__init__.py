"""TransformerEngine's kernels on a CPU: a ``transformer_engine_torch`` in PyTorch, and a loader for TE's Python.

Each module replaces one of TE's ``csrc/extensions`` and is named after it. Nothing of parity is imported here.

==================================================  ====================================================================
module                                              replaces, in TransformerEngine 2.20.2
==================================================  ====================================================================
``activation``                                      ``activation.cpp``, and the fused activations of ``bias.cpp``
``attention`` on ``flash``, ``flash_fp8`` and       ``attention.cpp``: cuDNN's fused attention, and the KV cache
``attention_problem``
``cast`` on ``formats``: ``float8``, ``mxfp8``,     ``cast.cpp``, ``transpose.cpp``, ``bias.cpp``, and
``block_scaling``, ``nvfp4``; ``swizzle``           ``csrc/quantizer.cpp``
``context_parallel``                                ``attention.cpp``: packed sequences that are split among ranks
``cudnn_frontend``                                  cuDNN's Python package ``cudnn``: graphs for ``score_mod``
``dropout``                                         ``dropout.cpp``
``expert_parallel``                                 ``ep.cpp``
``gemm`` on ``tensor_cores``, ``kernel_choices``    ``gemm.cpp``; options for the arithmetic of other kernels
``multi_tensor``                                    ``multi_tensor``: Adam, SGD, norms and scales of lists of tensors
``normalization``                                   ``normalization.cpp``
``partial_cast``                                    ``fp8_partial_cast.cpp``, ``nvfp4_2d_partial_cast.cpp``
``recipe``                                          ``recipe.cpp``, ``swizzle.cpp``
``rope``                                            ``apply_rope.cpp``
``router``                                          ``router.cpp``, ``permutation.cpp``, ``padding.cpp``
``softmax``                                         ``softmax.cpp``
``extension``, ``enums``, ``versions``              ``pybind.cpp``, ``misc.cpp``, as each version of TE has them
``linear_attention``, ``mla_projection``            operations of cuDNN's Python frontend that TE's Python calls
``triton``, ``mhc``                                 functions of TE's Python that launch Triton kernels, and Triton
                                                    kernels that TE's own functions launch
``cuda``                                            ``torch.cuda`` for one emulated GPU
``distributed``                                     ``torch.distributed`` for ranks that communicate through gloo
``graphs``                                          ``torch.cuda.CUDAGraph``: work that is recorded and replayed
``loading``                                         imports of TE's Python and users' scripts, to run on the CPU
==================================================  ====================================================================
"""

from __future__ import annotations


class EmulationError(Exception):
    """What is wrong with the environment in which TE is to run on the CPU, and what to do."""
