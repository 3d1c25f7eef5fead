"""Which files of pairs a run compares: those that are named, or the default suite."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from importlib import metadata, util
from pathlib import Path
from typing import TYPE_CHECKING

from tabulate import tabulate

from parity.declaring import built_in
from parity.declaring.source import imports_parity
from parity.user_error import UserError

if TYPE_CHECKING:  # which files to compare is known without torch, in the process that only starts workers
    from parity.case import Case, Size

GROUP = "parity.pairs"


def files(paths: Sequence[str] | None) -> list[str]:
    """Files and pytest ids to compare.

    Args:
        paths: files, folders, or ids such as ``my_pairs.py::mlp[bf16-2x64]``; None or none for the default suite, which
            is what installed packages declare under the entry point group ``parity.pairs``, and the folder ``cases``
            beside the package ``parity`` in a checkout.

    Returns:
        For a folder, those of its files that import parity.

    Raises:
        UserError: if a path does not exist, holds no pairs, or there is no default suite.
    """
    found = [name for path in paths for name in _expand(path)] if paths else list(_default_files())
    if not found:
        raise UserError(
            f"there is no default suite: no package declares an entry point {GROUP!r}; name a file of pairs"
        )
    return list(dict.fromkeys(found))


def right_ports(paths: Sequence[str] | None) -> tuple[str, ...]:
    """Files of pairs that are known to agree: those that are named, or the default suite and the zoo's hosts.

    Raises:
        UserError: as ``files``.
    """
    from parity.lab.calibration.right_ports import ZOO

    return (*files(paths), *(() if paths else (ZOO,)))


def cases(paths: Sequence[str] | None) -> list[Case]:
    """The cases of those files, or of those ids, in the order of declaration.

    A folder's file without pairs may be there to help others.

    Raises:
        UserError: as ``files`` and ``registry.load``.
    """
    from parity import registry

    found: dict[str, Case] = {}
    for name in files(paths):
        try:
            found.update({case.name: case for case in registry.load(name)})
        except registry.NoPairError:
            if not paths or name in paths:
                raise
    return list(found.values())


def table(found: Iterable[Case]) -> str:
    """Cases with their sizes, precisions and places, for a terminal."""
    rows = [
        (case.name, "\n".join(map(_size, case.sizes)), ", ".join(case.precisions or ("all",)), _place(case))
        for case in found
    ]
    return tabulate(rows, ["case", "sizes", "precisions", "declared"], tablefmt="simple", disable_numparse=True)


def _expand(path: str) -> Iterator[str]:
    file = Path(path.split("::")[0])
    if not file.exists():
        raise UserError(f"there is no file or folder {file}")
    if not file.is_dir():
        if file.suffix != ".py":
            raise UserError(f"{file}: a file of pairs is a Python file, its name ends in .py")
        yield path
        return
    pairs = [child for child in sorted(file.rglob("*.py")) if imports_parity(child) and not _is_hidden(child, file)]
    if not pairs:
        raise UserError(f"no Python file in {file} imports parity")
    yield from map(str, pairs)


def _is_hidden(file: Path, folder: Path) -> bool:
    return any(part.startswith((".", "__")) for part in file.relative_to(folder).parts)


def _default_files() -> Iterator[str]:
    """In a checkout its own cases, whether another copy is installed or not."""
    cases = built_in.checkout()
    entry_points = [
        entry_point
        for entry_point in metadata.entry_points(group=GROUP)
        if cases is None or entry_point.module.rpartition(".")[0] != built_in.MODULE
    ]
    found = [file for entry_point in entry_points for file in _module_files(entry_point)]
    if cases is not None:
        found += [file for file in sorted(cases.rglob("*.py")) if imports_parity(file)]
    yield from dict.fromkeys(_from_here(file.resolve()) for file in found)


def _module_files(entry_point: metadata.EntryPoint) -> list[Path]:
    """The file of a module, or those of a package that import parity."""
    try:
        spec = util.find_spec(entry_point.module)
    except ImportError:
        spec = None
    if spec is None or spec.origin is None:
        raise UserError(
            f"the entry point {entry_point.name!r} of {GROUP} names {entry_point.module}, which is not there"
        )
    folders = spec.submodule_search_locations or ()
    if not folders:
        return [Path(spec.origin)]
    return [file for folder in folders for file in sorted(Path(folder).rglob("*.py")) if imports_parity(file)]


def _from_here(file: Path) -> str:
    """Relative to the current folder where the file is below it."""
    return str(file.relative_to(Path.cwd()) if file.is_relative_to(Path.cwd()) else file)


def _size(size: Size) -> str:
    return " ".join(f"{key}={value}" for key, value in size.items()) or "-"


def _place(case: Case) -> str:
    return f"{_from_here(case.path.resolve())}:{case.line}"
