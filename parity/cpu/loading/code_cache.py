"""Keeps the code of TE's rewritten modules between processes, as Python keeps that of other modules in ``__pycache__``.

Parsing, rewriting and compiling TE's modules takes more than half of the time that importing them takes.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import marshal
import os
import sys
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import CodeType

_KEY_LENGTH = hashlib.sha256().digest_size


def cached(source: bytes, path: str, compile_source: Callable[[], CodeType]) -> CodeType:
    """The code of a module, from the cache, or compiled and entered there.

    A cache that cannot be read or written is none; ``PYTHONDONTWRITEBYTECODE`` leaves it as it is.

    Args:
        source: of the module.
        path: of its file.
        compile_source: called where the cache has no code for this source, path, Python and rewriting.
    """
    key = hashlib.sha256(b"\0".join((_rewriting(), path.encode(), source))).digest()
    file = _folder() / f"{hashlib.sha256(path.encode()).hexdigest()[:32]}.{sys.implementation.cache_tag}.pyc"
    code = _read(file, key)
    if code is None:
        code = compile_source()
        if not sys.dont_write_bytecode:
            with contextlib.suppress(OSError):
                _write(file, key + marshal.dumps(code))
    return code


def _folder() -> Path:
    root = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(root) / "parity" / "transformer_engine"


@cache
def _rewriting() -> bytes:
    """What tells this Python, its optimization, and the modules here, which say how sources are rewritten."""
    modules = sorted(Path(__file__).parent.glob("*.py"))
    flags = f"{sys.flags.optimize}".encode()
    return b"\0".join((importlib.util.MAGIC_NUMBER, flags, *(module.read_bytes() for module in modules)))


def _read(file: Path, key: bytes) -> CodeType | None:
    try:
        content = file.read_bytes()
        code = marshal.loads(content[_KEY_LENGTH:]) if content[:_KEY_LENGTH] == key else None
    except (OSError, EOFError, ValueError, TypeError):
        return None
    return code if isinstance(code, CodeType) else None


def _write(file: Path, content: bytes) -> None:
    """All at once, since other processes may read the file or write it, too."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=file.parent, delete=False) as written:
        written.write(content)
    os.replace(written.name, file)
