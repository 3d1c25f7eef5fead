"""Test what all commands have: examples in their help, ``--color``, ``--quiet``, and completion in the shell."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from lab.__main__ import app as lab
from parity.cli import app, shared
from parity.progress import QUIET
from parity.settings import PRECISION_NAMES
from parity.user_error import UserError

OF_USERS, OF_DEVELOPERS = (typer.main.get_command(each).commands for each in (app, lab))  # type: ignore[attr-defined]
APPS = dict.fromkeys(OF_USERS, (app, "parity")) | dict.fromkeys(OF_DEVELOPERS, (lab, "python -m lab"))
COMMANDS = OF_USERS | OF_DEVELOPERS
PAIRS = """
import parity
from parity import pair
@parity.pair("mlp")
def mlp(te): ...
@pair("norm", sizes=[dict(n=2)])
def norm(te): ...
for kind in ("a", "b"):
    parity.pair(f"of_{kind}")(mlp)
"""


@pytest.mark.parametrize("name", COMMANDS)
def test_the_help_of_a_command_ends_with_two_or_three_of_its_calls(name: str) -> None:
    of, start = APPS[name]
    shown = CliRunner().invoke(of, [name, "--help"]).output
    _, examples = shown.split("Examples:\n")
    calls = [line.strip() for line in examples.splitlines() if line.strip()]
    assert 1 <= len(calls) <= 3
    assert f"{start} {name}" in calls[0]
    known = {option for parameter in COMMANDS[name].params for option in (*parameter.opts, *parameter.secondary_opts)}
    own = [call for call in calls if re.search(rf"{start} {name}\b", call)]
    given = [call.partition(f"{start} {name}")[2] for call in own]
    asked = {option for each in given for option in re.findall(r"(?<=\s)--?[a-z][a-z-]*", each)}
    assert asked <= known


@pytest.mark.parametrize("name", COMMANDS)
def test_the_list_of_commands_cuts_no_sentence_short(name: str) -> None:
    assert COMMANDS[name].get_short_help_str(limit=62).endswith(".")


@pytest.mark.parametrize(
    ("color", "before", "after"),
    [
        ("auto", {"NO_COLOR": "1"}, {"NO_COLOR": "1"}),
        ("auto", {}, {}),
        ("yes", {"NO_COLOR": "1", "PY_COLORS": "0"}, {"FORCE_COLOR": "1"}),
        ("no", {"FORCE_COLOR": "1", "PY_COLORS": "1"}, {"NO_COLOR": "1"}),
    ],
)
def test_an_option_for_colours_wins_over_the_environment(
    monkeypatch: pytest.MonkeyPatch, color: str, before: dict[str, str], after: dict[str, str]
) -> None:
    monkeypatch.setattr(os, "environ", dict(before))
    shared.prepare(color, quiet=False)
    assert os.environ == after


def test_quiet_is_passed_on_to_what_a_command_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", {})
    shared.prepare("auto", quiet=True)
    assert os.environ == {QUIET: "1"}


def test_another_word_for_colours_is_told() -> None:
    with pytest.raises(UserError, match="--color is 'always', but must be one of auto, yes, no"):
        shared.prepare("always", quiet=False)


@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        ("", list(PRECISION_NAMES)),
        ("b", ["bf16"]),
        ("bf16,fp8_", ["bf16,fp8_delayed", "bf16,fp8_current", "bf16,fp8_block"]),
        ("bf16,b", []),  # it is named already
        ("x", []),
    ],
)
def test_precisions_are_completed_after_each_comma(typed: str, offered: list[str]) -> None:
    assert shared.precisions(typed) == offered


@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        ("", ["my_pairs.py", "other.py", "models/"]),
        ("my", ["my_pairs.py"]),
        ("my_pairs.py", ["my_pairs.py", "my_pairs.py::mlp", "my_pairs.py::norm"]),
        ("my_pairs.py::n", ["my_pairs.py::norm"]),
        ("models/", ["models/llama.py"]),
        ("models/llama.py::", ["models/llama.py::mlp", "models/llama.py::norm"]),
        ("other.py::", []),  # it is not Python
        ("gone/", []),
        (".h", [".hidden.py"]),
    ],
)
def test_files_and_the_pairs_in_their_text_are_completed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, typed: str, offered: list[str]
) -> None:
    (tmp_path / "models").mkdir()
    for name, text in {"my_pairs.py": PAIRS, "models/llama.py": PAIRS, "other.py": "def", ".hidden.py": ""}.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "notes.txt").write_text("")
    monkeypatch.chdir(tmp_path)
    assert shared.pairs(typed) == offered


@pytest.mark.skipif(sys.platform == "win32", reason="has none of these shells")
@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        ("parity do", {"doctor"}),
        ("parity run my_pairs.py::n", {"my_pairs.py::norm"}),
        ("parity train my_pairs.py -p fp3", {"fp32"}),
    ],
)
def test_a_shell_is_answered_without_torch(tmp_path: Path, typed: str, offered: set[str], shell: str) -> None:
    (tmp_path / "my_pairs.py").write_text(PAIRS)
    code = (
        "import sys; sys.argv[0] = 'parity'\nfrom parity.cli import main\ntry: main()\n"
        "finally: print([name for name in ('torch', 'numpy') if name in sys.modules], file=sys.stderr)"
    )
    asked = {
        "PYTHONPATH": str(Path(shared.__file__).parents[2]),
        "_PARITY_COMPLETE": f"complete_{shell}",
        # Bash sets the first two variables, zsh and fish the others.
        "COMP_WORDS": typed,
        "COMP_CWORD": str(len(typed.split()) - 1),
        "_TYPER_COMPLETE_ARGS": typed,
        "_TYPER_COMPLETE_FISH_ACTION": "get-args",
    }
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env={**os.environ, **asked},
        capture_output=True,
        text=True,
        check=False,
    )
    assert _offers(done.stdout, shell) == offered, done.stderr
    assert done.stderr.splitlines()[-1] == "[]"


def _offers(answer: str, shell: str) -> set[str]:
    """Return the completions in an answer: code to run for zsh, lines of ``name TAB description`` for other shells."""
    if shell == "zsh":
        return {offer.replace("\\", "") for offer in re.findall(r'(?m)(?:^|\(\()"([^"]*)"', answer)}
    return {line.partition("\t")[0] for line in answer.splitlines()}
