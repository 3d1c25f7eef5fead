"""Whether files can be written is known before anything is computed, and finding out leaves nothing behind."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from parity.plugin.options import check_file, check_folder
from parity.user_error import UserError


def test_a_folder_that_can_be_made_is_not_made(tmp_path: Path) -> None:
    check_folder(tmp_path / "new" / "deep", "--report")
    check_file(tmp_path / "report.md", "--report")
    assert list(tmp_path.iterdir()) == []


def test_a_file_in_the_place_of_the_folder_or_above_it_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"--report is .*/file: that is a file, but should be a folder"):
        check_folder(tmp_path / "file", "--report")
    with pytest.raises(UserError, match=r"--report is .*/file/deep, which lies below .*/file:"):
        check_folder(tmp_path / "file" / "deep", "--report")


def test_a_folder_in_the_place_of_the_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "report.md").mkdir()
    with pytest.raises(UserError, match=r"report\.md is a folder, but should be a file"):
        check_file(tmp_path / "report.md", "--report")


@pytest.mark.skipif(sys.platform != "linux", reason="has no /proc")
def test_a_place_where_nobody_may_write_is_told() -> None:
    with pytest.raises(UserError, match=r"--report is /proc/x, but /proc cannot be written to"):
        check_folder(Path("/proc/x"), "--report")


def test_a_name_that_no_file_can_have_is_told(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"--report: .* cannot be written: File name too long"):
        check_file(tmp_path / (300 * "x"), "--report")
