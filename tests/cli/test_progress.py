"""Test how progress is shown: by a bar on a terminal, by lines elsewhere, or not at all."""

from __future__ import annotations

import io
import os
import pty
from contextlib import suppress
from types import SimpleNamespace

import pytest

from parity import progress
from parity.progress import Following, duration, followed, line

CONTROL = "\x1b"


class Clock:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=lambda: self.now))


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    for variable in (progress.QUIET, "NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(variable, raising=False)
    return Clock(monkeypatch)


def shown_of(parts: int, seconds: float, clock: Clock, total: int | None) -> list[str]:
    file = io.StringIO()
    with Following("comparing", total, file) as following:
        for _ in range(parts):
            clock.now += seconds
            following.step()
    return file.getvalue().splitlines()


@pytest.mark.parametrize(
    ("parts", "seconds", "total", "told"),
    [
        (3, 1.0, 3, []),  # it is over before the first line is due
        (4, 20.0, 4, ["comparing: 2 of 4 after 40 s, about 40 s left", "comparing: 4 of 4 after 80 s"]),
        (2, 600.0, 10, ["comparing: 1 of 10 after 10 min, about 90 min left",
                        "comparing: 2 of 10 after 20 min, about 80 min left"]),
        (1, 40.0, None, ["comparing: 1 after 40 s"]),
    ],
)  # fmt: skip
def test_a_file_gets_a_line_now_and_then(
    clock: Clock, parts: int, seconds: float, total: int | None, told: list[str]
) -> None:
    assert shown_of(parts, seconds, clock, total) == told


@pytest.mark.parametrize(
    ("variable", "expected"), [(progress.QUIET, 0), ("FORCE_COLOR", 2), ("NO_COLOR", 2), ("TERM", 2)]
)
def test_no_variable_brings_control_codes_into_a_file(
    clock: Clock, monkeypatch: pytest.MonkeyPatch, variable: str, expected: int
) -> None:
    monkeypatch.setenv(variable, "1")
    shown = shown_of(4, 20.0, clock, 4)
    assert len(shown) == expected
    assert not any(CONTROL in each for each in shown)


def on_a_terminal(body: str = "comparing") -> str:
    ours, theirs = pty.openpty()
    with os.fdopen(theirs, "w") as terminal:
        with Following(body, 4, terminal) as following:
            following.step(2)
        terminal.flush()
        os.set_blocking(ours, False)
        found = []
        with suppress(BlockingIOError):
            while True:
                found.append(os.read(ours, 65536))
        os.close(ours)
        return b"".join(found).decode()


@pytest.mark.parametrize(
    ("variables", "bar", "colours"),
    [
        ({"TERM": "xterm-256color"}, True, True),
        ({"TERM": "xterm-256color", "NO_COLOR": "1"}, True, False),
        ({"TERM": "xterm-256color", progress.QUIET: "1"}, False, False),
        ({"TERM": "dumb"}, False, False),
    ],
)
def test_a_terminal_gets_a_bar_with_colours_unless_they_are_unwanted(
    clock: Clock, monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], bar: bool, colours: bool
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    shown = on_a_terminal("comparing [bold]mlp[bf16-2x64]")
    assert ("2/4" in shown) is bar
    assert ("comparing [bold]mlp[bf16-2x64]" in shown) is bar  # names chosen by users are not markup
    assert (f"{CONTROL}[3" in shown) is colours


def test_each_part_is_yielded_whatever_its_number() -> None:
    assert list(followed([], "nothing")) == []
    assert list(followed([1, 2], "two")) == [1, 2]
    assert list(followed(iter("ab"), "letters", 2)) == ["a", "b"]


@pytest.mark.parametrize(
    ("seconds", "told"), [(0.2, "0 s"), (99.0, "99 s"), (100.0, "2 min"), (5940.0, "99 min"), (7500.0, "2 h 5 min")]
)
def test_a_time_is_told_as_people_say_it(seconds: float, told: str) -> None:
    assert duration(seconds) == told


def test_a_line_of_what_is_done_says_nothing_of_what_is_left() -> None:
    assert line("x", 0, 3, 40.0) == "x: 0 of 3 after 40 s"
