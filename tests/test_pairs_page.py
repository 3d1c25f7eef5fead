"""The examples of docs/pairs.md are a file of pairs that pass."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import parity
from parity.case import registry

PAGE = Path(parity.__file__).parents[1] / "docs" / "pairs.md"
BLOCKS = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, parity.Case]]:
    before = registry.cases()
    file = tmp_path_factory.mktemp("page") / "pairs_of_the_page.py"
    file.write_text("\n\n".join(BLOCKS), encoding="utf-8")
    yield {case.name: case for case in registry.load_file(file)}
    registry.restore(before)


@pytest.mark.parametrize("name", re.findall(r'parity\.pair\("(\w+)"', "".join(BLOCKS)))
def test_each_example_passes(cases: dict[str, parity.Case], name: str) -> None:
    precision = "bf16" if cases[name].runs_at("bf16") else "fp8_current"
    results = parity.compare(cases[name], [precision])
    assert results
    for result in results:
        assert result.passed, (result.reason, result.findings)


def test_modules_that_exist_already_are_compared(cases: dict[str, parity.Case]) -> None:
    te = parity.te.kernels("cpu").te
    namespace = cases["my_linear"].factory.__globals__
    assert [result.passed for result in namespace["compare_mine"](te)] == [True, True]
