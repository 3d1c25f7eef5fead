"""What each statistic of an error sees, and what it does not."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from parity.judge import statistics
from parity.judge.second_look import DRAWS
from parity.judge.statistics import least_error
from parity.numerics.errors import Summed

LEAST = 1e-9


def draw(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def observed(error, model_errors, golden, least=LEAST):
    found = statistics.statistics(Summed(error), [Summed(model) for model in model_errors], Summed(golden), least)
    return {statistic.name: statistic for statistic in found}


def component(error, model_errors, direction, golden, expected_norm):
    return component_of(error, model_errors, direction, golden, expected_norm).value


def component_of(error, model_errors, direction, golden, expected_norm):
    models = [Summed(model) for model in model_errors]
    return statistics.Component(Summed(error), models, Summed(direction), Summed(golden), expected_norm)


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
    """As of a softmax, whose largest value has most of the error."""
    place = torch.randint(64, (4, 128, 1), generator=torch.Generator().manual_seed(seed))
    deviations = torch.full((4, 128, 64), 1e-5, dtype=torch.float64).scatter(2, place, 1e-3)
    error, *drawn = (Summed(deviations * draw(4, 128, 64, seed=100 * seed + i), i > 0) for i in range(1 + DRAWS))
    found = {s.name: s.value for s in statistics.statistics(error, drawn, Summed(draw(4, 128, 64)), LEAST)}
    assert max(found["row"], found["slice"]) < 1.5


def test_a_row_of_many_errors_may_not():
    error = FAITHFUL.clone()
    error[1, 5] *= 3.0
    assert values(error, [MODEL], GOLDEN)["row"] > 1.9


def unluckiest_row(draw_errors, unlucky):
    """The worst row of 64 for an error that is unlucky in the first one, next to drawn runs."""
    drawn = [Summed(draw_errors(seed), is_drawn=True) for seed in range(DRAWS)]
    error = draw_errors(DRAWS)
    error[0] = unlucky * torch.stack([run.values[0] for run in drawn]).norm(dim=-1).max() * error[0] / error[0].norm()
    found = statistics.statistics(Summed(error), drawn, Summed(draw(64, 256, seed=99)), LEAST, of_parameter=True)
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
    found = {s.name: s for s in statistics.statistics(Summed(error), [Summed(MODEL)], Summed(GOLDEN), LEAST, True)}
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
        found = statistics.statistics(Summed(FAITHFUL), [Summed(lucky)], Summed(GOLDEN), LEAST, terms=terms)
        return next(statistic for statistic in found if statistic.name == "slice")

    assert worst(math.inf).value < 1.6
    assert worst(0.0).value > 3
    assert worst(0.0).where == "dim 1 at 7"


@pytest.mark.parametrize("dim", [0, 1, 2])
@pytest.mark.parametrize("times", [1e-2, 1e-5, 1e-8])
def test_a_wrong_factor_in_a_small_slice_shows_beside_large_ones(dim, times):
    """A slice is judged by its own error, however large the others' is."""
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
    """An error of golden's factor, beside noise of each element."""
    factor = 1e-2 * torch.randn((), generator=rng, dtype=torch.float64)
    noise = 1e-3 * torch.randn(golden.shape, generator=rng, dtype=torch.float64)
    return Summed(golden * (factor + noise), drawn)


def gain_of(error, models, golden):
    found = statistics.statistics(error, models, Summed(golden), least=1e-6)
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
    assert gain_of(Summed(0.2 * golden), models, golden) > 8


def test_independent_roundings_excuse_nothing_where_candidate_and_model_round_alike():
    rng = torch.Generator().manual_seed(0)
    golden = torch.randn(64, 64, generator=rng, dtype=torch.float64)
    models = [few_numbers_scale(golden, rng) for _ in range(2)]
    models += [few_numbers_scale(golden, rng, drawn=True) for _ in range(DRAWS)]
    highest = max(models[:2], key=lambda model: model.dot(Summed(golden)))
    shared = Summed(highest.values + 1e-5 * golden * torch.randn(64, 64, generator=rng, dtype=torch.float64))
    wrong = Summed(shared.values + 1e-3 * golden)
    assert gain_of(wrong, models, golden) > 3 * gain_of(shared, models, golden)


def behind_a_clamp(*passed):
    """A tensor of 64 whose elements but the first are 0."""
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
