"""Each code that a finding may have is explained, and nothing else."""

import re
from pathlib import Path

from parity.mistakes.codes import CODES

PAGE = Path(__file__).parents[2] / "docs" / "findings.md"


def test_every_code_and_title_has_its_section_and_every_section_its_code():
    sections = {
        (code, title)
        for code, titles in re.findall(r"^## (PAR\d+) (.+)$", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)
        for title in titles.split(", ")
    }
    assert sections == {(code, title) for title, code in CODES.items()}
