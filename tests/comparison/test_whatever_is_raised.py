"""A comparison always has a result, whatever the pair's code raises and whatever texts it makes."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable
from typing import Any, NoReturn

import pytest
import torch
from bad_input import TOKENS, WIDTH, assert_says, linear, result_of
from torch import Tensor, nn

import parity
from parity.report import record


class Mute(Exception):
    """An exception that has no text and cannot be pickled."""

    def __str__(self) -> str:
        raise RuntimeError("no text")

    __repr__ = __str__

    def __reduce__(self) -> NoReturn:
        raise RuntimeError("no pickle")


class Foreign(BaseException):
    """An exception that ``except Exception`` does not catch, as libraries use for cancelled tasks."""


def recurse(depth: int = 0) -> int:
    return recurse(depth + 1)


def throw(error: BaseException) -> NoReturn:
    raise error


RAISING: dict[str, tuple[Callable[[], Any], str]] = {
    "an exception": (lambda: throw(ValueError("no")), "raised ValueError: no; at "),
    "one without a text": (lambda: throw(Mute()), "raised Mute: (its __str__ raises RuntimeError)"),
    "one that no file can hold": (lambda: throw(ValueError("a \udcff")), "raised ValueError: a \\udcff"),
    "one that a terminal obeys": (lambda: throw(ValueError("\x1b[2J")), "raised ValueError: \\x1b[2J"),
    "an end": (lambda: throw(SystemExit(0)), "raised SystemExit: 0"),
    "a generator's end": (lambda: throw(GeneratorExit()), "raised GeneratorExit"),
    "a foreign one": (lambda: throw(Foreign("cancelled")), "raised Foreign: cancelled"),
    "an endless recursion": (recurse, "raised RecursionError: maximum recursion depth exceeded"),
    "no memory": (lambda: throw(MemoryError()), "raised MemoryError"),
}


def from_call(number: int, run: Callable[[], Any], factor: float = 1.0) -> Callable[..., Tensor]:
    """Return a call whose output is ``factor`` times the right one, and which raises from call ``number`` on."""
    calls = itertools.count(1)

    def call(module: nn.Module, x: Tensor) -> Tensor:
        if next(calls) >= number:
            run()
        return factor * module(x)

    return call


@pytest.mark.parametrize("name", RAISING)
def test_a_candidate_that_raises_is_an_error(name: str) -> None:
    run, told = RAISING[name]
    assert_says(result_of(linear(call_candidate=from_call(1, run))), "error", told)


@pytest.mark.parametrize("name", RAISING)
def test_the_verdict_stays_where_a_wrong_candidate_raises_in_a_later_call(name: str) -> None:
    run, told = RAISING[name]
    result = result_of(linear(call_candidate=from_call(3, run, factor=2.0)))
    assert_says(
        result, "failed", "the second look, which tells chance from a mistake, raised", told, "the first look counts"
    )
    # The parts of the search that do not call the candidate follow one that does; what is no exception ends the search.
    is_named = [finding.title for finding in result.findings] == ["factor"]
    assert is_named or "the search for the cause raised" in " ".join(result.notes), (result.findings, result.notes)
    assert result.margin > 100


def test_a_search_that_raises_leaves_the_findings_out_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("parity.search.explanation.explain", lambda *_: throw(Mute()))
    result = result_of(linear(call_candidate=lambda module, x: 2 * module(x)))
    assert_says(result, "failed", "the search for the cause raised Mute: (its __str__ raises RuntimeError)")
    assert result.findings == ()


def test_a_judge_that_raises_is_an_error_of_parity_s_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("parity.comparison.judge", lambda *_, **__: throw(ZeroDivisionError("by chance")))
    (result,) = parity.compare(linear(), ["fp32"])
    assert (result.status, result.tensors) == ("error", ())
    assert result.traceback.startswith("Traceback (most recent call last):")


def test_ctrl_c_ends_a_comparison() -> None:
    with pytest.raises(KeyboardInterrupt):
        parity.compare(linear(call_candidate=from_call(1, lambda: throw(KeyboardInterrupt()))), ["fp32"])


# What modules return.


class Evil:
    """An object none of whose attributes can be read."""

    def __getattribute__(self, name: str) -> NoReturn:
        raise RuntimeError("hands off")


class Strict(Tensor):
    """A tensor that refuses to be measured."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "norm" in str(func):
            raise ValueError("not measured")
        return super().__torch_function__(func, types, args, kwargs or {})


def nested(y: Tensor) -> Tensor:
    return torch.nested.nested_tensor([y, y[:3]], layout=torch.jagged)


def endless(y: Tensor) -> list[Any]:
    within: list[Any] = [y]
    within.append(within)
    return within


RETURNED: dict[str, tuple[Callable[[Tensor], Any], str]] = {
    "float8": (
        lambda y: y.to(torch.float8_e4m3fn),
        "a float8_e4m3fn tensor, which cannot be compared",
    ),
    "sparse": (lambda y: y.to_sparse(), "a sparse_coo tensor, which cannot be compared"),
    "nested": (nested, "a nested tensor, which cannot be compared"),
    "complex": (lambda y: y.to(torch.complex64), "the candidate returns {}"),
    "integers": (lambda y: y.int(), "the candidate returns {}"),
    "a generator": (lambda y: (x for x in [y]), "the candidate returns {}"),
    "far more": (lambda y: y.expand(2**20, TOKENS, WIDTH), "(1048576, 16, 32)"),
    "no values": (lambda y: y.to("meta"), "the candidate raised"),
    "itself": (endless, "RecursionError"),
    "nothing readable": (lambda y: Evil(), "hands off"),
}


@pytest.mark.parametrize("name", RETURNED)
def test_what_cannot_be_compared_is_an_error_that_says_what_it_is(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # Near the end of the stack, an earlier object's finaliser may fail as well, which pytest would report as an error.
    monkeypatch.setattr(sys, "unraisablehook", lambda *_: None)
    returned, told = RETURNED[name]
    assert_says(result_of(linear(call_candidate=lambda module, x: returned(module(x)))), "error", told)


def test_a_tensor_of_a_class_of_its_own_is_compared() -> None:
    assert_says(result_of(linear(call_candidate=lambda module, x: module(x).as_subclass(Strict))), "passed")


def test_names_of_outputs_are_shown_as_text_that_can_be_printed_and_written() -> None:
    name = "a\udcff\x1b[31m"
    pair = linear(
        call_reference=lambda module, x: {name: module(x), "b": x},
        call_candidate=lambda module, x: {name: 2 * module(x), "b": x},
    )
    result = result_of(pair, diagnose=False)
    assert_says(result, "failed")
    assert "output[a\\udcff\\x1b[31m]" in {tensor.label for tensor in result.tensors}
    assert record.result_line(result).encode()


class WithoutGrad(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        torch.set_grad_enabled(False)
        return super().forward(x)


def test_an_infinite_error_is_searched_for_like_others() -> None:
    result = result_of(linear(reference=WithoutGrad(WIDTH, WIDTH)))
    assert_says(result, "failed", "which is 0 in golden and up to")
    assert not any("raised" in note for note in result.notes)
