"""Damaged files, killed runs and mishaps."""

from __future__ import annotations

import random
from pathlib import Path

import kills
import mishaps
import pytest

from lab import torture
from lab.torture import HOSTILE, mutated
from parity import shown

# Damaged files never raise, hang or run code, and reach a report only as text.


SAMPLE = b'{"a": [1, 2, {"b": "text"}]}\n{"c": 1.5}\n'


def test_each_reader_takes_damaged_files_or_refuses_them_in_a_sentence() -> None:
    outcomes = list(torture.run(600))
    assert [outcome.reader for outcome in outcomes] == list(torture.READERS)
    for outcome in outcomes:
        assert outcome.wrong == {}, outcome.reader.where
        assert outcome.read + outcome.refused == outcome.inputs > 0, outcome.reader.where


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
        reader = torture.Reader("x", "x", lambda folder: b"", read)
        file = tmp_path_factory.mktemp("x") / "file"
        file.touch()
        assert torture._one(reader, file) == wrong


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
    assert list(torture.foreign(f'<a href="#x">x</a>{data}')) == []
    assert list(torture.foreign(f"{hostile}{data}"))


# The only place that escapes text.


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


# Runs that are killed at random moments lose nothing and count nothing twice; `make torture` kills more of them.


def test_killed_runs_go_on_to_what_they_would_have_been(tmp_path: Path) -> None:
    tally, runs = kills.Tally(), kills.Runs(tmp_path)
    for seed in (5, 9):  # two workers; then none, with the resumed run killed as well
        runs.trial(seed, tally)
    assert tally.wrong == []
    assert sum(tally.kills.values()) == 3


# Cases that misbehave affect only themselves, and many results are all kept; `make torture` has more of both.


TRIED = [
    ("no file can grow above 4 KiB, as on a full disk", 0, 2),
    ("forks, and the child goes on", 1, 0),
    ("ends the process in its pass", 1, 1),
    ("has C code that calls _exit", 0, 1),
    ("fills the disk of record and report", 0, 0),
    ("fills the disk of temporary files", 1, 0),
    ("fills the disk of record, report and temporary files", 0, 2),
]


@pytest.mark.parametrize(("what", "workers", "code"), TRIED)
def test_a_case_that_misbehaves_is_told_and_costs_no_other(what: str, workers: int, code: int, tmp_path: Path) -> None:
    (mishap,) = (each for each in mishaps.MISHAPS if each.what == what)
    try:
        found = mishaps.run(mishap, workers, tmp_path / "run")
    except OSError as error:
        assert mishap.disk
        pytest.skip(f"no small file system can be mounted here: {error}")
    assert found.wrong == ()
    assert found.code == code


def test_many_results_are_all_kept(tmp_path: Path) -> None:
    found = mishaps.soak(100, tmp_path)
    assert found.megabytes > 0
    assert found.kept > found.by_pytest > 0
