"""Load TransformerEngine's own Python so that it computes on the CPU wherever its source says ``cuda``."""

from __future__ import annotations

import ast
import contextlib
import hashlib
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import marshal
import os
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

from te_on_cpu import EmulationError, cuda, cudnn_frontend, extension, linear_attention, triton, versions
from te_on_cpu.graphs import recorded
from te_on_cpu.loading import stand_ins
from te_on_cpu.loading.words import STAND_INS, cuda_means_cpu

# A cache of the code of TE's rewritten modules, as Python caches other modules in ``__pycache__``.
#
# Parsing, rewriting and compiling TE's modules takes more than half of the time that importing them takes.


_KEY_LENGTH = hashlib.sha256().digest_size


def cached(source: bytes, path: str, compile_source: Callable[[], CodeType]) -> CodeType:
    """Return the code of a module from the cache, or compile it and add it to the cache.

    A cache that cannot be read or written is ignored. ``PYTHONDONTWRITEBYTECODE`` prevents writing.

    Args:
        source: source of the module.
        path: path of its file.
        compile_source: called if the cache has no code for this source, path, Python and rewriting.
    """
    key = hashlib.sha256(b"\0".join((_rewriting(), path.encode(), source))).digest()
    file = _folder() / f"{hashlib.sha256(path.encode()).hexdigest()[:32]}.{sys.implementation.cache_tag}.pyc"
    code = read_cached(file, key)
    if code is None:
        code = compile_source()
        if not sys.dont_write_bytecode:
            with contextlib.suppress(OSError):
                _write(file, entry_of(key, code))
    return code


def _folder() -> Path:
    root = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(root) / "parity" / "transformer_engine"


@cache
def _rewriting() -> bytes:
    """Return bytes that change with Python, its optimization, and the modules here, which rewrite the sources."""
    modules = sorted(Path(__file__).parent.glob("*.py"))
    flags = f"{sys.flags.optimize}".encode()
    return b"\0".join((importlib.util.MAGIC_NUMBER, flags, *(module.read_bytes() for module in modules)))


def entry_of(key: bytes, code: CodeType) -> bytes:
    """Return the content of a cache file: its key, a checksum of the code, and the code."""
    content = marshal.dumps(code)
    return key + hashlib.sha256(content).digest() + content


def read_cached(file: Path, key: bytes) -> CodeType | None:
    """Return the code in a cache file, or None if it has another key or is damaged."""
    try:
        content = file.read_bytes()
    except OSError:
        return None
    code = content[2 * _KEY_LENGTH :]
    if content[: 2 * _KEY_LENGTH] != key + hashlib.sha256(code).digest():  # damaged code could crash the process
        return None
    found = marshal.loads(code)
    return found if isinstance(found, CodeType) else None


def _write(file: Path, content: bytes) -> None:
    """Write a file atomically, because other processes may also read or write it."""
    file.parent.mkdir(parents=True, exist_ok=True)
    descriptor, draft = tempfile.mkstemp(dir=file.parent)
    try:
        with os.fdopen(descriptor, "wb") as written:
            written.write(content)
        os.replace(draft, file)
    except OSError:
        os.unlink(draft)
        raise


# The import of TransformerEngine's own Python.
#
# In TE's sources, ``cuda`` is replaced by the CPU. The syntax tree is rewritten (``words.py``) while a
# ``transformer_engine.*`` module is imported, so nothing outside TE is patched: ``torch.cuda``, ``torch.Tensor`` and
# the user's code stay as they are, in every thread and after any exception. More names have stand-ins in TE's sources:
#
# =====================================  =====================================  =======================================
# TE writes                              is read as                             because
# =====================================  =====================================  =======================================
# ``torch.compile``                      ``stand_ins.fuse``                     it rounds as the compiled GPU code does
# ``triton``                             ``te_on_cpu.loading.triton``          it has no CPU target
# ``from importlib.metadata import``     ``te_on_cpu.loading.stand_ins``       it hides packages that need a GPU
# ``torch.baddbmm``, ``torch.bmm``       ``stand_ins.baddbmm`` and ``bmm``      cuBLAS may add in 16 bits there
# the projection's kernel of ``cudnn``   ``te_on_cpu.mla_projection``           it needs a GPU, and ``cuda.bindings``
# =====================================  =====================================  =======================================
#
# nvdlfw_inspect runs the files of TE's debug features by their paths, past every import. Its function for that is
# replaced, so that these files are read as TE's modules are.
#
# Functions of TE that launch Triton kernels are replaced after their module is loaded, see ``te_on_cpu/triton.py``, and
# so is the one that imports operations of cuDNN's Python frontend, see ``te_on_cpu/linear_attention.py``. Of this
# frontend, ``import cudnn``, in users' code as well, finds what ``score_mod`` needs (``te_on_cpu/cudnn_frontend.py``).


_ROOT = "transformer_engine"
_TRITON_MODULE = "te_on_cpu.loading.triton"
_METADATA_MODULE = "te_on_cpu.loading.stand_ins"
_MLA_MODULE = "te_on_cpu.mla_projection"
_MLA_IMPORTS = (("cudnn", "gemm_proj_rope_mxfp8_wrapper_sm100"), ("cuda.bindings", "driver"))
# Stand-ins by the name of the ``torch`` function that they replace. The name in TE's modules is ``__parity_compile__``
# and so on, which is set before a module is executed.
_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "compile": stand_ins.fuse,
    "baddbmm": stand_ins.baddbmm,
    "bmm": stand_ins.bmm,
}


class _StandIns(ast.NodeTransformer):
    """Inserts the stand-ins that only TE's own source needs: for ``_FUNCTIONS``, Triton and ``importlib.metadata``."""

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
            node.module = _METADATA_MODULE
        elif (node.module, node.names[0].name) in _MLA_IMPORTS:
            node.module = _MLA_MODULE
        return node


def _is_triton(module: str) -> bool:
    return module.partition(".")[0] == "triton"


class _CpuLoader(importlib.machinery.SourceFileLoader):
    """Loads modules so that ``cuda`` in them means the CPU, without using their ``.pyc`` files."""

    def get_code(self, fullname: str) -> CodeType:
        path = self.get_filename(fullname)
        source = self.get_data(path)
        return cached(source, path, lambda: self.source_to_code(source, path))

    def source_to_code(self, data: Any, path: Any, *, _optimize: int = -1) -> CodeType:  # type: ignore[override]
        tree = _StandIns().visit(cuda_means_cpu(ast.parse(data, path)))
        return compile(tree, path, "exec", dont_inherit=True, optimize=_optimize)

    def exec_module(self, module: ModuleType) -> None:
        if module.__name__ == _ROOT:
            _import_dynamo_without_triton()
        stand_ins = {f"__parity_{name}__": function for name, function in _FUNCTIONS.items()}
        vars(module).update({**STAND_INS, **stand_ins})
        with _importing_without_cuda_libraries():
            super().exec_module(module)
        vars(module).update({name: recorded(one) for name, one in triton.replacements(module.__name__).items()})
        if module.__name__ == _ROOT and _FEATURE_READER in sys.modules:
            _read_features_as_te(sys.modules[_FEATURE_READER])
        if module.__name__ == f"{_ROOT}.common":
            vars(module)["load_framework_extension"] = lambda framework: None
        elif module.__name__ == f"{_ROOT}.pytorch.ep":
            vars(module)["_check_nccl_runtime_version"] = lambda: None
        elif module.__name__ == f"{_ROOT}.pytorch.graph":
            vars(module)["_graph_pool_handle"] = cuda.graph_pool_handle
        elif module.__name__ == f"{_ROOT}.pytorch.attention.linear_attention.base":
            vars(module)["_import_linear_attention_op"] = linear_attention.operation
        elif module.__name__ == f"{_ROOT}.pytorch.attention.fused_mla_q_uproj":
            vars(module)["_cudnn_frontend_version_supported"] = lambda: True


_FEATURE_READER = "nvdlfw_inspect.debug_manager"


class _FeatureReaderLoader(importlib.machinery.SourceFileLoader):
    """Loads the module of nvdlfw_inspect that reads files of features."""

    def exec_module(self, module: ModuleType) -> None:
        super().exec_module(module)
        _read_features_as_te(module)


def _read_features_as_te(reader: Any) -> None:
    """Let nvdlfw_inspect read TE's files of features as modules of a TE on the CPU kernels, if that is the TE here."""
    read = reader.import_and_exec_module

    def read_as_te(path: str) -> None:
        package = importlib.util.find_spec(_ROOT)
        folder = Path(path).resolve().parent
        homes = package.submodule_search_locations if package is not None else None
        home = next((Path(one).resolve() for one in homes or () if folder.is_relative_to(Path(one).resolve())), None)
        if home is None or package is None or not isinstance(package.loader, _CpuLoader):
            read(path)
            return
        parts = Path(path).resolve().relative_to(home).with_suffix("").parts
        module = ModuleType(".".join((_ROOT, *parts)))
        module.__package__ = ".".join((_ROOT, *parts[:-1]))
        _CpuLoader(module.__name__, path).exec_module(module)

    reader.import_and_exec_module = read_as_te


class _BuiltLoader(importlib.abc.Loader):
    """Loads the CPU kernels as TE's compiled extension, and the stand-in for cuDNN's Python frontend."""

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        if spec.name == cudnn_frontend.NAME:
            return cudnn_frontend.build()
        return extension.build(versions.installed_version())

    def exec_module(self, module: ModuleType) -> None:
        """Do nothing, because the module was built with its kernels."""


class CpuFinder(importlib.abc.MetaPathFinder):
    """Finds ``transformer_engine``, its submodules, its extension and ``cudnn``, and passes them to the CPU's loaders.

    Args:
        wanted: called when ``transformer_engine`` itself is imported; if it returns False, this finder finds nothing.
    """

    def __init__(self, wanted: Callable[[], bool]) -> None:
        self._wanted = wanted
        self._asking = threading.local()  # true while a thread runs ``wanted``, which may itself look for TE

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname == _FEATURE_READER:
            spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
            if spec is not None and spec.origin is not None:
                spec.loader = _FeatureReaderLoader(fullname, spec.origin)
            return spec
        if fullname.partition(".")[0] not in (_ROOT, extension.NAME, cudnn_frontend.NAME):
            return None
        if not (self._is_wanted() if fullname in (_ROOT, cudnn_frontend.NAME) else is_loaded()):
            return None
        if fullname in (extension.NAME, cudnn_frontend.NAME):
            return importlib.machinery.ModuleSpec(fullname, _BuiltLoader())
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is not None and isinstance(spec.loader, importlib.machinery.SourceFileLoader):
            spec.loader = _CpuLoader(fullname, spec.loader.path)
        return spec

    def _is_wanted(self) -> bool:
        if getattr(self._asking, "now", False):
            return False
        self._asking.now = True
        try:
            return self._wanted()
        finally:
            self._asking.now = False


def _import_dynamo_without_triton() -> None:
    """Import ``torch._dynamo``, which TE needs, without Triton.

    Triton has no CPU target, and costs 0.1 s to import and 1.2 s at exit. PyTorch imports it later if it compiles for a
    GPU. If it is already imported, it stays.
    """
    if "triton" in sys.modules or "torch._dynamo" in sys.modules:
        return
    from torch.utils._triton import has_triton_package

    sys.modules["triton"] = None  # type: ignore[assignment]  # makes imports of it fail
    try:
        importlib.import_module("torch._dynamo")
    finally:
        del sys.modules["triton"]
        has_triton_package.cache_clear()


@contextmanager
def _importing_without_cuda_libraries() -> Iterator[None]:
    """Keep TE's import from looking for libcudnn, libnvrtc and its core library, as it does while TE is being built."""
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


class AlreadyImported(EmulationError, RuntimeError):
    """Raised if TransformerEngine was imported on its real kernels before it was to be imported on the CPU's."""


@contextmanager
def on_cpu() -> Iterator[None]:
    """Let ``import transformer_engine.pytorch`` in this context import TE on the CPU kernels, GPU or not.

    This outlasts the context: modules that were imported in it go on computing on the CPU.

    Raises:
        AlreadyImported: if this process has already imported TransformerEngine on its real kernels.
        UnsupportedTEVersion: if TransformerEngine is not installed, or too old.
    """
    if is_loaded():
        yield
        return
    if _ROOT in sys.modules:
        raise AlreadyImported(
            "this process has already imported transformer_engine itself; ask for it on the CPU before that"
        )
    versions.installed_version()
    finder = CpuFinder(lambda: True)
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        if not is_loaded():  # else TE's modules still import some of their own when they are first used
            sys.meta_path.remove(finder)


def is_loaded() -> bool:
    """Return whether the ``transformer_engine`` in ``sys.modules`` computes on the CPU kernels."""
    module = sys.modules.get(_ROOT)
    return module is not None and isinstance(getattr(module.__spec__, "loader", None), _CpuLoader)


def unload() -> None:
    """Remove a TE whose import failed halfway, so that the next import starts afresh."""
    for name in [name for name in sys.modules if name.partition(".")[0] in (_ROOT, extension.NAME)]:
        del sys.modules[name]
