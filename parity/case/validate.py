"""Check what a pair builds on the meta device, before anything is allocated, and say what is wrong with it."""

from __future__ import annotations

import dataclasses
import inspect
import re
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import init
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode

from parity.case import transfer
from parity.case.case import Case, Pair, Rng, Size, Training, are_same, draw_inputs
from parity.case.formats import check_patterns, checked_formats, checked_recipes, keeps_unquantized
from parity.case.map_check import check_map, other_names
from parity.case.weight_map import WeightMapError, names
from parity.numerics.formats import Role
from parity.te.attention_backend import BACKENDS, AttentionBackend, checked_choice, has_attention
from parity.te.devices import refusing_meta_tensors
from parity.te.recipes import list_roles
from parity.trace.effects import undisturbed
from parity.trace.whose import first_paragraph, is_of_te, users_frame, users_line
from parity.user_error import INTERRUPTS, UserError

# Run code that builds modules and tensors so that they get shapes and dtypes, but neither memory nor values.


_META = torch.device("meta")
_MOVES = (Tensor.cpu, Tensor.cuda)
# On the meta device no values are held, so none are drawn: PyTorch takes long even for drawing none.
_DRAWS = (Tensor.normal_, Tensor.uniform_)
_INITS = (init.normal_, init.uniform_, init.kaiming_uniform_)
_DRAWN = (torch.randn, torch.rand)


@contextmanager
def without_memory() -> Iterator[None]:
    """Put every tensor that is created or moved in the context on the meta device, whatever device the code names.

    Code that reads a tensor's values, or mixes in real tensors, raises as it does for any meta tensor.
    """
    with torch.device("meta"), _EveryDeviceIsMeta(), refusing_meta_tensors():
        yield


class _EveryDeviceIsMeta(TorchFunctionMode):
    """Replace devices in the arguments of PyTorch's functions, which would override ``torch.device("meta")``."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func in _MOVES or func in _DRAWS:
            return args[0]
        named = dict(kwargs or {})
        if func in _INITS:
            return named["tensor"] if "tensor" in named else args[0]
        # A CPU generator cannot draw on the meta device, and nothing is drawn there.
        named.pop("generator", None)
        if named.get("device") is not None:
            named["device"] = _META
        if func in _DRAWN:
            func = torch.empty
        if func is torch.empty_like and not named.keys() - {"device"} and args[0].is_contiguous():
            return torch.empty(args[0].shape, dtype=args[0].dtype)  # takes PyTorch a twentieth of the time
        moves = func is Tensor.to
        return func(*[_META if _names_device(arg, moves) else arg for arg in args], **named)


def _names_device(argument: Any, moves: bool) -> bool:
    """Return whether a positional argument is a device; ``Tensor.to`` also takes one as a string or an index."""
    if isinstance(argument, torch.device):
        return True
    return moves and isinstance(argument, (str, int)) and not isinstance(argument, bool)


# Which modules a pair can have at all: their parameters must have shapes, be real, and stay the module's own.


def check_module(role: str, module: Any) -> None:
    """Check that a module can be compared.

    Args:
        role: ``reference`` or ``candidate``, for the message.
        module: what the pair has in that place.

    Raises:
        UserError: if it is not a module, is TorchScript's, or has parameters without a shape or of complex numbers.
    """
    if not isinstance(module, nn.Module):
        kind = "None" if module is None else type(module).__name__
        kind = f"the class {module.__name__}; call it to make one" if isinstance(module, type) else kind
        raise UserError(f"the {role} must be a torch.nn.Module, not {kind}")
    for name, part in module.named_modules():
        if isinstance(part, torch.jit.ScriptModule):
            what = f"the {role}'s {name}" if name else f"the {role}"
            raise UserError(
                f"{what} is compiled by TorchScript, which hands out copies of its parameters; give the module that it "
                "was made of"
            )
    for name, parameter in module.named_parameters():
        if is_lazy(parameter):
            raise UserError(
                f"the {role}'s {name} has no shape before the first call of the {role}; call it once, on a tensor of "
                "zeros, before you hand it over"
            )
        if parameter.is_complex():
            raise UserError(
                f"the {role}'s {name} holds complex numbers, which no precision of TransformerEngine has; hold it as "
                "torch.view_as_real(...) and compute with torch.view_as_complex(...)"
            )


# A port's parameters outside of TransformerEngine's modules, such as a router's or a head's.
#
# PyTorch's own layers multiply in the dtype that they hold: TE's autocast does not make them compute in FP8, nor do
# they read FP32 as TF32 unless they are told to.


def parameters_outside_te(pair: Pair) -> frozenset[str]:
    """Return the reference's parameters that the candidate holds outside of TE's modules and modules derived from them.

    A parameter that is tied to one of TE's, such as a head's to an embedding's, counts as TE's.
    """
    within = {id(parameter) for module in of_te(pair.candidate).values() for parameter in module.parameters()}
    parameters = dict(pair.candidate.named_parameters())
    inside = {
        name
        for left, right in pair.weights.items()
        if any(id(parameters[parameter]) in within for parameter in names(right))
        for name in names(left)
    }
    return frozenset(name for left in pair.weights for name in names(left)) - inside


def parameters_kept_unquantized(pair: Pair) -> frozenset[str]:
    """Return the reference's parameters that the candidate holds in modules which the pair asks to quantize nothing."""
    formats = checked_formats(pair.formats)
    kept = {
        name for name, _ in pair.candidate.named_parameters() if keeps_unquantized(formats, name.rpartition(".")[0])
    }
    return frozenset(
        name for left, right in pair.weights.items() if kept.issuperset(names(right)) for name in names(left)
    )


def roles_of_parameters(pair: Pair) -> dict[str, Role]:
    """Return the roles that TE's modules give the reference's parameters that they hold, by the parameters' names."""
    held = {
        f"{path}.{name}".lstrip("."): role
        for path, module in of_te(pair.candidate).items()
        for name, role in list_roles(module).items()
    }
    return {
        name: held[parameter]
        for left, right in pair.weights.items()
        for parameter in names(right)
        if parameter in held
        for name in names(left)
    }


def of_te(module: nn.Module) -> dict[str, nn.Module]:
    """Return the module and its parts that are TE's, or derived from TE's, by their names in it."""
    return {name: part for name, part in module.named_modules() if any(is_of_te(base) for base in type(part).__mro__)}


def has_te(module: nn.Module) -> bool:
    """Return whether a module contains one of TE's."""
    return bool(of_te(module))


# Find a case's mistakes before anything runs: it is built at each size without memory, and its parts must fit together.


@dataclass(frozen=True, eq=False)
class CheckedSize:
    """A size at which a case fits together.

    Attributes:
        size: as the case declares it.
        label: the shape of the first input tensor, e.g. ``2x1024x512``; if several sizes of the case share it, followed
            by the entries in which they differ, e.g. ``2x1024x512-ffn1536``; unique in the case.
        has_attention: whether TE picks an attention backend in the candidate.
        has_te: whether the candidate has a module of TE's.
        inputs: how many floating-point tensors the reference is given.
        trained: how many of the reference's parameters get gradients.
    """

    size: Size
    label: str
    has_attention: bool = False
    has_te: bool = True
    inputs: int = 0
    trained: int = 0


def check_case(case: Case, te: ModuleType) -> list[CheckedSize]:
    """Check a case at each of its sizes.

    Both modules are built without memory or values. If the factory or ``inputs`` needs values, both are called again
    for real. Neither may keep tensors in a cache of its own across calls: without memory these would be useless later.

    Args:
        case: the case.
        te: the module ``transformer_engine.pytorch``.

    Returns:
        The sizes, in the case's order.

    Raises:
        UserError: if the factory raises or does not return two modules, the weight map does not fit them, or ``inputs``
            raises or returns no tensor; names the case, its file and line, and the size.
    """
    with undisturbed():
        checked = [_check_size(case, te, size) for size in case.sizes]
    labels = _make_unique_labels([each.label for each in checked], case.sizes)
    return [dataclasses.replace(each, label=label) for each, label in zip(checked, labels, strict=True)]


def attention_of(case: Case, checked: CheckedSize, asked: str) -> Sequence[AttentionBackend | None]:
    """Return the attention backends to force, each in an item of its own; None lets TE choose.

    Args:
        case: the case, which may ask for some backends if the run leaves that open.
        checked: its size; a candidate without attention is one item, whatever is asked for.
        asked: what the run asks for, one of ``CHOICES``.

    Raises:
        UserError: if it is none of them.
    """
    checked_choice(asked)
    if not checked.has_attention:
        return (None,)
    if asked == "auto":
        return case.attention or (None,)
    return [backend for backend in BACKENDS if asked in (backend, "all")]


def _check_size(case: Case, te: ModuleType, size: Size) -> CheckedSize:
    """Return the size, with the shape of the first input tensor as label."""
    with located(case, size):
        pair, drawn = _build_without_memory(case, te, size)
        _check_plain(pair)
        check_patterns(checked_formats(pair.formats), of_te(pair.candidate))
        try:
            check_map(
                pair.weights,
                transfer.parameter_shapes(pair.reference),
                transfer.parameter_shapes(pair.candidate),
                other_names(pair.reference),
                other_names(pair.candidate),
            )
        except WeightMapError as error:
            raise WeightMapError(f"{error}\n{proposes_a_map(case)}") from None
        tensors = list(_find_tensors(drawn))
        if not tensors:
            raise UserError(f"inputs must return at least one tensor, not {_type_name(drawn)}")
    return CheckedSize(
        size,
        label="x".join(map(str, tensors[0].shape)) or "scalar",
        has_attention=has_attention(pair.candidate),
        has_te=has_te(pair.candidate),
        inputs=sum(tensor.is_floating_point() for tensor in tensors),
        trained=sum(parameter.requires_grad for parameter in pair.reference.parameters()),
    )


def proposes_a_map(case: Case) -> str:
    """Return a sentence that says how to get a proposal of a weight map for a case."""
    if case.path.suffix != ".py":
        return "parity.suggest_map(pair) proposes a map"
    return f"`parity suggest-map {case.path.name}::{case.name}` proposes a map"


@contextmanager
def located(case: Case, size: Size) -> Iterator[None]:
    """Let a ``UserError`` that is raised in the context name the case, its file and line, and the size."""
    try:
        yield
    except UserError as error:
        at_size = f", size ({', '.join(f'{key}={value!r}' for key, value in size.items())})" if size else ""
        where = f"{case.path}:{case.line}: pair {case.name!r}{at_size}" if case.line else "the pair"
        raise type(error)(f"{where}:{_indent_lines(str(error))}") from error.__cause__


def _build_without_memory(case: Case, te: ModuleType, size: Size) -> tuple[Pair, Any]:
    """Return the pair and its inputs, without memory if they can be built so."""
    try:
        with without_memory():
            pair = case.build(te, size)
            _check_pair(pair)
            return pair, draw_inputs(pair, size, Rng(0))
    except (UserError, *INTERRUPTS):
        raise
    except BaseException:
        # Sound code can need values. Only the real call tells whether it does, and shows the real cause if not.
        pass
    return build(case, te, size)


def modules_without_memory(case: Case, te: ModuleType, size: Size) -> Pair:
    """Return the pair at a size, whose modules are on the meta device if they can be built so.

    Raises:
        UserError: if the factory raises, or returns no pair of two modules; names the case and the size.
    """
    with located(case, size), undisturbed():
        try:
            with without_memory():
                pair = case.build(te, size)
        except (UserError, *INTERRUPTS):
            raise
        except BaseException:  # as for ``_build_without_memory``
            with _as_user_error("the factory", case.path):
                pair = case.build(te, size)
        _check_pair(pair)
        return pair


def with_buffers_alone(case: Case, te: ModuleType, size: Size) -> Pair:
    """Return the pair at a size with the values of its buffers, but not of its parameters.

    A parameter has memory only until its module registers it, so only one of them has memory at a time.

    Raises:
        UserError: if the factory raises.
    """

    def forget(module: nn.Module, name: str, parameter: nn.Parameter) -> nn.Parameter:
        if parameter.is_meta:  # tied to one that was registered before
            return parameter
        return nn.Parameter(torch.empty(parameter.shape, dtype=parameter.dtype, device=_META), parameter.requires_grad)

    with located(case, size), undisturbed():
        hook = register_module_parameter_registration_hook(forget)  # type: ignore[arg-type]
        try:
            with _as_user_error("the factory", case.path):
                return case.build(te, size)
        finally:
            hook.remove()


def build(case: Case, te: ModuleType, size: Size) -> tuple[Pair, Any]:
    """Return the pair at a size, and its inputs.

    Raises:
        UserError: if the factory or ``inputs`` raises, or the factory returns no pair of two modules.
    """
    with _as_user_error("the factory", case.path):
        pair = case.build(te, size)
    _check_pair(pair)
    with _as_user_error("inputs", case.path):
        return pair, draw_inputs(pair, size, Rng(0))


@contextmanager
def _as_user_error(what: str, path: Path) -> Iterator[None]:
    try:
        yield
    except (UserError, *INTERRUPTS):
        raise
    except BaseException as error:
        frames = traceback.extract_tb(error.__traceback__)
        # The user looks for the mistake in the file that declares the case, even if other code raised further down.
        lines = [frame.lineno for frame in frames if Path(frame.filename).resolve() == path]
        place = f" in line {lines[-1]}" if lines else ""
        innermost = users_frame(error)
        deeper = innermost is not None and Path(innermost.filename).resolve() != path
        further = f"; at {users_line(error)}" if deeper else ""
        raise UserError(f"{what} raised {type(error).__name__}{place}: {first_paragraph(error)}{further}") from error


def _check_pair(pair: Any) -> None:
    if not isinstance(pair, Pair):
        raise UserError(f"the factory must return a parity.Pair, not {_type_name(pair)}")
    check_module("reference", pair.reference)
    check_module("candidate", pair.candidate)
    if pair.reference is pair.candidate:
        raise UserError("reference and candidate are the same module, which would be compared with itself")
    for role, function in (
        ("inputs", pair.inputs),
        ("call_reference", pair.call_reference),
        ("call_candidate", pair.call_candidate),
    ):
        if not (callable(function) or (function is None and role != "inputs")):
            raise UserError(f"{role} must be a function, not {_type_name(function)}")
    if pair.fill not in (True, False, None):
        raise UserError(f"fill must be True, False or None, not {pair.fill!r}")
    _check_training(pair.training)


_ADAMW = "lambda model: torch.optim.AdamW(model.parameters(), lr=1e-3)"
_EXAMPLES = {
    "optimizer": _ADAMW,
    "candidate_optimizer": _ADAMW,
    "scheduler": "lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, step_size=10)",
}


def _check_training(training: Any) -> None:
    """Refuse attributes that are not functions, or take parameters in place of a module, as PyTorch's optimizers do."""
    if not isinstance(training, Training):
        raise UserError(f"training must be a parity.Training, not {_type_name(training)}")
    for name, function in vars(training).items():
        made = function.func if isinstance(function, partial) else function
        is_class = isinstance(made, type) and issubclass(made, Optimizer)
        takes_parameters = is_class and "params" in inspect.signature(made).parameters
        if name not in ("clip", "recipes") and (takes_parameters or not (function is None or callable(function))):
            example = f" such as {_EXAMPLES[name]}" if name in _EXAMPLES else ""
            given = f"the class {made.__name__}, which takes parameters" if is_class else _type_name(function)
            raise UserError(f"{name} of a training must be a function{example}, not {given}")
    try:
        inspect.signature(training.scheduler or (lambda optimizer: None)).bind(None)
    except TypeError as error:
        raise UserError(
            f"scheduler of a training must be a function such as {_EXAMPLES['scheduler']}, which is called with the "
            f"optimizer alone; {getattr(training.scheduler, '__name__', training.scheduler)} cannot be: {error}"
        ) from error
    checked_recipes(training.recipes)
    clip = training.clip
    if clip is not None and (isinstance(clip, bool) or not isinstance(clip, (int, float)) or not clip > 0):
        raise UserError(f"clip of a training must be a number above 0, or None, not {clip!r}")


def _check_plain(pair: Pair) -> None:
    """Refuse a reference that computes with TE's kernels: it would be compared with itself, and cannot run in FP64."""
    for name, part in of_te(pair.reference).items():
        if list(part.parameters(recurse=False)) or has_attention(part):
            what = f"its {name}" if name else "it"
            advice = "" if has_te(pair.candidate) else "; did you swap reference and candidate?"
            raise UserError(
                f"the reference must be plain PyTorch, which runs in FP64, but {what} is TransformerEngine's "
                f"{_type_name(part)}{advice}"
            )


def _find_tensors(inputs: Any) -> Iterator[Tensor]:
    if isinstance(inputs, Tensor):
        yield inputs
    elif isinstance(inputs, (tuple, list, Mapping)):
        for entry in inputs.values() if isinstance(inputs, Mapping) else inputs:
            yield from _find_tensors(entry)


def _make_unique_labels(shapes: Sequence[str], sizes: Sequence[Size]) -> list[str]:
    """Return each shape, made unique by the entries in which the sizes that share it differ."""
    sharing = [[other for j, other in enumerate(sizes) if shapes[j] == shape] for shape in shapes]
    labels = [
        "-".join([shape, *(_entry_label(key, size) for key in _find_differing_keys(group) if key in size)])
        for shape, size, group in zip(shapes, sizes, sharing, strict=True)
    ]
    counts = Counter(labels)
    return [label if counts[label] == 1 else f"{label}-size{i}" for i, label in enumerate(labels)]


def _find_differing_keys(sizes: Sequence[Size]) -> list[str]:
    """Return the keys, in order of appearance, whose values are not the same in all sizes."""
    keys = dict.fromkeys(key for size in sizes for key in size)
    return [key for key in keys if not all(key in size and are_same(size[key], sizes[0].get(key)) for size in sizes)]


def _entry_label(key: str, size: Size) -> str:
    return key + re.sub(r"[^A-Za-z0-9_.-]+", "_", str(size[key])).strip("_")


def _indent_lines(text: str) -> str:
    """Put each of several lines, such as a weight map's problems, on a line of its own below the first."""
    lines = text.splitlines()
    return f" {text}" if len(lines) == 1 else "".join(f"\n  {line}" for line in lines)


def _type_name(value: object) -> str:
    return "None" if value is None else type(value).__name__
