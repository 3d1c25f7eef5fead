"""The enumerations of ``transformer_engine_torch``, and the tensors of delayed scaling, ``FP8TensorMeta``.

Names and order are those of TransformerEngine 2.20.2 (``common/util/pybind_helper.h`` and
``csrc/extensions/pybind.cpp``), and the numbers of ``DType`` those of
``common/include/transformer_engine/transformer_engine.h``.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

import torch
from torch import Tensor


class DType(enum.IntEnum):
    """Element types of TE's kernels."""

    kByte = 0
    kInt32 = 2
    kFloat32 = 4
    kFloat16 = 5
    kBFloat16 = 6
    kFloat8E4M3 = 7
    kFloat8E5M2 = 8
    kFloat4E2M1 = 10


TORCH_DTYPE: dict[int, torch.dtype] = {
    DType.kByte: torch.uint8,
    DType.kInt32: torch.int32,
    DType.kFloat32: torch.float32,
    DType.kFloat16: torch.float16,
    DType.kBFloat16: torch.bfloat16,
    DType.kFloat8E4M3: torch.float8_e4m3fn,
    DType.kFloat8E5M2: torch.float8_e5m2,
}


FP8FwdTensors = enum.IntEnum(
    "FP8FwdTensors",
    "GEMM1_INPUT GEMM1_WEIGHT GEMM1_OUTPUT GEMM2_INPUT GEMM2_WEIGHT GEMM2_OUTPUT GEMM3_INPUT GEMM3_WEIGHT GEMM3_OUTPUT",
    start=0,
    module=__name__,
)
FP8BwdTensors = enum.IntEnum(
    "FP8BwdTensors",
    "GRAD_OUTPUT1 GRAD_INPUT1 GRAD_OUTPUT2 GRAD_INPUT2 GRAD_OUTPUT3 GRAD_INPUT3",
    start=0,
    module=__name__,
)
NVTE_Bias_Type = enum.IntEnum(
    "NVTE_Bias_Type", "NVTE_NO_BIAS NVTE_PRE_SCALE_BIAS NVTE_POST_SCALE_BIAS NVTE_ALIBI", start=0, module=__name__
)
NVTE_Mask_Type = enum.IntEnum(
    "NVTE_Mask_Type",
    "NVTE_NO_MASK NVTE_PADDING_MASK NVTE_CAUSAL_MASK NVTE_PADDING_CAUSAL_MASK NVTE_CAUSAL_BOTTOM_RIGHT_MASK "
    "NVTE_PADDING_CAUSAL_BOTTOM_RIGHT_MASK",
    start=0,
    module=__name__,
)
NVTE_Softmax_Type = enum.IntEnum(
    "NVTE_Softmax_Type", "NVTE_VANILLA_SOFTMAX NVTE_OFF_BY_ONE_SOFTMAX NVTE_LEARNABLE_SOFTMAX", start=0, module=__name__
)
NVTE_QKV_Format = enum.IntEnum(
    "NVTE_QKV_Format",
    "NVTE_SBHD NVTE_BSHD NVTE_THD NVTE_BSHD_2SBHD NVTE_SBHD_2BSHD NVTE_THD_2BSHD NVTE_THD_2SBHD NVTE_BHSD "
    "NVTE_QKV_Format_NOT_SET",
    start=0,
    module=__name__,
)
NVTE_QKV_Layout = enum.IntEnum(
    "NVTE_QKV_Layout",
    "NVTE_SB3HD NVTE_SBH3D NVTE_SBHD_SB2HD NVTE_SBHD_SBH2D NVTE_SBHD_SBHD_SBHD NVTE_BS3HD NVTE_BSH3D NVTE_BSHD_BS2HD "
    "NVTE_BSHD_BSH2D NVTE_BSHD_BSHD_BSHD NVTE_T3HD NVTE_TH3D NVTE_THD_T2HD NVTE_THD_TH2D NVTE_THD_THD_THD "
    "NVTE_SBHD_BSHD_BSHD NVTE_BSHD_SBHD_SBHD NVTE_THD_BSHD_BSHD NVTE_THD_SBHD_SBHD NVTE_Paged_KV_BSHD_BSHD_BSHD "
    "NVTE_Paged_KV_BSHD_SBHD_SBHD NVTE_Paged_KV_SBHD_BSHD_BSHD NVTE_Paged_KV_SBHD_SBHD_SBHD "
    "NVTE_Paged_KV_THD_BSHD_BSHD NVTE_Paged_KV_THD_SBHD_SBHD NVTE_BHSD_BHSD_BHSD NVTE_QKV_Layout_NOT_SET",
    start=0,
    module=__name__,
)
NVTE_Fused_Attn_Backend = enum.IntEnum(
    "NVTE_Fused_Attn_Backend", {"NVTE_No_Backend": -1, "NVTE_F16_arbitrary_seqlen": 1, "NVTE_FP8": 2}, module=__name__
)
NVTEScalingMode = enum.IntEnum(
    "NVTEScalingMode",
    "NVTE_DELAYED_TENSOR_SCALING NVTE_MXFP8_1D_SCALING NVTE_BLOCK_SCALING_1D NVTE_BLOCK_SCALING_2D "
    "NVTE_NVFP4_1D_SCALING NVTE_INVALID_SCALING",
    start=0,
    module=__name__,
)
NVTERoutingMapFormat = enum.IntEnum("NVTERoutingMapFormat", "BYTEMAP BITMAP_U8", start=0, module=__name__)
NVTEQBHistogramMode = enum.IntEnum("NVTEQBHistogramMode", "TWO_KERNEL FUSED_ATOMIC", start=0, module=__name__)
Float8BlockScaleTensorFormat = enum.IntEnum(
    "Float8BlockScaleTensorFormat", "GEMM_READY COMPACT INVALID", start=0, module=__name__
)
CommOverlapType = enum.IntEnum("CommOverlapType", "RS AG", start=0, module=__name__)
CommOverlapAlgo = enum.IntEnum(
    "CommOverlapAlgo",
    "BULK_OVERLAP_AG BULK_OVERLAP_RS SPLIT_PIPELINED_AG_P2P SPLIT_PIPELINED_RS SPLIT_PIPELINED_RS_P2P "
    "ATOMIC_GEMM_RS ATOMIC_GEMM_AG_P2P ATOMIC_GEMM_RS_P2P EXTERNAL_BULK_OVERLAP_AG",
    start=0,
    module=__name__,
)


@dataclass(eq=False)
class FP8TensorMeta:
    """Hold the state of delayed scaling for several tensors, in FP32, with one element or column for each tensor."""

    scale: Tensor | None = None
    scale_inv: Tensor | None = None
    amax_history: Tensor | None = None
