"""Which files use parity is told from their syntax, in whatever form they import it."""

from __future__ import annotations

from pathlib import Path

import pytest

from parity.case.files import imports_parity


def uses_parity(folder: Path, text: str) -> bool:
    file = folder / "a_file.py"
    file.write_text(text)
    return imports_parity(file)


@pytest.mark.parametrize(
    "text",
    [
        "import parity",
        "import torch, parity",
        "import parity as p",
        "import parity.te as te",
        "from parity import pair",
        "from parity.case.case import Pair",
        "x = 1; import parity",
        "try:\n    import parity\nexcept ImportError:\n    parity = None",
        "def build():\n    from parity import (\n        Pair,\n    )",
        "from torch import \\\n    nn; import parity",
        "\ufeffimport torch, parity",
    ],
)
def test_every_form_of_an_import_counts(tmp_path: Path, text: str) -> None:
    assert uses_parity(tmp_path, text)


@pytest.mark.parametrize(
    "text",
    [
        "import parity_check",
        "from . import parity",
        "from .parity import bit",
        '"""Not a file of pairs:\n\nimport parity\n"""',
        "# import parity",
        "parity = 1",
    ],
)
def test_what_only_reads_alike_does_not(tmp_path: Path, text: str) -> None:
    assert not uses_parity(tmp_path, text)


@pytest.mark.parametrize(("text", "uses"), [("import torch, parity\nx = (", True), ("x = (  # import parity", False)])
def test_a_file_that_cannot_be_parsed_is_told_by_its_lines(tmp_path: Path, text: str, uses: bool) -> None:
    assert uses_parity(tmp_path, text) is uses
