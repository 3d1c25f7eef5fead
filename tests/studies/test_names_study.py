"""The study ``names``: its table is complete, its ports only have the planted mistake, and two rows are judged."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("matplotlib")
from lab.corpus.catalogue import MODELS, PORTS
from lab.corpus.judging import Judgement, Said, said_of
from lab.corpus.models import HOSTS
from lab.corpus.port import Port
from lab.studies.names.study import OUTCOMES, Judged, Settings, judgements, write
from parity import te
from parity.case.validate import check_case
from parity.mistakes.codes import CODES


def test_the_tables_are_complete_and_no_two_rows_have_a_name():
    assert {name: len(rows) for name, rows in MODELS.items()} == {
        "constants": 40,
        "partial": 40,
        "kinds": 44,
        "near": 38,
    }


@pytest.mark.parametrize("row", [port for ports in MODELS.values() for port in ports], ids=lambda row: row.name)
def test_a_row_has_a_title_and_its_port_can_be_built(row: Port):
    assert set(row.titles) <= set(CODES)
    assert row.summary.endswith(".")
    check_case(row.case, te.kernels("cpu").te)


def test_each_constant_has_a_number_and_each_part_a_place():
    assert all(row.number is not None for row in MODELS["constants"])
    assert all(
        row.place and (row.change.at or row.change.layers or "RoPE" not in row.name) for row in MODELS["partial"]
    )


@pytest.mark.parametrize("host", [host for host in HOSTS if host not in ("llama", "granite", "gemma")])
def test_a_right_port_passes(host: str):
    assert said_of(Judgement("", f"models.{host}", "bf16", 0)).status == "passed"


def test_a_number_counts_if_it_is_told_nearly():
    row = next(row for row in MODELS["constants"] if row.host == "models.attention" and row.number == 5000)
    assert row.is_named_by("rope-base", "it rotates with base 5,010")
    assert not row.is_named_by("rope-base", "it rotates with base 10000")
    assert not row.is_named_by("rope-scaling", "it rotates with base 5000")


def test_two_cheap_rows_are_judged_and_reported(tmp_path: Path):
    settings = Settings(tables=("constants",), precisions=("bf16",))
    chosen = [one for one in judgements(settings) if one.host == "models.norm_mlp" and one.searched][:2]
    found = {one: said_of(one) for one in chosen}
    assert all(Judged(PORTS[one.row, one.host], said).outcome in OUTCOMES for one, said in found.items())
    assert all(said.status == "failed" for said in found.values())
    text = write(found, settings, tmp_path).read_text()
    assert "2 of 40" in text


def test_a_wrong_fact_misnames_and_a_title_alone_lacks_the_place():
    row = next(row for row in MODELS["partial"] if row.name == "one head not causal")

    def outcome(title: str, message: str, status: str = "failed", sure: bool = True) -> str:
        return Judged(row, Said(status, 2.0, ((title, message, sure),), "", 0.0)).outcome

    assert outcome("mask", "head 1 sees later keys") == "named"
    assert outcome("mask", "it is not causal") == "no place"
    assert outcome("window", "head 1 has another") == "misnamed"
    assert outcome("window", "head 1 has another", sure=False) == "doubted"
    assert outcome("unexplained", "head 1") == "unnamed"
    assert outcome("mask", "", "passed") == "not detected"
