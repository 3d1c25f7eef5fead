"""Answer what TransformerEngine asks about libraries and streams before it computes anything.

Answers for ``csrc/extensions/misc.cpp`` and the questions of ``pybind.cpp`` of TransformerEngine 2.20.2.
"""

from __future__ import annotations

from parity.cpu import cuda

__all__ = [
    "device_supports_multicast",
    "get_cublasLt_version",
    "get_cudnn_version",
    "get_num_cublas_streams",
    "get_stream_priority_range",
    "nvte_built_with_cublasmp",
    "ubuf_built_with_mpi",
]


def get_cublasLt_version() -> int:
    return cuda.cublaslt_version()


def get_cudnn_version() -> int:
    return cuda.cudnn_version()


def get_num_cublas_streams() -> int:
    return 4


def device_supports_multicast(device_id: int = -1) -> bool:
    return False


def get_stream_priority_range(device_id: int = -1) -> tuple[int, int]:
    return 0, 0


def ubuf_built_with_mpi() -> bool:
    return False


def nvte_built_with_cublasmp() -> bool:
    return False
