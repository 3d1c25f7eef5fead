"""Each port of the corpus is rejected or passes as it should, and its mistake is named.

By default the right port of each small host runs, and one row of each subject and title, in FP32 or BF16. ``--full``
runs all rows in both.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from typing import Any

import pytest

import parity
from lab.corpus.catalogue import MODELS, PLANTED, PORTS, SMALL
from lab.corpus.port import Port, at_size
from parity.mistakes.codes import CODES

BOTH = ("fp32", "bf16")


def rows() -> Iterator[Any]:
    """Yield each port with each of its precisions; a row whose kind others show is marked for ``--full``.

    Models and planted bugs take long, and so only run by default for titles that no small port has.
    """
    shown: set[Any] = set()
    for groups in (SMALL, MODELS, PLANTED):
        before = {title for _, title in shown}
        for group, ports in groups.items():
            for port in ports:
                title = port.titles[0] if port.titles else f"right {port.host}"
                by_default = (group, title) not in shown and (groups is SMALL or title not in before)
                before |= set() if groups is SMALL else {title}
                shown.add((group, title))
                precisions = [one for one in port.precisions or BOTH if port.occurs_at(one)]
                first = zlib.crc32(port.name.encode()) % len(precisions)
                for number, precision in enumerate(precisions):
                    marks = () if by_default and number == first else pytest.mark.only_full
                    yield pytest.param(port, precision, id=f"{port.host}: {port.name}, {precision}", marks=marks)


@pytest.mark.parametrize(("port", "precision"), list(rows()))
def test_a_port_is_told_by_its_mistake(port: Port, precision: str):
    (result,) = parity.compare(at_size(port.case, "small"), [precision])
    if result.status == "skipped":
        pytest.skip(result.reason)
    if not port.titles:
        assert result.passed, result.findings or result.reason
        return
    assert result.status == "failed", result.reason
    first, *others = result.findings
    assert port.is_named_by(first.title, first.message), first
    assert port.others or not others, others


def test_no_two_ports_have_a_name_and_all_titles_exist():
    listed = [port.key for groups in (SMALL, MODELS, PLANTED) for ports in groups.values() for port in ports]
    assert len(listed) == len(PORTS)
    assert {title for port in PORTS.values() for title in port.titles} <= set(CODES)
