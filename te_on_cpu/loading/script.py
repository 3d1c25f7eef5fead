"""Run a user's script and TransformerEngine on the CPU kernels, and show its exceptions as ``python SCRIPT`` would."""

from __future__ import annotations

import ast
import importlib.abc
import importlib.machinery
import runpy
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import CodeType, ModuleType, TracebackType
from typing import Any

from te_on_cpu.loading.loader import cached
from te_on_cpu.loading.words import STAND_INS, cuda_means_cpu, normalize_devices

# A user's script as a whole program. Its traceback is shown as ``python SCRIPT`` would: without the frames of the code
# that runs it, and of the import system between its modules.


def run_program(name: str, arguments: Sequence[str], is_module: bool, raised: tuple[type[Exception], ...] = ()) -> int:
    """Run ``python NAME ARGUMENTS``, or ``python -m NAME ARGUMENTS``, as ``run`` and ``run_module`` do.

    An exception goes to ``sys.excepthook``, which prints it unless the script has replaced that hook.

    Args:
        name: the script's path, or the module's name.
        arguments: its own arguments.
        is_module: whether the name is a module's.
        raised: exceptions that are raised here instead, for the caller to report.

    Returns:
        The exit code: 1 after an exception, else 0.
    """
    try:
        if is_module:
            run_module(name, arguments)
        else:
            run(Path(name), arguments)
    except raised:
        raise
    except Exception as error:
        for each in _chain(error):
            each.__traceback__ = _without_ours(each.__traceback__)
        sys.excepthook(type(error), error, error.__traceback__)
        return 1
    return 0


def _chain(error: BaseException) -> Iterator[BaseException]:
    """Yield the exception and those that Python shows with it, each once."""
    found: dict[int, BaseException] = {}
    waiting: list[BaseException | None] = [error]
    while waiting:
        each = waiting.pop()
        if each is None or id(each) in found:
            continue
        found[id(each)] = each
        waiting += [each.__cause__, each.__context__]
    yield from found.values()


def _without_ours(traceback: TracebackType | None) -> TracebackType | None:
    kept: TracebackType | None = None
    for each in reversed(list(_of_the_script(traceback))):
        kept = TracebackType(kept, each.tb_frame, each.tb_lasti, each.tb_lineno)
    return kept


def _of_the_script(traceback: TracebackType | None) -> Iterator[TracebackType]:
    ours = False
    while traceback is not None:
        file = traceback.tb_frame.f_code.co_filename
        parses = ours and file == ast.__file__  # parses a user's module for the frame above
        ours = parses or file == __file__ or file.startswith("<frozen importlib")
        if not ours:
            yield traceback
        traceback = traceback.tb_next


# The run of a user's script with TransformerEngine on the CPU kernels, although the script says ``cuda``.


def run(script: Path, arguments: Sequence[str]) -> None:
    """Run ``script`` as ``python SCRIPT ARGUMENTS`` would, with the CPU in place of CUDA.

    This applies to the script, to modules in its folder and below, and to modules of installed packages that mention
    PyTorch and CUDA or ``distributed``, as Megatron-Core's do. From here on, the process belongs to the script:
    ``sys.argv``, ``sys.path`` and ``__main__`` are set for good. Any exception of the script, including ``SystemExit``,
    is raised here.

    Raises:
        OSError: if the script cannot be read.
        SyntaxError: if it is not Python.
    """
    sys.argv = [str(script), *arguments]
    read_as_cpu(script.resolve().parent)
    module = ModuleType("__main__")
    loader = _ScriptLoader("__main__", str(script))
    module.__file__, module.__loader__ = str(script), loader
    sys.modules["__main__"] = module
    loader.exec_module(module)


def run_module(name: str, arguments: Sequence[str]) -> None:
    """Run a module as ``python -m NAME ARGUMENTS`` would, with the current folder in place of the script's in ``run``.

    pytest compiles tests itself to show what an assertion compared, so its ``--assert=plain`` is set.
    """
    plain = ("--assert=plain",) if name == "pytest" else ()
    sys.argv = [name, *plain, *arguments]
    read_as_cpu(Path.cwd())
    runpy.run_module(name, run_name="__main__", alter_sys=True)


def read_as_cpu(folder: Path) -> None:
    """Put ``folder`` first in ``sys.path``, and replace CUDA by the CPU in its modules and in installed packages."""
    sys.path.insert(0, str(folder))
    # This goes just before the finder that searches folders, and after TransformerEngine's finder and those of built-in
    # modules.
    sys.meta_path.insert(sys.meta_path.index(importlib.machinery.PathFinder), _ScriptFinder(str(folder)))


class _ScriptLoader(importlib.machinery.SourceFileLoader):
    """Loads source so that ``cuda`` in it means the CPU; it neither reads nor writes ``.pyc`` files."""

    def get_code(self, fullname: str) -> CodeType:
        path = self.get_filename(fullname)
        return self.source_to_code(self.get_data(path), path)

    def source_to_code(self, data: Any, path: Any, *, _optimize: int = -1) -> CodeType:  # type: ignore[override]
        tree = cuda_means_cpu(normalize_devices(ast.parse(data, path)))
        return compile(tree, path, "exec", dont_inherit=True, optimize=_optimize)

    def exec_module(self, module: ModuleType) -> None:
        vars(module).update(STAND_INS)
        super().exec_module(module)


class _PackageLoader(_ScriptLoader):
    """Loads an installed package's source in the same way, and caches its code between processes."""

    def get_code(self, fullname: str) -> CodeType:
        path = self.get_filename(fullname)
        source = self.get_data(path)
        return cached(source, path, lambda: self.source_to_code(source, path))


# Packages that are never rewritten: PyTorch, its foundations, and packages with their own finder.
_LEFT = frozenset({"torch", "torchgen", "functorch", "triton", "numpy", "transformer_engine", "te_on_cpu", "parity"})


class _ScriptFinder(importlib.abc.MetaPathFinder):
    """Finds modules in the script's folder or below, and modules of installed packages that use a GPU."""

    def __init__(self, folder: str) -> None:
        self._folder = folder

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname.partition(".")[0] in _LEFT:
            return None
        places = sys.path if path is None else path
        spec = importlib.machinery.PathFinder.find_spec(fullname, places, target)
        if spec is None or not isinstance(spec.loader, importlib.machinery.SourceFileLoader):
            return None
        file = Path(spec.loader.path)
        if file.is_relative_to(self._folder) and not _is_installed(file.relative_to(self._folder)):
            spec.loader = _ScriptLoader(fullname, spec.loader.path)
        elif _means_a_gpu(file):
            spec.loader = _PackageLoader(fullname, spec.loader.path)
        else:
            return None
        return spec


def _is_installed(file: Path) -> bool:
    return not {"site-packages", "dist-packages"}.isdisjoint(file.parts)


def _means_a_gpu(file: Path) -> bool:
    if file.is_relative_to(sysconfig.get_path("stdlib")) and not _is_installed(file):
        return False
    source = file.read_bytes()
    return b"torch" in source and (b"cuda" in source or b"distributed" in source)
