"""Any recipe is a precision: declared in a file, named on the command line, listed by a pair."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest
import torch
from torch import nn

import parity
from parity import settings
from parity.case.recipes import find_precision, name_precisions
from parity.te import DECLARED, PRECISIONS
from parity.user_error import UserError

te = parity.te.kernels("cpu").te
recipes = pytest.importorskip("transformer_engine.common.recipe")

overrides_backward = pytest.mark.skipif(
    "backward_override" not in recipes.Float8CurrentScaling.__dataclass_fields__, reason="TE 2.17 and newer"
)

FILE = """
    import parity

    def make():
        from transformer_engine.common.recipe import Float8CurrentScaling

        return Float8CurrentScaling({arguments})

    parity.recipe("of_a_file", make)
"""


@pytest.fixture(autouse=True)
def _forgotten() -> Iterator[None]:
    """Forget the precisions that a test declares."""
    before = dict(DECLARED)
    yield
    DECLARED.clear()
    DECLARED.update(before)


def file_in(folder: Path, arguments: str = "") -> Path:
    path = folder / f"recipes_{folder.name.replace('-', '_')}.py"
    path.write_text(dedent(FILE).format(arguments=arguments))
    return path


def linear() -> Any:
    return parity.Pair(
        reference=nn.Linear(64, 64, bias=False),
        candidate=te.Linear(64, 64, bias=False),
        inputs=lambda rng: rng.normal(32, 64),
        weights={"weight": "weight"},
        fill=True,
    )


@overrides_backward
def test_a_declared_recipe_is_compared_and_says_by_whose_limits() -> None:
    mine = parity.recipe("mine", lambda: recipes.Float8CurrentScaling(backward_override="high_precision"))
    (result,) = parity.compare(linear(), precisions=[mine])
    assert (result.status, result.precision) == ("passed", "mine")
    assert "judged by the limits of fp8_current, since mine has none of its own" in result.notes
    weight = next(tensor for tensor in result.tensors if tensor.kind == "weight gradient")
    output = next(tensor for tensor in result.tensors if tensor.kind == "output")
    assert weight.errors.relative_l2 < 0.1 * output.errors.relative_l2  # the backward pass is in BF16
    assert weight.margin < 1


@overrides_backward
def test_a_port_that_rounds_as_another_recipe_fails() -> None:
    """Under the recipe's own expectation, gradients in FP8 are far off where a backward pass in BF16 is asked for."""

    class Within(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = te.Linear(64, 64, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with te.autocast(enabled=True, recipe=recipes.Float8CurrentScaling()):
                y: torch.Tensor = self.linear(x)
                return y

    mine = parity.recipe("mine", lambda: recipes.Float8CurrentScaling(backward_override="high_precision"))
    pair = parity.Pair(
        reference=nn.Linear(64, 64, bias=False),
        candidate=Within(),
        inputs=lambda rng: rng.normal(32, 64),
        weights={"weight": "linear.weight"},
        fill=True,
    )
    (result,) = parity.compare(pair, precisions=[mine], diagnose=False)
    assert result.status == "failed"
    assert {tensor.kind for tensor in result.tensors if not tensor.passed} == {"input gradient", "weight gradient"}


def test_the_dtype_may_be_another_one() -> None:
    mine = parity.recipe("mine", lambda: recipes.Float8CurrentScaling(), dtype=torch.float16)
    (result,) = parity.compare(linear(), precisions=[mine])
    assert result.status == "passed"
    assert DECLARED["mine"].rounding.storage is torch.float16


def test_a_pair_lists_what_the_declaration_returns() -> None:
    mine = parity.recipe("mine", lambda: recipes.Float8CurrentScaling())
    before = parity.case.registry.cases()
    try:
        case = parity.pair("listed", precisions=["bf16", mine])(lambda te: linear())
        assert case.precisions == ("bf16", "mine")
        assert [result.precision for result in parity.compare(case, precisions=["fp32", "bf16", mine])] == [
            "bf16",
            "mine",
        ]
    finally:
        parity.case.registry.restore(before)


@pytest.mark.parametrize(
    ("name", "arguments", "told"),
    [
        ("a-b", {}, "a name may only have letters, digits and '_'"),
        ("bf16", {}, "this precision is already there; rename it"),
        ("mine", {"make": "not a function"}, "give a function that makes the recipe, such as lambda: str"),
        ("mine", {"dtype": torch.float64}, "must be torch.bfloat16, torch.float16 or torch.float32"),
    ],
)
def test_a_bad_declaration_is_told_with_its_place(name: str, arguments: dict[str, Any], told: str) -> None:
    with pytest.raises(UserError, match=rf"test_recipes.py:\d+: recipe '{name}'.*{told}"):
        parity.recipe(name, **({"make": recipes.DelayedScaling} | arguments))


def test_two_files_cannot_declare_the_same_name(tmp_path: Path) -> None:
    folders = [tmp_path / "one", tmp_path / "two"]
    for folder in folders:
        folder.mkdir()
    first, second = map(file_in, folders)
    assert name_precisions([f"{first}::of_a_file"], "-p") == ("of_a_file",)
    assert name_precisions([f"{first}::of_a_file"], "-p") == ("of_a_file",)  # which imports nothing again
    with pytest.raises(UserError, match=r"this precision is already there \(.*one.*::of_a_file\); rename it"):
        name_precisions([f"{second}::of_a_file"], "-p")


def test_another_process_finds_a_recipe_by_its_source(tmp_path: Path) -> None:
    source = f"{file_in(tmp_path)}::of_a_file"
    assert find_precision(source).source == source
    assert find_precision("bf16") is PRECISIONS["bf16"]


def test_what_a_file_does_not_declare_is_told_with_what_it_does(tmp_path: Path) -> None:
    path = file_in(tmp_path)
    with pytest.raises(
        UserError, match=r"declares no parity.recipe\('other', ...\); it declares of_a_file, and built in"
    ):
        name_precisions([f"{path}::other"], "-p")
    with pytest.raises(UserError, match="there is no Python file"):
        name_precisions(["nowhere.py::mine"], "-p")


@overrides_backward
def test_what_te_refuses_is_an_error_of_the_item() -> None:
    mine = parity.recipe("mine", lambda: recipes.DelayedScaling(backward_override="dequantized"))
    (result,) = parity.compare(linear(), precisions=[mine])
    assert result.status == "error"
    assert result.reason.startswith("the recipe mine (")
    assert result.reason.endswith("is refused: Assertion failed, Delayed scaling only supports backward_override=None.")


def test_a_projects_precisions_are_relative_to_its_file(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text('[tool.parity]\nprecisions = ["mine.py::of_a_file", "bf16"]\n')
    found = settings.of_project([tmp_path / "pyproject.toml"], tmp_path, ["precisions"])
    assert found == {"precisions": f"{tmp_path / 'mine.py'}::of_a_file,bf16,"}
