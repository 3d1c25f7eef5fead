"""The study of recipes: each is one that TE makes, and the report counts what was refused apart from what failed."""

from __future__ import annotations

import re

import pytest

pytest.importorskip("transformer_engine.pytorch.custom_recipes.quantizer_factory_zoo")  # TE 2.20 and newer

from lab.studies.recipes import study
from lab.studies.recipes.named import FACTORIES, OTHERS, RECIPES
from lab.studies.recipes.study import BUGS, HOSTS, Said, Settings, Trial


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_has_a_rounding_and_a_family(name: str) -> None:
    assert RECIPES[name].rounding.storage is RECIPES[name].dtype
    assert RECIPES[name].families


def test_there_are_all_of_tes_factories_and_more_than_20_recipes_with_other_arguments() -> None:
    assert len(FACTORIES) == 13
    assert len(OTHERS) > 20
    assert len({repr(RECIPES[name].rounding) + str(RECIPES[name].warmup_passes) for name in OTHERS}) > 20


def test_the_report_counts_what_te_refuses_apart() -> None:
    settings = Settings(recipes=("mxfp8_in_hybrid",), seeds=(0,))
    found = {}
    for precision in ("mxfp8", "mxfp8_in_hybrid"):
        for host in HOSTS:
            found[Trial(precision, host, "", 0)] = Said("passed", 0.5, "")
        for host, bug in BUGS:
            found[Trial(precision, host, bug, 0)] = Said("failed", 9.0, "")
    found[Trial("mxfp8_in_hybrid", HOSTS[0], "", 0)] = Said("error", 0.0, "TE refuses it; in linear")
    found[Trial("mxfp8_in_hybrid", HOSTS[1], "", 0)] = Said("failed", 1.5, "")
    found[Trial("mxfp8_in_hybrid", *BUGS[0], 0)] = Said("passed", 0.9, "")
    report = re.sub(" +", " ", "\n".join(study._sections(found, settings)))
    right = len(HOSTS)
    assert f"Of {right} comparisons of right ports, 1 failed, and TE refused 1. Of {len(BUGS)} wrong ports" in report
    assert f"| `mxfp8_in_hybrid` | {right - 2} | 1 | 1 | 1.50 | {len(BUGS) - 1} | 1 | mxfp8 |" in report
    assert f"| right | error | mxfp8_in_hybrid | {HOSTS[0]} | TE refuses it |" in report
    assert f"| {BUGS[0][1]} | passed | mxfp8_in_hybrid | {BUGS[0][0]} |" in report
