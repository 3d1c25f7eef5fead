"""Judge a candidate's behaviour apart from its numbers.

Check whether it is deterministic, whether it remembers earlier calls, and which TE modules it runs.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from parity.case.validate import of_te
from parity.case.weight_map import WeightMap
from parity.mistakes.codes import repairable
from parity.passes.all_passes import Recalled, Tensors
from parity.passes.refusals import gradients_missed
from parity.result import Determinism, Finding, TensorResult, label_of
from parity.shown import few_of
from parity.te import emulation
from parity.te.seen_formats import NAME_MARK
from parity.trace.digests import Trace, as_bytes, first_difference
from parity.trace.effects import RandomState, kept, other_numbers
from parity.trace.unwritten import Filled, lines_read
from parity.trace.whose import is_in_call, is_te, line_running, watching_calls

# Does a candidate that is built again return the same bytes, and if not, where does it first differ?
#
# State that one module keeps from call to call is checked further below.


Run = Callable[[Callable[[nn.Module], None]], Tensors]
# A kernel that adds in the order in which its blocks finish does not give different bytes every time, so try again.
_ATTEMPTS = 3


def repeat(run: Run, first: Tensors, before: RandomState, device: torch.device) -> Determinism:
    """Build and run the candidate again from the same random state and, if nothing differs, from another one.

    Args:
        run: runs the candidate's pass, and calls its argument with the newly built module.
        first: what the candidate returned before.
        before: the random state that it started from.
        device: the kernels' device.
    """
    with kept(device):
        before.restore(device)
        differing = _list_differing_tensors(first, run(lambda module: None))
        if differing:
            return Determinism(differing, first=_locate_difference(run, before, device))
    with other_numbers(device):
        return Determinism(drawn=_list_differing_tensors(first, run(lambda module: None)))


def _list_differing_tensors(one: Tensors, other: Tensors) -> tuple[str, ...]:
    return tuple(
        label_of(kind, name)
        for (kind, name), tensor in one.items()
        if not torch.equal(as_bytes(tensor), as_bytes(other[kind, name]))
    )


def _locate_difference(run: Run, before: RandomState, device: torch.device) -> str:
    for _ in range(_ATTEMPTS):
        traces = Trace(), Trace()
        for trace in traces:
            before.restore(device)
            with trace.of_kernels():
                run(trace.watch)
        place = first_difference(*traces)
        if place:
            return place
    return ""


# Does a candidate read memory that it has not written?


def unwritten_reads(run: Run, first: Tensors, before: RandomState, device: torch.device) -> tuple[Finding, ...]:
    """Return a finding if the candidate's tensors depend on what is in the memory that it allocates.

    One run is enough if memory full of NaN changes nothing. Otherwise, other runs tell whether it is the memory: the
    same run must return the same bytes, and one with another constant in memory other bytes.

    Args:
        run, first, before, device: as for ``repeat``.
    """

    def run_filled(filled: Filled) -> Tensors | str:
        before.restore(device)
        with filled:
            try:
                return run(filled.watch)
            except KeyboardInterrupt:
                raise
            except BaseException as error:  # numbers that were never meant may make any code raise anything
                return type(error).__name__

    def is_read(places: Collection[str]) -> bool:
        return not _are_same(run_filled(Filled(places.__contains__)), quiet)

    with kept(device):
        loud = run_filled(Filled())
        if _are_same(first, loud):
            return ()
        filled = Filled(lambda place: False)
        quiet = run_filled(filled)
        if _are_same(quiet, loud):
            return ()
        for _ in range(_ATTEMPTS - 1):  # a kernel that adds in any order does not differ every time
            if not _are_same(loud, run_filled(Filled())) or is_read(()):
                return ()
        lines = lines_read(is_read, filled.places)
    if not lines:
        return ()
    evidence = f"{_describe_change(quiet, loud)}; it was allocated at {'; and at '.join(lines)}"
    return (repairable("unwritten-memory", evidence, _WRITE_FIRST),)


_WRITE_FIRST = "write all of it before it is read (torch.zeros, copy_), or read only the part that was written"


def _are_same(one: Tensors | str, other: Tensors | str) -> bool:
    if isinstance(one, str) or isinstance(other, str):
        return one == other
    return not _list_differing_tensors(one, other)


def _describe_change(quiet: Tensors | str, loud: Tensors | str) -> str:
    """Say what memory that is full of NaN does to a pass, compared with memory full of small numbers."""
    what = "memory that nothing has written is read: if it holds NaN"
    if isinstance(quiet, str) or isinstance(loud, str):
        return f"{what} and not small numbers, the candidate raises {loud if isinstance(loud, str) else 'nothing'}"
    labels = _list_differing_tensors(quiet, loud)
    not_finite = sum(int((~x.isfinite() & quiet[key].isfinite()).sum()) for key, x in loud.items())
    return f"{what}, {few_of(labels, _MOST_TOLD)} change, and {not_finite} numbers are no longer finite"


# Does a candidate keep state between calls that its outputs depend on? No reference may.


_TITLE = "state-between-calls"


def by_recalling(recalled: Recalled, tensors: Sequence[TensorResult]) -> tuple[Finding, ...]:
    """Return a finding if the same inputs, before and after the pass, gave outputs that differ by more than rounding.

    Two outputs that are both within a tolerance of golden are within twice that tolerance of each other.

    Args:
        recalled: the outputs of the candidate's calls.
        tensors: the verdicts on its pass.
    """
    tolerance = {tensor.name: tensor.tolerance_relative_l2 for tensor in tensors if tensor.kind == "output"}
    for name, one in recalled.before.items():
        other = recalled.after.get(name)
        if other is None or other.shape != one.shape:
            return (finding_of_recalled(recalled, f"it does not return {name} as before"),)
        apart = torch.linalg.vector_norm((other.double() - one.double()).nan_to_num())
        size = torch.linalg.vector_norm(one.double().nan_to_num())
        if name in tolerance and apart > 2 * tolerance[name] * size:
            moved = f"{(apart / size).item():.2g} of its norm" if size else f"{apart.item():.2g}"
            return (finding_of_recalled(recalled, f"its {name} changes by {moved}"),)
    return ()


def finding_of_recalled(recalled: Recalled, evidence: str) -> Finding:
    """Return the finding that the candidate keeps state between calls, with the evidence for it."""
    where = f" in {', '.join(recalled.changed)}" if recalled.changed else ""
    return repairable(
        _TITLE,
        f"the candidate remembers its last call{where}: when it is called again, {evidence}",
        "let each call depend only on its inputs and the weights, and reset any other state when it begins",
    )


# Which of TransformerEngine's modules does a candidate run, and which code reads the weights of the others?


# These classes have no parameters of their own: any that they hold belong to a user's class derived from them.
_WITHOUT_PARAMETERS = (
    *("TransformerLayer", "MultiheadAttention", "Sequential", "TransformerEngineBaseModule"),
    *("FusibleOperation", "BasicOperation", "FusedOperation"),
)
_KERNELS = tuple(str(Path(str(of.__file__)).parent) for of in (torch, emulation.cuda))  # TE calls them
_COPIES = ("clone", "copy_", "detach", "alias", "zero_")  # functions that compute nothing from a weight
_MOST_TOLD = 4  # names in a message

Rerun = Callable[[Callable[[nn.Module], None]], object]
"""Runs the candidate again, after a change to its newly built module."""


class TeModules:
    """Find out which of a candidate's TE modules run."""

    def __init__(self) -> None:
        """Prepare to note the modules that run in this thread inside the context ``watched``."""
        self._candidate: nn.Module | None = None
        self._ran: set[str] = set()
        self._used: set[int] = set()

    def of(self, candidate: nn.Module) -> None:
        """Watch this candidate's modules and the copies that it makes of them.

        If there are several candidates, ``idle`` and ``left_out`` are about the first.
        """
        self._candidate = candidate if self._candidate is None else self._candidate
        for name, module in of_te(candidate).items():
            vars(module)[NAME_MARK] = name

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Note each module in which TE's own ``forward`` begins; a derived class may override it and never call it."""

        def see(frame: FrameType, event: str, _: Any) -> None:
            if event == "call" and frame.f_code.co_name in ("forward", "new_fwd") and is_te(frame):
                # The latter replaces the forward of a module that is captured in a graph (``pytorch/graph.py``).
                module = frame.f_locals.get("self", frame.f_locals.get("func"))
                if isinstance(module, nn.Module):
                    self._note_module(module)

        with watching_calls(see):
            yield

    def _note_module(self, module: nn.Module) -> None:
        name = vars(module).get(NAME_MARK)
        if name is not None:
            self._ran.add(name)
        # A module that is not the candidate's own may compute with the weights of one that is.
        self._used.update(map(id, module.parameters(recurse=name is None)))

    def idle(self) -> dict[str, list[str]]:
        """Return the TE modules that hold parameters and did not run, by name, with the parameters' names."""
        if self._candidate is None:
            return {}
        names = {id(parameter): name for name, parameter in self._candidate.named_parameters()}
        found: dict[str, list[str]] = {}
        for name, module in of_te(self._candidate).items():
            own = [x for x in module.parameters(recurse=False) if id(x) not in self._used]
            if own and name not in self._ran and not _holds_users(module) and not self._runs_within(name, module):
                found[name] = [names[id(x)] for x in own]
        return found

    def _runs_within(self, name: str, module: nn.Module) -> bool:
        """Return whether an enclosing TE module has run, which computes in its place, as fused operations do."""
        parents = [name.rsplit(".", i)[0] for i in range(1, name.count(".") + 1)] + [""] * bool(name)
        is_tes = str(getattr(module.forward, "__module__", "")).partition(".")[0] == "transformer_engine"
        return is_tes and any(parent in self._ran for parent in parents)

    def left_out(self, weights: WeightMap, golden: Mapping[str, Tensor], rerun: Rerun) -> str:
        """Say which TE modules the candidate leaves out and which code reads their weights; empty if none.

        A module is left out if it did not run although its weight has a gradient in the reference, or although
        PyTorch's functions read it. An expert that no token reached, or a layer that both sides skip, is not left out.

        Args:
            weights: the pair's map.
            golden: the gradients of the reference's parameters, without frozen ones.
            rerun: runs the candidate again, after a change to its newly built module.
        """
        idle = self.idle()
        self._candidate = None  # its memory is needed
        if not idle:
            return ""
        of_idle = tuple(name for parameters in idle.values() for name in parameters)
        trained = set(gradients_missed(of_idle, weights, golden))
        again, reads = TeModules(), _Reads(of_idle)

        def watch(candidate: nn.Module) -> None:
            again.of(candidate)
            reads.of(candidate)

        with _force_eager_mode(), again.watched(), reads:  # the forward of a compiled module cannot be watched
            rerun(watch)
        still = {name: parameters for name, parameters in idle.items() if name in again.idle()}
        found = {
            name: parameters
            for name, parameters in still.items()
            if not reads.by_te.intersection(parameters)
            and (trained.intersection(parameters) or reads.of_any(parameters))
        }
        if not found:
            return ""
        named = [_describe_module(name, reads.of_any(parameters)) for name, parameters in found.items()]
        return (
            f"TransformerEngine's modules hold weights and did not run: {few_of(named, _MOST_TOLD)}; call them, or "
            "use plain PyTorch modules for what TransformerEngine is not meant to compute"
        )


def _holds_users(module: nn.Module) -> bool:
    """Return whether a module's own parameters belong to a user's class."""
    of_tes = [base.__name__ for base in type(module).__mro__ if base.__module__.startswith("transformer_engine")]
    return of_tes[0] in _WITHOUT_PARAMETERS


def _describe_module(name: str, line: str) -> str:
    return f"{name or 'the candidate itself'} (its weight is read by PyTorch at {line})" if line else name


def _force_eager_mode() -> AbstractContextManager[Any]:
    stance = getattr(torch.compiler, "set_stance", None)  # new in PyTorch 2.6
    return nullcontext() if stance is None else stance("force_eager")


class _Reads(TorchDispatchMode):
    """Note which code computes with certain parameters in the forward pass.

    Attributes:
        by_te: names of the parameters that TE's own code computes with.
    """

    def __init__(self, names: Sequence[str]) -> None:
        super().__init__()
        self._names = names
        self._parameters: dict[int, str] = {}
        self._lines: dict[str, str] = {}
        self.by_te: set[str] = set()

    def of(self, candidate: nn.Module) -> None:
        """Note reads of this candidate's parameters that have the given names."""
        self._parameters.update((id(x), name) for name, x in candidate.named_parameters() if name in self._names)

    def of_any(self, parameters: list[str]) -> str:
        """Return the line at which PyTorch first reads one of the parameters; empty if it reads none."""
        return next(filter(None, map(self._lines.get, parameters)), "")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket.__name__ not in _COPIES:
            for x in tree_leaves((args, kwargs)):
                if isinstance(x, Tensor) and id(x) in self._parameters:
                    self._note_read(self._parameters[id(x)])
        return func(*args, **(kwargs or {}))

    def _note_read(self, name: str) -> None:
        if not is_in_call():
            return
        frame: FrameType | None = sys._getframe(2)
        while frame is not None and frame.f_code.co_filename.startswith(_KERNELS):
            frame = frame.f_back
        if frame is not None and is_te(frame):
            self.by_te.add(name)
        else:
            self._lines.setdefault(name, line_running() or "a line of its own")
