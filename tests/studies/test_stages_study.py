"""The study ``stages``: where mistakes are, what is kept of the stages, and what the report counts."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import pytest
import torch

pytest.importorskip("matplotlib")
from interrupted import run_again

from lab.corpus.catalogue import MODELS, PORTS, SMALL
from lab.corpus.models import Mistake
from lab.studies.stages import study
from lab.studies.stages.places import Place, is_held, places_of
from lab.studies.stages.report import location_of, write
from lab.studies.stages.study import GROUPS, QUICK, Direction, Flagged, Seen, Settings, Trial, seen, subjects, trials
from parity.case.case import Case
from parity.case.validate import check_case
from parity.judge.request import Request
from parity.numerics.freedom import Freedom
from parity.passes.modes import usual_modes
from parity.passes.prepare import Prepared, calls_of, prepare
from parity.stages.graph import traced_graph
from parity.stages.judge import Judged, Stage
from parity.stages.locate import Stages
from parity.te import Kernels
from parity.trace.calls import Misfit
from parity.trace.trace import Call, Site, Trace

# Where mistakes are.


@pytest.fixture(scope="module")
def prepared_host(kernels: Kernels) -> Callable[[Case], tuple[Prepared, list[Call]]]:
    """Return a function that returns a right port, prepared, with its reference's calls."""
    kept: dict[Case, tuple[Prepared, list[Call]]] = {}

    def of(case: Case) -> tuple[Prepared, list[Call]]:
        if case not in kept:
            (checked,) = check_case(case, kernels.te)
            with usual_modes():
                prepared = prepare(case, checked, torch.bfloat16, 0, kernels)
                kept[case] = prepared, calls_of(prepared).trace.calls
        return kept[case]

    return of


@pytest.mark.parametrize("table", MODELS)
def test_each_place_of_a_mistake_has_calls_in_its_reference(table, prepared_host):
    hosts = {port.host: port.right for port in MODELS[table]}
    for port in MODELS[table]:
        prepared, calls = prepared_host(hosts[port.host])
        places = places_of(port.change, prepared.reference)
        assert places, port.name
        assert all(any(place.holds(call) for call in calls) for place in places), port.name


@pytest.mark.parametrize(
    ("mistake", "held"),
    [
        (Mistake({"eps": 1e-3}, layers=(2,)), {"layers.2.0.norm rms_norm", "layers.2.1.norm rms_norm"}),
        (Mistake({"final_norms": 2}), {"norm rms_norm", "head linear"}),
        (Mistake({"causal": False}, layers=(1,)), {"layers.1.0.inner masked_fill"}),
        (Mistake({"gate_last": True}, layers=(0,)), {"layers.0.1.inner silu", "layers.0.1.inner mul"}),
        (Mistake({"multiplier": 1.0}), {"the module mul", "tokens embedding"}),
    ],
    ids=lambda given: " ".join(given.changes) if isinstance(given, Mistake) else "",
)
def test_a_mistake_is_at_the_step_that_its_settings_change(mistake, held, prepared_host):
    prepared, calls = prepared_host(PORTS["final norm twice", "models.llama"].right)
    places = places_of(mistake, prepared.reference)
    assert {f"{call.module} {call.name}" for call in calls if any(place.holds(call) for place in places)} == held


def test_a_mistake_in_gradients_spoils_no_value():
    norm, place = call_of("layers.2.0.norm", "rms_norm"), Place(r"layers\.2\..*", backward=True)
    forward, backward = (stage_of(norm.site, norm, backward=backward) for backward in (False, True))
    assert is_held([place], backward, Trace([norm]))
    assert not is_held([place], forward, Trace([norm]))
    assert is_held([Place(place.module)], forward, Trace([norm]))


def test_a_gradient_may_be_wrong_where_its_value_comes_from():
    made, read = call_of("layers.1", "add"), call_of("layers.2.norm", "rms_norm")
    place = Place(r"layers\.1", frozenset({"add"}), backward=True)
    assert is_held([place], stage_of(made.site, read, backward=True), Trace([made, read]))
    assert not is_held([Place(place.module)], stage_of(made.site, read), Trace([made, read]))


def stage_of(end: Site, *calls: Call, backward: bool = False) -> Stage:
    return Stage(end, calls, (), evidence="agrees", watched="te.Linear", backward=backward)


def call_of(module: str, name: str) -> Call:
    return Call((module, 0, name, 0), name, None, (), {}, None)


# What is kept of the stages. ``judge_stages`` is replaced by a list of stages.


def judged(module: str, *names: str, ratio: float = 1.0, gain: float = 0.0, backward: bool = False) -> Judged:
    calls = tuple(call_of(module, name) for name in names)
    return Judged(stage_of(calls[-1].site, *calls, backward=backward), ratio, 1.0, gain)


@pytest.fixture
def judged_as(monkeypatch: pytest.MonkeyPatch):
    """Return a function that sets the stages of every port, on its inputs and on probing ones."""

    def of(*stages: Judged, probed: Sequence[Judged] = ()) -> None:
        def judge_stages(request: Request, prepared: Prepared, freedoms: Sequence[Freedom]) -> Stages:
            is_probed = set(prepared.golden.outputs.values()) == set(prepared.probed.values())
            return Stages(tuple(probed if is_probed else stages), traced_graph(prepared), {}, ())

        monkeypatch.setattr(study, "judge_stages", judge_stages)

    return of


WRONG = "models.norm_mlp: no norm"


def test_stages_are_counted_by_direction_and_flagged_ones_by_the_mistakes_place(judged_as):
    judged_as(
        judged("norm", "rms_norm", ratio=40.0, gain=-7.0),
        judged("inner", "silu", "mul", ratio=2.0),
        judged("", "transpose"),
        judged("norm", "rms_norm", ratio=math.inf, backward=True),
    )
    one = seen(Trial("kinds", WRONG, "bf16", 0))
    assert one.status == "failed"
    assert one.reason == ""
    assert one.forward == Direction(3, {"agrees": 3}, (40.0, 2.0), (-7.0, 0.0))
    assert one.backward == Direction(1, {"agrees": 1}, (math.inf,), (0.0,))
    assert [(flagged.end, flagged.backward, flagged.holds) for flagged in one.flagged] == [
        ("1st rms_norm of norm", False, True),
        ("1st mul of inner", False, False),
        ("gradient at the 1st rms_norm of norm", True, True),
    ]
    assert one.flagged[1].calls == ("inner silu", "inner mul")
    assert location_of(one) == "partly"
    assert 0 < one.touching < one.hypotheses


def test_a_port_of_no_flagged_stage_is_judged_on_probing_inputs_by_values_alone(judged_as):
    of_probes = [judged("norm", "rms_norm", ratio=3.0), judged("inner", "mul", ratio=3.0, backward=True)]
    judged_as(judged("inner", "silu"), probed=of_probes)
    one = seen(Trial("constants", "models.norm_mlp: norm_mlp eps 5e-06 for 1e-05", "bf16", 0))
    assert one.forward == Direction(1, {"agrees": 1}, (1.0,), (0.0,))
    assert [(flagged.end, flagged.holds, flagged.probed) for flagged in one.flagged] == [
        ("1st rms_norm of norm", True, True)
    ]


def test_why_stages_cannot_be_judged_is_kept_with_the_verdict(judged_as, monkeypatch):
    def unfit(request, prepared, freedoms):
        raise Misfit("the reference cannot be computed stage by stage") from ValueError("no such value")

    monkeypatch.setattr(study, "judge_stages", unfit)
    one = seen(Trial("models", "models.norm_mlp", "bf16", 0))
    assert (one.status, one.reason) == ("passed", "ValueError: no such value")


def test_an_interrupted_study_goes_on(judged_as, monkeypatch, tmp_path):
    judged_as(judged("norm", "rms_norm", ratio=math.inf, gain=math.nan))
    settings = Settings(("models", "kinds"), ("models.norm_mlp", WRONG), ("bf16",))
    measured, (found, _) = run_again(monkeypatch, study, "seen", partial(study.measured, settings, tmp_path))
    assert measured == trials(settings)
    assert [one.flagged[0].ratio for one in found.values()] == [math.inf, math.inf]
    assert all(math.isnan(one.forward.gains[0]) for one in found.values())


# Which ports are judged.


def test_right_ports_of_each_source_are_listed_and_wrong_ones_of_each_table():
    assert {group: len(subjects(group)) for group in ("drawn", "models", *MODELS)} == {
        "drawn": 60,
        "models": 17,
        **{table: len(ports) for table, ports in MODELS.items()},
    }
    small = subjects("small")
    assert all(one.find_places is None for one in small.values())
    assert all(one.find_places is not None for one in subjects("placed").values())
    assert {name.partition(":")[0] for name in subjects("placed")} == set(subjects("placed_hosts"))
    assert {port.host for ports in SMALL.values() for port in ports} == {name.partition(":")[0] for name in small}
    assert small["decaying_sgd: right"].case.precisions == ("fp32",)
    assert all(len(one.case.sizes) == 1 for one in subjects("packaged").values())


def test_the_quick_settings_name_ports():
    assert {one.port for one in trials(QUICK)} == {"model_000", "model_001", *QUICK.ports[1:]}
    assert set(QUICK.groups) < set(GROUPS)


# The report.


def flagged(holds: bool, backward: bool = False) -> Flagged:
    return Flagged(
        "1st silu of mlp", backward, 12.0, -30.0, "next", "silu", ("mlp silu", "mlp mul", "out linear"), holds
    )


def test_where_the_flagged_stages_of_a_wrong_port_are():
    def located(*holds: bool) -> str:
        return location_of(Seen("failed", 2.0, "", 1.0, flagged=tuple(map(flagged, holds))))

    assert [located(True, True), located(True, False), located(False), located()] == [
        "exactly",
        "partly",
        "beside",
        "not",
    ]


def test_the_report_counts_and_lists(tmp_path: Path):
    forward = Direction(4, {"weights": 1, "agrees": 2, "output": 1}, (0.9, 1.0, 12.0), (0.1, -0.2, -30.0))
    right = Seen("passed", 0.5, "", 2.0, 1.0, forward, unmatched=2)
    found = {
        Trial("drawn", "model_000", "bf16", 0): right,
        Trial("drawn", "model_001", "bf16", 0): Seen(
            "passed", 0.5, "", 2.0, 1.0, forward, flagged=(flagged(False), flagged(False, backward=True))
        ),
        Trial("drawn", "model_002", "bf16", 0): Seen("passed", 0.5, "ValueError: no such value", 2.0),
        Trial("drawn", "model_004", "bf16", 0): Seen("passed", 0.5, "ValueError: no such value", 2.0),
        Trial("drawn", "model_003", "bf16", 0): Seen("failed", 9.0, "", 2.0, 1.0, forward, flagged=(flagged(False),)),
        Trial("kinds", "a: located", "bf16", 0): Seen(
            "failed", 3.0, "", 1.0, 1.0, flagged=(flagged(True),), hypotheses=50, touching=2
        ),
        Trial("kinds", "b: hidden", "bf16", 0): Seen(
            "passed", 0.9, "", 1.0, 3.0, flagged=(flagged(True),) * 2, hypotheses=50, touching=4
        ),
        Trial("kinds", "c: elsewhere", "bf16", 0): Seen("failed", 3.0, "", 1.0, 1.0, flagged=(flagged(False),)),
        Trial("kinds", "d: missed", "bf16", 0): Seen("passed", 0.9, "", 1.0, 1.0),
    }
    text = write(found, Settings(precisions=("bf16",)), tmp_path).read_text()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line[:1] == "|"]
    assert ["drawn", "`bf16`", "forward", "2 of 5", "8", "2, 4, 0, 2", "6 (3 to 3)", "1, 12, 12", "30, 30", "2",
            "1 in 1"] in rows  # fmt: skip
    assert [row[-1] for row in rows if row[2:3] == ["backward"]] == ["1 in 1"]
    assert ["kinds", "`bf16`", "4 of 4", "2", "2 (1 in one stage)", "0", "1", "1", "2", "1 of 2", "6%"] in rows
    assert [row[5:7] for row in rows if row[1] == "model_001"] == [
        ["1st silu of mlp", "12"],
        ["1st silu of mlp", "12"],
    ]
    assert {row[1]: row[0] for row in rows if row[0] in ("beside", "not")} == {
        "c: elsewhere": "beside",
        "d: missed": "not",
    }
    assert {row[1]: row[5] for row in rows if row[0] in ("beside", "not")} == {
        "c: elsewhere": "0 of 1",
        "d: missed": "0 of 0",
    }
    assert ["kinds", "`bf16`", "4", "1, 1", "1, 3", "150%"] in rows
    assert [row[-2:] for row in rows if row[1] == "model_003"] == [["9", "1"]]
    assert ["drawn", "`bf16`", "passed", "ValueError: no such value", "2: model_002, model_004"] in rows
    assert [row[-1] for row in rows if row[1] == "c: elsewhere"] == ["3 calls: mlp: silu mul; out: linear"]
