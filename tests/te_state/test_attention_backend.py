"""Which attention kernel TransformerEngine runs: seen, forced, and refused with TE's reason."""

from __future__ import annotations

import logging
import os
from types import ModuleType

import pytest
import torch
from torch import nn

import parity
from parity import te
from parity.case.case import Case
from parity.case.validate import CheckedSize, attention_of, check_case
from parity.comparison import compare
from parity.reference import CoreAttention
from parity.result import Result
from parity.te.attention_backend import NotOffered, attention_backends, has_attention
from parity.user_error import UserError


@pytest.fixture(scope="module")
def te_module() -> ModuleType:
    return te.kernels("cpu").te


def attend(te_module: ModuleType, dtype: torch.dtype = torch.bfloat16) -> None:
    module = te_module.DotProductAttention(2, 64, qkv_format="bshd", attention_dropout=0.0)
    module(*(torch.randn(2, 16, 2, 64, dtype=dtype) for _ in range(3)))


def attention_pair(te_module: ModuleType) -> parity.Pair:
    return parity.Pair(
        reference=CoreAttention(causal=True),
        candidate=te_module.DotProductAttention(2, 64, qkv_format="bshd", attention_dropout=0.0),
        inputs=lambda rng: tuple(rng.normal(2, 16, 2, 64) for _ in range(3)),
    )


def case(attention: tuple[str, ...] = ()) -> Case:
    return Case("core", attention_pair, sizes=({},), attention=attention)  # type: ignore[arg-type]


def by_item(results: list[Result]) -> dict[str, tuple[str, str]]:
    return {result.item: (result.status, result.attention) for result in results}


def test_the_backend_that_ran_is_seen_with_its_kernel(te_module: ModuleType) -> None:
    with attention_backends() as ran:
        attend(te_module)
        attend(te_module, torch.float32)
        attend(te_module)
    assert list(ran) == ["fused (F16_arbitrary_seqlen)", "unfused"]


@pytest.mark.parametrize("backend", ["fused", "unfused"])
def test_a_forced_backend_runs_though_te_has_picked_before(backend: str, te_module: ModuleType) -> None:
    attend(te_module)
    with attention_backends(backend) as ran:  # type: ignore[arg-type]
        attend(te_module)
    assert [name.split()[0] for name in ran] == [backend]
    with attention_backends() as ran:
        attend(te_module)
    assert [name.split()[0] for name in ran] == ["fused"]


def test_what_te_does_not_offer_is_refused_with_its_reason(te_module: ModuleType) -> None:
    with (
        pytest.raises(NotOffered, match="flash attention here: flash-attn is not installed"),
        attention_backends("flash"),
    ):
        attend(te_module)
    with (
        pytest.raises(NotOffered, match=r"fused attention here: Disabling FusedAttention.*float32"),
        attention_backends("fused"),
    ):
        attend(te_module, torch.float32)


def test_another_error_of_the_module_stays_what_it_is(te_module: ModuleType) -> None:
    with pytest.raises(ValueError, match="mine"), attention_backends("fused"):
        raise ValueError("mine")


def test_environment_and_log_are_left_as_they_were(te_module: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NVTE_FUSED_ATTN", "0")
    monkeypatch.delenv("NVTE_UNFUSED_ATTN", raising=False)
    attend(te_module)
    logger = logging.getLogger("DotProductAttention")
    before = logger.level, list(logger.handlers), logger.propagate
    with pytest.raises(NotOffered), attention_backends("flash"):
        attend(te_module)
    assert os.environ["NVTE_FUSED_ATTN"] == "0"
    assert "NVTE_UNFUSED_ATTN" not in os.environ
    assert (logger.level, logger.handlers, logger.propagate) == before


def test_a_module_has_attention_where_te_picks_a_backend(te_module: ModuleType) -> None:
    assert has_attention(nn.Sequential(te_module.MultiheadAttention(64, 1)))
    assert not has_attention(te_module.Linear(16, 16))
    assert not has_attention(nn.MultiheadAttention(16, 1))


def test_collection_knows_which_cases_have_attention(te_module: ModuleType) -> None:
    assert [checked.has_attention for checked in check_case(case(), te_module)] == [True]


@pytest.mark.parametrize(
    ("demanded", "asked", "forced"),
    [
        ((), "auto", [None]),
        (("fused", "unfused"), "auto", ["fused", "unfused"]),
        (("fused", "unfused"), "flash", ["flash"]),
        ((), "all", ["flash", "fused", "unfused"]),
    ],
)
def test_the_run_asks_for_backends_or_else_the_case_does(
    demanded: tuple[str, ...], asked: str, forced: list[str | None]
) -> None:
    assert list(attention_of(case(demanded), CheckedSize({}, "", has_attention=True), asked)) == forced
    assert list(attention_of(case(demanded), CheckedSize({}, "", has_attention=False), asked)) == [None]


def test_an_unknown_backend_is_refused() -> None:
    with pytest.raises(UserError, match="'cudnn', but must be one of auto, flash, fused, unfused, all"):
        attention_of(case(), CheckedSize({}, ""), "cudnn")
    with pytest.raises(UserError, match="there is no attention backend 'cudnn', only flash, fused, unfused"):
        parity.pair("any", attention=["cudnn"])(lambda te: None)


def test_each_backend_is_an_item_and_one_that_is_not_offered_is_skipped() -> None:
    results = compare(case(), ["bf16"], backend="cpu", attention="all")
    assert by_item(results) == {
        "core[bf16-2x16x2x64-flash]": ("skipped", ""),
        "core[bf16-2x16x2x64-fused]": ("passed", "fused (F16_arbitrary_seqlen)"),
        "core[bf16-2x16x2x64-unfused]": ("passed", "unfused"),
    }
    assert "flash-attn is not installed" in results[0].reason


def test_what_te_chose_is_in_the_result() -> None:
    assert by_item(compare(case(), ["fp32"], backend="cpu")) == {"core[fp32-2x16x2x64]": ("passed", "unfused")}
