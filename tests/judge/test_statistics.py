"""Test which errors each statistic of an error detects, and which it does not."""

from __future__ import annotations

import math
from itertools import combinations
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from parity.judge import statistics
from parity.judge.directions import Direction, found_by_filter
from parity.judge.judge import allow_for_kernels
from parity.judge.second_look import DRAWS
from parity.judge.statistics import Component, coefficient, largest_of, least_error, resemblance, scatters
from parity.mistakes.hypothesis import Hypothesis
from parity.numerics.errors import CachedTensor
from parity.result import Check, Errors, TensorResult

LEAST = 1e-9


def draw(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def observed(error, model_errors, golden, least=LEAST):
    found = statistics.statistics(
        CachedTensor(error), [CachedTensor(model) for model in model_errors], CachedTensor(golden), least
    )
    return {statistic.name: statistic for statistic in found}


def component(error, model_errors, direction, golden, expected_norm):
    return component_of(error, model_errors, direction, golden, expected_norm).value


def component_of(error, model_errors, direction, golden, expected_norm):
    models = [CachedTensor(model) for model in model_errors]
    return statistics.Component(
        CachedTensor(error), models, CachedTensor(direction), CachedTensor(golden), expected_norm
    )


def values(*arguments):
    return {name: statistic.value for name, statistic in observed(*arguments).items()}


GOLDEN = draw(4, 32, 64)
MODEL = 1e-3 * draw(4, 32, 64, seed=1)
FAITHFUL = 1e-3 * draw(4, 32, 64, seed=2)


def test_the_models_own_error_has_ratios_of_about_one_and_no_gain():
    found = values(MODEL, [MODEL], GOLDEN)
    assert found.pop("gain") == 0.0
    assert all(0.7 < value <= 1.05 for value in found.values()), found


def test_an_independent_error_of_the_same_size_stays_near_one():
    found = values(FAITHFUL, [MODEL], GOLDEN)
    assert abs(found.pop("gain")) < 4
    assert all(0.6 < value < 1.4 for value in found.values()), found


@pytest.mark.parametrize("seed", range(5))
def test_a_row_whose_error_is_that_of_one_element_may_be_as_unlucky_as_one_element(seed):
    """In a softmax, for example, the largest value has most of the error."""
    place = torch.randint(64, (4, 128, 1), generator=torch.Generator().manual_seed(seed))
    deviations = torch.full((4, 128, 64), 1e-5, dtype=torch.float64).scatter(2, place, 1e-3)
    error, *drawn = (CachedTensor(deviations * draw(4, 128, 64, seed=100 * seed + i), i > 0) for i in range(1 + DRAWS))
    found = {s.name: s.value for s in statistics.statistics(error, drawn, CachedTensor(draw(4, 128, 64)), LEAST)}
    assert max(found["row"], found["slice"]) < 1.5


def test_a_row_of_many_errors_may_not():
    error = FAITHFUL.clone()
    error[1, 5] *= 3.0
    assert values(error, [MODEL], GOLDEN)["row"] > 1.9


def unluckiest_row(draw_errors, unlucky):
    """Return the worst of 64 rows for an error that is unlucky in the first one, compared with drawn runs."""
    drawn = [CachedTensor(draw_errors(seed), is_drawn=True) for seed in range(DRAWS)]
    error = draw_errors(DRAWS)
    error[0] = unlucky * torch.stack([run.values[0] for run in drawn]).norm(dim=-1).max() * error[0] / error[0].norm()
    found = statistics.statistics(
        CachedTensor(error), drawn, CachedTensor(draw(64, 256, seed=99)), LEAST, of_parameter=True
    )
    return next(statistic.value for statistic in found if statistic.name == "slice")


def test_a_row_that_one_rounding_moves_may_be_as_unlucky_as_one_rounding():
    row = draw(256, seed=50)
    by_one = unluckiest_row(lambda seed: draw(64, 1, seed=seed) * row, unlucky=3.0)
    by_many = unluckiest_row(lambda seed: draw(64, 256, seed=seed), unlucky=3.0)
    assert by_one < 2.2
    assert by_many > 2.4


def test_what_any_model_loses_is_expected():
    assert values(2 * MODEL, [MODEL, 2 * MODEL], GOLDEN)["norm"] <= 1.0
    assert values(2 * MODEL, [MODEL], GOLDEN)["norm"] > 1.8


def test_one_wrong_row_hides_in_the_norm_and_shows_in_its_row():
    error = FAITHFUL.clone()
    error[2, 5] *= 10
    found = observed(error, [MODEL], GOLDEN)
    assert found["norm"].value < 1.5
    assert found["row"].value > 5
    assert found["row"].where == "row at 2, 5"


def test_rows_of_stacked_matrices_are_slices_of_a_parameter():
    error = FAITHFUL.clone()
    error[2, 5] *= 10
    found = {
        s.name: s
        for s in statistics.statistics(CachedTensor(error), [CachedTensor(MODEL)], CachedTensor(GOLDEN), LEAST, True)
    }
    assert "row" not in found
    assert found["slice"].where == "row at 2, 5"


@pytest.mark.parametrize("dim", [0, 1, 2])
def test_one_wrong_sequence_position_or_column_shows_in_its_slice(dim):
    error = FAITHFUL.clone()
    error.select(dim, 3).mul_(10)
    found = observed(error, [MODEL], GOLDEN)["slice"]
    assert found.value > 5
    assert found.where == f"dim {dim} at 3"


def test_the_norm_of_few_elements_may_exceed_anothers_by_chance():
    for seed in range(200):
        few, others = draw(16, 32, seed=2 * seed), draw(16, 32, seed=2 * seed + 1)
        found = values(1e-3 * few, [1e-3 * others], draw(16, 32, seed=seed))
        assert found["norm"] < 1.1
        assert found["slice"] < 1.3


def test_a_slice_in_which_the_models_are_lucky_is_not_expected_to_err_less_than_terms_that_cancel():
    lucky = MODEL.clone()
    lucky[:, 7] *= 1e-3

    def worst(terms):
        found = statistics.statistics(
            CachedTensor(FAITHFUL), [CachedTensor(lucky)], CachedTensor(GOLDEN), LEAST, terms=terms
        )
        return next(statistic for statistic in found if statistic.name == "slice")

    assert worst(math.inf).value < 1.6
    assert worst(0.0).value > 3
    assert worst(0.0).where == "dim 1 at 7"


@pytest.mark.parametrize("dim", [0, 1, 2])
@pytest.mark.parametrize("times", [1e-2, 1e-5, 1e-8])
def test_a_wrong_factor_in_a_small_slice_shows_beside_large_ones(dim, times):
    """A slice is judged by its own error, however large the errors of others are."""
    scale = torch.ones(4, 32, 64, dtype=torch.float64)
    scale.select(dim, 3).fill_(times)
    right, model, golden = scale * FAITHFUL, scale * MODEL, scale * GOLDEN
    wrong = right + 0.1 * golden * (scale < 1)
    found = observed(wrong, [model], golden)["slice"]
    assert values(right, [model], golden)["slice"] < 1.4
    assert found.value > 40
    assert found.where == f"dim {dim} at 3"


def test_a_slice_that_golden_has_only_by_fp64s_rounding_is_judged_by_the_average():
    golden, model = GOLDEN.clone(), MODEL.clone()
    golden[:, 0] *= 1e-15
    model[:, 0] = 0.0
    assert values(FAITHFUL, [model], golden)["slice"] < 1.4


def test_one_wrong_element_shows_as_the_largest():
    error = FAITHFUL.clone()
    error[1, 2, 3] = 0.1
    found = observed(error, [MODEL], GOLDEN)["largest"]
    assert found.value > 20
    assert found.where == "element 1, 2, 3"


def test_a_missing_bias_below_the_noise_of_an_element_shows_in_the_shift():
    error = FAITHFUL + 3e-4 * draw(64, seed=3)
    found = values(error, [MODEL], GOLDEN)
    assert found["norm"] < 1.2
    assert found["shift"] > 2


@pytest.mark.parametrize("factor", [1e-3, -1e-3])
def test_a_wrong_factor_as_small_as_the_noise_shows_in_the_gain_with_its_sign(factor):
    gain = values(FAITHFUL + factor * GOLDEN, [MODEL], GOLDEN)["gain"]
    assert math.copysign(1, gain) == math.copysign(1, factor)
    assert abs(gain) > 20


def test_an_error_where_none_is_expected_is_infinitely_too_large():
    zero = torch.zeros(64, dtype=torch.float64)
    assert values(zero + 1, [zero], zero)["norm"] == math.inf
    assert values(zero, [zero], zero)["norm"] == 0.0


def test_a_vector_has_no_slices_and_an_empty_tensor_no_statistics():
    vector = draw(64)
    assert set(values(vector, [vector], vector)) == {"norm", "largest", "gain"}
    empty = torch.zeros(0, 8, dtype=torch.float64)
    assert observed(empty, [empty], empty) == {}


@given(exponent=st.integers(-40, 40))
def test_no_statistic_depends_on_the_unit(exponent):
    factor = 2.0**exponent
    scaled = values(factor * FAITHFUL, [factor * MODEL], factor * GOLDEN)
    assert scaled == pytest.approx(values(FAITHFUL, [MODEL], GOLDEN), rel=1e-9)


@given(seed=st.integers(0, 2**31))
def test_no_statistic_depends_on_the_order_of_rows(seed):
    order = torch.randperm(32, generator=torch.Generator().manual_seed(seed))
    reordered = values(FAITHFUL[:, order], [MODEL[:, order]], GOLDEN[:, order])
    assert reordered == pytest.approx(values(FAITHFUL, [MODEL], GOLDEN), rel=1e-9)


def test_a_component_within_what_the_models_have_counts_for_nothing():
    direction = draw(4, 32, 64, seed=4)
    models = [MODEL + 1e-4 * direction, MODEL - 1e-4 * direction]
    norm = torch.linalg.vector_norm(MODEL).item()
    assert component(MODEL, models, direction, GOLDEN, norm) == 0.0
    assert component(MODEL + 1e-3 * direction, models, direction, GOLDEN, norm) > 10


def test_the_least_error_is_the_results_rounding_or_the_order_of_a_long_fp32_sum():
    assert least_error(torch.bfloat16, 4096) == pytest.approx(2**-9)
    short, long = least_error(torch.float32, 1), least_error(torch.float32, 4096)
    assert short == pytest.approx(2**-23)
    terms = draw(4096, 64, seed=5).float()
    one_by_one = terms[0].clone()
    for row in terms[1:]:
        one_by_one += row
    golden = terms.double().sum(0)
    lost = ((one_by_one.double() - golden).norm() / golden.norm()).item()
    assert short < lost < 3 * long


@given(st.integers(0, 1000), st.sampled_from([0.0, 1e-3, 1.0, 30.0]), st.sampled_from([0.0, 1e-3, 1.0]))
def test_a_component_stays_below_the_bound_that_needs_no_scatter(seed, along, expected_norm):
    direction, error = draw(4, 32, seed=seed), draw(4, 32, seed=seed + 1) + along * draw(4, 32, seed=seed)
    found = component_of(error, [draw(4, 32, seed=seed + 2)], direction, direction, expected_norm)
    assert found.at_most * (1 + 1e-12) >= abs(found.value)


def test_what_candidate_and_model_share_cancels():
    """An FP8 cast rounds most elements the same way in both; a mistake far below that noise still shows."""
    model, independent, direction = (draw(4, 8, 16, seed=seed) for seed in (1, 2, 4))
    norm = torch.linalg.vector_norm(model).item()
    shared = component(model + 0.01 * independent + 0.12 * direction, [model], direction, direction, norm)
    apart = component(independent + 0.12 * direction, [model], direction, direction, norm)
    assert shared > 5 > abs(apart)


def test_a_constant_that_is_rounded_to_fp32_is_no_mistake():
    unit = torch.finfo(torch.float32).eps / 2
    tiny = unit / 100 * draw(4, 32, 64, seed=5)
    found = component(tiny + unit * GOLDEN, [tiny], GOLDEN, GOLDEN, torch.linalg.vector_norm(tiny).item())
    assert found == pytest.approx(1.0, rel=0.01)


@pytest.mark.parametrize("slices", [(64, 1, 1), (64, 32, 1), (1, 1, 48)], ids=["first index", "row", "last index"])
def test_errors_of_a_slice_that_share_their_sign_count_as_one(slices):
    direction = draw(64, 32, 48, seed=4)
    error = 1e-3 * draw(*slices, seed=6).sign() * direction
    assert abs(component(error, [0 * error], direction, direction, 0.0)) < 4


def few_numbers_scale(golden, rng, drawn=False):
    """Return an error that scales golden by one random factor, with some noise in each element."""
    factor = 1e-2 * torch.randn((), generator=rng, dtype=torch.float64)
    noise = 1e-3 * torch.randn(golden.shape, generator=rng, dtype=torch.float64)
    return CachedTensor(golden * (factor + noise), drawn)


def gain_of(error, models, golden):
    found = statistics.statistics(error, models, CachedTensor(golden), least=1e-6)
    return next(abs(statistic.value) for statistic in found if statistic.name == "gain")


def test_a_factor_that_independent_roundings_scatter_by_is_no_gain():
    rng = torch.Generator().manual_seed(0)
    golden = torch.randn(64, 64, generator=rng, dtype=torch.float64)
    drawn = [few_numbers_scale(golden, rng, drawn=True) for _ in range(DRAWS)]
    rounded = [few_numbers_scale(golden, rng) for _ in range(2)]
    beyond = [few_numbers_scale(golden, rng) for _ in range(64)]
    assert max(gain_of(error, rounded, golden) for error in beyond) > 50
    assert max(gain_of(error, [*rounded, *drawn], golden) for error in beyond) < 5


def test_a_factor_beyond_their_scatter_is_one():
    rng = torch.Generator().manual_seed(0)
    golden = torch.randn(64, 64, generator=rng, dtype=torch.float64)
    models = [few_numbers_scale(golden, rng) for _ in range(2)]
    models += [few_numbers_scale(golden, rng, drawn=True) for _ in range(DRAWS)]
    assert gain_of(CachedTensor(0.2 * golden), models, golden) > 8


def test_independent_roundings_excuse_nothing_where_candidate_and_model_round_alike():
    rng = torch.Generator().manual_seed(0)
    golden = torch.randn(64, 64, generator=rng, dtype=torch.float64)
    models = [few_numbers_scale(golden, rng) for _ in range(2)]
    models += [few_numbers_scale(golden, rng, drawn=True) for _ in range(DRAWS)]
    highest = max(models[:2], key=lambda model: model.dot(CachedTensor(golden)))
    shared = CachedTensor(highest.values + 1e-5 * golden * torch.randn(64, 64, generator=rng, dtype=torch.float64))
    wrong = CachedTensor(shared.values + 1e-3 * golden)
    assert gain_of(wrong, models, golden) > 3 * gain_of(shared, models, golden)


def behind_a_clamp(*passed):
    """Return a tensor of 64 elements, of which all but the first ones are 0."""
    return torch.tensor([*passed, *[0.0] * (64 - len(passed))], dtype=torch.float64)


@pytest.mark.parametrize("direction", [behind_a_clamp(0.5), behind_a_clamp(0.5, 0.01)])
def test_the_error_of_the_only_element_resembles_nothing(direction):
    model, error = behind_a_clamp(3e-3, 2e-3), behind_a_clamp(7e-3, 3e-3)
    assert abs(component(error, [model], direction, behind_a_clamp(1.0, 1.0), 3e-3)) < 3


def test_an_error_far_beyond_the_only_elements_roundings_does():
    model, error = behind_a_clamp(3e-3), behind_a_clamp(0.1)
    assert component(error, [model], behind_a_clamp(0.5), behind_a_clamp(1.0), 3e-3) > 10


def test_what_candidate_and_model_share_cancels_for_one_large_element_too():
    direction = behind_a_clamp(1.0) + 1e-3 * draw(64, seed=3)
    model = 1e-3 * draw(64, seed=4)
    alike = model + 1e-6 * draw(64, seed=5)
    assert component(alike + 1e-4 * direction, [model], direction, draw(64), 1e-4) > 10


# The mistake that an error resembles most.


def draw_along(seed):
    return torch.randn(8, 64, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@given(st.integers(0, 1000), st.lists(st.sampled_from([0.0, 0.05, 0.3, 1.0]), min_size=1, max_size=6))
def test_the_likeliest_mistake_is_the_one_that_judging_every_mistake_finds(seed, contained):
    changes = [CachedTensor(draw_along(seed + i)) for i in range(len(contained))]
    known = [Direction(SimpleNamespace(name=str(i)), {"output": change}) for i, change in enumerate(changes)]
    noise, golden = draw_along(seed + 10), CachedTensor(draw_along(seed + 11))
    error = CachedTensor(noise + sum(share * change.values for share, change in zip(contained, changes, strict=True)))
    models = [CachedTensor(draw_along(seed + 12)), CachedTensor(draw_along(seed + 13))]

    found = resemblance("output", error, models, golden, models[0].norm, known)

    values = [Component(error, models, change, golden, models[0].norm).value for change in changes]
    close = [i for i, value in enumerate(values) if abs(value) >= 0.9 * max(map(abs, values))]
    likeliest = min(close, key=lambda i: abs(coefficient(error, changes[i]) - 1.0))
    assert (found.value, found.where) == (largest_of(len(changes), values[likeliest]), str(likeliest))


def test_the_largest_of_many_directions_exceeds_a_limit_no_oftener_than_one_direction_does():
    """Random components along directions without any mistake exceed the limit as rarely as a single one."""
    components = torch.randn(200_000, 12, generator=torch.Generator().manual_seed(0)).abs().amax(1)

    for limit, exceeded in ((2.0, 0.0455), (3.0, 0.0027)):
        judged = [abs(largest_of(12, value)) > limit for value in components[components > limit].tolist()]
        assert 0.8 * exceeded < sum(judged) / len(components) < 1.1 * exceeded


def test_one_direction_is_judged_by_its_own_deviations_and_an_infinite_one_stays_infinite():
    assert largest_of(1, -3.0) == pytest.approx(-3.0)
    assert largest_of(9, math.inf) == math.inf
    assert largest_of(9, 0.0) == 0.0


def test_an_output_that_no_mistake_changes_resembles_none():
    error, golden = CachedTensor(draw_along(0)), CachedTensor(draw_along(1))
    known = [Direction(SimpleNamespace(name="other"), {"output[1]": CachedTensor(draw_along(2))})]
    assert resemblance("output[0]", error, [error], golden, error.norm, known) is None


def test_a_mistake_that_another_output_lacks_is_none():
    """Few numbers may resemble anything; an output with many numbers from the same tokens is better evidence."""
    mistake = Hypothesis("norm-statistics", "norm statistics in bf16", "take them in FP32")
    known = [Direction(mistake, {})]
    errors = Errors(0.1, 0.1, 1.0, 1.0, 20.0, 1.0)

    def output(name: str, value: float, coefficient: float) -> TensorResult:
        check = Check("mistake", value, 5.7, mistake.name, coefficient)
        return TensorResult(name, "output", (2, 128), errors, errors, 0.0, 0.0, checks=(check,), margin=check.margin)

    of_few, of_many = output("mean", 6.4, 0.74), output("tokens", 1.8, 0.16)
    assert list(found_by_filter([of_few], known))
    assert not list(found_by_filter([of_few, of_many], known))


# The bias of a kernel is removed from an error along its own direction, and nothing else is.


GENERATOR = torch.Generator().manual_seed(0)
LEANT = torch.randn(64, 64, generator=GENERATOR, dtype=torch.float64)
BASE = 1e-4 * torch.randn(64, 64, generator=GENERATOR, dtype=torch.float64)
CHANGE = -7e-4 * LEANT
ELSEWHERE = 1e-3 * torch.randn(64, 64, generator=GENERATOR, dtype=torch.float64)


def granted_to(error: torch.Tensor):
    return allow_for_kernels(CachedTensor(error), CachedTensor(BASE), [CachedTensor(BASE + CHANGE)])


@pytest.mark.parametrize("share", [0.3, 1.0, 1.2])
def test_share_of_the_change_is_taken_out(share):
    found = granted_to(BASE + share * CHANGE)
    assert found is not None
    assert found.coefficient == pytest.approx(share, rel=1e-6)
    torch.testing.assert_close(found.left.values, BASE)
    assert found.norm == pytest.approx(share * CHANGE.norm().item(), rel=1e-6)


@pytest.mark.parametrize(
    ("error", "why"),
    [
        (BASE, "the kernels do nothing of the kind"),
        (torch.zeros_like(BASE), "the kernels are more accurate"),
        (BASE - CHANGE, "it leans the other way"),
        (BASE + 30 * CHANGE, "it leans far more than such kernels do"),
        (torch.full_like(BASE, torch.nan), "it is not finite"),
    ],
)
def test_nothing_is_granted(error, why):
    assert granted_to(error) is None, why


def test_a_lean_against_one_that_candidate_and_model_share_is_taken_out():
    """Clipped numbers make both smaller by 0.6 of the change, so the error without the granted part is larger."""
    base = BASE - 0.6 * CHANGE
    found = allow_for_kernels(CachedTensor(base + 0.7 * CHANGE), CachedTensor(base), [CachedTensor(base + CHANGE)])
    assert found is not None
    torch.testing.assert_close(found.left.values, base)


def test_mistake_elsewhere_stays_whole():
    found = granted_to(BASE + CHANGE + ELSEWHERE)
    assert found is not None
    assert found.left.norm == pytest.approx((BASE + ELSEWHERE).norm().item(), rel=0.05)


def test_expected_errors_grow_by_a_part_of_the_change_alone():
    found = granted_to(BASE + CHANGE)
    assert found is not None
    for model in found.models:
        assert model.norm <= BASE.norm().item() + 0.3 * CHANGE.norm().item()


def test_few_elements_are_compared_with_the_base():
    error, base = torch.tensor(0.011, dtype=torch.float64), torch.tensor(0.001, dtype=torch.float64)
    found = allow_for_kernels(CachedTensor(error), CachedTensor(base), [CachedTensor(base + 0.01)])
    assert found is not None
    assert found.left.values.item() == pytest.approx(0.001)


# Whether drawn runs show that few roundings decide the size of an error.


RUNS, TOKENS, WIDTH = 16, 8, 128


def drawn(make) -> list[CachedTensor]:
    generator = torch.Generator().manual_seed(0)
    return [CachedTensor(make(generator)) for _ in range(RUNS)]


def normal(*shape: int):
    return lambda generator: torch.randn(*shape, dtype=torch.float64, generator=generator)


def one_row_is_moved(generator: torch.Generator) -> Tensor:
    """Return small errors of all elements plus one that moves the whole first row, like a saturated softmax's score."""
    error = normal(TOKENS, WIDTH)(generator)
    error[0] += 2.0 * torch.randn(1, dtype=torch.float64, generator=generator)
    return error


def mean_of_moved_rows(generator: torch.Generator) -> Tensor:
    return one_row_is_moved(generator).expand(1, TOKENS, WIDTH).mean(1)


@pytest.mark.parametrize("shape", [(32,), (TOKENS, WIDTH), (1, WIDTH), (4, 8, 16)])
def test_independent_roundings_of_many_elements_do_not_scatter(shape):
    assert not scatters(drawn(normal(*shape)))


def test_a_row_that_one_rounding_moves_scatters():
    assert scatters(drawn(one_row_is_moved))


def test_a_sum_of_rows_scatters_though_others_hide_the_one_that_does():
    assert scatters(drawn(mean_of_moved_rows))


def test_kinds_of_kernels_that_lose_unequally_are_no_scatter():
    runs = drawn(normal(TOKENS, WIDTH))
    assert not scatters([CachedTensor(run.values * (1.0 + 0.5 * (index % 2))) for index, run in enumerate(runs)])


def test_few_or_infinite_runs_tell_nothing():
    runs = drawn(one_row_is_moved)
    infinite = CachedTensor(torch.full((TOKENS, WIDTH), torch.inf, dtype=torch.float64))
    assert not scatters([*runs[:3], infinite, infinite])


# Stored sums equal sums that are computed again.


SHAPES = st.lists(st.integers(1, 5), min_size=0, max_size=4).map(tuple)


def draw_rows(shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@given(shape=SHAPES, seed=st.integers(0, 100))
def test_norm_and_largest_are_those_of_all_elements(shape, seed):
    x = draw_rows(shape, seed)
    summed = CachedTensor(x)
    assert summed.norm == pytest.approx(torch.linalg.vector_norm(x).item())
    assert summed.max_abs == x.abs().max().item()


@given(shape=SHAPES.filter(len))
def test_squares_are_summed_over_any_dimensions(shape):
    x = draw_rows(shape)
    summed = CachedTensor(x)
    for size in range(1, len(shape) + 1):
        for dims in combinations(range(len(shape)), size):
            torch.testing.assert_close(summed.squares_over(dims), x.square().sum(dims))


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_one_element_that_is_not_finite_shows(value):
    x = draw_rows((3, 4))
    x[1, 2] = value
    assert not CachedTensor(x).is_finite
    assert not math.isfinite(CachedTensor(x).max_abs)


def test_nothing_sums_to_zero():
    empty = CachedTensor(draw_rows((2, 0)))
    assert (empty.norm, empty.max_abs, empty.is_finite) == (0.0, 0.0, True)


def test_a_product_is_the_same_when_asked_for_again():
    x, y = CachedTensor(draw_rows((3, 4))), CachedTensor(draw_rows((3, 4), seed=1))
    assert x.dot(y) == x.dot(y) == pytest.approx((x.values * y.values).sum().item())
    assert x.dot(x) == pytest.approx(x.total)
