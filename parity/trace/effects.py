"""Notice side effects of a module, and undo changes that a pair's code makes to its process.

A module may remember something from one call to the next, detach an output, draw random numbers, or write to its
inputs.
"""

from __future__ import annotations

import functools
import gc
import operator
import os
import random
import signal
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, MutableMapping, MutableSequence, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as modules

from parity.shown import one_line

# Find attributes that a call changes, which modules remember besides parameters and buffers.


_OF_EVERY_MODULE = frozenset(vars(nn.Module()))

Attributes = dict[str, tuple[Any, int]]


def attributes_of(module: nn.Module) -> Attributes:
    """Return the present values of each module's own attributes, by ``name of the module.attribute``."""
    return {
        f"{name}.{key}".removeprefix("."): (value, _mark(value))
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


def _mark(value: Any) -> int:
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
    changed = _only(candidate, reference)
    return changed and (
        f"the candidate changes {changed} in place, but the reference does not: whatever reads it afterwards, such as "
        "a residual, gets other numbers; let the candidate compute on a copy"
    )


def by_reference_alone(reference: Sequence[str], candidate: Sequence[str]) -> str:
    """Return a remark on inputs that only the reference changes, or an empty text; arguments as above."""
    changed = _only(reference, candidate)
    return changed and (
        f"the reference changes {changed} in place, but the candidate does not; code that reads it afterwards was not "
        "compared"
    )


def _only(names: Sequence[str], others: Sequence[str]) -> str:
    return ", ".join(name for name in names if name not in others)


# Undo the changes that a pair's code makes to its process, and report them, so that they do not affect other pairs.
#
# The table below lists the state of a process that a module's numbers may depend on, with the name of each entry and
# functions that read and write it. All entries are read before a pair's code runs and again afterwards, and those that
# have changed are restored.


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


@dataclass(frozen=True)
class _Names(_Entry):
    """An entry that consists of many names, each of which is reported by itself.

    Attributes:
        write: is called with a name and its value, which is ``_NONE`` for a name to delete.
        may_add: whether a name may be new, because imports and lazy attributes add names to modules, and libraries add
            methods to classes.
        counts: whether a name with this value belongs to the entry. This is called only if something has changed,
            because there are thousands of names.
    """

    may_add: Callable[[str], bool] = lambda name: False
    counts: Callable[[str, Any], bool] = lambda name, value: True

    def changes(self, before: Any, now: Any) -> list[str]:
        return [self.name.format(name) for name in self._others(before, now)]

    def undo(self, before: Any, now: Any) -> None:
        for name in self._others(before, now):
            self.write((name, before.get(name, _NONE)))

    def _others(self, before: dict[str, Any], now: dict[str, Any]) -> list[str]:
        if list(before) == list(now) and all(map(operator.is_, before.values(), now.values())):
            return []
        before, now = ({name: x for name, x in held.items() if self.counts(name, x)} for held in (before, now))
        new = [name for name in now if name not in before and not self.may_add(name)]
        return [name for name, value in before.items() if now.get(name, _NONE) is not value] + new


_NONE = object()
# Prefixes of variables that PyTorch and Triton set themselves.
_OF_LIBRARIES = ("CUDA_MODULE_LOADING", "TORCHINDUCTOR_", "TRITON_")


def _flag(name: str, owner: Any, attribute: str) -> _Entry:
    return _Entry(name, partial(getattr, owner, attribute), partial(setattr, owner, attribute))


def _dict(name: str, held: MutableMapping[Any, Any]) -> _Entry:
    def write(content: dict[Any, Any]) -> None:
        held.clear()
        held.update(content)

    return _Entry(name, lambda: dict(held), write, shown=False)


def _list(name: str, held: Callable[[], MutableSequence[Any]]) -> _Entry:
    def write(content: list[Any]) -> None:
        held()[:] = content

    return _Entry(name, lambda: list(held()), write, shown=False)


def _environment() -> _Names:
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


def _functions(owner: Any, called: str) -> _Names:
    """Return the entry for the functions and classes that a module or a class holds.

    ``torch.Storage`` does not count, because PyTorch sets it with the default dtype.
    """

    def write(entry: tuple[str, Any]) -> None:
        name, value = entry
        if value is _NONE:
            delattr(owner, name)
        else:
            setattr(owner, name, value)

    def counts(name: str, value: Any) -> bool:
        return callable(value) and name != "Storage"

    def may_add(name: str) -> bool:
        # A new method, such as transformers' `Module.smart_apply`, affects no other code if no base class has it.
        return not isinstance(owner, type) or not (name.startswith("__") or hasattr(owner.__base__, name))

    return _Names(f"{called}.{{}}", lambda: dict(vars(owner)), write, may_add=may_add, counts=counts)


def _namespaces(te: Any) -> Iterator[_Names]:
    """Yield the entries for PyTorch's and TE's functions, and for the methods of their modules."""
    yield _functions(torch, "torch")
    yield _functions(torch.nn.functional, "torch.nn.functional")
    yield _functions(torch.Tensor, "torch.Tensor")
    for package, called in ((torch.nn, "torch.nn"), (te, "te")):
        if package is None:
            continue
        yield _functions(package, called)
        for name, kind in vars(package).items():
            if isinstance(kind, type) and issubclass(kind, nn.Module):
                yield _functions(kind, f"{called}.{name}")


def _numbers() -> Iterator[_Entry]:
    """Yield the entries for the settings of PyTorch's arithmetic."""
    yield _Entry("torch's default dtype", torch.get_default_dtype, torch.set_default_dtype)
    yield _Entry("torch's default device", _default_device, torch.set_default_device)
    yield _Entry("the grad mode", torch.is_grad_enabled, torch.set_grad_enabled)
    yield _Entry("the number of threads", torch.get_num_threads, torch.set_num_threads)
    yield _Entry("whether denormal numbers are flushed to 0", _flushes, torch.set_flush_denormal)
    yield _Entry(
        "deterministic algorithms",
        lambda: (torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()),
        lambda modes: torch.use_deterministic_algorithms(modes[0], warn_only=modes[1]),
    )
    yield _flag("filling of uninitialized memory", torch.utils.deterministic, "fill_uninitialized_memory")
    yield _Entry("the detection of anomalies", torch.is_anomaly_enabled, torch.autograd.set_detect_anomaly)
    yield _flag("torch.backends.mkldnn.enabled", torch.backends.mkldnn, "enabled")
    for name in ("enabled", "benchmark", "deterministic", "allow_tf32"):
        if name != "allow_tf32" or not has_fp32_settings():
            yield _flag(f"torch.backends.cudnn.{name}", torch.backends.cudnn, name)
    for name in ("allow_fp16_reduced_precision_reduction", "allow_bf16_reduced_precision_reduction"):
        yield _flag(f"torch.backends.cuda.matmul.{name}", torch.backends.cuda.matmul, name)
    for name in ("flash", "mem_efficient", "math", "cudnn"):
        read = getattr(torch.backends.cuda, f"{name}_sdp_enabled")
        yield _Entry(f"{name} attention of PyTorch", read, getattr(torch.backends.cuda, f"enable_{name}_sdp"))
    products = torch.get_float32_matmul_precision, torch.set_float32_matmul_precision
    yield _Entry("the precision of FP32 products", *products)
    for place in FP32_SETTINGS if has_fp32_settings() else ():  # after the entries that set some of them
        yield _Entry(f"fp32_precision of {' '.join(place)}", partial(fp32_setting, place), partial(set_fp32, place))
    for kind in ("cpu", "cuda"):
        on, dtype = partial(torch.is_autocast_enabled, kind), partial(torch.get_autocast_dtype, kind)
        yield _Entry(f"autocast on {kind}", on, partial(torch.set_autocast_enabled, kind))
        yield _Entry(f"autocast's dtype on {kind}", dtype, partial(torch.set_autocast_dtype, kind))


def _surroundings() -> Iterator[_Entry]:
    """Yield the entries for the environment of Python code."""
    hooks = {name: held for name, held in vars(modules).items() if name.startswith("_global_") and held is not None}
    for name, held in hooks.items():
        if isinstance(held, MutableMapping):
            yield _dict(f"hooks of all modules ({name.removeprefix('_global_')})", held)
    yield _flag("whether hooks of all modules are full backward hooks", modules, "_global_is_full_backward_hook")
    yield _environment()
    yield _Entry("the current folder", os.getcwd, os.chdir, shown=False)
    yield _list("sys.path", lambda: sys.path)
    yield _list("the filters of warnings", lambda: warnings.filters)  # type: ignore[arg-type, return-value]
    yield _Entry("the recursion limit", sys.getrecursionlimit, sys.setrecursionlimit)
    yield _Entry("what NumPy does with overflow and the like", _numpy_errors, _set_numpy_errors)
    yield _Entry("the mask of new files", _umask, os.umask, shown=False)
    for name in ("SIGINT", "SIGTERM"):  # without their handlers, a run cannot be ended early
        number = getattr(signal, name)
        yield _Entry(f"the handler of {name}", partial(signal.getsignal, number), partial(signal.signal, number), False)
    yield _Entry("an alarm that rings later", _has_alarm, _set_alarm, shown=False)
    yield _Entry(
        "whether Python collects garbage", gc.isenabled, lambda enabled: gc.enable() if enabled else gc.disable()
    )
    for stream in ("stdin", "stdout", "stderr"):
        yield _Entry(f"sys.{stream}", partial(getattr, sys, stream), partial(setattr, sys, stream), shown=False)


def _numpy_errors() -> dict[str, str] | None:
    numpy = sys.modules.get("numpy")
    return None if numpy is None else numpy.geterr()


def _set_numpy_errors(errors: dict[str, str] | None) -> None:
    if errors is not None:
        sys.modules["numpy"].seterr(**errors)


def _umask() -> int:
    mask = os.umask(0o077)  # it can only be read by being set
    os.umask(mask)
    return mask


def _has_alarm() -> bool:
    return signal.getitimer(signal.ITIMER_REAL)[0] > 0


def _set_alarm(is_set: bool) -> None:
    """Cancel an alarm that a pair has set. One that a pair has cancelled is lost, because its time is not known."""
    if not is_set:
        signal.setitimer(signal.ITIMER_REAL, 0)


def _default_device() -> torch.device | None:
    context = getattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context", None)
    return None if context is None else context.device


def _flushes() -> bool:
    return bool((torch.full((), 5e-324, dtype=torch.float64, device="cpu") * 1.0).item() == 0.0)


@functools.cache
def _table(te: Any) -> tuple[_Entry, ...]:
    """Return the entries that this version of PyTorch has; ``te`` is TE's package, None before it is imported."""
    return tuple(entry for entry in (*_numbers(), *_surroundings(), *_namespaces(te)) if _is_known(entry))


def _is_known(entry: _Entry) -> bool:
    try:
        entry.read()
    except AttributeError:
        return False
    except (OSError, RuntimeError):  # it can be read at other times
        pass
    return True


def _value(entry: _Entry) -> Any:
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


def _seed(seed: int) -> None:
    # Without a GPU, PyTorch would record each seed, with the stack, in case a GPU appears later.
    (torch.manual_seed if torch.cuda.is_initialized() else torch.default_generator.manual_seed)(seed)
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed)


# Report what a pair's code has changed.


@dataclass
class Disturbed:
    """The changes to the process, which are filled in when ``undisturbed`` is left.

    Attributes:
        changed: descriptions of the changes.
        kept: descriptions of changes that could not be undone.
    """

    changed: list[str] = field(default_factory=list)
    kept: list[str] = field(default_factory=list)

    @property
    def note(self) -> str:
        """Return a note on the changes, or an empty text if there were none."""
        if not self.changed:
            return ""
        return (
            f"the pair's code changed {', '.join(self.changed)} for the whole process; parity undid this after the "
            "comparison, so that it does not affect other pairs: change such settings only for the module"
        )

    @property
    def problem(self) -> str:
        """Return a message on changes that could not be undone, or an empty text if there were none."""
        if not self.kept:
            return ""
        return (
            f"the pair's code made changes that cannot be undone, so later results of this process cannot be trusted: "
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
    table = _table(sys.modules.get("transformer_engine.pytorch"))
    before = [(entry, _value(entry)) for entry in table]
    generators = _Generators.now()
    disturbed = Disturbed()
    if seed is not None:
        _seed(seed)
    try:
        yield disturbed
    finally:
        disturbed.changed = [told for entry, value in before for told in _changes(entry, value)]
        for entry, value in before if disturbed.changed else ():
            disturbed.kept += _undone(entry, value)
        disturbed.kept += generators.restore()


def _changes(entry: _Entry, before: Any) -> list[str]:
    now = _value(entry)
    if before is _NONE or now is _NONE:
        return [] if before is now else [entry.name]
    return entry.changes(before, now)


def _undone(entry: _Entry, before: Any) -> list[str]:
    """Undo the changes to an entry, and return descriptions of those that could not be undone."""
    if before is _NONE or not _changes(entry, before):
        return []
    try:
        entry.undo(before, _value(entry))
    except Exception as error:
        return [f"{entry.name}: {type(error).__name__}"]
    return [f"{told} stays" for told in _changes(entry, before)]
