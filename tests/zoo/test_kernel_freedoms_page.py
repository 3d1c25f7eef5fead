"""The page of kernel freedoms: every choice that shows here is tried, and its counts are of what was judged."""

from __future__ import annotations

from parity.lab.zoo.kernel_freedoms import Asked, _sections, is_rejected, plan, shown
from parity.lab.zoo.trial import CLEAN, Trial
from parity.numerics.kernel_choices import CHOICES

LINEAR = Trial(CLEAN, "linear", "small", "fp32", 0)


def test_each_choice_is_tried_on_right_ports_and_on_bugs_with_and_without_what_is_granted():
    asked = plan(1)
    for choice in CHOICES:
        mine = [one for one in asked if one.kernels == choice.name]
        kinds = {(one.trial.bug == CLEAN, one.granted) for one in mine}
        assert len(kinds) == (4 if shown(choice) else 0), choice.name
    assert len(set(asked)) == len(asked)


def test_right_port_on_truncating_kernels_passes_by_what_is_granted_alone():
    verdicts = {granted: is_rejected(Asked(LINEAR, "tf32-truncated", granted)) for granted in (False, True)}
    assert verdicts == {False: True, True: False}


def test_page_counts_what_was_judged_and_names_what_is_missed():
    bug = Trial("some-bug", "linear", "small", "fp32", 0)
    page = "\n".join(
        _sections(
            {
                Asked(LINEAR, "", False): False,
                Asked(LINEAR, "", True): False,
                Asked(bug, "", False): True,
                Asked(bug, "", True): False,
            },
            1,
        )
    )
    (row,) = [line for line in page.splitlines() if line.startswith("| default")]
    assert [cell.strip() for cell in row.strip("|").split("|")] == ["default", "`fp32`", "1", "0", "0", "1", "1", "0"]
    assert "- `some-bug` in `linear`, fp32, seed 0" in page
