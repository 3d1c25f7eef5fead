"""A failing pair shrinks until every further step would make its failure vanish, and never into another failure."""

from __future__ import annotations

import re
import sys
import textwrap
from pathlib import Path

import pytest

from parity import te
from parity.case import registry
from parity.cli.smallest import print_smallest
from parity.minimize import minimize as shrinking
from parity.minimize.minimize import minimize
from parity.progress import Following
from parity.user_error import UserError

# A stack of norms and linear layers, and a port that multiplies by NaN where a setting says so.
MODEL = """
    import math

    import torch
    from torch import nn

    import parity

    UNUSED = 77


    def unused():
        return UNUSED


    class Scaled(nn.Module):
        '''Multiplies what a module returns.'''

        def __init__(self, inner, factor):
            super().__init__()
            self.inner, self.factor = inner, factor

        def forward(self, x):
            return self.inner(x) * self.factor(x)


    def stack(linear, width, factors):
        return nn.Sequential(*(Scaled(linear(width, width, bias=False), factor) for factor in factors))


    def right(x):
        return 1.0
"""
SIZES = """
    @parity.pair("other")
    def other(te):
        raise RuntimeError


    @parity.pair("wrong", sizes=[dict(layers=2, width=32, rows=16), dict(layers=6, width=64, rows=48)], marks=["slow"])
    def wrong(te, layers, width, rows):
        def off(x):
            return math.nan if WHERE else 1.0

        return parity.Pair(
            reference=stack(nn.Linear, width, [right] * layers),
            candidate=stack(te.Linear, width, [off] + [right] * (layers - 1)),
            weights={"{i}.inner.weight": "{i}.inner.weight"},
            inputs=lambda rng, rows, width: rng.normal(rows, width),
        )
"""
LITERALS = """
    WIDTH, LENGTHS = 32, (16, 8, 24)


    @parity.pair("wrong")
    def wrong(te):
        def off(x):
            return torch.where(torch.arange(x.shape[1]) == 5.0, math.nan, 1.0).to(x.dtype)[:, None]

        return parity.Pair(
            reference=stack(nn.Linear, WIDTH, [right]),
            candidate=stack(te.Linear, WIDTH, [off]),
            weights={"0.inner.weight": "0.inner.weight"},
            inputs=lambda rng: rng.normal(4, sum(LENGTHS), 32),
        )
"""
PARTS = """
    @parity.pair("wrong")
    def wrong(te):
        def off(x):
            return math.nan

        return parity.Pair(
            reference=nn.Sequential(nn.Linear(32, 48), nn.Sequential(nn.GELU(), stack(nn.Linear, 48, [right]))),
            candidate=nn.Sequential(te.Linear(32, 48), nn.Sequential(nn.GELU(), stack(te.Linear, 48, [off]))),
            weights={
                "0.weight": "0.weight",
                "0.bias": "0.bias",
                parity.transpose("1.1.0.inner.weight"): parity.transpose("1.1.0.inner.weight"),
            },
            inputs=lambda rng: rng.normal(4, 32),
        )
"""
RAISES = """
    @parity.pair("wrong", sizes=[dict(width=64, rows=48)])
    def wrong(te, width, rows):
        def raises(x):
            if width < 15.5:
                raise TypeError(f"a width of {width} is too small")
            if rows > 4.5:
                raise ValueError(f"{rows} rows are too many")

        return parity.Pair(
            reference=stack(nn.Linear, width, [right]),
            candidate=stack(te.Linear, width, [raises]),
            weights={"{i}.inner.weight": "{i}.inner.weight"},
            inputs=lambda rng, rows, width: rng.normal(rows, width),
        )
"""


@pytest.fixture
def unchecked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shrinking, "_check_in_new_process", lambda *_: "")


def write(folder: Path, *parts: str) -> Path:
    path = folder / "my_pairs.py"
    path.write_text("\n".join(map(textwrap.dedent, parts)))
    return path


def shrink(path: Path, item: str = "wrong", precision: str = "bf16") -> str:
    """Return the smallest file, without the comment at its head."""
    case = registry.load_case(path, item.partition("[")[0])
    precisions = [te.PRECISIONS[precision]]
    text = minimize(case, item, precisions, 0, te.kernels("cpu"), Following("")).text
    return re.sub(r"\A(#.*\n)+", "", text)


# Sizes.


@pytest.mark.parametrize(
    ("where", "precision", "smallest"),
    [
        ("True", "bf16", "layers=1, width=1, rows=1"),
        ("layers > 2", "bf16", "layers=3, width=1, rows=1"),
        ("x.shape[0] > 17.0", "bf16", "layers=1, width=1, rows=18"),
        ("True", "fp8_current", "layers=1, width=16, rows=16"),
        ("width > 8.0 else 2.0 if True", "bf16", "layers=1, width=9, rows=1"),  # below that, it fails for another cause
    ],
)
@pytest.mark.usefixtures("unchecked")
def test_sizes_shrink_as_long_as_the_failure_is_there(
    tmp_path: Path, where: str, precision: str, smallest: str
) -> None:
    text = shrink(write(tmp_path, MODEL, SIZES.replace("WHERE", where)), precision=precision)
    assert f'@parity.pair("wrong", sizes=[dict({smallest})], precisions=["{precision}"])' in text
    for left_out in ("other", "UNUSED", "unused", "'''", "slow"):
        assert left_out not in text


@pytest.mark.parametrize(
    ("item", "declared"),
    [("wrong", "[dict(layers=2, width=1, rows=1), "), ("wrong[bf16-48x64]", ", dict(layers=6, width=64, rows=48)]")],
)
@pytest.mark.usefixtures("unchecked")
def test_a_pair_whose_name_is_computed_is_compared_at_a_size_that_the_text_declares(tmp_path, item, declared):
    made = textwrap.indent(textwrap.dedent(SIZES.replace("WHERE", "True").replace('"wrong"', "name")), "    ")
    text = shrink(write(tmp_path, MODEL, f'def declare(name):{made}\n\ndeclare("wrong")\n'), item)
    assert declared in text


@pytest.mark.usefixtures("unchecked")
def test_numbers_in_the_code_shrink_where_both_modules_get_them(tmp_path: Path) -> None:
    text = shrink(write(tmp_path, MODEL, LITERALS))
    assert "WIDTH, LENGTHS = 1, (6,)" in text  # the sixth position is wrong
    assert "rng.normal(1, sum(LENGTHS), 1)" in text


@pytest.mark.usefixtures("unchecked")
def test_the_smallest_part_that_fails_is_compared_alone(tmp_path: Path) -> None:
    text = shrink(write(tmp_path, MODEL, PARTS))
    assert 'reference=whole.reference.get_submodule("1.1.0")' in text
    assert 'candidate=whole.candidate.get_submodule("1.1.0")' in text
    assert 'parity.transpose("inner.weight"): parity.transpose("inner.weight")' in text
    assert re.search(r"inputs=lambda rng: \(rng.normal\(1, 1, std=0\.\d+\),\)", text)


@pytest.mark.usefixtures("unchecked")
def test_an_error_stays_the_same_error(tmp_path: Path) -> None:
    text = shrink(write(tmp_path, MODEL, RAISES))
    assert "dict(width=16, rows=5)" in text


# What fails.


@pytest.mark.usefixtures("unchecked")
def test_an_id_chooses_the_item(tmp_path: Path) -> None:
    path = write(tmp_path, MODEL, SIZES.replace("WHERE", "True"))
    assert "dict(layers=1" in shrink(path, "wrong[bf16-16x32]")
    with pytest.raises(UserError, match="no such item"):
        shrink(path, "wrong[bf16-7x7]")


def test_what_passes_cannot_shrink(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"nothing fails: wrong.bf16-16x32. passed, wrong.bf16-48x64. passed"):
        shrink(write(tmp_path, MODEL, SIZES.replace("WHERE", "False")))


# The file.


@pytest.mark.usefixtures("unchecked")
def test_modules_beside_the_file_become_part_of_it(tmp_path: Path) -> None:
    (tmp_path / "my_model.py").write_text(textwrap.dedent(MODEL))
    imports = "import math\n\nfrom torch import nn\n\nimport parity\nfrom my_model import right as correct, stack"
    text = shrink(write(tmp_path, imports, SIZES.replace("WHERE", "True").replace("[right]", "[correct]")))
    assert "my_model" not in text
    assert "def stack(" in text
    assert "correct = right" in text


def test_the_file_that_is_printed_fails_in_a_new_process(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path, MODEL, SIZES.replace("WHERE", "True"))
    out = tmp_path / "new" / "smaller.py"
    assert print_smallest(f"{path}::wrong[fp32-16x32]", "", 3, "bf16", "cpu", out)
    head = " ".join(out.read_text().split("\nimport")[0].replace("\n#", "").split())
    for part in ("wrong[fp32-1x1] failed. PAR001 not-finite", "16x32 (", "became 1x1 (", "--seeds 3,", "emulated:"):
        assert part in head
    assert "became" in capsys.readouterr().err


def test_a_failure_that_needs_this_process_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "is_wrong_here", True, raising=False)
    path = write(tmp_path, MODEL, SIZES.replace("WHERE", "hasattr(__import__('sys'), 'is_wrong_here')"))
    assert not print_smallest(f"{path}::wrong", "layers=1,width=2,rows=1", 0, "fp32", "cpu", None)
    printed = capsys.readouterr()
    assert "PAR001 not-finite" in printed.out
    assert "in a new process this file does not fail like that: <Result wrong[fp32-1x1], seed 0: passed" in printed.err


def test_a_failure_that_needs_the_files_folder_is_told(tmp_path: Path) -> None:
    path = write(tmp_path, MODEL, SIZES.replace("WHERE", f"__file__.startswith('{tmp_path}')"))
    with pytest.raises(UserError, match=r"a copy of .* in another folder does not fail like that"):
        shrink(path)
