"""Loads TransformerEngine's own Python so that it computes on the CPU.

TE's sources are read as they are, with one word exchanged: where they say ``cuda``, the CPU is meant. The rewrite
happens on the syntax tree (``rewrite.py``) while a ``transformer_engine.*`` module is imported, so nothing
outside TE is patched: ``torch.cuda``, ``torch.Tensor`` and the user's code stay what they were, in every thread, after
any exception. More names have stand-ins in TE's sources:

=====================================  =====================================  =======================================
TE writes                              is read as                             because
=====================================  =====================================  =======================================
``torch.compile``                      ``parity.cpu.loading.fusion.fuse``     it rounds as the compiled GPU code does
``triton``                             ``parity.cpu.triton.stand_in``         it has no CPU target
``from importlib.metadata import``     ``parity.cpu.loading.packages``        flash-attention may be installed here
``torch.baddbmm``, ``torch.bmm``       ``parity.cpu.attention.unfused``       cuBLAS may add in 16 bits there
=====================================  =====================================  =======================================

Functions of TE that launch Triton kernels are replaced once their module is loaded, see ``parity.cpu.triton``.
"""

from __future__ import annotations

import ast
import importlib
import importlib.abc
import importlib.machinery
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import CodeType, ModuleType
from typing import Any

from parity.cpu import cuda, extension, versions
from parity.cpu.attention import unfused
from parity.cpu.loading import code_cache, fusion, rewrite
from parity.cpu.triton import replacements

_ROOT = "transformer_engine"
_TRITON_MODULE = "parity.cpu.triton.stand_in"
_PACKAGES_MODULE = "parity.cpu.loading.packages"
# Functions of ``torch`` by their names there; TE's modules find the stand-in as ``__parity_compile__``, which is set
# before a module is executed.
_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "compile": fusion.fuse,
    "baddbmm": unfused.baddbmm,
    "bmm": unfused.bmm,
}


class _StandIns(ast.NodeTransformer):
    """What only TE's own source needs: stand-ins for a compiler, for Triton, and for who tells what is installed."""

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        self.generic_visit(node)
        match node:
            case ast.Attribute(value=ast.Name("torch"), attr=name) if name in _FUNCTIONS:
                return ast.copy_location(ast.Name(f"__parity_{name}__", node.ctx), node)
        return node

    def visit_Import(self, node: ast.Import) -> ast.AST:
        for alias in node.names:
            if _is_triton(alias.name):
                alias.name, alias.asname = _TRITON_MODULE, alias.asname or "triton"
        return node

    def visit_ImportFrom(self, node: ast.ImportFrom) -> ast.AST:
        if node.level == 0 and node.module is not None and _is_triton(node.module):
            node.module = _TRITON_MODULE
        elif node.module == "importlib.metadata":
            node.module = _PACKAGES_MODULE
        return node


def _is_triton(module: str) -> bool:
    return module.partition(".")[0] == "triton"


class _CpuLoader(importlib.machinery.SourceFileLoader):
    """Loads modules that mean the CPU where they say ``cuda``; it leaves TE's own ``.pyc`` files alone."""

    def get_code(self, fullname: str) -> CodeType:
        path = self.get_filename(fullname)
        source = self.get_data(path)
        return code_cache.cached(source, path, lambda: self.source_to_code(source, path))

    def source_to_code(self, data: Any, path: Any, *, _optimize: int = -1) -> CodeType:  # type: ignore[override]
        tree = _StandIns().visit(rewrite.cuda_means_cpu(ast.parse(data, path)))
        return compile(tree, path, "exec", dont_inherit=True, optimize=_optimize)

    def exec_module(self, module: ModuleType) -> None:
        if module.__name__ == _ROOT:
            _import_dynamo_without_triton()
        stand_ins = {f"__parity_{name}__": function for name, function in _FUNCTIONS.items()}
        vars(module).update({rewrite.CUDA_NAME: cuda, **stand_ins})
        with _importing_without_cuda_libraries():
            super().exec_module(module)
        vars(module).update(replacements.replacements(module.__name__))
        if module.__name__ == f"{_ROOT}.common":
            vars(module)["load_framework_extension"] = lambda framework: None
        elif module.__name__ == f"{_ROOT}.pytorch.graph":
            # A capture that failed later would leave TE's modules wrapped, with FP8 switched off.
            vars(module)["set_capture_start"] = cuda.CUDAGraph


class _ExtensionLoader(importlib.abc.Loader):
    """Loads what TE imports as its compiled extension."""

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return extension.build(versions.installed_version())

    def exec_module(self, module: ModuleType) -> None:
        """Its kernels are in place once it is built."""


class CpuFinder(importlib.abc.MetaPathFinder):
    """Finds ``transformer_engine``, its submodules and its extension, and hands them to the CPU's loaders.

    Args:
        wanted: asked when ``transformer_engine`` itself is imported; if it says no, this finder finds nothing of it.
    """

    def __init__(self, wanted: Callable[[], bool]) -> None:
        self._wanted = wanted

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname.partition(".")[0] not in (_ROOT, extension.NAME):
            return None
        if not (self._wanted() if fullname == _ROOT else is_loaded()):
            return None
        if fullname == extension.NAME:
            return importlib.machinery.ModuleSpec(fullname, _ExtensionLoader())
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is not None and isinstance(spec.loader, importlib.machinery.SourceFileLoader):
            spec.loader = _CpuLoader(fullname, spec.loader.path)
        return spec


def _import_dynamo_without_triton() -> None:
    """TE imports ``torch._dynamo``, and that Triton, whose code has no CPU target, which takes 0.1 s and at exit 1.2 s.

    PyTorch imports Triton later where it compiles for a GPU; who has imported it already keeps it.
    """
    if "triton" in sys.modules or "torch._dynamo" in sys.modules:
        return
    from torch.utils._triton import has_triton_package

    sys.modules["triton"] = None  # type: ignore[assignment]  # which says that there is none
    try:
        importlib.import_module("torch._dynamo")
    finally:
        del sys.modules["triton"]
        has_triton_package.cache_clear()


@contextmanager
def _importing_without_cuda_libraries() -> Iterator[None]:
    """TE looks for libcudnn, libnvrtc and its core library while it is imported, unless it is being built."""
    flag = "NVTE_PROJECT_BUILDING"
    before = os.environ.get(flag)
    os.environ[flag] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[flag]
        else:
            os.environ[flag] = before


def is_loaded() -> bool:
    """Whether the ``transformer_engine`` in ``sys.modules`` is the one that computes on the CPU."""
    module = sys.modules.get(_ROOT)
    return module is not None and isinstance(getattr(module.__spec__, "loader", None), _CpuLoader)


def unload() -> None:
    """Forget a TE that could not be imported to its end, so that the next import starts afresh."""
    for name in [name for name in sys.modules if name.partition(".")[0] in (_ROOT, extension.NAME)]:
        del sys.modules[name]
