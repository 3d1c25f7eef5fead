"""Find out what this process may use of its machine: cores, free memory, and GPUs, and how processes share these.

NVIDIA's management library (NVML) lists the GPUs: it creates no CUDA context, needs no torch, and knows every MIG
slice, while CUDA shows a process only one.
"""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import util
from pathlib import Path
from typing import Any

from parity.user_error import UserError

_ROOT = Path("/")
_CGROUPS = (  # limit, use, and the entry of memory.stat for the file cache, which counts as used but can be reclaimed
    ("memory.max", "memory.current", "inactive_file"),
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "total_inactive_file"),
)


def cores() -> int:
    """Return how many processor cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def workers() -> int:
    """Return how many processes of pytest-xdist share the machine; 1 without it."""
    return int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))


def share_to_keep(free: int) -> int:
    """Return how many of these free bytes this process may keep for speed: an eighth, divided among the workers."""
    return free // (8 * workers())


def free_memory(root: Path = _ROOT) -> int | None:
    """Return the bytes that are available without swapping, within a container's limit; None if they are unknown.

    Args:
        root: the folder that holds ``proc`` and ``sys``.
    """
    told = [_of_machine(root), *(_of_container(root, *files) for files in _CGROUPS)]
    return min((free for free in told if free is not None), default=None)


def _of_machine(root: Path) -> int | None:
    text = _read_text(root / "proc/meminfo")
    kibibytes = [line.split()[1] for line in text.splitlines() if line.startswith("MemAvailable:")]
    return int(kibibytes[0]) * 1024 if kibibytes else None


def _of_container(root: Path, limit: str, use: str, cached: str) -> int | None:
    folder = root / "sys/fs/cgroup"
    allowed, used = _read_text(folder / limit).strip(), _read_text(folder / use).strip()
    if not (allowed.isdecimal() and used.isdecimal()):  # "max" where there is no limit
        return None
    statistics = _read_text((folder / limit).with_name("memory.stat"))
    yields = [int(line.split()[1]) for line in statistics.splitlines() if line.split()[:1] == [cached]]
    return max(int(allowed) - int(used) + sum(yields), 0)


def _read_text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except OSError:
        return ""


# The GPUs that a run may use, and how its processes share them.


CUDA_VISIBLE_DEVICES = "CUDA_VISIBLE_DEVICES"
PARITY_DEVICES = "PARITY_DEVICES"


@dataclass(frozen=True)
class Device:
    """A GPU, or a MIG slice of one.

    Attributes:
        identifier: its name in ``CUDA_VISIBLE_DEVICES``: an index, or the UUID of a GPU or of a slice.
        name: the GPU's product name.
        uuid: the UUID of the GPU or slice; empty if NVML could not be asked.
        free: bytes that were free when the device was listed; None if NVML could not be asked or does not know.
        slices: the slices of a GPU in MIG mode; a process uses one of them instead of the whole GPU.
        processes: how many processes may use it at once: 1 in the compute mode for exclusive processes; 0 if the
            compute mode forbids CUDA, or if the GPU is in MIG mode without slices; None for any number.
    """

    identifier: str
    name: str = "GPU"
    uuid: str = ""
    free: int | None = None
    slices: tuple[Device, ...] = ()
    processes: int | None = None


def chosen(environment: Mapping[str, str]) -> list[Device]:
    """Return the devices for a run: the visible devices that ``PARITY_DEVICES`` names, or all visible ones.

    ``PARITY_DEVICES`` numbers the visible devices from 0, as PyTorch does, or names them by UUID or its beginning.

    Raises:
        UserError: if ``PARITY_DEVICES`` names no device, or the same one twice; the message lists the devices.
    """
    devices = visible(environment)
    asked = environment.get(PARITY_DEVICES, "").strip()
    if not asked:
        return devices
    found = [_find_device(token.strip(), devices, asked) for token in asked.split(",")]
    if len(set(found)) < len(found):
        raise UserError(f"{PARITY_DEVICES} is {asked!r}, which names a device twice")
    return found


def _find_device(token: str, devices: Sequence[Device], asked: str) -> Device:
    if re.fullmatch(r"\d+", token):
        matches = list(devices[int(token) : int(token) + 1])
    else:
        matches = [device for device in devices if token and device.uuid.startswith(token)]
    if len(matches) == 1:
        return matches[0]
    there_are = "; ".join(f"{i}: {device.name} {device.uuid}".rstrip() for i, device in enumerate(devices))
    raise UserError(
        f"{PARITY_DEVICES} is {asked!r}, but {token!r} names {'several' if matches else 'none'} of the visible "
        f"devices, which are {there_are or 'none at all'}; list some of these numbers, or UUIDs, separated by commas"
    )


def visible(environment: Mapping[str, str]) -> list[Device]:
    """Return the devices in ``CUDA_VISIBLE_DEVICES``, in its order, without those that no process may use.

    As in CUDA, an empty value or one that names a device twice leaves none, and the first entry that names no device
    ends the list. If the variable is unset, every GPU is visible or, where a GPU is in MIG mode, each of its slices.
    """
    value = environment.get(CUDA_VISIBLE_DEVICES)
    listed = list_devices()
    if listed is None:
        return _counted_by_torch(value)
    if value is None:
        return _filter_usable(usable for device in listed for usable in device.slices or (device,))
    found: list[Device] = []
    for token in (part.strip() for part in value.split(",")):
        device = _known_to_cuda(token, listed)
        if device is None:
            break
        found.append(device)
    return _filter_usable(found) if len({device.uuid for device in found}) == len(found) else []


def _filter_usable(devices: Iterable[Device]) -> list[Device]:
    return [device for device in devices if device.processes != 0]


def _known_to_cuda(token: str, listed: Sequence[Device]) -> Device | None:
    """Return the device that CUDA uses for an entry of ``CUDA_VISIBLE_DEVICES``: in MIG mode, a GPU's first slice.

    An index stays the device's identifier, because CUDA may count GPUs of different models in another order than NVML,
    and the user meant CUDA's.
    """
    if re.fullmatch(r"\d+", token):
        if int(token) >= len(listed):
            return None
        device = listed[int(token)]
        first = device.slices[0] if device.slices else device
        return Device(token, first.name, first.uuid, first.free, processes=first.processes)
    everything = [usable for device in listed for usable in (device, *device.slices)]
    matches = [device for device in everything if token and device.uuid.startswith(token)]
    return matches[0] if len(matches) == 1 else None


def list_devices() -> list[Device] | None:
    """Return every GPU of the machine, from NVML; None if NVML is not available.

    NVML needs the package nvidia-ml-py and a library of NVIDIA's driver, which a container may lack although CUDA works
    in it.
    """
    try:
        import pynvml
    except ModuleNotFoundError:
        return None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    try:
        handles = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())]
        return [_make_device(pynvml, handle, _list_slices(pynvml, handle)) for handle in handles]
    except pynvml.NVMLError:  # such as a GPU that has fallen off the bus
        return None
    finally:
        pynvml.nvmlShutdown()


def _list_slices(pynvml: Any, gpu: Any) -> tuple[Device, ...]:
    """Return the slices in the order of their indices, among which removed slices leave gaps."""
    try:
        count = pynvml.nvmlDeviceGetMaxMigDeviceCount(gpu)
    except pynvml.NVMLError:  # the GPU has no MIG mode
        return ()
    slices = []
    for i in range(count):
        with contextlib.suppress(pynvml.NVMLError):  # no slice has this index
            slices.append(_make_device(pynvml, pynvml.nvmlDeviceGetMigDeviceHandleByIndex(gpu, i)))
    return tuple(slices)


def _make_device(pynvml: Any, handle: Any, slices: tuple[Device, ...] = ()) -> Device:
    uuid = pynvml.nvmlDeviceGetUUID(handle)
    processes = None if slices else _read_process_limit(pynvml, handle)
    return Device(uuid, pynvml.nvmlDeviceGetName(handle), uuid, _read_free_memory(pynvml, handle), slices, processes)


def _read_process_limit(pynvml: Any, handle: Any) -> int | None:
    """Return how many processes may use a device, see ``Device``; None if the driver does not say, as for a slice."""
    try:
        mode = pynvml.nvmlDeviceGetComputeMode(handle)
    except pynvml.NVMLError:
        return None
    if mode == pynvml.NVML_COMPUTEMODE_PROHIBITED or _is_in_mig_mode(pynvml, handle):
        return 0
    return 1 if mode == pynvml.NVML_COMPUTEMODE_EXCLUSIVE_PROCESS else None


def _is_in_mig_mode(pynvml: Any, handle: Any) -> bool:
    try:
        current, _ = pynvml.nvmlDeviceGetMigMode(handle)
    except pynvml.NVMLError:  # the GPU has no such mode
        return False
    return bool(current == pynvml.NVML_DEVICE_MIG_ENABLE)


def _read_free_memory(pynvml: Any, handle: Any) -> int | None:
    """Return the free bytes; None for a GPU without its own memory, or one of which a container may use only slices."""
    try:
        return int(pynvml.nvmlDeviceGetMemoryInfo(handle).free)
    except pynvml.NVMLError:
        return None


def _counted_by_torch(value: str | None) -> list[Device]:
    """Return as many devices as PyTorch counts, for want of NVML. Their free memory stays unknown."""
    import torch

    count = torch.cuda.device_count()
    names = [str(i) for i in range(count)] if value is None else [token.strip() for token in value.split(",")]
    return [Device(name) for name in names[:count]]


def spread(devices: Sequence[Device], processes: int) -> list[Device]:
    """Return a device for each process, chosen in turn so that each process gets the most free memory.

    Raises:
        UserError: if the devices do not allow so many processes.
    """
    taken = [0] * len(devices)
    places: list[Device] = []
    for _ in range(processes):
        open_ones = [i for i, device in enumerate(devices) if device.processes is None or taken[i] < device.processes]
        if not open_ones:
            raise UserError(
                f"{processes} workers are asked for, but the GPUs take {len(places)}: those in the compute mode for "
                f"exclusive processes take one each; give -n {len(places)}, or change the mode (nvidia-smi -c DEFAULT)"
            )
        best = max(open_ones, key=lambda i: (devices[i].free or 1) / (taken[i] + 1))
        taken[best] += 1
        places.append(devices[best])
    return places


# The output of ``nvidia-smi``, the command of NVIDIA's driver.


_LONGEST_ANSWER = 20  # seconds


def ask(arguments: Sequence[str]) -> str | None:
    """Return the standard output of ``nvidia-smi``; None if it is missing, fails, or takes too long."""
    try:
        done = subprocess.run(
            ["nvidia-smi", *arguments], capture_output=True, text=True, timeout=_LONGEST_ANSWER, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout


# The free memory of the GPU in use, or of the machine.


def free() -> int | None:
    """Return the bytes that are free on the GPU in use, else on the machine; None if they are unknown."""
    import torch  # the plugin asks for GPUs before torch is imported

    if torch.cuda.is_initialized():
        return torch.cuda.mem_get_info()[0]
    return free_memory()


def in_words(number: int | None) -> str:
    """Return a number of bytes as text, such as ``3.2 GiB``."""
    return "an unknown amount" if number is None else f"{number / 2**30:.1f} GiB"


# Find out whether TransformerEngine's compiled kernels are installed, without importing them or torch.


def is_installed() -> bool:
    """Return whether the module ``transformer_engine_torch`` exists, by itself or inside TE, as in a source build."""
    return util.find_spec("transformer_engine_torch") is not None or _is_shipped_inside()


def _is_shipped_inside() -> bool:
    spec = util.find_spec("transformer_engine")
    roots = spec.submodule_search_locations if spec else None
    return any(any(Path(root).glob("**/transformer_engine_torch*.so")) for root in roots or ())
