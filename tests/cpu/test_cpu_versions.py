"""Versions of TransformerEngine: those that are refused, tried, or adapted to."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from importlib import metadata
from pathlib import Path

import pytest
from packaging.version import Version

from parity.cpu import extension, versions
from parity.cpu.versions import UnsupportedTEVersion


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch):
    """Pretend that a version of TransformerEngine is installed, or none."""

    def pretend(version: str | None) -> None:
        def answer(name: str) -> str:
            if version is None:
                raise metadata.PackageNotFoundError(name)
            return version

        monkeypatch.setattr(metadata, "version", answer)

    return pretend


def test_a_version_that_is_too_old_is_refused_by_name(installed) -> None:
    installed("2.13.4")
    with pytest.raises(UnsupportedTEVersion, match=r"2\.13\.4 is older than 2\.14"):
        versions.installed_version()


def test_without_transformer_engine_the_error_says_how_to_install_it(installed) -> None:
    installed(None)
    with pytest.raises(UnsupportedTEVersion, match="pip install transformer-engine"):
        versions.installed_version()


@pytest.mark.parametrize("version", ["2.14", "2.14.1", "2.16.1", "2.18.0", "2.19.0", "2.20.2", "2.20.7+cu13"])
def test_versions_that_were_tried_are_taken_without_a_word(installed, version: str) -> None:
    installed(version)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert versions.installed_version() == Version(version)


def test_a_newer_version_is_warned_of_once(installed) -> None:
    installed("2.98.0")
    with pytest.warns(UserWarning, match=r"2\.98\.0 is newer than 2\.20"):
        versions.installed_version()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert versions.installed_version() == Version("2.98.0")


@pytest.mark.skipif(
    versions.installed_version().release[:2] < versions.NEWEST.release,
    reason="only the newest TransformerEngine can pass for a later one",
)
def test_a_newer_version_is_tried(tmp_path: Path) -> None:
    """The installed TransformerEngine, under the number of a later one."""
    distribution = tmp_path / "transformer_engine-2.99.0.dist-info"
    distribution.mkdir()
    (distribution / "METADATA").write_text("Metadata-Version: 2.1\nName: transformer_engine\nVersion: 2.99.0\n")
    path = os.pathsep.join(filter(None, [str(tmp_path), *sys.path]))
    program = "import torch; from parity import te; print(te.kernels('cpu').te.Linear(32, 16)(torch.ones(8, 32)).shape)"
    ran = subprocess.run(
        [sys.executable, "-c", program], env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True
    )
    assert "torch.Size([8, 16])" in ran.stdout, ran.stderr
    assert ran.stderr.count("2.99.0 is newer than") == 1


def test_before_2_16_the_fused_attention_for_short_sequences_has_a_name() -> None:
    name = "NVTE_F16_max512_seqlen"
    assert hasattr(extension.build(Version("2.14.1")).NVTE_Fused_Attn_Backend, name)
    assert not hasattr(extension.build(Version("2.16.1")).NVTE_Fused_Attn_Backend, name)


def test_adapting_to_an_old_version_leaves_the_kernels_of_new_ones_as_they_are() -> None:
    def public_names(version: str) -> dict[str, object]:
        return {name: value for name, value in vars(extension.build(Version(version))).items() if name[0] != "_"}

    before = public_names("2.20.2")
    extension.build(Version("2.14.1"))
    assert {**public_names("2.20.2"), "version": None} == {**before, "version": None}
