"""Ports of public threads, in ``examples/threads``: the wrong one gets the finding that its file states."""

from __future__ import annotations

from pathlib import Path

import pytest

import parity
from parity import Case
from parity.case.registry import load_case
from parity.mistakes.codes import CODES
from parity.result import Result

THREADS = Path(__file__).parents[2] / "examples" / "threads"

SAID = [
    ("adam_in_bf16", "master-weights", "the weights exist only in bfloat16"),
    ("auxiliary_loss_of_own_tokens", "gradient-scale", "in which output[1] counts 0.5 times instead of once"),
    ("cached_weight_scale", "state-between-steps", "such as FP8 scales, cached weights and buffers"),
    ("cross_entropy_first_gradient", "gradient-scale", "every gradient is 0; look for detach"),
    ("expert_gradients_over_the_dense_group", "parts-added-up", "each rank has the sum of all parts"),
    ("fp8_state_lost_in_conversion", "state-not-saved", "save and load _extra_state of each module"),
    ("graph_gradient_buffers", "stale-gradient", "the optimizer gets no gradients"),
    ("labels_shifted_twice", "labels-shifted", "the port compares them with the label of the second next position"),
    ("last_micro_batch_not_averaged", "state-between-steps", "what that step does besides one pass"),
    ("log_probs_at_a_temperature", "temperature", "logits divided by a temperature of 0.6"),
    ("log_probs_in_16_bits", "log-softmax-precision", "each number of output can be held in bfloat16"),
    ("loss_times_context_ranks", "reduced-twice", "a loss is multiplied by the number of ranks"),
    ("masked_loss_by_own_tokens", "shares-of-ranks", "each divides its loss by its own count"),
    (
        "norm_gradient_of_a_shard",
        "reduction-missing",
        "the weight gradient layer_norm_weight is only a part of the sum on each",
    ),
    (
        "odd_lengths_over_context_ranks",
        "wrong-over-ranks",
        "right in one process, but over 2 ranks (cp2) it is wrong in output",
    ),
    ("packed_rows_rolled_at_real_ends", "unexplained", "no known mistake explains the error of output"),
    (
        "query_norm_of_own_heads",
        "reduction-missing",
        "the weight gradient norm.weight is only a part of the sum on each",
    ),
    ("recompute_backward_scales", "scale-not-updated", "the output gradient of weight has a scale"),
    ("recompute_outside_autocast", "recipe-disabled", "as if part of the candidate ran without it"),
    (
        "router_gradient_of_own_experts",
        "reduction-missing",
        "the weight gradient router.weight is only a part of the sum on each",
    ),
    ("sink_left_out_of_the_norm", "gradient-norm", "with attend.softmax_offset only as the first rank has it"),
    ("weight_cache_not_refreshed", "weight-cache-stale", "is_first_microbatch=True"),
]
PASSES_WITH_A_NOTE = {"recompute_outside_autocast"}


def compared(file: str, which: str) -> Result:
    case: Case = load_case(THREADS / f"{file}.py", f"{file}_{which}")
    switch = case.switches[0] if case.switches else ""
    over = case.ranks[0] if case.ranks else None
    (result,) = parity.compare(case, case.precisions, steps=case.steps, switch=switch, ranks=over)
    return result


@pytest.mark.parametrize("file", [file for file, *_ in SAID])
def test_the_right_port_passes(file):
    result = compared(file, "right")
    assert (result.status, result.reason, result.findings) == ("passed", "", ())


@pytest.mark.parametrize(("file", "title", "told"), SAID)
def test_the_wrong_port_gets_the_finding_that_its_file_states(file, title, told):
    result = compared(file, "wrong")
    assert f"``{title}`` ({CODES[title]})" in (THREADS / f"{file}.py").read_text()
    if file in PASSES_WITH_A_NOTE:
        assert result.status == "passed"
        assert any(told in note and title in note for note in result.notes)
    else:
        assert result.status == "failed"
        assert result.findings[0].title == title
        assert told in result.findings[0].message


def test_each_file_has_a_row_here_and_in_the_table_of_the_folder():
    files = {file.stem for file in THREADS.glob("*.py")}
    assert files == {file for file, *_ in SAID}
    assert all(f"[{file}.py]({file}.py)" in (THREADS / "README.md").read_text() for file in files)
