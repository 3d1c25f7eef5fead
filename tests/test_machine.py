"""What ``parity doctor`` finds out about a machine."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch

from parity import te
from parity.cli import machine
from parity.cpu.versions import NEWEST, OLDEST
from parity.te.precision import PRECISIONS


@pytest.mark.parametrize(
    ("version", "words"),
    [
        ("1.13.0", f"1.13.0, too old: the CPU kernels serve {OLDEST} to {NEWEST}"),
        (f"{NEWEST}.9", f"{NEWEST}.9 (the CPU kernels serve"),
        ("99.0", "99.0, newer than was tried"),
        (None, "not installed: pip install transformer-engine"),
    ],
)
def test_the_version_of_te_is_held_against_what_the_cpu_kernels_serve(version: str | None, words: str) -> None:
    assert machine.te_range(version).startswith(words)


def test_a_precision_is_available_or_has_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = te.Kernels("cpu", torch.device("cpu"), ModuleType("te"))
    monkeypatch.setattr("parity.te.kernels", lambda backend: kernels)
    monkeypatch.setattr(
        "parity.te.precision.why_unavailable", lambda precision, _: "it needs Hopper" if precision.recipe else None
    )
    answers = machine.availability("cpu")
    assert (answers["bf16"], answers["fp8_current"]) == ("yes", "no: it needs Hopper")


def test_kernels_that_cannot_be_loaded_are_a_reason_for_each_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    def raise_(backend: str) -> None:
        raise te.BackendUnavailable("already loaded")

    monkeypatch.setattr("parity.te.kernels", raise_)
    assert machine.availability("cpu") == dict.fromkeys(PRECISIONS, "no: already loaded")


def test_without_a_gpu_the_doctor_tells_of_each_gpu_what_te_says_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("parity.te.why_no_gpu", lambda: "PyTorch sees no CUDA device")
    diagnosis = machine.diagnose()
    assert diagnosis.real == dict.fromkeys(PRECISIONS, "no: PyTorch sees no CUDA device")
    refused = {
        gpu: {name for name, answer in answers.items() if answer.startswith("no")}
        for gpu, answers in diagnosis.emulated.items()
    }
    assert refused == {
        "Ada 8.9": {"fp8_block", "mxfp8", "nvfp4"},
        "Hopper 9.0": {"mxfp8", "nvfp4"},
        "Blackwell 10.0": set(),
    }
    assert "compute capability 10.0" in diagnosis.emulated["Hopper 9.0"]["mxfp8"]
    assert "CublasLt version 12.1.3.x" in diagnosis.emulated["Ada 8.9"]["fp8_delayed"]
    assert "CUDA >= 12.9" in diagnosis.emulated["Hopper 9.0"]["fp8_block"]
    assert diagnosis.emulated["Hopper 9.0"]["fp8_delayed"] == "yes"


def test_the_table_has_a_row_for_each_precision_and_a_column_for_each_gpu() -> None:
    yes, no = dict.fromkeys(PRECISIONS, "yes"), dict.fromkeys(PRECISIONS, "no: there is no GPU")
    versions = (("PyTorch", torch.__version__),)
    diagnosis = machine.Diagnosis(
        versions, no, {"Ada 8.9": yes | {"fp32": "yes: CUDA 12"}, "Hopper 9.0": yes}, "CUDA 13"
    )
    lines = str(diagnosis).splitlines()
    assert lines[0].split() == ["PyTorch", torch.__version__]
    assert lines[2].split() == ["precision", "this", "GPU", "Ada", "8.9", "Hopper", "9.0"]
    rows = [line.split() for line in lines[4 : 4 + len(PRECISIONS)]]
    assert [row[0] for row in rows] == list(PRECISIONS)
    assert rows[0][1:] == ["no", "(1)", "yes", "(2)", "yes"]
    assert "(1) there is no GPU" in lines
    assert "(2) CUDA 12" in lines
