"""Which tensors of a pass hold numbers of the storage dtype already, since they are what a rounding returned."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef


class Stored:
    """Tensors that were rounded, as long as they live and nothing is written to them.

    Views count as well, but for those made below autograd, as in a dispatch mode, which do not tell what is written.
    """

    def __init__(self) -> None:
        # By the storage's address, which another tensor may be given once this one is gone.
        self._kept: dict[int, tuple[StorageWeakRef, int]] = {}

    def add(self, x: Tensor) -> None:
        """Note that ``x`` was rounded."""
        if not _is_watched(x):
            return
        storage = x.untyped_storage()
        self._kept[storage.data_ptr()] = StorageWeakRef(storage), x._version

    def __contains__(self, x: Tensor) -> bool:
        if not _is_watched(x):
            return False
        storage, version = self._kept.get(x.untyped_storage().data_ptr(), (None, 0))
        return storage is not None and not storage.expired() and version == x._version


def _is_watched(x: Tensor) -> bool:
    """Whether somebody counts what is written to its memory, if it has one of its own at all."""
    return x.layout is torch.strided and not x.is_inference()
