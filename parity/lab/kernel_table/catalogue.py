"""All calls of the table, in its order, the choice of some, and the kernels that no call makes."""

from __future__ import annotations

from parity.lab.kernel_table import (
    activation_calls,
    attention_calls,
    cast_calls,
    core_attention_calls,
    gemm_calls,
    grouped_calls,
    layout_calls,
    loss_calls,
    mixture_calls,
    norm_calls,
    optimizer_calls,
    shard_calls,
)
from parity.lab.kernel_table.bench import KernelCall
from parity.user_error import UserError

# Kernels of the CPU's that no call of the table makes, each with the reason.


_QUERIES = "it computes nothing, but tells of the machine or makes room"
_RANDOM = "its random bits come from another generator"
_GROUPED = "it takes TE's grouped tensors, which need another cuBLAS or a Blackwell; not in the table yet"
_BLACKWELL = "it serves formats that need a Blackwell; not in the table yet"
NOT_CALLED: dict[str, str] = {
    **dict.fromkeys(("dropout_fwd", "dropout_bwd"), _RANDOM),
    **dict.fromkeys(
        (
            "create_empty_quantized_tensor",
            "device_supports_multicast",
            "get_cublasLt_version",
            "get_cudnn_version",
            "get_grouped_gemm_setup_workspace_size",
            "get_num_cublas_streams",
            "get_stream_priority_range",
            "nvte_built_with_cublasmp",
            "ubuf_built_with_mpi",
        ),
        _QUERIES,
    ),
    **dict.fromkeys(
        (
            "bgrad_group_quantize",
            "group_dequantize",
            "group_quantize",
            "group_requantize_inplace",
            "nvfp4_group_quantize_with_amax",
            "splits_to_offsets",
            "splits_to_offsets_multi",
            "te_general_grouped_gemm_for_discrete_in",
            "te_general_grouped_gemm_for_discrete_out",
            "te_general_grouped_gemm_for_grouped_tensor",
        ),
        _GROUPED,
    ),
    **dict.fromkeys(
        (
            "grouped_swizzle_for_gemm",
            "multi_tensor_compute_scale_inv_e8m0",
            "multi_tensor_swizzle_scales_for_gemm_",
            "multi_tensor_swizzle_scales_for_gemm_unchecked_",
            "mxfp8_scaling_compute_partial_amax",
            "mxfp8_scaling_partial_cast",
            "nvfp4_2d_multi_tensor_transpose",
            "nvfp4_2d_scale_transpose",
            "nvfp4_compute_global_scale",
            "nvfp4_data_transpose",
            "nvfp4_multi_tensor_2d_partial_cast",
            "nvfp4_multi_tensor_compute_partial_amax",
            "nvfp4_multi_tensor_fused_scale",
            "nvfp4_quantize_with_amax",
            "swizzle_scales_for_gemm_",
        ),
        _BLACKWELL,
    ),
    "fused_topk_with_score_function_qb_fwd": "quantile balancing, new in TE 2.20; not in the table yet",
    "multi_tensor_adam_fp8": "Adam on FP8 parameters; not in the table yet",
}


# All calls of the table, in its order, and the choice of some.


CALLS: tuple[KernelCall, ...] = (
    *gemm_calls.calls(),
    *norm_calls.calls(),
    *activation_calls.calls(),
    *attention_calls.calls(),
    *core_attention_calls.calls(),
    *cast_calls.calls(),
    *shard_calls.calls(),
    *grouped_calls.calls(),
    *mixture_calls.calls(),
    *layout_calls.calls(),
    *optimizer_calls.calls(),
    *loss_calls.calls(),
)


def select(keyword: str) -> tuple[KernelCall, ...]:
    """Return the calls whose name contains the keyword; an empty one is in all.

    Raises:
        UserError: if it is in none.
    """
    chosen = tuple(call for call in CALLS if keyword in call.name)
    if not chosen:
        raise UserError(f"no kernel call contains {keyword!r} in its name, such as {CALLS[0].name!r}")
    return chosen
