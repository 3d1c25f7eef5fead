"""What every medium shows of a run: reports, the page, the terminal, GitHub and JUnit; whatever its texts hold."""

from __future__ import annotations

import functools
import json
import math
import re
import shlex
import subprocess
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, replace
from html.parser import HTMLParser
from typing import Any

import pytest
from fakes import ENVIRONMENT, result, tensor
from hypothesis import example, given, settings
from hypothesis import strategies as st
from markdown_it import MarkdownIt
from markdown_it.token import Token

from lab import torture
from parity import shown
from parity.judge.limits import Difference, OfPrecision
from parity.report import changes, ci, failure, html, markdown, record
from parity.report.changes import Comparison
from parity.report.earlier import Asked
from parity.report.markdown import digest
from parity.report.numbers import markdown_table
from parity.report.record import Item, Record, Uncollected
from parity.result import Check, Determinism, Finding, Result, Step

HELD = Finding("PAR112", "weights-not-as-mapped", "fc1_weight is not what the map makes of it")


def in_every_medium(*results: Result, **also: Any) -> dict[str, str]:
    """Return what each report, the terminal and CI say about a run, and about its change since one that passed."""
    here = also.pop("environment", ENVIRONMENT)
    run = digest(Record(here, results, **also))
    before = tuple(replace(each, status="passed", findings=(), reason="") for each in results)
    runs = Comparison(Record(ENVIRONMENT, before), Record(here, results, **also), ("before", "now"))
    return {
        "markdown": markdown.draw(run, "x"),
        "page": html.draw_with("", run, "x", runs),
        "summary": ci.summary(run, "x"),
        "junit": "\n".join(f"{name}={value}" for item in run.items for name, value in ci.properties(item.results)),
        "terminal": "\n".join([markdown.verdict(run, shown.line), *failure.lines_of_failures(run.items, run.failed)]),
        "message": "\n".join(failure.message(item) for item in run.items if item.bad),
        "changes": changes.draw(runs),
        "changes in lines": "\n".join(changes.lines(runs)),
    }


@pytest.mark.parametrize("reason", ["", "step 3 is the first that is not right"])
@pytest.mark.parametrize("tensors", [1, 0])
def test_a_failure_that_no_margin_explains_shows_none_and_is_worse_than_any_pass(reason: str, tensors: int) -> None:
    bad = result(margin=0.56, status="failed", reason=reason, findings=(HELD,))
    bad = replace(bad, tensors=bad.tensors[:tensors])
    told = in_every_medium(bad, result(size_label="4x64", margin=0.93), result("other", margin=0.2))
    for medium, text in told.items():
        assert not re.search(r"margin[^\n]{0,60}0\.56|0\.56 times|[✕❌] (failed )?0\.56|=0\.56", text), medium
    for medium in ("markdown", "page", "summary", "terminal", "changes"):
        assert "0.93" not in told[medium].partition("## Case by case")[0].partition('id="cases"')[0], medium
    assert "❌ failed" in told["markdown"]
    assert "❌ failed" in told["changes"]
    assert '<span aria-hidden="true">✕</span> failed</a>' in told["page"]


def test_failures_in_a_terminal_come_in_the_order_of_their_severity() -> None:
    results = (
        result("a", margin=0.5, status="failed"),
        result("b", margin=40.0),
        result("c", status="error", tensors=(), reason="broken"),
        result("d", margin=math.inf),
    )
    items = [Item((each,)) for each in results]
    told = [line.split("[")[0].strip() for line in failure.lines_of_failures(items, 4)]
    assert told == ["c", "d", "b", "a"]


# Texts in a record may hold anything; each medium shows it, and obeys none of it.

PAYLOADS = (
    *(
        "plain",
        "<img src=x onerror=alert(1)>",
        "</script><script>alert(1)</script>",
        "[c](javascript:alert(1))",
        "]: x",
    ),
    *(
        "![t](http://127.0.0.1:9/t.png)",
        "x\\|![t](http://127.0.0.1:9/t.png)",
        "`![t](http://127.0.0.1:9/t.png)",
        "a|b|c",
    ),
    *(
        "\x1b]0;pwn\x07\x1b[31m",
        "$(touch pwn)",
        "'; touch pwn; '",
        "`touch pwn`",
        "x; touch pwn #",
        "\r\n::error::x\n # H1",
    ),
    *(
        "@octocat #1 http://evil.example/x",
        "www.evil.example",
        "\u202egnp.exe",
        "~~~\n# H1\n```",
        "\\",
        "&lt;script&gt;",
    ),
    *(
        "<!--",
        "]]>",
        "\ud800",
        "1" * 5_000,
        "- 1. > # ---",
        "**a** __b__ _c_ ~~d~~",
        "$x$",
        "--rootdir=/",
        "@file",
        "`",
    ),
)
MARKDOWN = MarkdownIt("commonmark").enable(["table", "strikethrough"])
FOLDS = re.compile(r"</?details>|<summary>[^<\n]*(<code>[^<\n]*</code>[^<\n]*)?</summary>|\n")
UNSEEN = re.compile("[\x00-\x09\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff\ud800-\udfff]")


def with_texts(value: Any, text: str, read: Any) -> Any:
    """Return the value with this text in every text field; ``read`` raises where a field takes only certain texts."""

    def changed(part: Any, at: tuple[Any, ...]) -> Iterator[tuple[Any, ...]]:
        if isinstance(part, dict):
            for key in part:
                yield from changed(part[key], (*at, key))
        elif isinstance(part, list):
            for index, entry in enumerate(part):
                yield from changed(entry, (*at, index))
        elif isinstance(part, str):
            yield at

    content = json.loads(json.dumps(value))
    for *way, last in changed(content, ()):
        holder = functools.reduce(lambda part, key: part[key], way, content)
        before, holder[last] = holder[last], text
        try:
            read(content)
        except ValueError:
            holder[last] = before
    return read(content)


def hostile(text: str) -> dict[str, Any]:
    """Return a run whose every text is this one, as keyword arguments of ``in_every_medium``."""
    limits = (
        OfPrecision("bf16", 1, 1, 1, Difference("norm", "output", 2, 1), Difference("norm", "output", 1, 2), 1, "x"),
    )
    here = replace(ENVIRONMENT, limits="x", limits_compared=limits, asked=Asked({"x": "x"}, "x", {"x": "x"}), items=5)
    errors = Determinism(("x",), "x", ("x",))
    full: dict[str, Any] = dict(
        findings=(Finding("x", "x", "x", repair="x", now=("x",), then=("x",)), HELD), notes=("x",)
    )
    full |= dict(attention="x", forced_attention="x", determinism=errors, traceback="x", ranks="x")
    checked = replace(tensor(margin=9.0), checks=(Check("x", 9.0, 1.0, "x"),), of="x")
    results = (
        result(margin=9.0, tensors=(checked,), **full),
        result("training", margin=0.5, status="failed", reason="x", steps=(Step(1, 1.0, 1.0, 0.5),), **full),
        result("right", **full | dict(findings=())),
        result("broken", status="error", tensors=(), reason="x", **full),
        result("skipped", status="skipped", tensors=(), reason="x"),
    )
    read = [with_texts(record.to_json(each), text, record.from_json) for each in results]
    return {
        "results": [replace(each, case=f"{n}{each.case}") for n, each in enumerate(read)],
        "environment": with_texts(asdict(here), text, record.environments.from_json),
        "uncollected": (Uncollected(f"{text}::x", text), Uncollected(text, text)),
    }


@functools.cache
def shown_of(text: str) -> dict[str, str]:
    run = hostile(text)
    return in_every_medium(*run.pop("results"), **run)


def inline(text: str) -> Iterator[Token]:
    for token in MARKDOWN.parse(text):
        yield from token.children or [token]


def shape(text: str) -> Counter[str]:
    """Return what a markdown consists of; fail if anything in it is live, or is HTML that parity does not write."""
    tokens = list(inline(text))
    for token in tokens:
        assert token.type not in ("link_open", "image", "html_inline"), token
        assert token.type != "html_block" or not FOLDS.sub("", token.content), token
        assert token.type != "text" or not re.search(r"://|www\.|@\w|#\d|\$\S", token.content), token
    return Counter(token.type for token in tokens if token.type not in ("text", "code_inline", "softbreak", "fence"))


@pytest.mark.parametrize("text", PAYLOADS, ids=range(len(PAYLOADS)))
def test_a_text_of_a_record_is_shown_everywhere_and_obeyed_nowhere(text: str) -> None:
    told = shown_of(text)
    for medium in ("markdown", "summary", "changes"):
        assert shape(told[medium]) == shape(shown_of("plain")[medium]), medium
    assert list(torture.foreign(told["page"])) == []
    for medium, lines in told.items():
        assert not UNSEEN.search(lines), medium
        assert not re.search(r"^\s*::|##\[", lines, re.MULTILINE), medium


@pytest.mark.parametrize("text", PAYLOADS, ids=range(len(PAYLOADS)))
def test_a_command_in_a_report_is_one_line_in_which_each_word_stands_for_itself(text: str) -> None:
    told = shown_of(text)
    commands = re.findall(r"^(?:reproduce: )?(pytest .*)", f"{told['markdown']}\n{told['message']}", re.MULTILINE)
    assert len(commands) == 6
    for command in commands:
        words = shlex.split(command)
        assert words[-2:] == ["-n", "0"]
        assert all(word.startswith("--parity-") for word in words[2:-2])
        assert words[1][0] not in "-@"
        heard = subprocess.run(
            ["sh", "-c", command.replace("pytest", "printf '%s\\n'", 1)], capture_output=True, text=True
        )
        assert heard.stdout == "".join(f"{word}\n" for word in words[1:])


SPECIAL = st.text(st.sampled_from("ab1 `*_~[]()!<>&#$@|\\:/.-+=;w\n\t\x1b\u202e{}"), max_size=14)


@settings(max_examples=200, deadline=None)
@given(SPECIAL, SPECIAL)
@example("[x", "](javascript:1)")
@example("x\\|![t](http://e/t)", "`")
@example("a]", "b\\")
def test_markdown_shows_a_text_as_it_is_beside_any_other(a: str, b: str) -> None:
    inert = {"paragraph_open", "paragraph_close"}
    assert set(shape(f"x: {shown.prose(a)}, {shown.code(b)} {shown.prose(b)}")) <= inert
    if shown.line(a).strip() and not shown.line(a).startswith("    "):
        assert set(shape(shown.prose(a))) <= inert
    table = shape(markdown_table([(shown.prose(f"y{a}"), shown.code(f"y{a}"), shown.code(f"y{b}"))], ["x", "y", "z"]))
    assert table == shape(markdown_table([("x", "x", "x")], ["x", "y", "z"]))
    seen = "".join(token.content for token in inline(f"q: {shown.prose(a)}"))
    assert re.sub("[ `]", "", seen) == re.sub("[ `]", "", f"q: {shown.line(a)}")


class _Ids(HTMLParser):
    found: list[str]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found += [value or "" for name, value in attrs if name == "id"]


def test_no_id_of_the_page_is_taken_by_a_name_of_a_record() -> None:
    ids = _Ids()
    ids.found = []
    ids.feed(in_every_medium(result())["page"])
    names = [name.removeprefix("case-") for name in ids.found]
    ids.found.clear()
    ids.feed(in_every_medium(*(result(name, size_label="") for name in names))["page"])
    assert [each for each, count in Counter(ids.found).items() if count > 1] == []
