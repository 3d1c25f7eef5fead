"""The claims of the study ``flops``: formulas agree with PyTorch's counter in every case, and with their sources."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("matplotlib")
from lab.studies import catalogue
from lab.studies.flops import study as study
from lab.studies.flops.study import Settings
from parity.case.case import Case, Size
from parity.measuring import flops
from parity.te import Kernels
from parity.user_error import UserError

SUITE = list(study.suite())


@pytest.mark.parametrize(("case", "size"), SUITE, ids=[case.name for case, _ in SUITE])
def test_the_formulas_count_exactly_what_pytorch_counts(case: Case, size: Size, kernels: Kernels) -> None:
    found = study.count(case, size, kernels)
    assert found.computed == found.counted
    assert found.skipping <= found.computed


def test_a_step_with_full_recomputation_is_equation_3_of_narayanan() -> None:
    assert study.GPT3.products("full") == study.narayanan_step(study.GPT3)


def test_palm_s_parameters_and_utilisation_follow_from_its_components() -> None:
    palm = study.PALM
    sizes = palm.layer
    parameters = study.palm_parameters(palm)
    assert round(parameters / 1e9, 2) == 540.35
    attention = 12 * palm.layers * sizes.heads * sizes.head_dim * sizes.seq
    assert palm.products("none") == sizes.tokens * (6 * parameters + attention)


def test_32_in_front_of_the_brackets_counts_attention_and_logits_a_third_too_high() -> None:
    model = study.WIDE_LLAMA
    sizes = model.layer
    pairs = flops.visible_pairs(sizes.seq, sizes.seq)
    core = flops.core_attention(sizes.batch, sizes.heads, pairs, sizes.head_dim)
    attention = model.layers * 4 * sum(each.forward for each in core.values())
    logits = flops.total([flops.logits(sizes.tokens, sizes.hidden, model.vocabulary)])
    excess = study.megatron_deepspeed_step(model, "full") - model.products("full")
    assert excess == pytest.approx((attention + logits) / 3)


def test_every_claim_disagrees_where_the_count_is_another(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [claim.agrees[:2] for claim in study.claims()] == ["ex", "ex", "to", "ex", "no", "no", "bu", "to"]
    pairs, components = flops.visible_pairs, flops.in_products

    def twice(layer: Mapping[str, flops.Flops]) -> dict[str, flops.Flops]:
        doubled = {name: replace(each, forward=2 * each.forward) for name, each in components(layer).items()}
        return {name: replace(each, backward=2 * each.backward) for name, each in doubled.items()}

    monkeypatch.setattr(flops, "visible_pairs", lambda *sizes, **options: 2 * pairs(*sizes, **options))
    monkeypatch.setattr(flops, "in_products", twice)
    assert {claim.agrees[:2] for claim in study.claims()} == {"no"}


def test_the_report_shows_the_gate_and_every_case(tmp_path: Path) -> None:
    report = catalogue.run("flops", Settings(seqs=(64, 128)), tmp_path).read_text()
    assert f"{len(SUITE)} of {len(SUITE)} cases" in report
    assert "32 B s h²" in report
    assert (tmp_path / "flops.png").stat().st_size > 0


def test_heads_that_do_not_divide_are_told(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="heads=3 must divide hidden=4096"):
        catalogue.run("flops", Settings(heads=3), tmp_path)
