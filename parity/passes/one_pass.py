"""Run one forward and backward pass of a module, and return its tensors by name."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import keystr, tree_flatten_with_path, tree_leaves, tree_map_only, tree_map_with_path

from parity.case.case import signed_as_call
from parity.te import state
from parity.trace.whose import call_of_pair
from parity.user_error import UserError

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True)
class Pass:
    """The results of a forward and backward pass.

    Attributes:
        outputs: the module's floating-point outputs; ``output``, or ``output[i]`` if there are several, or
            ``output[key]`` if it returns a dict or a dataclass.
        input_gradients: by the input's name; zero where no gradient arrived.
        weight_gradients: by the parameter's name, from ``main_grad`` where TE added it there; zero where no gradient
            arrived.
        unreached: names of the parameters where no gradient arrived.
        not_compared: how many tensors of other than floating-point types the module returned.
        changed_inputs: names of the inputs whose values the forward pass changed.
        detached_outputs: names of the outputs that require no gradient.
        numbers: the Python numbers and booleans that the module also returned, by their place: ``[1]``, ``['loss']``.
        buffers: the buffers that the pass changed, as it left them.
        instead: the classes of what the module returned, for a message; empty if all of it is tensors.
    """

    outputs: dict[str, Tensor]
    input_gradients: dict[str, Tensor]
    weight_gradients: dict[str, Tensor]
    unreached: tuple[str, ...]
    not_compared: int = 0
    changed_inputs: tuple[str, ...] = ()
    detached_outputs: tuple[str, ...] = ()
    numbers: dict[str, float] = field(default_factory=dict)
    buffers: dict[str, Tensor] = field(default_factory=dict)
    instead: str = ""


def as_arguments(inputs: Any) -> Arguments:
    """Return a pair's inputs as arguments of a call.

    A dict is passed by keyword, a tuple or list by position, and anything else as the only argument.
    """
    if isinstance(inputs, Mapping):
        return (), dict(inputs)
    if isinstance(inputs, (tuple, list)):
        return tuple(inputs), {}
    return (inputs,), {}


def named_inputs(inputs: Any, names: Sequence[str]) -> dict[str, Tensor]:
    """Return the tensors among a pair's inputs, with the names that ``run`` gives them.

    Args:
        inputs: as a pair's ``inputs`` returns them.
        names: names of the positional inputs, see ``positional_names``.
    """
    args, kwargs = as_arguments(inputs)
    given = {**dict(zip(names, args, strict=True)), **kwargs}
    leaves = [(name, tree_flatten_with_path(value)[0]) for name, value in given.items()]
    return {name + keystr(path): x for name, some in leaves for path, x in some if isinstance(x, Tensor)}


def with_inputs(inputs: Any, names: Sequence[str], others: Mapping[str, Tensor]) -> Any:
    """Return a pair's inputs with the tensors of these names replaced; ``named_inputs`` gives the names."""

    def other(name: str, value: Any) -> Any:
        return tree_map_with_path(lambda path, x: others.get(name + keystr(path), x), value)

    if isinstance(inputs, Mapping):
        return {name: other(name, value) for name, value in inputs.items()}
    if isinstance(inputs, (tuple, list)):
        return tuple(other(name, value) for name, value in zip(names, inputs, strict=True))
    return other(names[0], inputs)


def positional_names(module: nn.Module, call: Callable[..., Any] | None, inputs: Any) -> tuple[str, ...]:
    """Return the names that the called function has for its positional inputs.

    A single input is named ``input``, and one beyond the function's named parameters ``input[i]``.

    Args:
        module: its ``forward`` is called if ``call`` is None.
        call: as in ``parity.Pair``; its first parameter is the module.
        inputs: as a pair's ``inputs`` returns them.
    """
    args, _ = as_arguments(inputs)
    if len(args) == 1:
        return ("input",)
    parameters = list(inspect.signature(call or module.forward).parameters.values())[1 if call else 0 :]
    named = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    return tuple(named[i] if i < len(named) else f"input[{i}]" for i in range(len(args)))


def run(
    module: nn.Module,
    call: Callable[..., Any] | None,
    inputs: Any,
    names: Sequence[str],
    cotangents: Callable[[dict[str, Tensor]], dict[str, Tensor]],
    forward_context: AbstractContextManager[Any] | None = None,
    before_backward: Callable[[], None] = lambda: None,
    watch_inputs: bool = False,
    after_backward: Callable[[], None] = lambda: None,
    differentiated: bool = True,
) -> Pass:
    """Run a module's forward and backward pass, and return its tensors. Its buffers and the inputs stay unchanged.

    Args:
        module: its parameters' gradients are cleared first, including those in ``main_grad``.
        call: how to call it, as in ``parity.Pair``; None calls the module itself.
        inputs: as a pair's ``inputs`` returns them, in the module's dtype and on its device.
        names: names of the positional inputs, see ``positional_names``.
        cotangents: returns the gradient with respect to each output, given the outputs.
        forward_context: entered around the forward pass only.
        before_backward: called between the two passes.
        watch_inputs: whether to note the inputs that the module writes to.
        after_backward: called before the gradients are read.
        differentiated: whether to run a backward pass; without it, there are only outputs.
    """
    module.zero_grad(set_to_none=True)
    state.clear(module)
    given = _Given({}, [])
    args, kwargs = _make_differentiable_copies(as_arguments(inputs), names, given)
    with restored_buffers(module) as moved_buffers:
        with forward_context or nullcontext():
            returned = _call_module(module, call, (args, kwargs))
        outputs = named_outputs(returned)
        changed = given.changed() if watch_inputs else ()
        if differentiated:
            before_backward()
        backward = cotangents(outputs)
        reached = [name for name, output in outputs.items() if output.requires_grad or not differentiated]
        if differentiated:
            torch.autograd.backward([outputs[name] for name in reached], [backward[name] for name in reached])
            after_backward()
        buffers = moved_buffers()
    leaves = given.leaves if differentiated else {}
    parameters = module.named_parameters() if differentiated else ()
    trained = {name: parameter for name, parameter in parameters if parameter.requires_grad}
    gradients = {name: state.gradient(parameter) for name, parameter in trained.items()}
    return Pass(
        outputs={name: output.detach() for name, output in outputs.items()},
        input_gradients={name: or_zero(leaf.grad, leaf) for name, leaf in leaves.items()},
        weight_gradients={name: or_zero(gradients[name], parameter) for name, parameter in trained.items()},
        unreached=tuple(name for name, gradient in gradients.items() if gradient is None),
        not_compared=sum(isinstance(leaf, Tensor) for leaf in leaves_of(returned)) - len(outputs),
        changed_inputs=changed,
        detached_outputs=tuple(name for name in outputs if name not in reached),
        numbers=_find_numbers(returned),
        buffers=buffers,
        instead=", ".join(sorted({type(leaf).__name__ for leaf in leaves_of(returned)} - {"Tensor"})),
    )


@dataclass(frozen=True)
class Selected:
    """A selection of what a module returned.

    Attributes:
        outputs: floating-point tensors, by the names that they have among all outputs.
        others: all tensors of other types.
    """

    outputs: dict[str, Tensor]
    others: list[Tensor]


def selecting(module: nn.Module, call: Callable[..., Any] | None, names: Container[str]) -> Callable[..., Any]:
    """Return a call that returns only the outputs with these names.

    Args:
        module: its ``forward`` is called if ``call`` is None.
        call: as in ``parity.Pair``.
        names: as in ``Pass``.
    """

    def selected(module: nn.Module, *args: Any, **kwargs: Any) -> Selected:
        returned = call(module, *args, **kwargs) if call else module(*args, **kwargs)
        outputs = {name: x for name, x in named_outputs(returned).items() if name in names}
        others = [x for x in leaves_of(returned) if isinstance(x, Tensor) and not x.is_floating_point()]
        return Selected(outputs, others)

    return signed_as_call(selected, module, call)


def outputs_of(module: nn.Module, call: Callable[..., Any] | None, inputs: Any) -> dict[str, Tensor]:
    """Return the outputs of a forward pass by name. Like ``run``, this leaves the buffers and the inputs unchanged."""
    fresh = tree_map_only(Tensor, torch.clone, inputs)
    with restored_buffers(module):
        return named_outputs(_call_module(module, call, as_arguments(fresh)))


def _call_module(module: nn.Module, call: Callable[..., Any] | None, arguments: Arguments) -> Any:
    args, kwargs = arguments
    with torch.set_grad_enabled(torch.is_grad_enabled()), call_of_pair():  # restored, since the module may change it
        return call(module, *args, **kwargs) if call else module(*args, **kwargs)


@contextmanager
def restored_buffers(module: nn.Module) -> Iterator[Callable[[], dict[str, Tensor]]]:
    """Restore the buffers afterwards, and hand out a function that returns copies of those that changed so far.

    A pass must not see what another pass left, such as a BatchNorm's mean or a call counter. A module may write to a
    buffer, or put another tensor in its place.
    """
    before = [
        (f"{path}.{key}".removeprefix("."), part, key, buffer, None if buffer is None else buffer.clone())
        for path, part in module.named_modules()
        for key, buffer in part._buffers.items()
    ]

    def moved() -> dict[str, Tensor]:
        return {
            name: now.detach().clone()
            for name, part, key, _, value in before
            if (now := part._buffers.get(key)) is not None and (value is None or not are_equal(now, value))
        }

    try:
        yield moved
    finally:
        with torch.no_grad():
            for _, part, key, buffer, value in before:
                if part._buffers.get(key) is not buffer:
                    part._buffers[key] = buffer
                if buffer is not None and value is not None and not torch.equal(buffer, value):
                    buffer.copy_(value)  # only if it changed, because autograd cannot use a buffer that was written to


def are_equal(x: Tensor, y: Tensor) -> bool:
    """Return whether two tensors have the same shape and numbers."""
    return x.shape == y.shape and torch.equal(x, y)


def or_zero(gradient: Tensor | None, leaf: Tensor) -> Tensor:
    return torch.zeros_like(leaf) if gradient is None else gradient.detach()


@dataclass(frozen=True)
class _Given:
    """The tensors that a module is given.

    Attributes:
        leaves: the leaves that its floating-point inputs are computed from, by name.
        copies: each tensor's name, the tensor, and the copy of it that the module may write to.
    """

    leaves: dict[str, Tensor]
    copies: list[tuple[str, Tensor, Tensor]]

    def copy(self, name: str, tensor: Tensor) -> Tensor:
        """Return the copy of a tensor for the module.

        The module gets no leaf, because it may write to its inputs, and autograd forbids that for leaves.
        """
        if tensor.is_floating_point():
            tensor = self.leaves[name] = tensor.detach().requires_grad_()
        self.copies.append((name, tensor, tensor.clone()))
        return self.copies[-1][2]

    def changed(self) -> tuple[str, ...]:
        """Return the names of the tensors whose copies have changed."""
        return tuple(
            name for name, before, after in self.copies if not _have_same_values(before.detach(), after.detach())
        )


def _have_same_values(x: Tensor, y: Tensor) -> bool:
    """Return whether two tensors hold the same values, where NaN equals NaN."""
    if x.shape != y.shape:  # one of them was resized in place
        return False
    return torch.equal(x, y) or bool(((x == y) | ((x != x) & (y != y))).all())


def _make_differentiable_copies(arguments: Arguments, names: Sequence[str], given: _Given) -> Arguments:
    """Return copies of the arguments. Floating-point copies are computed from leaves, which ``given`` keeps."""
    args, kwargs = arguments

    def copied(name: str, value: Any) -> Any:
        def copied_leaf(path: Any, leaf: Any) -> Any:
            return given.copy(name + keystr(path), leaf) if isinstance(leaf, Tensor) else leaf

        return tree_map_with_path(copied_leaf, value)

    positional = tuple(copied(name, value) for name, value in zip(names, args, strict=True))
    return positional, {name: copied(name, value) for name, value in kwargs.items()}


def named_outputs(returned: Any) -> dict[str, Tensor]:
    """Return the floating-point tensors that a module returned, with the names that they have in results."""
    if isinstance(returned, Selected):
        return returned.outputs
    if _is_record(returned):
        returned = _read_fields(returned)
    if isinstance(returned, Mapping):
        keyed = [(str(key), _find_floating_tensors(value)) for key, value in returned.items()]
        found = [(key if len(of) == 1 else f"{key}.{i}", x) for key, of in keyed for i, x in enumerate(of)]
    else:
        found = [(str(i), x) for i, x in enumerate(_find_floating_tensors(returned))]
    if len(found) == 1:
        return {"output": found[0][1]}
    return {f"output[{key}]": x for key, x in found}


def _find_floating_tensors(returned: Any) -> list[Tensor]:
    """Return the floating-point tensors that a module returned.

    Raises:
        UserError: for a tensor of a kind that PyTorch can neither subtract nor differentiate.
    """
    found = [x for x in leaves_of(returned) if isinstance(x, Tensor) and x.is_floating_point()]
    for x in found:
        if x.is_nested or x.layout is not torch.strided or x.itemsize == 1:
            kind = "nested" if x.is_nested else str(x.dtype if x.itemsize == 1 else x.layout).removeprefix("torch.")
            raise UserError(
                f"a module returns a {kind} tensor, which cannot be compared: return a dense one of at least 16 bits "
                "from call_reference and call_candidate"
            )
    return found


def _find_numbers(returned: Any, place: str = "") -> dict[str, float]:
    """Return the Python numbers and booleans that a module returned, by their places."""
    if _is_record(returned):
        fields_of = _read_fields(returned).items()
        return {name: x for key, value in fields_of for name, x in _find_numbers(value, f"{place}.{key}").items()}
    found: dict[str, float] = {}
    for path, leaf in tree_flatten_with_path(returned, is_leaf=_is_record)[0]:
        if _is_record(leaf):
            found |= _find_numbers(leaf, place + keystr(path))
        elif isinstance(leaf, (bool, int, float)):
            found[place + keystr(path)] = leaf
    return found


def leaves_of(returned: Any) -> Iterator[Any]:
    """Yield the single values that a module returned, out of any tuples, lists, dicts and dataclasses."""
    for leaf in tree_leaves(returned, is_leaf=_is_record):
        if _is_record(leaf):
            for value in _read_fields(leaf).values():
                yield from leaves_of(value)
        else:
            yield leaf


def _is_record(value: Any) -> bool:
    """Return whether a value is a dataclass but not also a mapping, as the outputs of transformers' models are."""
    return is_dataclass(value) and not isinstance(value, (type, Mapping))


def _read_fields(record: Any) -> dict[str, Any]:
    return {field.name: getattr(record, field.name) for field in fields(record)}
