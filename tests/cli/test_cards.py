"""Cards: what comparisons of a pair prove, written down, and what has changed since."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from textwrap import dedent

import pytest

from parity.card.card import FORMAT, Card, Comparison, Coverage, read_card, write_card
from parity.card.checking import list_changes
from parity.cli import cards
from parity.user_error import UserError

SCHEMA = Path(__file__).parents[2] / "docs" / "card.schema.json"
PAIR = """
    import parity
    from torch import nn

    @parity.pair("carded", precisions=["bf16", "fp8_current"], sizes=[dict(n=32)], steps=1{further})
    def carded(te, n):
        right, left = nn.LayerNorm(n), te.LayerNorm(n, eps={eps})
        return parity.Pair(right, left, lambda rng: rng.normal(16, n), {{"weight": "weight", "bias": "bias"}})
"""


@dataclass
class File:
    path: Path

    def write(self, eps: float = 1e-5, further: str = "") -> None:
        self.path.write_text(dedent(PAIR).format(eps=eps, further=further))

    @property
    def card(self) -> Path:
        return self.path.with_name("carded.card.yaml")


@pytest.fixture
def file(tmp_path: Path) -> File:
    return File(tmp_path / "my_carded_pairs.py")


def test_the_schema_in_the_docs_is_that_of_cards() -> None:
    assert json.loads(SCHEMA.read_text()) == Card.model_json_schema()


def test_a_card_says_what_was_compared_and_a_page_shows_it(file: File, capsys: pytest.CaptureFixture[str]) -> None:
    file.write()
    assert cards.write(str(file.path), ["fp32", "bf16"], [0, 3], "cpu", None, covers=True)
    card = read_card(file.card)
    assert card.pair == "my_carded_pairs.py::carded"
    assert card.model == "LayerNorm with 64 parameters"
    ways = [(one.way, one.precision, one.seeds, one.status) for one in card.comparisons]
    assert ways == [("one pass", "bf16", [0, 3], "passed"), ("1 step", "bf16", [0, 3], "passed")]
    assert [one.precision for one in card.coverage] == ["bf16"]
    page = file.card.with_suffix(".md").read_text()
    assert "| one pass | n=32 | bf16 | 2 | passed |" in page
    assert "Everything that was compared passed." in page
    assert f"card: {file.card}" in capsys.readouterr().out


def test_checking_tells_what_is_worse(
    file: File, capsys: pytest.CaptureFixture[str], forgotten: Callable[[], None]
) -> None:
    file.write()
    cards.write(str(file.path), ["bf16"], [0], "cpu", None, covers=False)
    assert cards.check(file.card, "cpu")
    assert capsys.readouterr().out.endswith(f"no differences from {file.card}\n")
    forgotten()
    file.write(eps=0.01)
    assert not cards.check(file.card, "cpu")
    told = capsys.readouterr().out
    assert "my_carded_pairs.py has changed" in told
    assert "✗ one pass at bf16 (n=32): passed, margin" in told
    assert "failed, margin" in told


@pytest.fixture
def forgotten() -> Callable[[], None]:
    """Return a function that makes the next command import the test's file again, as another process would."""
    import sys

    from parity.case import registry

    before = registry.cases()

    def forget() -> None:
        registry.restore(before)
        sys.modules.pop("my_carded_pairs", None)

    return forget


def a_card(**fields: object) -> Card:
    compared = Comparison(
        way="one pass", size={"n": 2}, precision="bf16", seeds=[0], status="passed", margin=0.5, worst="output"
    )
    complete = Card(
        format=FORMAT,
        pair="a.py::a",
        model="Linear",
        commit="1",
        code={"a.py": "1"},
        weights="1",
        environment={"PyTorch": "2.13"},
        comparisons=[compared],
        coverage=[Coverage(precision="bf16", tried=3, passed=["softcap: cap missing"])],
    )
    return complete.model_copy(update=fields)


def changed(**fields: object) -> list[Comparison]:
    return [a_card().comparisons[0].model_copy(update=fields)]


@pytest.mark.parametrize(
    ("fields", "told", "is_worse"),
    [
        ({"environment": {"PyTorch": "2.14"}}, "PyTorch: 2.13 before, 2.14 now", False),
        ({"weights": "2"}, "the reference's weights are others", False),
        ({"code": {"a.py": "2"}}, "a.py has changed", False),
        ({"comparisons": []}, "one pass at bf16 (n=2): compared before (passed, margin 0.5), not any more", True),
        (
            {"comparisons": changed(status="failed", margin=2.0)},
            "one pass at bf16 (n=2): passed, margin 0.5 before, failed, margin 2 now",
            True,
        ),
        (
            {"comparisons": changed(margin=0.4)},
            "one pass at bf16 (n=2): passed, margin 0.5 before, passed, margin 0.4 now",
            False,
        ),
        (
            {"comparisons": changed(formats=[["fc1", "bf16", "bf16", "bf16"]])},
            "one pass at bf16 (n=2): TE's modules computed in other formats",
            True,
        ),
        (
            {"coverage": [Coverage(precision="bf16", tried=3, passed=["softcap: cap missing", "window: none"])]},
            "bf16: could not have shown window: none, which it could before",
            True,
        ),
    ],
)
def test_each_kind_of_change_is_told(fields: dict[str, object], told: str, is_worse: bool) -> None:
    assert [(one.told, one.is_worse) for one in list_changes(a_card(), a_card(**fields))] == [(told, is_worse)]


def test_a_card_is_read_as_it_was_written(tmp_path: Path) -> None:
    file = tmp_path / "card.yaml"
    file.write_text(write_card(a_card()))
    assert read_card(file) == a_card()
    assert list_changes(a_card(), read_card(file)) == []


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (": [", "is not a card: not YAML"),
        ("a: 1", "is not a card that parity card wrote"),
        (write_card(a_card()).replace("te-parity/card/1", "te-parity/card/9"), "is not a card that parity card wrote"),
        (None, "cannot read the card"),
    ],
)
def test_what_is_no_card_is_a_users_error(tmp_path: Path, text: str | None, told: str) -> None:
    file = tmp_path / "card.yaml"
    if text is not None:
        file.write_text(text)
    with pytest.raises(UserError, match=told):
        cards.check(file, "cpu")


def test_a_pair_that_runs_at_none_of_the_precisions_is_a_users_error(file: File) -> None:
    file.write()
    with pytest.raises(UserError, match="runs at none of fp16"):
        cards.write(str(file.path), ["fp16"], [0], "cpu", None, covers=False)
