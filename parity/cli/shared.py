"""Give every command what all of them have: ``--color``, ``--quiet``, and examples at the end of its help."""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable
from typing import Annotated, Any, TypeVar

import typer

from parity.progress import QUIET
from parity.user_error import UserError

COLORS = ("auto", "yes", "no")
_VARIABLES = {"yes": "FORCE_COLOR", "no": "NO_COLOR"}  # which rich, pytest and the processes that are started heed
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
        name: the command's name, if it is not the function's.
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
        app.command(name, epilog=_shown(examples), **settings)(command)
        return function

    return declare


def prepare(color: str, quiet: bool) -> None:
    """Let this process, and those that it starts, show colours and progress as they are asked to.

    Raises:
        UserError: for another word than ``COLORS``.
    """
    if color not in COLORS:
        raise UserError(f"--color is {color!r}, but must be one of {', '.join(COLORS)}")
    if color != "auto":
        for variable in (*_VARIABLES.values(), "PY_COLORS"):  # the last one is pytest's, and would win
            os.environ.pop(variable, None)
        os.environ[_VARIABLES[color]] = "1"
    if quiet:
        os.environ[QUIET] = "1"


def _shown(examples: tuple[str, ...]) -> str:
    """Return the examples as the help shows them, a line each."""
    return "\n".join(("\b", "Examples:", *(f"  {example}" for example in examples)))
