"""Print what a finding means."""

from __future__ import annotations

import difflib
import re
from importlib import resources

from parity.mistakes.codes import CODES
from parity.user_error import UserError


def explain(name: str) -> str:
    """Return the section of ``docs/findings.md`` about a code or a title of findings.

    Raises:
        UserError: if there is none; suggests the nearest ones.
    """
    pages = (resources.files("parity") / "findings.md").read_text(encoding="utf-8")
    for section in re.findall(r"^## (PAR.*?)(?=^## |\Z)", pages, re.MULTILINE | re.DOTALL):
        if name.lower() in re.split(r",? ", section.partition("\n")[0].lower()):
            return section.strip()
    close = difflib.get_close_matches(name, {*CODES, *CODES.values()}, n=1)
    near = f"did you mean {close[0]}?" if close else "codes are like PAR201, titles like norm-eps"
    raise UserError(f"no finding has the code or the title {name!r}; {near}")
