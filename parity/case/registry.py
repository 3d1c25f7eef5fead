"""Collect the pairs that ``@parity.pair`` declares, in a file or in installed packages."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import re
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from importlib import metadata
from pathlib import Path
from types import FrameType, MappingProxyType, ModuleType
from typing import Any
from weakref import WeakKeyDictionary

from parity import te
from parity.case.case import Case, Pair, Size, are_same, checked_steps, checked_switches
from parity.case.files import Place, place_of
from parity.case.formats import checked_formats
from parity.ranks.layout import Degrees, degrees
from parity.result import Switch
from parity.settings import AXES, check_precisions
from parity.te.attention_backend import BACKENDS, AttentionBackend
from parity.user_error import INTERRUPTS, UserError

# What ``@parity.pair`` accepts: each function returns an argument as ``Case`` holds it, or raises and says why not.


MARKS_BELONG = 'pytest marks have no effect on a pair; name them in its declaration: marks=["slow"]'
_VALID_NAME = re.compile(r"[A-Za-z0-9_.-]+")


def checked_name(name: object) -> str:
    """Return a case's name, which consists of letters, digits, ``_``, ``-`` and ``.``."""
    if not isinstance(name, str) or not _VALID_NAME.fullmatch(name):
        raise UserError("a name may only have letters, digits, '_', '-' and '.'")
    return name


def checked_factory(factory: Any) -> Callable[..., Pair]:
    """Return the factory, a function whose first parameter must be ``te``."""
    if isinstance(factory, Case):
        raise UserError(
            f"@pair decorates a function, not the pair {factory.name!r}; declare two pairs by calling "
            "parity.pair(...)(function) for each"
        )
    if not callable(factory):
        raise UserError(f"@pair decorates a function, not {factory!r}")
    if getattr(factory, "pytestmark", ()):
        raise UserError(MARKS_BELONG)
    _parameters_after_te(factory)
    return factory


def checked_switch(argument: str, value: object) -> bool:
    """Return the value, which must be True or False, since a text such as ``"no"`` would count as true."""
    if not isinstance(value, bool):
        raise UserError(f"{argument} must be True or False, not {value!r}")
    return value


def checked_sizes(sizes: object, factory: Callable[..., Pair], besides: Sequence[str] = ()) -> tuple[Size, ...]:
    """Return the sizes, each of which ``factory(te, **size)`` accepts, with further arguments of these names."""
    if isinstance(sizes, (str, Mapping)) or not isinstance(sizes, Iterable):
        raise UserError(f"sizes must be a list of dicts, one for each size, not {sizes!r}")
    chosen = tuple(sizes)
    if not chosen:
        raise UserError("sizes is empty; leave it out for a factory that needs none")
    parameters = _parameters_after_te(factory)
    for i, size in enumerate(chosen):
        if not isinstance(size, Mapping) or not all(isinstance(key, str) for key in size):
            raise UserError(f"size {size!r} is not a dict with names as keys")
        if any(are_same(size, other) for other in chosen[:i]):
            raise UserError(f"size {dict(size)!r} is listed twice")
        _check_accepts(parameters, size, besides)
    return tuple(dict(size) for size in chosen)


def checked_precisions(precisions: object) -> tuple[str, ...] | None:
    """Return names that ``parity.te`` knows; None stays None."""
    if precisions is None:
        return None
    if isinstance(precisions, str) or not isinstance(precisions, Iterable):
        raise UserError(f'precisions must be a list, such as ["bf16"], not {precisions!r}')
    chosen = tuple(str(getattr(each, "name", each)) for each in precisions)  # parity.recipe returns an object
    if not chosen:
        raise UserError("precisions is empty; leave it out for all that the run asks for")
    check_precisions(chosen, "precisions")
    return chosen


def checked_ranks(ranks: object) -> tuple[Degrees, ...]:
    """Return the layouts of ranks that compute the candidate; a single dict is one layout."""
    asked = [ranks] if isinstance(ranks, Mapping) else ranks
    if isinstance(asked, str) or not isinstance(asked, Iterable):
        raise UserError(f"ranks must be a list of dicts, such as [dict(tp=2)], not {ranks!r}")
    found = tuple(map(degrees, asked))
    if len(set(found)) < len(found):
        raise UserError("ranks lists the same layout twice")
    return found


def checked_attention(backends: object) -> tuple[AttentionBackend, ...]:
    """Return names of attention backends."""
    chosen = _require_names("attention", backends)
    unknown = [name for name in chosen if name not in BACKENDS]
    if unknown:
        raise UserError(f"unknown attention backend {unknown[0]!r}; there are {', '.join(BACKENDS)}")
    return tuple(backend for backend in BACKENDS if backend in chosen)


def checked_axes(axes: object) -> tuple[str, ...]:
    """Return names of axes of invariance."""
    chosen = _require_names("invariance", axes)
    unknown = [name for name in chosen if name not in AXES]
    if unknown:
        raise UserError(f"unknown axis {unknown[0]!r} of invariance; there are {', '.join(AXES)}")
    return tuple(axis for axis in AXES if axis in chosen)


def checked_golden(golden: object, **without: object) -> str | None:
    """Return the name of the recipe that golden rounds as; None stays None.

    Args:
        golden: what a user gives.
        without: arguments that do not go with it.
    """
    if golden is None:
        return None
    name = str(getattr(golden, "name", golden))  # parity.recipe returns an object
    check_precisions((name,), "golden")
    if te.precision_named(name).recipe is None:
        raise UserError(f"golden is {name!r}, which has no recipe to round by; name one, such as fp8_current")
    for argument, value in without.items():
        if value:
            raise UserError(f"golden={name!r} is of a single pass in one process; leave {argument} out, or golden")
    return name


def checked_marks(marks: object) -> tuple[str, ...]:
    """Return names of pytest marks."""
    chosen = _require_names("marks", marks)
    for mark in chosen:
        if not mark.isidentifier():
            raise UserError(f"mark {mark!r} is not a valid name of a pytest mark")
    return chosen


def _require_names(argument: str, values: object) -> tuple[str, ...]:
    listed = None if isinstance(values, str) or not isinstance(values, Iterable) else tuple(values)
    if listed is None or not all(isinstance(value, str) for value in listed):
        raise UserError(f"{argument} must be a list of names, not {values!r}")
    return listed


def _parameters_after_te(factory: Callable[..., Any]) -> list[inspect.Parameter]:
    try:
        parameters = list(inspect.signature(factory).parameters.values())
    except (TypeError, ValueError):  # functions that are not written in Python may have no signature
        parameters = []
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    if not parameters or parameters[0].name != "te" or parameters[0].kind not in positional:
        raise UserError("the factory's first parameter must be te, which is transformer_engine.pytorch")
    return parameters[1:]


def _check_accepts(parameters: list[inspect.Parameter], size: Size, besides: Sequence[str]) -> None:
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    required = [p.name for p in parameters if p.default is p.empty and p.kind not in variadic]
    missing = [name for name in required if name not in {*size, *besides}]
    if missing:
        raise UserError(f"size {dict(size)!r} lacks {', '.join(missing)}, which the factory requires")
    by_keyword = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    accepted = [p.name for p in parameters if p.kind in by_keyword]
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters)
    for name in besides:
        if name not in accepted and not takes_any:
            raise UserError(
                f"the pair is declared with {name}=, so its function needs a parameter of that name: {name}=None"
            )
    unknown = [key for key in size if key == "te" or (key not in accepted and not takes_any)]
    if unknown:
        raise UserError(
            f"size {dict(size)!r} has {', '.join(unknown)}, which the factory does not take; "
            "add a parameter, or **_ for what only inputs needs"
        )


# The cases of a run: declared with ``@parity.pair``, found in a user's files and in installed packages.
#
# A case belongs to the file that is being imported when it is declared, even if a function of another file declares it.


ENTRY_POINT_GROUP = "parity.pairs"


class NoPairError(UserError):
    """Raised for a file that declares no pair."""


_CASES: dict[str, Case] = {}
_PLACES: WeakKeyDictionary[Case, Place] = WeakKeyDictionary()
_MISDECLARED: dict[tuple[Path, int, str], UserError] = {}
_KEEPS_MISTAKES: ContextVar[bool] = ContextVar("keeps mistakes", default=False)


def pair(
    name: str,
    *,
    sizes: Iterable[Size] = ({},),
    large_sizes: Iterable[Size] = (),
    precisions: Iterable[str | te.Precision] | None = None,
    marks: Iterable[str] = (),
    vary_constants: bool = True,
    probe: bool = True,
    attention: Iterable[str] = (),
    accepts: Iterable[str] = (),
    invariance: Iterable[str] = (),
    steps: int = 0,
    switches: Iterable[Switch] = (),
    ranks: Iterable[Mapping[str, int]] | Mapping[str, int] = (),
    formats: Mapping[str, str | te.Precision] = MappingProxyType({}),
    golden: str | te.Precision | None = None,
) -> Callable[[Callable[..., Pair]], Case]:
    """Declare the decorated factory as a case: ``factory(te, **size)`` returns a ``parity.Pair``.

    Args:
        name: unique over all cases; letters, digits, ``_``, ``-`` and ``.``.
        sizes: keyword arguments of the factory, one dict for each size at which the pair is compared.
        precisions: names from ``parity.te.PRECISIONS``, and what ``parity.recipe`` returns; None means all that the
            run asks for.
        large_sizes: more of these, such as a real model's, which run where a GPU is and by ``--parity-sizes=large``.
        marks: names of pytest marks.
        vary_constants: whether parameters whose elements are all equal get noise, so that one that was never copied
            shows.
        probe: whether the outputs are compared on probing inputs as well.
        attention: ``flash``, ``fused``, ``unfused``: attention backends that TE must use, each in an item of its own.
        accepts: titles of findings, such as ``softcap``: known mistakes that this pair need not show under
            ``parity coverage --strict``.
        invariance: names of axes, such as ``batch-size``: the candidate's results must not depend on them, see
            ``parity invariance``.
        steps: how many steps the pair is trained for, in an item of its own besides that of a single pass.
        switches: ``resume``, ``resume-dcp``, ``resume-safetensors``, ``rollback``, ``recompute``, ``micro-batches``,
            ``graph``, ``compile``, ``offload``: further ways to make these steps, each in an item of its own.
        ranks: layouts of ranks that compute the candidate, each in an item of its own, such as ``[dict(tp=2)]``:
            degrees of ``tp``, ``cp``, ``ep``, ``dp`` and ``pp``, and ``sequence_parallel``. The factory is then called
            with ``ranks=``, a ``parity.Ranks`` with the process groups.
        formats: the precisions whose formats TE's modules must have, by patterns of their names, as in ``parity.Pair``.
        golden: the recipe whose rounding of linear layers' operands is part of golden, for weights that were trained
            under it; None for golden in FP64 alone. Of single passes in one process.

    Returns:
        A decorator that replaces the factory by its ``Case``.

    Raises:
        UserError: if it decorates the function itself, without parentheses. From the decorator, if an argument is not
            as above, the factory does not take the sizes, or another declaration has the same name. Importing the file
            again, or running the same lines again later, replaces the case.
    """
    written = _callers_place(inspect.currentframe())
    if callable(name):
        raise UserError(f'{written.path}:{written.line}: @parity.pair needs a name: @parity.pair("{_own_name(name)}")')

    large = tuple(large_sizes)

    def declare(factory: Callable[..., Pair]) -> Case:
        applied = _callers_place(inspect.currentframe())
        place = written if written.path == applied.path else applied
        case = Case(name=str(name), factory=factory, sizes=(), path=place.path, line=place.line)
        try:
            case = Case(
                name=checked_name(name),
                factory=checked_factory(factory),
                sizes=checked_sizes(sizes, factory, ("ranks",) if ranks else ()),
                large_sizes=checked_sizes(large, factory, ("ranks",) if ranks else ()) if large else (),
                precisions=checked_precisions(precisions),
                marks=checked_marks(marks),
                vary_constants=checked_switch("vary_constants", vary_constants),
                probe=checked_switch("probe", probe),
                attention=checked_attention(attention),
                accepts=_require_names("accepts", accepts),
                invariance=checked_axes(invariance),
                steps=checked_steps(steps),
                switches=checked_switches(_require_names("switches", switches), steps),
                ranks=checked_ranks(ranks),
                formats=checked_formats(formats),
                golden=checked_golden(golden, steps=steps, ranks=ranks),
                path=place.path,
                line=place.line,
            )
        except UserError as error:
            return _refuse_declaration(case, UserError(f"{place.path}:{place.line}: pair {name!r}: {error}"))
        try:
            _register_case(case, place)
        except UserError as error:
            return _refuse_declaration(case, error)
        return case

    return declare


def _refuse_declaration(case: Case, mistake: UserError) -> Case:
    """Raise what is wrong with a declaration, or keep it for ``misdeclared`` and return the case, which names it."""
    if not _KEEPS_MISTAKES.get():
        raise mistake from None
    _MISDECLARED[case.path, case.line, case.name] = mistake
    return case


@contextmanager
def mistakes_kept() -> Iterator[None]:
    """Keep mistakes in declarations instead of raising them, so that the other pairs of a file are declared as well."""
    before = _KEEPS_MISTAKES.set(True)
    try:
        yield
    finally:
        _KEEPS_MISTAKES.reset(before)


def misdeclared(file: Path) -> dict[str, UserError]:
    """Return what is wrong with the declarations of a file that was imported while mistakes were kept, by pair's name.

    Args:
        file: its resolved path.
    """
    return {name: error for (path, _, name), error in _MISDECLARED.items() if path == file}


def cases() -> list[Case]:
    """Return every declared case, in the order of declaration."""
    return list(_CASES.values())


def restore(declared: Sequence[Case]) -> None:
    """Make these the declared cases, which undoes all declarations, right or wrong, since ``declared = cases()``."""
    _MISDECLARED.clear()
    _CASES.clear()
    _CASES.update({case.name: case for case in declared})


def load_file(path: str | Path) -> list[Case]:
    """Import a Python file, unless it is already imported, and return the cases that it declares.

    As under pytest, the module is named after the file's stem (or its path, if another file took that name) and finds
    the modules beside it while it is imported.

    Raises:
        UserError: if there is no such file, it cannot be imported, or it declares no case (``NoPairError``).
    """
    path = Path(path).resolve()
    if path.is_dir():
        raise UserError(f"{path}: this is a folder; name one of the files of pairs in it")
    if not path.is_file():
        raise UserError(f"{path}: there is no such file")
    if path.suffix != ".py":
        raise UserError(f"{path}: a file of pairs is a Python file, its name ends in .py")
    found = _cases_of(module_of(path))
    if not found:
        raise NoPairError(f"{path}: the file declares no pair; decorate a function with @parity.pair(...)")
    return found


def module_of(path: Path) -> ModuleType:
    """Return the module of a file of pairs, and import it if that has not been done.

    Raises:
        UserError: if it cannot be imported.
    """
    module = _imported_from(path)
    if module is None:
        te.serve_imports()  # since the file, or a model that it imports, may import TransformerEngine
        with _undone_on_failure(), _on_sys_path(path.parent):
            module = _import_file(path)
    return module


def load_case(path: str | Path, name: str) -> Case:
    """Return the case of this name that a file declares.

    Raises:
        UserError: as ``load_file``, and if the file declares no such case; lists those that it does.
    """
    found = {case.name: case for case in load_file(path)}
    if name not in found:
        ids = ", ".join(f"{path}::{declared}" for declared in found)
        raise UserError(f"there is no pair {name!r} in {path}; name one of {ids}")
    return found[name]


def load(target: str) -> list[Case]:
    """Return the cases of a file, or the one that a pytest id such as ``my_pairs.py::my_mlp[bf16-2x64]`` names.

    Raises:
        UserError: as ``load_file`` and ``load_case``.
    """
    path, _, item = target.partition("::")
    return [load_case(path, item.partition("[")[0])] if item else load_file(path)


def only(target: str) -> Case:
    """Return the case that ``my_pairs.py::my_mlp`` names, or the only one that a file declares.

    Raises:
        UserError: as ``load``; if the file declares several.
    """
    cases = load(target)
    if len(cases) > 1:
        ids = ", ".join(f"{target}::{case.name}" for case in cases)
        raise UserError(f"{target} declares {len(cases)} pairs; name one of {ids}")
    return cases[0]


def size_of(case: Case, index: int) -> Size:
    """Return one of a case's sizes, counted from 0.

    Raises:
        UserError: if there is no such size.
    """
    if not 0 <= index < len(case.sizes):
        raise UserError(f"--size is {index}, but {case} has {len(case.sizes)}, counted from 0")
    return case.sizes[index]


def load_entry_points() -> list[Case]:
    """Return the cases of installed packages, whose entry points in the group ``parity.pairs`` name modules.

    Raises:
        UserError: if such a module cannot be imported or declares no case; names the package and the module.
    """
    found: list[Case] = []
    for entry in metadata.entry_points(group=ENTRY_POINT_GROUP):
        package = entry.dist.name if entry.dist else "an unknown package"
        try:
            with _undone_on_failure():
                module = importlib.import_module(entry.module)
        except INTERRUPTS:
            raise
        except BaseException as error:
            raise UserError(
                f"the package {package} announces pairs in the module {entry.module}, but importing it raised "
                f"{_describe_error(error)}"
            ) from error
        declared = _cases_of(module)
        if not declared:
            raise UserError(f"the package {package} announces pairs in the module {entry.module}, which declares none")
        found += [case for case in declared if case not in found]
    return found


def _own_name(function: Callable[..., Any]) -> str:
    return getattr(function, "__name__", "my_pair")


def _callers_place(frame: FrameType | None) -> Place:
    """Return where the function with this frame is called."""
    return place_of(frame.f_back if frame else None)


def _register_case(case: Case, place: Place) -> None:
    other = _CASES.get(case.name)
    if other is not None and not _same_declaration(case, place, other):
        raise UserError(
            f"{case.path}:{case.line}: pair {case.name!r} is already declared at {other.path}:{other.line}; "
            "rename one of them"
        )
    _CASES[case.name] = case
    _PLACES[case] = place


def _find_place(case: Case) -> Place:
    return _PLACES.get(case, Place(case.path, case.line))


def _same_declaration(case: Case, place: Place, other: Case) -> bool:
    """Return whether a file was imported again, or a function called or typed into an interpreter or notebook again."""
    if case.path == other.path:
        bodies = place.body, _find_place(other).body
        if None not in bodies:
            return bodies[0] is not bodies[1]
        if case.line == other.line:
            return True
    typed = not case.path.is_file() and not other.path.is_file()
    return typed and _qualified_name(case.factory) == _qualified_name(other.factory)


def _qualified_name(factory: Callable[..., Any]) -> tuple[str, str]:
    return getattr(factory, "__module__", ""), getattr(factory, "__qualname__", repr(factory))


def _cases_of(module: ModuleType) -> list[Case]:
    """Return the cases that are declared in a module's file, or in its submodules."""
    file = getattr(module, "__file__", None)
    path = Path(file).resolve() if file else None

    def belongs(case: Case) -> bool:
        home = _find_place(case).module
        return case.path == path or home == module.__name__ or home.startswith(module.__name__ + ".")

    return [case for case in _CASES.values() if belongs(case)]


def _imported_from(path: Path) -> ModuleType | None:
    """Return the module that was imported from this file, unless what it declared has been undone."""
    for name in {_find_place(case).module for case in _CASES.values() if case.path == path}:
        module = sys.modules.get(name)
        if module is not None and getattr(module, "__file__", None) and Path(str(module.__file__)).resolve() == path:
            return module
    return None


def _import_file(path: Path) -> ModuleType:
    name = path.stem if path.stem not in sys.modules else str(path)
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None  # every name that ends in .py has a loader
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException as error:
        del sys.modules[name]
        if isinstance(error, (UserError, *INTERRUPTS)):
            raise
        raise UserError(import_failure(path, error)) from error
    return module


def import_failure(path: Path, error: BaseException) -> str:
    """Return what a file raised while it was imported, and in which of its lines."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}:{error.lineno}: {_describe_error(error)}"
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
    return f"{path}:{lines[-1] if lines else 1}: importing the file raised {_describe_error(error)}"


def _describe_error(error: BaseException) -> str:
    text = error.msg if isinstance(error, SyntaxError) else str(error)
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


@contextmanager
def _undone_on_failure() -> Iterator[None]:
    """Undo what a module has declared in the context if importing it fails."""
    before = cases()
    try:
        yield
    except BaseException:
        restore(before)
        raise


@contextmanager
def _on_sys_path(folder: Path) -> Iterator[None]:
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        if str(folder) in sys.path:
            sys.path.remove(str(folder))
