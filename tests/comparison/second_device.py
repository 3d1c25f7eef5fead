"""A device that PyTorch takes for an accelerator: its tensors cannot be mixed with tensors on the CPU.

It computes on the CPU, tensor for tensor. So it shows whether code that only ever ran on the CPU would run on a GPU:
all tensors that the code makes must be on the device of its inputs. A process cannot remove the device again.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils import backend_registration
from torch.utils._pytree import tree_leaves, tree_map

NAME = "second"
# PyTorch allows tensors on two devices in these operators: copies, and indexing with indices on the CPU.
_MAY_MIX = ("aten::copy_", "aten::_copy_from", "aten::_to_copy", "aten::index", "aten::_index_put_impl_")
_VIEWS = ("aten::view", "aten::_unsafe_view", "aten::_reshape_alias")
# PyTorch's own implementations of these share the storage of their argument.
_ALIASES = ("detach", "alias", "lift", "lift_fresh")
_COMPOSITE = ("CompositeExplicitAutograd", "CompositeExplicitAutogradNonFunctional")

# The CPU tensor for each storage on the device. None is ever dropped: PyTorch makes aliases that Python cannot see.
_on_cpu: dict[int, Tensor] = {}
_libraries: list[torch.library.Library] = []  # a library's kernels are removed when it is freed


class _Module:
    """The module from which PyTorch learns about the device."""

    def is_available(self) -> bool:
        return True

    def is_initialized(self) -> bool:
        return True

    def device_count(self) -> int:
        return 1

    def current_device(self) -> int:
        return 0

    def _is_in_bad_fork(self) -> bool:
        return False

    def manual_seed_all(self, seed: int) -> None: ...


_CpuGenerator = torch.Generator


class _Generator(_CpuGenerator):
    """A generator on the CPU, whatever device is asked for."""

    def __new__(cls, device: Any = "cpu") -> _Generator:
        return _CpuGenerator.__new__(cls, "cpu")


def is_possible() -> bool:
    """Return whether this PyTorch lets Python make a device."""
    return hasattr(backend_registration, "_setup_privateuseone_for_python_backend")


def install() -> torch.device:
    """Make the device known to PyTorch in this process, for good."""
    backend_registration._setup_privateuseone_for_python_backend(rename=NAME, backend_module=_Module())
    every, aten = (torch.library.Library(namespace, "IMPL") for namespace in ("_", "aten"))
    every.fallback(_compute, "PrivateUse1")
    for name, operator in _composites():
        aten.impl(name, functools.partial(_compute, operator), "PrivateUse1")
    _libraries.extend((every, aten))
    torch.Generator = _Generator  # type: ignore[misc]
    _tell_addresses()
    return torch.device(NAME, 0)


def _composites() -> Iterator[tuple[str, Any]]:
    """Yield, by name, the operators that PyTorch would compute from others into an empty tensor that it then resizes.

    They need kernels here, because no tensor on this device can change its shape.
    """
    for full_name in torch._C._dispatch_get_all_op_names():
        namespace, _, name = full_name.partition("::")
        packet, _, overload = name.partition(".")
        is_composite = any(torch._C._dispatch_has_kernel_for_dispatch_key(full_name, key) for key in _COMPOSITE)
        operator = getattr(getattr(torch.ops.aten, packet, None), overload or "default", None)
        if namespace == "aten" and is_composite and operator is not None and packet not in _ALIASES:
            yield name, operator


def _is_there(value: object) -> bool:
    return isinstance(value, Tensor) and value.device.type == NAME


def _fetched(value: Any) -> Any:
    return _on_cpu[value.untyped_storage()._cdata] if _is_there(value) else value


def _placed(raw: Tensor) -> Tensor:
    tensor = torch._C._acc.create_empty_tensor(raw.shape, raw.dtype)
    _on_cpu[tensor.untyped_storage()._cdata] = raw.detach()
    return tensor


def _compute(operator: Any, *args: Any, **kwargs: Any) -> Any:
    """Compute the operator on the CPU's tensors, and place its results on the device.

    Raises:
        RuntimeError: with PyTorch's message if its operands are on two devices.
    """
    name = operator._schema.name
    tensors = [value for value in tree_leaves((args, kwargs)) if isinstance(value, Tensor)]
    there = [tensor for tensor in tensors if _is_there(tensor)]
    if there and any(not _is_there(tensor) and tensor.dim() for tensor in tensors) and name not in _MAY_MIX:
        raise RuntimeError(f"Expected all tensors to be on the same device, but got {NAME}:0 and cpu in {name}")
    if name == "aten::_copy_from":
        _fetched(args[1]).copy_(_fetched(args[0]))
        return args[1]
    asked = kwargs.get("device")
    if asked is not None:
        kwargs = {**kwargs, "device": torch.device("cpu")}
    raw_args, raw_kwargs = tree_map(_fetched, args), tree_map(_fetched, kwargs)
    if name in _VIEWS and not raw_args[0].is_contiguous():  # tensors on the device claim to be contiguous
        raw_args = (raw_args[0].contiguous(), *raw_args[1:])
    result = operator(*raw_args, **raw_kwargs)
    if asked is not None and torch.device(asked).type == "cpu":
        return result
    own = {id(_fetched(tensor)): tensor for tensor in there}  # a tensor written to is returned as the same object

    def returned(value: Any) -> Any:
        return _placed(value) if isinstance(value, Tensor) else value

    return tree_map(lambda value: own[id(value)] if id(value) in own else returned(value), result)


def _tell_addresses() -> None:
    """Make storages and tensors return the addresses of those on the CPU; on the device all would be 0."""
    of_storage, of_tensor = torch.UntypedStorage.data_ptr, Tensor.data_ptr

    def storage_address(storage: torch.UntypedStorage) -> int:
        if storage.device.type == NAME:
            return _on_cpu[storage._cdata].untyped_storage().data_ptr()
        return of_storage(storage)

    torch.UntypedStorage.data_ptr = storage_address  # type: ignore[method-assign]
    Tensor.data_ptr = lambda tensor: of_tensor(_fetched(tensor))  # type: ignore[method-assign]
