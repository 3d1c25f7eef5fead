"""Record what a model computes in some steps of a running training.

Nothing in the training has to change: hooks see when a model with parameters is called, and when an optimizer has made
a step. A pass that is recorded is watched as ``parity.stages`` watches a candidate. Its tensors are copied to the host
as soon as its gradients are known, and another thread writes them.
"""

from __future__ import annotations

import queue
import sys
import threading
import uuid
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from parity.machine.devices import in_words
from parity.passes.one_pass import named_outputs
from parity.ranks.layout import tensor_parallel_marks
from parity.recordings import folder as stored
from parity.recordings.environment import describe_environment
from parity.recordings.folder import DELAYED, RecordedPass, RecordedValue, key_of
from parity.recordings.joined import count_ranks
from parity.shown import few_of
from parity.stages.watch import Watch, Watched, unwrapped_parameters
from parity.te import emulation
from parity.te.state import dequantized_tensor, state_manager
from parity.trace.whose import is_of_te
from parity.user_error import UserError

_MOST = 16 << 30  # bytes of one pass, weights included
_GRAPHS_OF_TE = "transformer_engine.pytorch.graph"
_WITHOUT_GRAPH = (
    "replays of a CUDA graph of the whole step call no module: record steps without it, or graph layers with TE's "
    "make_graphed_callables, each of which is recorded as a whole"
)
_WRAPPED = "module."  # how DistributedDataParallel names what it wraps
_FSDP1 = "_fsdp_wrapped_module."  # and FSDP1, which keeps parameters in one vector


@contextmanager
def recording(
    folder: str | Path,
    steps: Collection[int] = (0,),
    modules: str | Sequence[str] = "*",
    model: nn.Module | None = None,
    passes: int = 1,
    max_bytes: int = _MOST,
) -> Iterator[Recorder]:
    """Record what a model computes in some steps of the training within the context.

    A step ends when an optimizer has made its step; without one, call ``next_step`` of what the context yields. Each
    rank writes its own files, which may be in one folder.

    Args:
        folder: a new or empty folder, for this recording alone.
        steps: the numbers of the steps to record, from 0, counted from the beginning of the context.
        modules: patterns of the submodules whose values are recorded, such as ``layers.3`` or ``layers.*``; those
            inside them are as well.
        model: the model to record; None for whatever module with parameters is called, outside of any other's call.
        passes: how many passes of a step are recorded, such as of its first micro-batches.
        max_bytes: the most that a pass may take on disk; values beyond are left out, the latest first.

    Raises:
        UserError: if the folder holds a recording, or an argument is not as above.
    """
    path = Path(folder)
    wanted = frozenset(steps)
    if any(not isinstance(step, int) or step < 0 for step in wanted) or not wanted:
        raise UserError(f"steps={steps!r} should be numbers of steps, from 0: steps=[0, 100]")
    if passes < 1 or max_bytes < 1:
        raise UserError("passes and max_bytes should be at least 1")
    rank, ranks = _place_among_ranks()
    if any(path.glob(f"step-*-rank-{rank}.json")):
        raise UserError(f"{path} already holds a recording; name another folder, or remove it")
    path.mkdir(parents=True, exist_ok=True)
    patterns = (modules,) if isinstance(modules, str) else tuple(modules)
    recorder = Recorder(path, wanted, patterns, model, passes, max_bytes, _agree_on_name(), rank, ranks)
    with recorder.watching():
        yield recorder


def _place_among_ranks() -> tuple[int, int]:
    if distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank(), distributed.get_world_size()
    return 0, 1


def _agree_on_name() -> str:
    """Return a new name for a recording, the same on all ranks, each of which must call this."""
    names = [uuid.uuid4().hex]
    if distributed.is_available() and distributed.is_initialized():
        distributed.broadcast_object_list(names, src=0)
    return names[0]


@dataclass
class _Running:
    """A pass of which the gradients are still to come.

    Attributes:
        number: which of the step's passes it is.
        root: the model.
        prefix: what a wrapper adds to its names.
        watch: watches the forward pass.
        weights: the model's parameters before the pass, by name, as far as they were whole.
        arguments: what it was called with, as JSON.
        given: the tensors among these, by name.
        outputs: its outputs, by name.
        inner: the names of those that another output is computed from, such as logits beside a loss.
        gradients: gradients of parameters, arguments and outputs, by key.
        recipes: TE's recipes, by submodule.
        unscaled: submodules whose delayed scaling has seen no gradient yet.
        autocast: the dtype of ``torch.autocast``.
        is_training: whether the model was in training mode.
        paths: each submodule's path, by its id.
        notes: what was left out.
        hooks: on parameters; removed at the end of the step.
        before: what was in the parameters' ``main_grad`` before the backward pass.
    """

    number: int
    root: nn.Module
    prefix: str
    watch: Watch
    autocast: str
    is_training: bool
    weights: dict[str, Tensor] = field(default_factory=dict)
    arguments: Any = None
    given: dict[str, Tensor] = field(default_factory=dict)
    outputs: dict[str, Tensor] = field(default_factory=dict)
    inner: tuple[str, ...] = ()
    gradients: dict[str, Tensor] = field(default_factory=dict)
    recipes: dict[str, str] = field(default_factory=dict)
    unscaled: list[str] = field(default_factory=list)
    paths: dict[int, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    hooks: ExitStack = field(default_factory=ExitStack)
    before: dict[str, Tensor] = field(default_factory=dict)

    def keep_gradient(self, key: str, gradient: Tensor) -> None:
        """Keep a gradient, or add it to another one of the same tensor."""
        own = gradient.detach().clone()
        self.gradients[key] = self.gradients[key] + own if key in self.gradients else own


class Recorder:
    """Records a training; made by ``recording``.

    Attributes:
        step: the number of the current step.
        written: the names of the passes that were recorded so far.
    """

    def __init__(
        self,
        path: Path,
        steps: Collection[int],
        patterns: Sequence[str],
        model: nn.Module | None,
        passes: int,
        max_bytes: int,
        run: str,
        rank: int,
        ranks: int,
    ) -> None:
        self.step = 0
        self.written: list[str] = []
        self._path, self._steps, self._patterns, self._model = path, steps, patterns, model
        self._passes, self._max_bytes = passes, max_bytes
        self._run, self._rank, self._ranks = run, rank, ranks
        self._environment = describe_environment()
        self._depth = 0  # of calls of modules, one within the other
        self._current: _Running | None = None  # the pass whose forward is running
        self._watching = ExitStack()
        self._waiting: list[_Running] = []  # passes whose gradients are to come
        self._in_backward: _Running | None = None  # the pass that gradients of parameters belong to
        self._count = 0  # passes of this step
        self._unseen: list[str] = []  # steps that were to be recorded, in which no model was called
        self._stepping: Any = None  # the optimizer whose steps count
        self._writer = _Writer(path)

    def next_step(self) -> None:
        """End a step, for trainings whose optimizer is not one of PyTorch's."""
        self._finish_passes()
        if self.step in self._steps and not self._count:
            self._unseen.append(str(self.step))
        self.step += 1
        self._count = 0

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Record within the context; afterwards, everything is on disk.

        Raises:
            UserError: if something could not be written, or the model was not called in a step that was to be recorded.
        """
        handles = (
            register_module_forward_pre_hook(self._enter_module),
            register_module_forward_hook(self._leave_module, with_kwargs=True, always_call=True),
            register_optimizer_step_pre_hook(self._before_step),
            register_optimizer_step_post_hook(self._after_step),
        )
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
            self._watching.close()
            try:
                self._finish_passes()
            finally:
                self._writer.close()
        if self._unseen:
            raise UserError(
                f"step {few_of(self._unseen)} was not recorded, since no module with parameters was called"
                f"{' as model' * (self._model is not None)}; {_WITHOUT_GRAPH}"
            )

    # When a pass begins and ends.

    def _enter_module(self, module: nn.Module, args: Any) -> None:
        self._depth += 1
        if self._current is None and self.step in self._steps and self._is_root(module):
            if self._count < self._passes:
                _check_not_capturing(module)
                self._begin_pass(module)
            self._count += 1
        if self._current is not None:
            self._current.watch.enter_module(module, args)
            is_graphed = _is_graphed(module)
            for part in module.modules() if is_graphed else (module,):
                if any(map(is_of_te, type(part).__mro__)):  # FSDP derives a class from a module's
                    self._note_recipe(self._current, part, is_graphed)

    def _is_root(self, module: nn.Module) -> bool:
        if torch._C._current_graph_task_id() != -1:  # a backward pass computes a checkpointed layer again
            return False
        graph: Any = sys.modules.get(_GRAPHS_OF_TE)
        if graph is not None and graph.is_graph_capturing():  # TE calls what it captures, to warm it up
            return False
        if self._model is not None:
            return module is self._model
        return self._depth == 1 and next(module.parameters(), None) is not None

    def _leave_module(self, module: nn.Module, args: Any, kwargs: Any, returned: Any = None) -> None:
        """End a call of a module; if it raised, PyTorch gives no keyword arguments."""
        is_left_out = self._waiting and self._current is None and self._is_root(module)
        self._depth -= 1
        if is_left_out:
            self._watch_backward(None, named_outputs(returned))
        if self._current is None:
            return
        self._current.watch.leave_module(module, args, returned)
        if hasattr(module, "unshard"):  # it is FSDP2's
            self._keep_parameters(self._current)
        for name, x in unwrapped_parameters(module):
            self._keep_parameter(self._current, f"{self._current.paths[id(module)]}.{name}", x)
        if module is self._current.root:
            one, self._current = self._current, None
            self._watching.close()
            with torch._C.DisableTorchFunction():
                self._end_forward(one, args, kwargs, returned)
            self._waiting.append(one)

    def _before_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        self._finish_passes()

    def _after_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        self._stepping = self._stepping or optimizer
        if optimizer is self._stepping:
            self.next_step()

    # What is kept.

    def _begin_pass(self, root: nn.Module) -> None:
        prefix = _prefix_of(root)
        device = next(root.parameters()).device.type
        autocast = str(torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else ""
        keeps = cache(partial(_is_inside, self._patterns, prefix))
        watch = Watch({path: (_strip_wrappers(path, prefix),) for path, _ in root.named_parameters()}, keeps)
        one = _Running(self._count, root, prefix, watch, autocast.removeprefix("torch."), root.training)
        one.paths = {id(part): _strip_wrappers(path, prefix) for path, part in root.named_modules()}
        self._keep_parameters(one)
        self._current = one
        # Hooks that came and went with each pass would change PyTorch's list of hooks while it goes through it.
        self._watching.enter_context(watch.following(root))

    def _note_recipe(self, one: _Running, module: nn.Module, is_graphed: bool) -> None:
        state: Any = getattr(state_manager(), "quantization_state", None)
        recipe = state.fp8_recipe if state is not None and state.fp8_enabled else None
        path = one.paths.get(id(module))
        if is_graphed:  # it computes as it was captured, whatever the context is now
            recipe = _find_captured_recipe(module)
            multiplies = hasattr(module, "fp8") and next(module.parameters(recurse=False), None) is not None
            path = path if multiplies or recipe is not None else None
        if path is not None:
            one.recipes[path] = type(recipe).__name__ if recipe is not None else ""
            if one.recipes[path] == DELAYED and not _has_scales(module):
                one.unscaled.append(path)

    def _end_forward(self, one: _Running, args: Any, kwargs: Any, returned: Any) -> None:
        def keep(x: Tensor) -> str:
            name = str(len(one.given))
            one.given[name] = x.detach().to("cpu", copy=True)
            if x.requires_grad and torch.is_grad_enabled():
                x.register_hook(partial(one.keep_gradient, key_of("gradient of argument", name)))
            return name

        one.arguments = stored.packed({"args": tuple(args), "kwargs": kwargs}, keep)
        if returned is None:  # it raised
            return
        outputs = named_outputs(returned)
        one.inner = _find_inner_outputs(outputs)
        for name, x in outputs.items():
            one.outputs[name] = x.detach().to("cpu", copy=True)
            if x.requires_grad:
                x.register_hook(partial(one.keep_gradient, key_of("gradient of output", name)))
        self._watch_backward(one, outputs)

    def _keep_parameters(self, one: _Running) -> None:
        """Keep those that are whole now: FSDP gathers a parameter only while a module of its group runs."""
        for path, x in one.root.named_parameters():
            is_part = hasattr(x, "full_tensor") or hasattr(x, "_fsdp_flattened")
            if not is_part and x.is_leaf:
                self._keep_parameter(one, _strip_wrappers(path, one.prefix), x)

    def _keep_parameter(self, one: _Running, name: str, x: Tensor) -> None:
        if name in one.weights:
            return
        # A parameter may be quantized, and the optimizer will change it.
        one.weights[name] = dequantized_tensor(x.detach()).to("cpu", copy=True)
        if x.requires_grad:
            one.hooks.callback(x.register_hook(partial(self._keep_weight_gradient, one, name, x)).remove)

    def _watch_backward(self, one: _Running | None, outputs: Mapping[str, Tensor]) -> None:
        """Let gradients of parameters belong to the pass whose outputs got theirs last: several may be on their way."""

        def begin(gradient: Tensor) -> None:
            if one is not None and one is not self._in_backward:
                held = {path: getattr(x, "main_grad", None) for path, x in one.root.named_parameters()}
                one.before = {_strip_wrappers(path, one.prefix): x.clone() for path, x in held.items() if x is not None}
            self._in_backward = one

        for x in outputs.values():
            if x.requires_grad:
                x.register_hook(begin)

    def _keep_weight_gradient(self, one: _Running, name: str, parameter: Any, gradient: Tensor | None) -> None:
        """Keep the gradient of a parameter, or what TE has just added to its ``main_grad`` in its place."""
        key = key_of("gradient of weight", name)
        if self._in_backward is not one:
            return
        is_marked = getattr(parameter, "grad_added_to_main_grad", False)  # which a CUDA graph does not do
        if name in one.before and (
            gradient is None or is_marked or not torch.equal(parameter.main_grad, one.before[name])
        ):
            overwrites = getattr(parameter, "overwrite_main_grad", False)
            one.gradients[key] = parameter.main_grad - (0.0 if overwrites else one.before[name])
        elif gradient is not None:
            one.keep_gradient(key, gradient)

    def _finish_passes(self) -> None:
        waiting, self._waiting, self._in_backward = self._waiting, [], None
        for one in waiting:
            one.hooks.close()
            if one.outputs:
                self._hand_over(one)

    def _hand_over(self, one: _Running) -> None:
        """Give a pass to the thread that writes it."""
        tensors = {
            **{key_of("weight", name): x for name, x in one.weights.items()},
            **{key_of("argument", name): x for name, x in one.given.items()},
            **{key_of("output", name): x for name, x in one.outputs.items()},
            **{key: x.to("cpu") for key, x in one.gradients.items()},
        }
        values = self._add_values(one, tensors)
        tp, sequence_parallel, cp = count_ranks(one.root)
        marks = tensor_parallel_marks(one.root) if tp > 1 else {}
        trained = {_strip_wrappers(name, one.prefix) for name, x in one.root.named_parameters() if x.requires_grad}
        reached = {name for name in trained if key_of("gradient of weight", name) in tensors}
        if trained and not reached and any(key.startswith("gradient of output") for key in tensors):
            one.notes.append("no gradient of a parameter was recorded")
        index = RecordedPass(
            run=self._run,
            rank=self._rank,
            ranks=self._ranks,
            step=self.step,
            number=one.number,
            root=type(one.root).__name__,
            dtypes=dict(Counter(str(x.dtype).removeprefix("torch.") for x in one.weights.values())),
            autocast=one.autocast,
            recipes=one.recipes,
            is_training=one.is_training,
            values=values,
            arguments=one.arguments,
            outputs=tuple(one.outputs),
            inner=one.inner,
            tensors={key: tuple(x.shape) for key, x in tensors.items()},
            unreached=tuple(sorted(trained - reached)) if reached else (),
            frozen=tuple(sorted(one.weights.keys() - trained)),
            notes=tuple(one.notes),
            environment=self._environment,
            unscaled=tuple(one.unscaled),
            tp=tp,
            sequence_parallel=sequence_parallel,
            cp=cp,
            splits={_strip_wrappers(name, one.prefix): (over.dim, over.blocks) for name, over in marks.items()},
        )
        self.written.append(index.stem)
        self._writer.put(index, tensors)

    def _add_values(self, one: _Running, tensors: dict[str, Tensor]) -> tuple[RecordedValue, ...]:
        """Add what the model computed to a pass's tensors, as far as there is room, and return what they are."""
        size = sum(x.nbytes for x in tensors.values())
        values: list[RecordedValue] = []
        for seen in one.watch.seen:
            both = {"value": seen.tensor, "gradient of value": seen.gradient}
            known = {key_of(kind, seen.order): x for kind, x in both.items() if x is not None}
            size += sum(x.nbytes for x in known.values())
            if size > self._max_bytes:
                left = len(one.watch.seen) - len(values)
                one.notes.append(f"{left} values are left out, since a pass may take {in_words(self._max_bytes)}")
                break
            values.append(_describe_value(seen, one.prefix))
            tensors.update((key, x.to("cpu")) for key, x in known.items())
        return tuple(values)


def _check_not_capturing(module: nn.Module) -> None:
    """Check that no CUDA graph is captured as a pass begins: nothing can be copied to the host then.

    Raises:
        UserError: if one is.
    """
    cuda = torch.cuda if torch.cuda.is_available() else emulation.cuda
    if cuda.is_current_stream_capturing():
        raise UserError(f"{type(module).__name__} cannot be recorded while it is captured; {_WITHOUT_GRAPH}")


def _is_graphed(module: nn.Module) -> bool:
    """Return whether calls of a module replay a CUDA graph: ``make_graphed_callables`` gives it another forward."""
    return getattr(vars(module).get("forward"), "__module__", "") == _GRAPHS_OF_TE


def _find_captured_recipe(module: Any) -> Any:
    """Return the recipe of a module's last call that was no replay; None if it did not quantize."""
    if hasattr(module, "fp8"):
        return module.fp8_meta["recipe"] if module.fp8 else None
    of_operation = (getattr(module, "_fp8_metas", None) or {}).get("forward")
    return of_operation and of_operation["recipe"]


def _has_scales(module: nn.Module) -> bool:
    """Return whether delayed scaling has set a scale for one of a module's gradients, or the module has none."""
    meta = getattr(module, "fp8_meta", None)
    if not isinstance(meta, dict) or next(module.parameters(recurse=False), None) is None:
        return True
    state = meta.get("scaling_bwd")
    return state is not None and bool((state.scale != 1.0).any())


def _find_inner_outputs(outputs: Mapping[str, Tensor]) -> tuple[str, ...]:
    """Return the names of outputs that other outputs are computed from, by autograd's graph."""
    nodes = {x.grad_fn: name for name, x in outputs.items() if x.grad_fn is not None}
    inner: set[str] = set()
    for start in nodes if len(nodes) > 1 else ():
        seen, waiting = {start}, [start]
        while waiting:
            for node, _ in waiting.pop().next_functions:
                if node is not None and node not in seen:
                    seen.add(node)
                    waiting.append(node)
        inner |= {nodes[node] for node in nodes if node in seen and node is not start}
    return tuple(sorted(inner))


def _is_inside(patterns: Sequence[str], prefix: str, path: str) -> bool:
    """Return whether a submodule, or one that it is in, has a path of these patterns."""
    parts = _strip_wrappers(path, prefix).split(".")
    inside = [".".join(parts[:count]) for count in range(1, len(parts) + 1)]
    return any(fnmatchcase(one, pattern) for one in inside for pattern in patterns)


def _prefix_of(root: nn.Module) -> str:
    names = [name for name, _ in root.named_parameters()]
    return _WRAPPED if names and all(name.startswith(_WRAPPED) for name in names) else ""


def _strip_wrappers(path: str, prefix: str) -> str:
    """Return the path of a submodule or parameter in the model itself, without what wrappers add to it."""
    return f"{path}.".removeprefix(prefix).replace(_FSDP1, "").removesuffix(".")


def _describe_value(one: Watched, prefix: str) -> RecordedValue:
    return RecordedValue(
        one.name,
        _strip_wrappers(one.module, prefix),
        tuple(sorted(one.lineage)),
        one.from_input,
        tuple(parent.order for parent in one.parents),
        tuple(_strip_wrappers(name, prefix) for name in one.weights),
        one.is_result,
        one.gradient is not None,
    )


class _Writer:
    """A thread that writes passes, so that the training goes on meanwhile."""

    def __init__(self, folder: Path) -> None:
        self._queue: queue.Queue[tuple[RecordedPass, dict[str, Tensor]] | None] = queue.Queue(maxsize=2)
        self._error: BaseException | None = None
        self._folder = folder
        self._thread = threading.Thread(target=self._write_passes, name="parity recording", daemon=True)
        self._thread.start()

    def put(self, index: RecordedPass, tensors: dict[str, Tensor]) -> None:
        """Write a pass, later; waits while two are still to be written."""
        self._raise_error()
        self._queue.put((index, tensors))

    def close(self) -> None:
        """Wait until everything is written.

        Raises:
            UserError: if something could not be written.
        """
        self._queue.put(None)
        self._thread.join()
        self._raise_error()

    def _write_passes(self) -> None:
        while (item := self._queue.get()) is not None:
            try:
                stored.write(self._folder, *item)
            except BaseException as error:  # told to the training's own thread
                self._error = self._error or error

    def _raise_error(self) -> None:
        if self._error is not None:
            error, self._error = self._error, None
            raise UserError(f"a recorded pass could not be written to {self._folder}: {error}") from error
