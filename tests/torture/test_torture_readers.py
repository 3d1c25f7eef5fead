"""Damaged files never raise, hang or run, nor reach a report as more than letters."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from parity import shown
from parity.lab.torture import readers
from parity.lab.torture.mutations import HOSTILE, mutated

SAMPLE = b'{"a": [1, 2, {"b": "text"}]}\n{"c": 1.5}\n'


@pytest.fixture(scope="module")
def outcomes() -> dict[str, readers.Outcome]:
    return {each.reader.where: each for each in readers.run(600)}


@pytest.mark.parametrize("reader", readers.READERS, ids=lambda reader: reader.where)
def test_a_reader_takes_damaged_files_or_refuses_them_in_a_sentence(
    outcomes: dict[str, readers.Outcome], reader: readers.Reader
) -> None:
    outcome = outcomes[reader.where]
    assert outcome.wrong == {}
    assert outcome.read + outcome.refused == outcome.inputs > 0


def test_the_same_seed_damages_in_the_same_way() -> None:
    assert [mutated(SAMPLE, random.Random(seed)) for seed in range(100)] == [
        mutated(SAMPLE, random.Random(seed)) for seed in range(100)
    ]
    assert len({mutated(SAMPLE, random.Random(seed)) for seed in range(100)}) > 80


def test_what_a_reader_does_with_a_file_is_watched(tmp_path_factory: pytest.TempPathFactory) -> None:
    def runs_it(file):
        exec(compile("1", "x", "exec"))
        yield ""

    def raises(file):
        raise KeyError(file.name)

    for read, wrong in ((runs_it, 'did {"exec": 1}'), (raises, "raised KeyError: 'file'")):
        reader = readers.Reader("x", "x", lambda folder: b"", read)
        file = tmp_path_factory.mktemp("x") / "file"
        file.touch()
        assert readers._one(reader, file) == wrong


@pytest.mark.parametrize(
    "hostile",
    [
        "<script>alert(1)</script>",
        "<img src=x onerror=alert(1)>",
        '<a href="javascript:alert(1)">x</a>',
        '<b onclick="alert(1)">x</b>',
        '<link href="https://example.com/x.css">',
        "<iframe></iframe>",
    ],
)
def test_what_a_page_would_run_or_fetch_besides_its_own_is_seen(hostile: str) -> None:
    data = '<script type="application/json" id="plots">{}</script>'
    assert list(readers.foreign(f'<a href="#x">x</a>{data}')) == []
    assert list(readers.foreign(f"{hostile}{data}"))


# The one place that escapes.


@pytest.mark.parametrize("show", [shown.text, shown.line, shown.prose, shown.code, shown.in_html])
def test_no_control_character_is_left(show) -> None:
    assert "\x1b" not in show(HOSTILE)
    assert "\\x1b[2J" in show(HOSTILE)


def test_a_line_stays_one() -> None:
    assert shown.line("a\nb\u2028c\r") == "a\\nb\\u2028c\\x0d"


def test_prose_has_no_tags_and_no_entities() -> None:
    assert shown.prose("<b> a & b &lt; 1 < 2") == "&lt;b> a & b &amp;lt; 1 &lt; 2"


def test_code_holds_backticks() -> None:
    assert shown.code("a") == "`a`"
    assert shown.code("`a` ``b``") == "``` `a` ``b`` ```"
    assert shown.fence(["```", "a"]) == "````text\n```\na\n````"


def test_the_page_on_reliability_lists_every_reader() -> None:
    page = (Path(__file__).parents[2] / "docs" / "reliability.md").read_text()
    assert [reader.where for reader in readers.READERS if f"| {reader.where} | {reader.what} |" not in page] == []
