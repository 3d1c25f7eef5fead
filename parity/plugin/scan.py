"""Find out whether a run has pairs before pytest collects, without opening what pytest itself would not open."""

from __future__ import annotations

import copy
import os
from collections.abc import Iterable, Iterator
from glob import glob
from pathlib import Path

import pytest
from _pytest.main import pytest_ignore_collect
from _pytest.python import path_matches_patterns

from parity.case.files import imports_parity, is_regular

_HAS_CASES = pytest.StashKey[bool]()


def has_cases(config: pytest.Config) -> bool:
    """Return whether a file that pytest was asked for imports parity. The plugin leaves other runs alone."""
    if _HAS_CASES not in config.stash:
        config.stash[_HAS_CASES] = next(files_of_cases(config), None) is not None
    return config.stash[_HAS_CASES]


def may_have_cases(config: pytest.Config) -> bool:
    """Return the same before any conftest, whose ``collect_ignore`` is unknown then, and before options are final."""
    early = copy.copy(config)
    early.option = config.known_args_namespace
    start = config.invocation_params.dir
    by_default = config.getini("testpaths") if start == config.rootpath else []
    named = early.option.file_or_dir or [
        found for pattern in by_default for found in sorted(glob(pattern, root_dir=start, recursive=True))
    ]
    return next(_find_parity_files(early, named or ["."]), None) is not None


def files_of_cases(config: pytest.Config) -> Iterator[Path]:
    """Yield the files that import parity among those that pytest would collect for its arguments."""
    return _find_parity_files(config, config.args)


def _find_parity_files(config: pytest.Config, arguments: Iterable[str]) -> Iterator[Path]:
    for argument in arguments:
        path = config.invocation_params.dir / argument.split("::")[0]
        found = [path] if path.suffix == ".py" and is_regular(path) else _find_python_files(path, config)
        yield from filter(imports_parity, found)


def _find_python_files(top: Path, config: pytest.Config) -> Iterator[Path]:
    """Yield the Python files that pytest would collect below a folder, each folder once however links lead."""
    seen: set[str] = set()
    patterns = config.getini("python_files")
    for folder, subfolders, names in os.walk(top, followlinks=True):
        real = os.path.realpath(folder)
        if real in seen:
            subfolders.clear()
            continue
        seen.add(real)
        subfolders[:] = [name for name in subfolders if not _is_ignored(Path(folder, name), config)]
        for path in (Path(folder, name) for name in names if name.endswith(".py")):
            if path_matches_patterns(path, patterns) and is_regular(path) and not _is_ignored(path, config):
                yield path


def _is_ignored(path: Path, config: pytest.Config) -> bool:
    try:
        return bool(pytest_ignore_collect(path, config))
    except Exception:  # pytest reports it when it collects
        return True
