"""Pairs over ranks: right ports pass, wrong ones fail with the mistake's name, and a failing rank ends its item."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path

import forked
import pytest
import torch
from packaging.version import Version
from pairs_over_ranks import dropping, experts_by_te, faked, linear, packed
from torch import nn

import parity
from lab.corpus.ranked_ports.ranks import DP, EP, RIGHT, SP, WRONG, case_of
from parity import te
from parity.case import registry
from parity.case.case import Case
from parity.ranks.launch import launch
from parity.ranks.layout import Degrees, GatheredTensor, Shard, degrees, over, part, places
from parity.trainings.gathered import with_parts_joined
from parity.trainings.why_over_ranks import explained_by_outputs, explained_over_ranks
from parity.trainings.why_stages import wrong_norm


def named(entry):
    return f"{entry.host}, {entry.variant or 'right'}, {degrees(entry.ranks).label}"


@pytest.mark.parametrize("right", RIGHT, ids=named)
def test_a_right_port_passes(right):
    precisions = ["bf16", "fp8_delayed"] if right.ranks == SP else ["bf16"]
    results = parity.compare(case_of(right.host, right.variant), precisions, ranks=right.ranks)
    assert {(result.status, result.reason, result.findings) for result in results} == {("passed", "", ())}


@pytest.mark.parametrize("wrong", WRONG, ids=named)
def test_a_mistake_is_named(wrong):
    (result,) = parity.compare(case_of(wrong.host, wrong.variant), ["bf16"], ranks=wrong.ranks)
    assert result.status == "failed"
    assert result.findings[0].title in wrong.titles


HAS_EP = pytest.mark.skipif(Version(parity.te.version()) < Version("2.20"), reason="TE's API for experts is of 2.20")


def spread_experts(ranks, precision="bf16", **options):
    (result,) = parity.compare(
        Case("experts", partial(experts_by_te, **options), sizes=({},)), [precision], ranks=dict(ep=ranks)
    )
    return result


@HAS_EP
@pytest.mark.parametrize(
    "options", [{}, {"precision": "fp8_current", "alignment": 16, "capacity": 256}], ids=["eager", "fixed"]
)
@pytest.mark.parametrize("ranks", [2, 4])
def test_a_right_mixture_on_te_s_expert_parallelism_passes(ranks, options):
    result = spread_experts(ranks, **options)
    assert (result.status, result.findings) == ("passed", ()), result.reason
    assert max(one.margin for one in result.tensors) < 1


@HAS_EP
@pytest.mark.parametrize("mistake", ["experts exchanged", "weights not applied", "tokens dropped"])
@pytest.mark.parametrize("ranks", [2, 4])
def test_a_wrong_mixture_on_te_s_expert_parallelism_fails(ranks, mistake):
    assert spread_experts(ranks, mistake=mistake).status == "failed"


def test_what_debug_features_change_on_ranks_is_expected(tmp_path):
    pytest.importorskip("nvdlfw_inspect.api", reason="TE's debug features need nvdlfw_inspect")
    case = Case("faked", partial(faked, folder=str(tmp_path)), sizes=({},))
    (result,) = parity.compare(case, ["bf16"], ranks=dict(dp=2))
    assert result.passed, result.reason
    assert any("weight (E5M2, one scale: fprop" in note for note in result.notes)
    output = next(one for one in result.tensors if one.kind == "output")
    assert output.errors.relative_l2 == pytest.approx(output.expected.relative_l2, rel=0.15)


# A candidate that is also wrong in one process, and ranks that fail.


def over_ranks(mishap, **options):
    (result,) = parity.compare(Case("linear", partial(linear, mishap=mishap), sizes=({},)), ["bf16"], ranks=dict(tp=2))
    return result


def test_a_mistake_of_the_module_itself_is_told_as_such():
    result = over_ranks("is wrong by itself")
    assert result.status == "failed"
    assert "the candidate is wrong in one process as well" in result.notes
    assert result.findings[0].code < "PAR700"


@pytest.mark.parametrize(
    ("mishap", "told"),
    [
        ("raises", "rank 1 of 2 (tp2) raised: RuntimeError: no memory left"),
        ("dies", "rank 1 of 2"),
        ("names no weight", "names 'weigth', which is not a parameter of the candidate; did you mean 'weight'?"),
        ("names no input", "splits names 'x', but the inputs and outputs are input, output"),
    ],
)
def test_a_rank_that_breaks_is_an_error_with_its_number(mishap, told):
    result = over_ranks(mishap)
    assert result.status == "error"
    assert told in result.reason


def test_a_rank_that_hangs_is_told_with_its_place(monkeypatch):
    monkeypatch.setattr("parity.trainings.parallel.TIMEOUT", 3.0)
    monkeypatch.setattr("parity.trainings.parallel.compare_over_ranks_at.__defaults__", (None, 0.0, 3.0))
    result = over_ranks("hangs")
    assert (result.status, "hung" in result.reason) == ("error", True)
    assert "in call" in result.traceback


def test_ranks_that_should_have_the_same_and_do_not_are_told():
    result = over_ranks("drifts")
    assert result.status == "failed"
    assert result.findings[0].title == "replicas-differ"


@pytest.mark.parametrize(
    ("p", "is_declared", "status", "reason", "notes"),
    [
        (0.5, True, "passed", "", ["switched off", "ranks 0 and 1 of dp drop the same elements of other tensors"]),
        (0.0, True, "error", "nothing was dropped", []),
        (0.5, False, "error", "draws random numbers", []),
    ],
)
def test_dropout_that_a_pair_declares_is_looked_at_by_itself(p, is_declared, status, reason, notes):
    factory = partial(dropping, p=p, is_declared=is_declared)
    (result,) = parity.compare(Case("dropping", factory, sizes=({},)), ["bf16"], ranks=dict(dp=2))
    assert (result.status, reason in result.reason) == (status, True)
    assert [told for told, note in zip(notes, result.notes, strict=True) if told not in note] == []


needs_strategies = pytest.mark.skipif(
    "CPLoadBalancingStrategy" not in dir(te.kernels("auto").te), reason="TE gives each rank two chunks of a document"
)


def compare_packed(ranks, precisions=("bf16",), **options):
    return parity.compare(Case("packed", partial(packed, **options), sizes=({},)), precisions, ranks=dict(cp=ranks))


@needs_strategies
@pytest.mark.parametrize("ranks", [2, 4])
def test_packed_tokens_that_context_ranks_hold_in_order_pass(ranks):
    results = compare_packed(ranks, ("bf16", "fp16"))
    assert {(result.status, result.reason) for result in results} == {("passed", "")}


@needs_strategies
def test_packed_tokens_that_are_cut_as_te_does_not_are_told():
    (result,) = compare_packed(2, balanced=True)
    assert (result.status, result.findings[0].title) == ("failed", "sequence-order")
    assert "get the sequence in balanced order, but compute as if it were in plain order" in result.findings[0].message
    (result,) = compare_packed(2, strategy="DUAL_CHUNK_SWAP")
    assert (result.status, result.findings[0].title) == ("failed", "wrong-over-ranks")


def test_in_one_process_declared_dropout_is_switched_off():
    case = Case("dropping", lambda te: dropping(te, None), sizes=({},))
    (result,) = parity.compare(case, ["bf16"])
    assert result.status == "passed"


def test_a_pair_of_modules_cannot_be_built_in_ranks():
    pair = parity.Pair(nn.Linear(4, 4), nn.Linear(4, 4), lambda rng: rng.normal(4, 4), {"weight": "weight"})
    with pytest.raises(parity.UserError, match=r"declare its function with @parity\.pair"):
        parity.compare(pair, ["fp32"], ranks=dict(tp=2))


def compared_on_each(ranks):
    (result,) = parity.compare(case_of("mlp", "norm gradient not reduced"), ["bf16"], ranks=ranks)
    return result.status, [found.title for found in result.findings], result.reason


def test_ranks_of_a_script_s_own_all_have_the_same_result():
    told = launch(compared_on_each, 2, [dict(tp=2, sequence_parallel=True)])
    assert told == [("failed", ["reduction-missing"], "")] * 2
    assert [
        "tp4 needs 4 ranks, but this process group has 2" in one[2] for one in launch(compared_on_each, 2, [dict(tp=4)])
    ] == [True] * 2


def test_what_explains_a_tensor_leaves_only_rounding():
    """A sum of parts that is itself far off explains nothing."""
    exact = torch.arange(64.0, dtype=torch.float64)
    at = torch.arange(64)
    halves = [Shard(rank, exact / 2 + rank, (), at) for rank in range(2)]
    off = [Shard(rank, exact * (0.3 + rank), (), at) for rank in range(2)]
    made = Degrees(tp=2)
    (found,) = explained_over_ranks([GatheredTensor("output", "output", exact + 1, halves)], made, {})
    assert found.title == "reduction-missing"
    assert explained_over_ranks([GatheredTensor("output", "output", exact, off)], made, {}) == ()


def pieces_of(exact, made, split, values):
    return [Shard(rank, values(rank), split, places(exact.shape, split, made, rank)) for rank in range(made.count)]


EXACT = torch.randn(12, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
PARTS = torch.randn(4, 12, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
PARTS[3] = EXACT - PARTS[:3].sum(0)
OTHERS = {
    "added up in pairs alone": (
        (),
        lambda r: PARTS[r // 2 * 2] + PARTS[r // 2 * 2 + 1],
        "reduction-missing",
        "2 parts",
    ),
    "counted four times": ((), lambda r: 4 * EXACT, "reduced-twice", "4 times"),
    "the next rank's": ((over("tp"),), lambda r: EXACT.chunk(4)[(r + 1) % 4], "shards-in-another-order", "rank 3 has"),
    "the first rank's": ((over("tp"),), lambda r: EXACT.chunk(4)[0], "shards-in-another-order", "the first rank"),
    "one block of query, key and value": (
        (over("tp", blocks=3),),
        lambda r: EXACT.chunk(4)[r],
        "shard-layout",
        "as one block",
    ),
    "the sum of all parts": ((over("tp"),), lambda r: sum(EXACT.chunk(4)), "parts-added-up", "leave it out"),
    "query, key and value each by itself": (
        (over("tp"),),
        lambda r: part(EXACT, [over("tp", blocks=3)], Degrees(tp=4), {"tp": r}),
        "shard-layout",
        "as three blocks",
    ),
}


@pytest.mark.parametrize(("split", "values", "title", "told"), OTHERS.values(), ids=OTHERS)
def test_pieces_on_four_ranks_that_are_right_otherwise_are_told(split, values, title, told):
    made = Degrees(tp=4)
    (found,) = explained_over_ranks(
        [GatheredTensor("output", "output", EXACT, pieces_of(EXACT, made, split, values))], made, {}
    )
    assert (found.title, told in found.message) == (title, True)


@pytest.mark.parametrize(
    ("factors", "title", "told"),
    [
        ((1.5, 0.5, 0.5, 1.5), "shares-of-ranks", "1.5, 0.5, 0.5, 1.5 times"),
        ((4.0, 4.0, 4.0, 4.0), "reduced-twice", "a loss is multiplied by the number of ranks"),
        ((0.25, 0.25, 0.25, 0.25), "averaged-over-ranks", "a loss is divided by the number of ranks"),
        ((1.1, 1.1, 1.1, 1.1), "", ""),
    ],
)
def test_factors_of_the_ranks_gradients_are_told(factors, title, told):
    made, split = Degrees(cp=4), (over("cp"),)
    pieces = pieces_of(EXACT, made, split, lambda r: factors[r] * EXACT.chunk(4)[r])
    found = explained_over_ranks([GatheredTensor("input gradient", "x", EXACT, pieces)], made, {})
    assert [one.title for one in found] == ([title] if title else [])
    assert all(told in one.message for one in found)


@pytest.mark.parametrize(
    ("counted", "told"),
    [
        (lambda a, b, c: a + c, "without b"),
        (lambda a, b, c: 4 * a + b + c, "counts a weight once for each rank that holds it"),
        (lambda a, b, c: a + float(PARTS[0][:3].square().sum()) + c, "b only as the first rank has it"),
        (lambda a, b, c: 10 * (a + b + c), "neither that of one rank's gradients nor that of all gradients"),
        (lambda a, b, c: a + b + c, None),
    ],
)
def test_what_a_norm_of_all_gradients_counts_wrongly_is_named(counted, told):
    made, b, c = Degrees(tp=4), PARTS[0], PARTS[1]
    splits = {"a": (EXACT, ()), "b": (b, (over("tp"),)), "c": (c, (over("tp"),))}
    wholes = [
        GatheredTensor(
            "weight gradient", name, x, pieces_of(x, made, split, lambda r, x=x, s=split: part(x, s, made, {"tp": r}))
        )
        for name, (x, split) in splits.items()
    ]
    squares = [float(x.square().sum()) for x in (EXACT, b, c)]
    found = wrong_norm([math.sqrt(counted(*squares))] * 4, wholes, made)
    assert (found is None) if told is None else (told in found.message)


def test_how_often_each_of_several_outputs_counts_is_told():
    made = Degrees(cp=2)
    of_each = {"loss": EXACT, "balance": PARTS[0]}

    def told(**counts):
        computed = sum(counts[name] * x for name, x in of_each.items())
        whole = GatheredTensor(
            "weight gradient", "w", sum(of_each.values()), pieces_of(EXACT, made, (), lambda r: computed)
        )
        scalars = [GatheredTensor("output", name, torch.ones(()), []) for name in of_each]
        found = explained_by_outputs([*scalars, whole], lambda name: {("weight gradient", "w"): of_each[name]})
        return [one.message.split(";")[0].split(":")[0] for one in found]

    message = "the gradients are those of a backward pass in which balance counts 0.5 times instead of once"
    assert told(loss=1, balance=0.5) == [message]
    of_each["balance"] = PARTS[1]  # so that the ranks' gradients are no multiple of it
    whole = GatheredTensor("weight gradient", "w", EXACT, pieces_of(EXACT, made, (), lambda r: PARTS[2]))
    scalars = [GatheredTensor("output", name, torch.ones(()), []) for name in of_each]
    assert explained_by_outputs([*scalars, whole], lambda name: {("weight gradient", "w"): of_each[name]}) == ()


def test_pytest_makes_an_item_of_each_number_of_ranks_of_the_page_s_example(tmp_path):
    page = (Path(__file__).parents[2] / "docs" / "parallel.md").read_text(encoding="utf-8")
    (tmp_path / "my_pairs.py").write_text(page.split("```python\n")[1].split("```")[0], encoding="utf-8")
    command = ["-m", "pytest", "-p", "parity.plugin", "my_pairs.py", "--parity-precisions=bf16", "-v", "-n", "0"]
    ran = forked.run(*command, folder=tmp_path)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    items = [f"mlp_over_ranks[bf16-32x2x64{ranks}] PASSED" for ranks in ("", "-tp2", "-tp2-sp")]
    assert [item for item in items if item not in ran.stdout] == []


def test_what_only_one_rank_holds_and_a_loss_are_looked_at_as_well():
    made = Degrees(ep=2)
    expert = GatheredTensor(
        "weight gradient", "weight0", EXACT, [Shard(0, EXACT, (), places(EXACT.shape, (), made, 0))]
    )
    router = GatheredTensor(
        "weight gradient", "router", EXACT, pieces_of(EXACT, made, (), lambda r: PARTS[2 * r] + PARTS[2 * r + 1])
    )
    assert [one.title for one in explained_over_ranks([expert, router], made, {})] == ["reduction-missing"]
    loss = torch.tensor(3.0, dtype=torch.float64)
    parts = pieces_of(loss, made, (), lambda r: loss * (0.25 + 0.5 * r))
    (found,) = explained_over_ranks([GatheredTensor("output", "output", loss, parts)], made, {"bias": torch.zeros(3)})
    assert found.title == "reduction-missing"


def test_gradients_of_an_input_that_data_parallel_ranks_divide_by_themselves_are_joined():
    made = Degrees(dp=4)
    own = pieces_of(EXACT, made, (), lambda r: EXACT * (torch.arange(12) // 3 == r)[:, None])
    assert torch.equal(with_parts_joined(GatheredTensor("input gradient", "x", EXACT, own), made).joined(), EXACT)
    parts = pieces_of(EXACT, made, (), lambda r: PARTS[r])
    assert with_parts_joined(GatheredTensor("input gradient", "x", EXACT, parts), made).pieces == parts
    tensor_parallel = Degrees(tp=4)  # these ranks compute the same gradients of what comes before, the whole ones
    assert with_parts_joined(GatheredTensor("input gradient", "x", EXACT, own), tensor_parallel).pieces == own


# The example file that shows how pairs of TE's modules are declared; ``make parity-ranks`` compares all of it.


EXAMPLE = Path(__file__).parents[2] / "examples" / "over_ranks.py"


@pytest.mark.parametrize(
    ("name", "precision", "ranks"),
    [
        ("layernorm_linear", "fp32", dict(tp=2, cp=2)),
        ("transformer_layer_gpt", "fp8_current", SP),
        ("llama_2_layers_a2a_p2p", "bf16", dict(cp=4)),
        ("multihead_attention_gqa_fsdp2", "fp8_block", DP),
        ("grouped_linear_experts", "bf16", EP),
    ],
)
def test_the_example_s_ports_are_right(name, precision, ranks):
    declared = registry.cases()
    registry.restore([])  # the built-in cases have pairs of these names, too
    try:
        case = registry.load_case(EXAMPLE, name)
        (result,) = parity.compare(case, [precision], ranks=ranks)
    finally:
        registry.restore(declared)
    assert degrees(ranks) in case.ranks
    assert (result.status, result.reason, result.ranks) == ("passed", "", degrees(ranks).label)
