"""Notice side effects of a module, and undo changes that a pair's code makes to its process.

A module may remember something from one call to the next, detach an output, draw random numbers, or write to its
inputs.
"""

from __future__ import annotations

import builtins
import copy
import ctypes
import functools
import gc
import os
import random
import resource
import signal
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, MutableMapping, MutableSequence, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, library, nn, overrides
from torch.nn.modules import module as modules
from torch.utils import _device as devices
from torch.utils import _python_dispatch as dispatch
from torch.utils._device import DeviceContext

from parity.shown import one_line

# Find attributes that a call changes, which modules remember besides parameters and buffers.


_OF_EVERY_MODULE = frozenset(vars(nn.Module()))

Attributes = dict[str, tuple[Any, int]]


def attributes_of(module: nn.Module) -> Attributes:
    """Return the present values of each module's own attributes, by ``name of the module.attribute``."""
    return {
        f"{name}.{key}".removeprefix("."): (value, _read_change_mark(value))
        for name, part in module.named_modules()
        for key, value in vars(part).items()
        if key not in _OF_EVERY_MODULE
    }


def changed_attributes(module: nn.Module, before: Attributes) -> list[str]:
    """Return the names of attributes that are new or have changed.

    A list, dict or set also counts as changed if its length has changed, and a tensor if it was written to.
    """
    return [
        name
        for name, (value, mark) in attributes_of(module).items()
        if name not in before or before[name][0] is not value or before[name][1] != mark
    ]


def _read_change_mark(value: Any) -> int:
    if isinstance(value, Tensor):
        return 0 if value.is_inference() else value._version
    return len(value) if isinstance(value, (list, Mapping, set)) else 0


# Find outputs that have a gradient in only one of the two modules.
#
# A loss beside a module's other outputs, such as a router's, may add less to every gradient than rounding does. If it
# is detached, no number shows it.


def detached_by_candidate_alone(reference: Sequence[str], candidate: Sequence[str]) -> str:
    """Return why a candidate with detached outputs is not a drop-in replacement, or an empty text if it has none.

    Args:
        reference: names of the reference's outputs that require no gradient.
        candidate: names of the candidate's outputs that require no gradient.
    """
    detached = [name for name in candidate if name not in reference]
    if not detached:
        return ""
    names, have, they = (", ".join(detached), *(("have", "they are") if len(detached) > 1 else ("has", "it is")))
    return (
        f"{names} of the candidate {have} no gradient, but the reference's {have} one: {they} detached, or computed "
        "under no_grad, so no weight is trained"
    )


# Save and restore the state of PyTorch's random generators, and draw other numbers than a comparison.


_OTHER_SEED = 407


@dataclass(frozen=True)
class RandomState:
    """The state of PyTorch's generators, from which a pass draws its random numbers.

    Attributes:
        cpu: as ``torch.get_rng_state`` returns it.
        gpu: as ``torch.cuda.get_rng_state`` returns it; None without a GPU.
    """

    cpu: Tensor
    gpu: Tensor | None

    @classmethod
    def now(cls, device: torch.device) -> RandomState:
        """Return the present state of the generators of the CPU and of the kernels' device."""
        return cls(torch.get_rng_state(), torch.cuda.get_rng_state(device) if device.type == "cuda" else None)

    def restore(self, device: torch.device) -> None:
        torch.set_rng_state(self.cpu)
        if self.gpu is not None:
            torch.cuda.set_rng_state(self.gpu, device)

    def is_as(self, other: RandomState) -> bool:
        """Return whether nothing was drawn between this state and another one of the same device."""
        if self.gpu is not None and other.gpu is not None and not torch.equal(self.gpu, other.gpu):
            return False
        return torch.equal(self.cpu, other.cpu)


def kept(device: torch.device) -> AbstractContextManager[None]:
    """Return a context after which the state of the random generators is restored."""
    return torch.random.fork_rng(devices=[device] if device.type == "cuda" else [])


@contextmanager
def other_numbers(device: torch.device) -> Iterator[None]:
    """Make random numbers differ from those of a comparison, but be the same each time, within the context."""
    with kept(device):
        # Without a GPU, PyTorch would record each seed, with the stack, in case a GPU appears later.
        (torch.manual_seed if device.type == "cuda" else torch.default_generator.manual_seed)(_OTHER_SEED)
        yield


# Find inputs that only one of the two modules writes to, which outputs alone do not show.


def written_by_candidate_alone(reference: Sequence[str], candidate: Sequence[str]) -> str:
    """Return why a candidate that changes inputs is not a drop-in replacement, or an empty text if it changes none.

    Args:
        reference: names of the inputs that the reference changes in place.
        candidate: names of the inputs that the candidate changes in place.
    """
    changed = _join_unshared_names(candidate, reference)
    return changed and (
        f"the candidate changes {changed} in place, but the reference does not: whatever reads it afterwards, such as "
        "a residual, gets other numbers; let the candidate compute on a copy"
    )


def by_reference_alone(reference: Sequence[str], candidate: Sequence[str]) -> str:
    """Return a remark on inputs that only the reference changes, or an empty text; arguments as above."""
    changed = _join_unshared_names(reference, candidate)
    return changed and (
        f"the reference changes {changed} in place, but the candidate does not; code that reads it afterwards was not "
        "compared"
    )


def _join_unshared_names(names: Sequence[str], others: Sequence[str]) -> str:
    return ", ".join(name for name in names if name not in others)


# Undo the changes that code makes to its process, and report them, so that they do not affect other pairs.
#
# The table below lists the state of a process that a module's numbers may depend on, with the name of each entry and
# functions that read and write it. All entries are read before a pair's code runs and again afterwards, and those that
# have changed are restored. What modules and classes hold is watched by identity, whatever its name.


# Settings for how FP32 products, convolutions and recurrent layers are computed, one for each operation of a backend.


# Backend and operation of each ``fp32_precision`` of PyTorch 2.9 and later; "none" means the first one above it that is
# set. Older versions have only the two older flags.
FP32_SETTINGS = (
    ("generic", "all"),
    ("cuda", "all"),
    ("mkldnn", "all"),
    ("cuda", "matmul"),
    ("cuda", "conv"),
    ("cuda", "rnn"),
    ("mkldnn", "matmul"),
    ("mkldnn", "conv"),
    ("mkldnn", "rnn"),
)


def has_fp32_settings() -> bool:
    """Return whether this version of PyTorch has ``fp32_precision`` settings."""
    return hasattr(torch._C, "_set_fp32_precision_setter")


def fp32_setting(place: tuple[str, str]) -> str:
    """Return the setting of a backend's operation."""
    return torch._C._get_fp32_precision_getter(*place)


def set_fp32(place: tuple[str, str], setting: str) -> None:
    """Change the setting of a backend's operation; ``torch.backends.mkldnn.fp32_precision`` sets the generic one."""
    torch._C._set_fp32_precision_setter(*place, setting)


# The table.


@dataclass(frozen=True)
class _Entry:
    """An entry of the table: a piece of the process's state.

    Attributes:
        name: its name in messages.
        read: returns its value; the entry has changed if a later value is not equal.
        write: sets it to such a value.
        shown: whether messages show the values.
    """

    name: str
    read: Callable[[], Any]
    write: Callable[[Any], object]
    shown: bool = True

    def changes(self, before: Any, now: Any) -> list[str]:
        """Return descriptions of what has changed."""
        if before == now:
            return []
        return [f"{self.name} (from {before} to {now})" if self.shown else self.name]

    def undo(self, before: Any, now: Any) -> None:
        """Restore the value from before."""
        self.write(before)

    def merged(self, value: Any, first: Any, last: Any) -> Any:
        """Return the value, or ``last`` if that differs from ``first``."""
        return last if self.changes(first, last) else value


class _Growing(_Entry):
    """An entry that holds several things, to which libraries add when they are imported; none may be removed."""

    def changes(self, before: Any, now: Any) -> list[str]:
        return [] if all(one in now for one in before) else [self.name]


@dataclass(frozen=True)
class _Names(_Entry):
    """An entry that consists of many names, each of which is reported by itself.

    Attributes:
        write: is called with a name and its value, which is ``_NONE`` for a name that the value from before lacks.
        told: returns a name as messages show it.
    """

    told: Callable[[str], str] = str

    def changes(self, before: Any, now: Any) -> list[str]:
        return [self.name.format(self.told(name)) for name in self._list_changed_names(before, now)]

    def undo(self, before: Any, now: Any) -> None:
        for name in self._list_changed_names(before, now):
            self.write((name, before.get(name, _NONE)))

    def merged(self, value: Any, first: Any, last: Any) -> Any:
        return value | {name: last.get(name, _NONE) for name in self._list_changed_names(first, last)}

    def _list_changed_names(self, before: dict[str, Any], now: dict[str, Any]) -> list[str]:
        return [name for name in now | before if now.get(name, _NONE) is not before.get(name, _NONE)]


_NONE = object()
# Prefixes of variables that PyTorch and Triton set themselves.
_OF_LIBRARIES = ("CUDA_MODULE_LOADING", "TORCHINDUCTOR_", "TRITON_")


def _make_flag_entry(name: str, owner: Any, attribute: str) -> _Entry:
    return _Entry(name, partial(getattr, owner, attribute), partial(setattr, owner, attribute))


def _make_dict_entry(name: str, held: MutableMapping[Any, Any]) -> _Entry:
    def write(content: dict[Any, Any]) -> None:
        held.clear()
        held.update(content)

    return _Entry(name, lambda: dict(held), write, shown=False)


def _make_list_entry(name: str, held: Callable[[], MutableSequence[Any]]) -> _Entry:
    def write(content: list[Any]) -> None:
        held()[:] = content

    return _Entry(name, lambda: list(held()), write, shown=False)


def _make_environment_entry() -> _Names:
    def read() -> dict[str, str]:
        # Equal texts must be the same object, because they are compared by identity.
        return {key: sys.intern(value) for key, value in os.environ.items() if not key.startswith(_OF_LIBRARIES)}

    def write(entry: tuple[str, Any]) -> None:
        name, value = entry
        if value is _NONE:
            del os.environ[name]
        else:
            os.environ[name] = value

    return _Names("the environment variable {}", read, write)


# What modules and classes hold: functions, classes and modules, each compared by identity with what it was at first.


# Packages that compute, with their modules, classes and tables of functions.
_COMPUTE = (
    "torch",
    "transformer_engine",
    "transformer_engine_torch",
    "te_on_cpu",
    "parity",
    "numpy",
    "scipy",
    "einops",
)
# Parts of PyTorch that compile, export, measure and sample, which no comparison in this process calls.
_BESIDES = tuple(
    f"torch.{name}."
    for name in (
        *(
            "_dynamo",
            "_functorch",
            "_higher_order_ops",
            "_inductor",
            "_numpy",
            "_subclasses",
            "ao",
            "compiler",
            "distributed",
        ),
        *("distributions", "export", "fx", "jit", "onnx", "package", "profiler", "quantization", "testing"),
        *("utils.data", "utils.tensorboard"),
    )
)
# Compiled packages, whose classes cannot be changed or hold no arithmetic.
_COMPILED = ("numpy", "scipy", "torch._C")
# Of these packages, only the modules count. pytest exchanges functions of ``warnings`` around each test.
_CALLED = {"pytest", *sys.stdlib_module_names} - {"warnings"}
# These replace methods of PyTorch's classes when a class is first used, or something is first compiled.
_REPLACE = ("torch.optim.optimizer", "torch._dynamo.")
_GONE = object()
# A dict whose version is the same has not changed. PyTorch's guards have this function, but no stable name for it.
_version = getattr(torch._C._dynamo.guards, "dict_version", lambda held: tuple(map(id, held.values())))


@dataclass(frozen=True)
class _Namespace:
    """The names of a module or a class, or the keys of a dict.

    Attributes:
        name: its name in messages.
        owner: the module, class or dict.
        held: its dict.
        first: what it held when it was first seen.
    """

    name: str
    owner: Any
    held: dict[str, Any]
    first: dict[str, Any]

    def others(self) -> Iterator[tuple[str, Any]]:
        """Yield each name that has another value than at first, and the value, which is ``_GONE`` if it was deleted.

        A new name counts only if it hides another one: modules get submodules and lazy attributes, and libraries add
        methods to classes, such as transformers' ``Module.smart_apply``. PyTorch sets ``torch.Storage`` with the
        default dtype, and pytest sets ``sys.last_type`` after a failure. What libraries set when it is first used, such
        as a class in the place of None, or a method that PyTorch wraps, is the first of its kind, too.
        """
        for name in self.held | self.first:
            now, first = self.held.get(name, _GONE), self.first.get(name, _GONE)
            if first is now or name in ("Storage", "last_type") or not (_is_code(now) or _is_code(first)):
                continue
            if _is_late(now, first) or (first is _GONE and not self._hides_other_name(name)):
                self.first[name] = now
            else:
                yield name, now

    def _hides_other_name(self, name: str) -> bool:
        if isinstance(self.owner, type):
            return name.startswith("__") or hasattr(self.owner.__base__, name)
        # PyTorch keeps an operator where it is first looked up, even one called "range", and points to it from C++.
        is_code = self.owner is not self.held and not isinstance(self.owner, type(torch.ops.aten))
        return is_code and name in _BUILTINS

    def set(self, name: str, value: Any) -> None:
        if isinstance(self.owner, type):
            delattr(self.owner, name) if value is _GONE else setattr(self.owner, name, value)
        else:
            self.held[name] = value
            if value is _GONE:
                del self.held[name]


def _is_code(value: Any) -> bool:
    """Return whether a value is code. Data changes as libraries compute: counters, caches, what is made when needed."""
    return callable(value) or isinstance(value, ModuleType) or hasattr(type(value), "__get__")


def _is_late(now: Any, first: Any) -> bool:
    """Return whether a library itself has set a value, when it was first needed."""
    home = vars(now) if isinstance(now, ModuleType) else getattr(now, "__globals__", {})
    home = home.get("__name__") or str(getattr(now, "__module__", ""))
    return home.startswith(_REPLACE) or (first is None and home.startswith(_COMPUTE))


class _Namespaces:
    """All namespaces that computations go through. Those of a module are added once it has been imported."""

    def __init__(self) -> None:
        self._all: list[_Namespace] = []
        self._versions: list[Any] = []
        self._seen: dict[int, dict[str, Any]] = {}
        self._modules = 0

    def read(self) -> dict[Any, Any]:
        """Return what differs from when it was first seen, by the namespace's number and the name in it."""
        if len(sys.modules) != self._modules:
            self._modules = len(sys.modules)
            for name, module in list(sys.modules.items()):
                if isinstance(module, ModuleType):
                    self._add_namespace(name, module, vars(module))
        changed: dict[Any, Any] = {}
        versions = list(map(_version, self._seen.values()))
        for index, version in enumerate(versions) if versions != self._versions else ():
            if version != self._versions[index]:
                others = {(index, name): value for name, value in self._all[index].others()}
                changed |= others
                self._versions[index] = self._versions[index] if others else version
        return changed

    def write(self, entry: tuple[Any, Any]) -> None:
        """Set a name to a value that ``read`` returned, or to its first one."""
        (index, name), value = entry
        one = self._all[index]
        one.set(name, one.first.get(name, _GONE) if value is _NONE else value)

    def told(self, place: Any) -> str:
        return f"{self._all[place[0]].name}.{place[1]}"

    def _add_namespace(self, name: str, owner: Any, held: dict[str, Any]) -> None:
        """Add a namespace of a package that computes, with those that a module of it holds, or a module of Python."""
        package = name.partition(".")[0]
        computes = package in _COMPUTE and not f"{name}.".startswith(_BESIDES)
        if id(held) in self._seen or not (computes or name in _CALLED or package == "_pytest"):
            return
        self._seen[id(held)] = held
        self._all.append(_Namespace(name, owner, held, dict(held)))
        self._versions.append(_version(held))
        for key, value in list(held.items()) if computes and isinstance(owner, ModuleType) else ():
            inner = f"{name}.{key}"
            if isinstance(value, type):
                if str(vars(value).get("__module__")).startswith(_COMPUTE) and not name.startswith(_COMPILED):
                    self._add_namespace(inner, value, gc.get_referents(vars(value))[0])
            elif isinstance(value, dict) and not key.startswith("__") and any(map(_is_code, value.values())):
                self._add_namespace(inner, value, value)
            elif isinstance(value, ModuleType) and value.__name__ not in sys.modules:
                self._add_namespace(value.__name__, value, vars(value))


# PyTorch's modes and hooks, which a pair may enter and never leave.


def _make_mode_entries() -> Iterator[_Entry]:
    """Yield the entries for PyTorch's stacks of modes, for hooks of all modules, and for kernels of operators."""
    hooks: Any = torch._C._autograd
    for kind, stack, leave in (
        ("torch function modes", _function_modes, torch._C._pop_torch_function_stack),
        ("torch dispatch modes", dispatch._get_current_dispatch_mode_stack, _leave_dispatch_mode),
        (
            "hooks of saved tensors",
            partial(hooks._top_saved_tensors_default_hooks, True),
            hooks._pop_saved_tensors_default_hooks,
        ),
    ):
        yield _Entry(kind, stack, partial(_leave_modes, stack, leave), shown=False)
    seen = set()
    for package, module in list(sys.modules.items()):
        for name, held in list(vars(module).items()) if package.startswith("torch.") else ():
            if name.startswith("_global_") and isinstance(held, MutableMapping) and id(held) not in seen:
                seen.add(id(held))
                yield _make_dict_entry(f"hooks of all modules ({name.removeprefix('_global_')})", held)
    yield _make_flag_entry(
        "whether hooks of all modules are full backward hooks", modules, "_global_is_full_backward_hook"
    )
    yield _Kernels("kernels of PyTorch's operators", lambda: set(library._impls), print)


def _leave_modes(stack: Callable[[], Any], leave: Callable[[], object], before: Any) -> None:
    """Leave the modes that have been entered since."""
    while (now := stack()) and now != before:
        leave()


def _function_modes() -> list[Any]:
    return [mode for mode in overrides._get_current_function_mode_stack() if not isinstance(mode, DeviceContext)]


def _default_device() -> torch.device | None:
    stack = overrides._get_current_function_mode_stack()
    return next((mode.device for mode in reversed(stack) if isinstance(mode, DeviceContext)), None)


def _leave_dispatch_mode() -> None:
    last = dispatch._get_current_dispatch_mode_stack()[-1]
    torch._C._pop_torch_dispatch_stack(getattr(last, "_mode_key", None))


def _set_default_device(device: torch.device | None) -> None:
    """Set the default device, and leave every ``with torch.device(...)``."""
    others = _function_modes()
    while torch._C._len_torch_function_stack():
        torch._C._pop_torch_function_stack()
    for mode in others:
        torch._C._push_on_torch_function_stack(mode)
    torch._GLOBAL_DEVICE_CONTEXT.device_context = devices.CURRENT_DEVICE = None
    torch.set_default_device(device)


class _Kernels(_Entry):
    """The kernels that Python code has registered for PyTorch's own operators."""

    def changes(self, before: set[str], now: set[str]) -> list[str]:
        return [f"the kernel of {key}" for key in now - before if key.startswith("aten/")]

    def undo(self, before: set[str], now: set[str]) -> None:
        for one in gc.get_objects():
            if type(one) is library.Library and one._op_impls & now - before:
                one._destroy()


# TE's debug features, which nvdlfw_inspect turns on for the whole process.


# Each attribute by its module and class in nvdlfw_inspect, with its value before anything is turned on.
_OF_DEBUGGER: tuple[tuple[str, str, str, Any], ...] = (
    ("api", "", "DEBUG_MANAGER", None),
    ("config_manager", "ConfigManager", "configs", []),
    ("config_manager", "ConfigManager", "layer_name_to_config_cache", {}),
    ("logging", "MetricLogger", "enabled_loggers", []),
    ("registry", "Registry", "data", {}),
)


class _DebugFeatures(_Entry):
    """The configuration of nvdlfw_inspect that is in force, with what it loaded; the manager stands for all of it."""

    def changes(self, before: list[Any], now: list[Any]) -> list[str]:
        return [self.name] if before[0] is not now[0] else []


def _read_debugger() -> list[Any]:
    """Return copies of what nvdlfw_inspect holds, in the order of ``_OF_DEBUGGER``."""
    found = [getattr(owner, name, usual) for owner, name, usual in _find_debugger()]
    return [found[0], *map(copy.copy, found[1:])]


def _write_debugger(held: list[Any]) -> None:
    for (owner, name, _), value in zip(_find_debugger(), [held[0], *map(copy.copy, held[1:])], strict=True):
        if hasattr(owner, name):
            setattr(owner, name, value)


def _find_debugger() -> Iterator[tuple[Any, str, Any]]:
    """Yield the owner of each attribute, None if it is not loaded, its name, and its usual value."""
    for module, place, name, usual in _OF_DEBUGGER:
        loaded: Any = sys.modules.get(f"nvdlfw_inspect.{module}")
        yield getattr(loaded, place, None) if place else loaded, name, usual


# Settings of PyTorch's arithmetic, and of Python.


def _make_setting_entries() -> Iterator[_Entry]:
    """Yield an entry for each setting of PyTorch that one function reads and another one sets."""
    others = "deterministic_algorithms", *(("tf32",) if has_fp32_settings() else ())
    for name in [name for name in dir(torch._C) if name.startswith("_set_") and not name.endswith(others)]:
        what, sets = name.removeprefix("_set_"), getattr(torch._C, name)
        attention = f"_get_{what.removeprefix('sdp_use_')}_sdp_enabled"
        for reads in (f"_get_{what}", f"_is_{what}", f"_{what}", attention):
            if hasattr(torch._C, reads):
                yield _Entry(f"torch's {what}", getattr(torch._C, reads), partial(_call_setter, sets))
                break


def _call_setter(sets: Callable[..., object], value: Any) -> None:
    sets(*value) if isinstance(value, tuple) else sets(value)


def _make_arithmetic_entries() -> Iterator[_Entry]:
    """Yield the entries for the settings of PyTorch's arithmetic."""
    yield _Entry("torch's default dtype", torch.get_default_dtype, torch.set_default_dtype)
    yield _Entry("torch's default device", _default_device, _set_default_device)
    yield _Entry("the grad mode", torch.is_grad_enabled, torch.set_grad_enabled)
    yield _Entry("the number of threads", torch.get_num_threads, torch.set_num_threads)
    yield _Entry("whether denormal numbers are flushed to 0", _flushes_denormals, torch.set_flush_denormal)
    libm: Any = ctypes.CDLL(None)
    yield _Entry("the rounding of the processor", lambda: libm.fegetround(), lambda mode: libm.fesetround(mode))
    yield _Entry(
        "deterministic algorithms",
        lambda: (torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()),
        lambda modes: torch.use_deterministic_algorithms(modes[0], warn_only=modes[1]),
    )
    yield _Entry("the detection of anomalies", torch.is_anomaly_enabled, torch.autograd.set_detect_anomaly)
    yield from _make_setting_entries()
    for place in FP32_SETTINGS if has_fp32_settings() else ():  # after the entries that set some of them
        yield _Entry(f"fp32_precision of {' '.join(place)}", partial(fp32_setting, place), partial(set_fp32, place))
    for kind in ("cpu", "cuda"):
        on, dtype = partial(torch.is_autocast_enabled, kind), partial(torch.get_autocast_dtype, kind)
        yield _Entry(f"autocast on {kind}", on, partial(torch.set_autocast_enabled, kind))
        yield _Entry(f"autocast's dtype on {kind}", dtype, partial(torch.set_autocast_dtype, kind))
    yield _make_environment_entry()
    yield _Entry("what NumPy does with overflow and the like", _numpy_errors, _set_numpy_errors)


def _make_surrounding_entries() -> Iterator[_Entry]:
    """Yield the entries for the surroundings of Python code, which pytest and other plugins change as well."""
    yield _Entry("the current folder", os.getcwd, os.chdir, shown=False)
    yield _make_list_entry("sys.path", lambda: sys.path)
    yield _Growing(
        "sys.meta_path",
        lambda: list(sys.meta_path),
        lambda before: sys.meta_path.extend(one for one in before if one not in sys.meta_path),
    )
    yield _make_list_entry("the filters of warnings", lambda: warnings.filters)  # type: ignore[arg-type, return-value]
    yield _Entry("the recursion limit", sys.getrecursionlimit, sys.setrecursionlimit)
    yield _Entry("the mask of new files", _read_umask, os.umask, shown=False)
    for one in signal.Signals:
        yield _Entry(f"the handler of {one.name}", partial(signal.getsignal, one), partial(signal.signal, one), False)
    for name, kind in vars(resource).items():
        if name.startswith("RLIMIT_"):
            yield _Entry(f"the limit {name}", partial(resource.getrlimit, kind), partial(resource.setrlimit, kind))
    yield _Entry("an alarm that rings later", _has_alarm, _set_alarm, shown=False)
    yield _Entry(
        "whether Python collects garbage", gc.isenabled, lambda enabled: gc.enable() if enabled else gc.disable()
    )
    for stream in _STREAMS:
        yield _Entry(f"sys.{stream}", partial(getattr, sys, stream), partial(setattr, sys, stream), shown=False)


def _numpy_errors() -> dict[str, str] | None:
    numpy = sys.modules.get("numpy")
    return None if numpy is None else numpy.geterr()


def _set_numpy_errors(errors: dict[str, str] | None) -> None:
    if errors is not None:
        sys.modules["numpy"].seterr(**errors)


def _read_umask() -> int:
    mask = os.umask(0o077)  # it can only be read by being set
    os.umask(mask)
    return mask


def _has_alarm() -> bool:
    return signal.getitimer(signal.ITIMER_REAL)[0] > 0


def _set_alarm(is_set: bool) -> None:
    """Cancel an alarm that a pair has set. One that a pair has cancelled is lost, because its time is not known."""
    if not is_set:
        signal.setitimer(signal.ITIMER_REAL, 0)


def _flushes_denormals() -> bool:
    return bool((torch.full((), 5e-324, dtype=torch.float64, device="cpu") * 1.0).item() == 0.0)


@functools.cache
def _find_known_entries() -> tuple[tuple[_Entry, ...], tuple[_Entry, ...]]:
    """Return the entries that this version of PyTorch has: those that numbers depend on, and the others."""
    names = _Namespaces()
    code = _Names("{}", names.read, names.write, told=names.told)
    features = _DebugFeatures("nvdlfw_inspect's configuration", _read_debugger, _write_debugger)
    tables = (code, features, *_make_mode_entries(), *_make_arithmetic_entries()), tuple(_make_surrounding_entries())
    return tuple(filter(_is_known, tables[0])), tuple(filter(_is_known, tables[1]))


def _is_known(entry: _Entry) -> bool:
    try:
        entry.read()
    except (AttributeError, TypeError):
        return False
    except (OSError, RuntimeError):  # it can be read at other times
        pass
    return True


def _read_value(entry: _Entry) -> Any:
    """Return an entry's value, or ``_NONE`` if it cannot be read now, such as a folder that was removed."""
    try:
        return entry.read()
    except (OSError, RuntimeError):
        return _NONE


# Restore all random generators. A pair may draw and seed as it likes, so this is not reported.


@dataclass(frozen=True)
class _Generators:
    """The states of the generators of ``torch``, ``random`` and ``numpy.random``."""

    cpu: torch.Tensor
    gpus: list[torch.Tensor]
    python: Any
    numpy: Any

    @staticmethod
    def now() -> _Generators:
        gpus = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
        numpy = sys.modules.get("numpy")
        return _Generators(
            torch.get_rng_state(), gpus, random.getstate(), None if numpy is None else numpy.random.get_state()
        )

    def restore(self) -> list[str]:
        """Restore all generators, and return descriptions of what could not be restored."""
        torch.set_rng_state(self.cpu)
        random.setstate(self.python)
        if self.numpy is not None:
            sys.modules["numpy"].random.set_state(self.numpy)
        try:
            if self.gpus:
                torch.cuda.set_rng_state_all(self.gpus)
        except RuntimeError as error:  # the pair's code broke CUDA, and its own error is reported as well
            return [f"the GPU's random numbers ({one_line(error)})"]
        return []


def _seed_generators(seed: int) -> None:
    # Without a GPU, PyTorch would record each seed, with the stack, in case a GPU appears later.
    (torch.manual_seed if torch.cuda.is_initialized() else torch.default_generator.manual_seed)(seed)
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed)


# The state of a process at one time.


@dataclass(frozen=True)
class State:
    """What the entries of the table were at one time.

    Attributes:
        values: each entry with its value.
    """

    values: Sequence[tuple[_Entry, Any]]

    @classmethod
    def now(cls, everything: bool = False) -> State:
        """Return the present state of what numbers depend on, or of everything in the table."""
        numbers, others = _find_known_entries()
        return cls([(entry, _read_value(entry)) for entry in (*numbers, *(others if everything else ()))])

    def changes(self, later: State) -> list[str]:
        """Return descriptions of what has changed until a later state."""
        return [
            told
            for (entry, before), (_, now) in zip(self.values, later.values, strict=True)
            for told in _list_changes(entry, before, now)
        ]

    def followed_by(self, first: State, last: State) -> State:
        """Return this state with the changes that lead from ``first`` to ``last``."""
        states = zip(self.values, first.values, last.values, strict=True)
        return State([(entry, entry.merged(value, x, y)) for (entry, value), (_, x), (_, y) in states])

    def restore(self) -> list[str]:
        """Make the process as it was, and return descriptions of what could not be undone."""
        return [told for entry, value in self.values for told in _undo_changes(entry, value)]


def _list_changes(entry: _Entry, before: Any, now: Any) -> list[str]:
    if before is _NONE or now is _NONE:
        return [] if before is now else [entry.name]
    return entry.changes(before, now)


def _undo_changes(entry: _Entry, before: Any) -> list[str]:
    """Undo the changes to an entry, and return descriptions of those that could not be undone."""
    now = _read_value(entry)
    if before is _NONE or not _list_changes(entry, before, now):
        return []
    try:
        entry.undo(before, now)
    except Exception as error:
        return [f"{entry.name}: {type(error).__name__}"]
    return [f"{told} stays" for told in _list_changes(entry, before, _read_value(entry))]


# Report what a pair's code has changed.


@dataclass
class Disturbed:
    """The changes to the process, which are filled in when ``undisturbed`` is left.

    Attributes:
        changed: descriptions of the changes.
        kept: descriptions of changes that could not be undone.
        whose: what made the changes.
        undone: when they were undone, and why.
    """

    changed: list[str] = field(default_factory=list)
    kept: list[str] = field(default_factory=list)
    whose: str = "the pair's code"
    undone: str = (
        "after the comparison, so that it does not affect other pairs: change such settings only for the module"
    )

    @property
    def note(self) -> str:
        """Return a note on the changes, or an empty text if there were none."""
        if not self.changed:
            return ""
        return f"{self.whose} changed {', '.join(self.changed)} for the whole process; parity undid this {self.undone}"

    @property
    def problem(self) -> str:
        """Return a message on changes that could not be undone, or an empty text if there were none."""
        if not self.kept:
            return ""
        return (
            f"{self.whose} made changes that cannot be undone, so later results of this process cannot be trusted: "
            f"{', '.join(self.kept)}"
        )


@contextmanager
def undisturbed(seed: int | None = None) -> Iterator[Disturbed]:
    """Restore the state of the process after the context, in which code may change it.

    Args:
        seed: the seed of all random generators, so that no draw depends on what ran before.

    Yields:
        The changes that had to be undone.
    """
    before, functions = State.now(everything=True), _BUILTINS.copy()
    generators = _Generators.now()
    disturbed = Disturbed()
    if seed is not None:
        _seed_generators(seed)
    try:
        with _streams_kept_open() as closed:
            yield disturbed
    finally:
        # What follows calls Python's own functions, so these are restored before all else.
        others, _ = _BUILTINS.copy(), _BUILTINS.update(functions)
        disturbed.changed = [f"builtins.{name}" for name in functions if others.get(name) is not functions[name]]
        disturbed.changed += [*dict.fromkeys(closed), *before.changes(State.now(everything=True))]
        if disturbed.changed:
            disturbed.kept += before.restore()
        disturbed.kept += generators.restore()


_BUILTINS = vars(builtins)


@contextmanager
def _streams_kept_open() -> Iterator[list[str]]:
    """Keep the standard streams open within the context, since a closed one cannot be opened again.

    Yields:
        Descriptions of those that were to be closed.
    """
    closed: list[str] = []
    kept = {name: vars(stream) for name in _STREAMS if hasattr(stream := getattr(sys, name), "__dict__")}
    before = {name: own.get("close", _NONE) for name, own in kept.items()}
    for name, own in kept.items():
        own["close"] = partial(closed.append, f"sys.{name} (closed)")
    try:
        yield closed
    finally:
        for name, own in kept.items():
            if before[name] is _NONE:
                own.pop("close", None)
            else:
                own["close"] = before[name]


_STREAMS = ("stdin", "stdout", "stderr")
