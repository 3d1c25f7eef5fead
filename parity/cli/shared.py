"""Give all commands ``--color``, ``--quiet``, examples at the end of their help, and completion in a shell."""

from __future__ import annotations

import ast
import functools
import inspect
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

from parity.case.files import text_of
from parity.progress import QUIET
from parity.settings import PRECISION_NAMES
from parity.user_error import UserError

COLORS = ("auto", "yes", "no")
_VARIABLES = {"yes": "FORCE_COLOR", "no": "NO_COLOR"}  # rich, pytest and child processes heed these
Command = TypeVar("Command", bound=Callable[..., Any])


def _complete_color(incomplete: str) -> list[str]:
    return [name for name in COLORS if name.startswith(incomplete)]


Color = Annotated[
    str, typer.Option(help="auto (a terminal, unless NO_COLOR is set), yes or no.", autocompletion=_complete_color)
]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Show no progress.")]


def add_command(
    app: typer.Typer, *examples: str, name: str | None = None, **settings: Any
) -> Callable[[Command], Command]:
    """Return a decorator that makes a function a command of the app.

    Args:
        app: the app.
        examples: command lines for the end of the command's help.
        name: the command's name; None for the function's name.
        settings: further arguments of typer's ``command``.
    """

    def declare(function: Command) -> Command:
        @functools.wraps(function)
        def command(*arguments: Any, color: str, quiet: bool, **options: Any) -> Any:
            prepare(color, quiet)
            return function(*arguments, **options)

        own = inspect.signature(function, eval_str=True)
        shared = [
            inspect.Parameter("color", inspect.Parameter.KEYWORD_ONLY, default="auto", annotation=Color),
            inspect.Parameter("quiet", inspect.Parameter.KEYWORD_ONLY, default=False, annotation=Quiet),
        ]
        signature = own.replace(parameters=[*own.parameters.values(), *shared])
        command.__signature__ = signature  # type: ignore[attr-defined]
        command.__annotations__ = {each.name: each.annotation for each in signature.parameters.values()}
        app.command(name, epilog=_format_examples(examples), **settings)(command)
        return function

    return declare


def prepare(color: str, quiet: bool) -> None:
    """Make this process and its children show colours and progress as asked.

    Raises:
        UserError: if ``color`` is not in ``COLORS``.
    """
    if color not in COLORS:
        raise UserError(f"--color is {color!r}, but must be one of {', '.join(COLORS)}")
    if color != "auto":
        for variable in (*_VARIABLES.values(), "PY_COLORS"):  # the last one is pytest's, and would take precedence
            os.environ.pop(variable, None)
        os.environ[_VARIABLES[color]] = "1"
    if quiet:
        os.environ[QUIET] = "1"


def _format_examples(examples: tuple[str, ...]) -> str:
    """Return the examples as the help shows them, each on a line of its own."""
    return "\n".join(("\b", "Examples:", *(f"  {example}" for example in examples)))


# Complete pairs and precisions in a shell, without importing torch.


def precisions(incomplete: str) -> list[str]:
    """Return lists of precisions that complete this one: ``bf16,fp32`` and others for ``bf16,fp``."""
    given, comma, last = incomplete.rpartition(",")
    chosen = given.split(",")
    return [f"{given}{comma}{name}" for name in PRECISION_NAMES if name.startswith(last) and name not in chosen]


def pairs(incomplete: str) -> list[str]:
    """Return folders and Python files that complete a path, and ``FILE::PAIR`` if it names a file."""
    path, colons, name = incomplete.partition("::")
    if colons:
        return [f"{path}::{declared}" for declared in _find_pair_names(Path(path)) if declared.startswith(name)]
    folder, _, beginning = path.rpartition("/")
    found = [
        each
        for each in _list_folder(Path(folder or "/" if "/" in path else "."))
        if each.name.startswith(beginning) and (beginning or not each.name.startswith("."))
    ]
    before = f"{folder}/" if "/" in path else ""
    files = [f"{before}{each.name}" for each in found if each.suffix == ".py"]
    folders = [f"{before}{each.name}/" for each in found if each.is_dir()]
    if files == [incomplete]:
        return [incomplete, *pairs(f"{incomplete}::")]
    return [*files, *folders]


def _list_folder(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except OSError:
        return []


def _find_pair_names(file: Path) -> Iterator[str]:
    """Yield the names of pairs that a file contains as literals, but not of those that it computes."""
    try:
        tree = ast.parse(text_of(file))
    except (SyntaxError, ValueError, RecursionError):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and node.args and _is_pair(node.func):
            first = node.args[0]
            if isinstance(first, ast.Constant) and isinstance(first.value, str):
                yield first.value


def _is_pair(function: ast.expr) -> bool:
    called = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
    return called == "pair"
