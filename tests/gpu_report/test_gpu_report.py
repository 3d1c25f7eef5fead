"""The report of a GPU: its parts, the facts about its kernels, and its limits."""

from __future__ import annotations

import json
import math
import time
from dataclasses import replace
from pathlib import Path

import fakes
import forked
import pytest
import typer.main
from hypothesis import given
from hypothesis import strategies as st

from parity import te
from parity.cli import app
from parity.judge import limits as table
from parity.machine.files import claimed
from parity.measuring.gpu_report import command, facts, limits
from parity.measuring.gpu_report.command import Outcome, Step, doctor, run_limited, steps
from parity.measuring.gpu_report.facts import ALIGNED, KEPT, PARTS, PROMOTED, READ, ROUNDED, STEP, Fact
from parity.report import environment, record
from parity.result import Check, Result
from parity.user_error import UserError
from te_on_cpu.kernel_choices import (
    FP8_14_BIT,
    FP32_EXACT,
    SPLIT_K_IN_OUTPUT_TYPE,
    TF32_TIES_AWAY,
    TF32_TRUNCATED,
    kernel_choices,
)

# ``parity gpu-report``: a step that fails or hangs stops no other, and the index says how each of them ended.


def step(name: str, program: str, share: float = 1.0, files: tuple[str, ...] = ()) -> Step:
    """Return a step whose verdict is the text that it writes to ``NAME.txt``."""
    return Step(
        name, "Does it work?", ("-c", program), share, files, lambda folder: (folder / f"{name}.txt").read_text()
    )


def report(folder: Path, *chosen: Step, limit: float = 60.0) -> str:
    outcomes = [command.make(each, limit, folder) for each in chosen]
    with claimed(folder / "steps.jsonl") as claim:
        command.write(claim, chosen, outcomes, environment.measure("cpu", [0], 0), "no GPU")
    return (folder / "index.md").read_text()


def row(text: str, name: str) -> str:
    return next(line for line in text.splitlines() if f"**{name}**" in line)


WORKS = "open('{}/good.txt', 'w').write('12 of 12')"


def test_a_step_s_verdict_files_and_duration_are_in_the_index(tmp_path: Path) -> None:
    text = report(tmp_path, step("good", WORKS.format(tmp_path), files=("good.txt", "absent.png")))
    line = row(text, "good")
    assert "✅" in line
    assert "12 of 12" in line
    assert "[good.txt](good.txt), [logs/good.txt](logs/good.txt)" in line
    assert "absent" not in line
    assert json.loads((tmp_path / "steps.jsonl").read_text())["status"] == "done"


@pytest.mark.parametrize(
    ("program", "status", "verdict"),
    [
        ("print('half'); raise SystemExit(1)", "failed", "half"),
        ("import os; print('gone', flush=True); os._exit(3)", "broken", "gone"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "broken", "left nothing"),
        ("pass", "done", "left nothing"),
    ],
)
def test_a_step_that_fails_tells_its_last_words(tmp_path: Path, program: str, status: str, verdict: str) -> None:
    outcome = command.make(step("bad", program), 60.0, tmp_path)
    assert outcome.status == status
    assert verdict in outcome.verdict


def test_a_step_that_fails_or_hangs_stops_no_other(tmp_path: Path) -> None:
    hangs = step("hangs", "import time; print('waiting', flush=True); time.sleep(600)")
    outcome = command.make(hangs, 1.5, tmp_path)
    text = report(tmp_path, step("bad", "raise SystemExit(2)"), step("good", WORKS.format(tmp_path)))
    assert (outcome.status, outcome.exit_code) == ("out of time", None)
    assert "💥" in row(text, "bad")
    assert "✅" in row(text, "good")
    assert "1 of 2 steps done; 1 broken: bad" in text


def test_what_a_hanging_process_started_is_ended_with_it(tmp_path: Path) -> None:
    child = f"import os, time; open('{tmp_path}/child', 'w').write(str(os.getpid())); time.sleep(600)"
    parent = (
        "import signal, subprocess, sys, time; signal.signal(signal.SIGINT, signal.SIG_IGN);"
        f"subprocess.Popen([sys.executable, '-c', {child!r}]); time.sleep(600)"
    )
    ended = run_limited(("-c", parent), 3.0, tmp_path / "log.txt", grace=0.2)
    assert ended.exit_code is None
    pid = int((tmp_path / "child").read_text())
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline and forked.is_running(pid):
        time.sleep(0.05)
    assert not forked.is_running(pid)


def test_an_interrupted_process_may_write_what_it_has(tmp_path: Path) -> None:
    program = (
        "import time\ntry:\n    print('begun', flush=True); time.sleep(600)\n"
        f"except KeyboardInterrupt:\n    open('{tmp_path}/saved', 'w').write('half')"
    )
    run_limited(("-c", program), 4.0, tmp_path / "log.txt")
    assert (tmp_path / "saved").read_text() == "half"


@given(st.lists(st.floats(0.1, 5.0), min_size=1, max_size=8), st.floats(60.0, 3600.0))
def test_steps_that_use_all_their_time_together_use_what_there_is(shares: list[float], seconds: float) -> None:
    chosen = [step(str(i), "", share) for i, share in enumerate(shares)]
    left = seconds
    for position in range(len(chosen)):
        left -= min(left, command.share_of(left, chosen[position:]))
    assert left < 1e-6 * seconds


def test_time_that_a_step_leaves_goes_to_the_next() -> None:
    chosen = [step("a", "", 1.0), step("b", "", 1.0)]
    assert command.share_of(100.0, chosen) == 50.0
    assert command.share_of(90.0, chosen[1:]) == 90.0


def test_even_without_time_a_step_is_tried() -> None:
    assert command.share_of(-3.0, [step("a", "")]) == command.LEAST_SECONDS


def test_a_report_without_a_gpu_says_that_nothing_in_it_is_a_gpu_s(tmp_path: Path) -> None:
    text = report(tmp_path, step("good", WORKS.format(tmp_path)))
    assert text.startswith("# A trial without a GPU")
    assert "No real kernels ran: no GPU. Nothing here is a GPU's figure." in text


def test_steps_that_are_yet_to_run_are_in_the_index(tmp_path: Path) -> None:
    machine = environment.measure("cpu", [0], 0)
    text = command.draw(tmp_path, [step("later", "")], [], machine, "")
    assert "not run yet" in row(text, "later")


@pytest.mark.parametrize("on_gpu", [True, False])
@pytest.mark.parametrize("quick", [True, False])
def test_every_step_is_a_command_that_parity_takes(tmp_path: Path, on_gpu: bool, quick: bool) -> None:
    cli = typer.main.get_command(app)
    for each in steps(tmp_path, on_gpu, quick, 8.0):
        if each.command[:2] != ("-m", "parity"):
            continue
        name, *arguments = each.command[2:]
        taken = cli.commands[name]  # type: ignore[attr-defined]
        taken.make_context(name, list(arguments))


def test_on_a_gpu_steps_ask_for_real_kernels_at_every_precision(tmp_path: Path) -> None:
    by_name = {each.name: each for each in steps(tmp_path, True, False, 8.0)}
    assert all("cpu" not in each.command for each in by_name.values())
    assert "-p" not in by_name["suite"].command
    assert not by_name["suite"].caveat


def test_without_a_gpu_steps_say_what_they_lack(tmp_path: Path) -> None:
    found = steps(tmp_path, False, False, 8.0)
    assert all("no GPU here" in each.caveat for each in found if each.name != "doctor")


def test_an_unknown_step_is_told(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no step 'zoo'.*suite"):
        command.run(tmp_path, 1.0, True, "cpu", ["zoo"])


def test_files_of_an_earlier_report_do_not_pass_for_this_one_s(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "old.md").write_text("from an earlier run")
    monkeypatch.setattr(command, "steps", lambda *_: [step("bad", "raise SystemExit(2)", files=("old.md",))])
    assert not command.run(tmp_path, 1.0, True, "cpu", [])
    assert "old.md" not in (tmp_path / "index.md").read_text()
    assert not (tmp_path / "old.md").exists()


@pytest.mark.parametrize(
    ("lines", "verdict"),
    [
        (["precision  this GPU  Ada", "fp32   yes    yes", "mxfp8   no: needs 10.0    yes"], "on real kernels: fp32"),
        (["precision  this GPU  Ada", "fp32    no: broken    yes"], "on real kernels: nothing"),
        (["precision  Ada  Hopper", "fp32    yes    yes"], "on real kernels: nothing"),
        (["Traceback"], "see its log"),
    ],
)
def test_the_doctor_s_verdict_names_the_precisions_on_real_kernels(
    tmp_path: Path, lines: list[str], verdict: str
) -> None:
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "doctor.txt").write_text("\n".join(lines))
    assert doctor(tmp_path) == verdict


def test_the_summary_tells_how_each_step_ended() -> None:
    chosen = [step(name, "") for name in ("a", "b", "c")]
    outcomes = [Outcome(name, status, 10.0, 20.0, 0, "") for name, status in (("a", "done"), ("b", "failed"))]  # type: ignore[arg-type]
    assert command.summary(chosen, outcomes) == "1 of 3 steps done; 1 failed: b; 20 s in all"


def test_two_reports_do_not_share_a_folder(tmp_path: Path) -> None:
    with claimed(tmp_path / "steps.jsonl") as claim:
        claim.begin(b"the other's\n")
        with pytest.raises(UserError, match=r"another run is writing to .*steps\.jsonl"):
            command.run(tmp_path, 1.0, quick=True, backend="cpu", only=["doctor"])
    assert [(each.name, each.read_text()) for each in tmp_path.iterdir()] == [("steps.jsonl", "the other's\n")]


# The questions about kernels, asked of emulated kernels with known answers.


FP8 = "FP8, TE, no split accumulator"
SPLIT = "FP8, TE, split accumulator"


def asked(*choices: str) -> list[Fact]:
    with kernel_choices(*choices):
        return list(facts.facts(te.kernels("cpu"), shapes=((16, 64),)))


def answers(found: list[Fact], question: str, kernel: str) -> set[str]:
    return {fact.answer for fact in found if (fact.question, fact.kernel) == (question, kernel)}


@pytest.mark.parametrize("layout", ["TN", "NN", "NT"])
@pytest.mark.parametrize(
    ("choice", "answer"),
    [
        (None, "rounded to TF32, ties to even"),
        (TF32_TRUNCATED, "cut to TF32, toward zero"),
        (TF32_TIES_AWAY, "rounded to TF32, ties away from zero"),
        (FP32_EXACT, "as FP32"),
    ],
)
def test_each_way_into_tf32_is_told(choice: str | None, answer: str, layout: str) -> None:
    with kernel_choices(*([choice] if choice else [])):
        assert facts.operands_read(te.kernels("cpu"), layout, (16, 64, 64)) == answer


OF_A_HOPPER = [
    (KEPT, FP8, "13"),
    (KEPT, SPLIT, "13 within an instruction, 23 across instructions"),
    (ROUNDED, FP8, "toward zero; across instructions toward zero"),
    (ALIGNED, FP8, "13"),
    (STEP, FP8, "32"),
    (STEP, SPLIT, "32"),
    (PROMOTED, FP8, "none shows: more than all"),
    (PROMOTED, SPLIT, "128"),
]
OF_PARTS = ("TE, BF16, TN", "TE, FP16, NT")


def test_the_short_sums_of_a_hopper_are_measured_and_reported() -> None:
    found = asked(TF32_TRUNCATED, FP8_14_BIT, SPLIT_K_IN_OUTPUT_TYPE)
    told = [(question, kernel, *answers(found, question, kernel)) for question, kernel, _ in OF_A_HOPPER]
    assert told == OF_A_HOPPER
    for kernel in OF_PARTS:
        (answer,) = answers(found, PARTS, kernel)
        assert "% of the results are off" in answer
    assert facts.verdict(found) == (
        "FP32 operands are cut to TF32, toward zero; bits that a sum of FP8 products keeps: 13; "
        "products until FP32 takes over: 128"
    )
    text = facts.draw(found, "emulated")
    for question in (READ, KEPT, ROUNDED, STEP, PROMOTED, PARTS):
        assert text.count(f"## {question}") == 1


def test_sums_in_fp32_keep_all_bits_and_round_to_nearest_and_parts_are_not_rounded() -> None:
    found = asked()
    assert answers(found, KEPT, FP8) == {"23"}
    assert answers(found, ROUNDED, FP8) == {"to nearest; across instructions to nearest"}
    for kernel in OF_PARTS:
        assert answers(found, PARTS, kernel) == {"no: each result is rounded once"}


# A run compared with the packaged limits, from its record alone.


KEY = ("bf16", "output", "norm")


def result(*values: float) -> Result:
    """Return a result with one output, whose ``norm`` checks have these values as multiples of the limit."""
    limit = table.packaged().limit(*KEY)
    checks = tuple(Check("norm", value * limit, limit) for value in values)
    return fakes.result(tensors=(replace(fakes.tensor(), checks=checks),))


def test_values_are_counted_in_standard_deviations_of_their_law() -> None:
    law = table.packaged().laws[KEY]
    center = math.exp(law.center) / table.packaged().limit(*KEY)
    (found,) = limits.deviations([result(center)]).values()
    assert found.values == pytest.approx((0.0,), abs=1e-9)


def test_what_lies_beyond_its_limit_is_counted_and_the_largest_is_named() -> None:
    found = limits.deviations([result(0.5, 1.5), result(2.0)])
    assert found[KEY].beyond == 2
    verdict = limits.verdict(found)
    assert verdict.startswith("2 of 3 values lie beyond the packaged limit")
    assert "2 of it (bf16, output, norm)" in verdict


def test_results_without_a_law_are_left_out() -> None:
    assert limits.deviations([replace(result(1.5), precision="fp7")]) == {}
    assert limits.verdict({}) == "no statistic was judged"


def test_the_command_writes_a_table_and_its_code_says_if_all_lie_within(tmp_path: Path) -> None:
    file, report = tmp_path / "suite.jsonl", tmp_path / "limits.md"
    for value, code in ((0.5, 0), (1.5, 1)):
        record.start(file, record.environment_line(fakes.ENVIRONMENT))
        record.append(file, record.result_line(result(value)))
        assert limits._write_report(str(file), str(report)) == code
    assert "emulated" in report.read_text()
    assert "| bf16" in report.read_text()


def test_a_run_in_which_nothing_was_judged_is_no_pass(tmp_path: Path) -> None:
    file = tmp_path / "suite.jsonl"
    record.start(file, record.environment_line(fakes.ENVIRONMENT))
    record.append(file, record.result_line(fakes.result(status="skipped", reason="no FP8", tensors=())))
    assert limits._write_report(str(file), str(tmp_path / "limits.md")) == 2


def test_without_a_record_the_command_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert limits._write_report(str(tmp_path / "absent.jsonl"), str(tmp_path / "limits.md")) == 2
    assert "cannot read" in capsys.readouterr().err


def test_limits_of_another_table_are_told_by_the_widest(tmp_path: Path) -> None:
    packaged = table.packaged()
    wider = replace(packaged.laws[KEY], spread=1.0)
    table.save(table.Table({KEY: wider}, {}), tmp_path / "other.json")
    ratio, key = limits.widest(tmp_path / "other.json")
    assert key == KEY
    assert ratio > 1
    table.save(table.Table({}, {}), tmp_path / "empty.json")
    with pytest.raises(UserError, match="shares no law"):
        limits.widest(tmp_path / "empty.json")


def test_signed_statistics_are_counted_by_their_magnitude() -> None:
    checks = tuple(Check("gain", value, 5.0) for value in (-2.0, 2.0))
    tensors = (replace(fakes.tensor(), checks=checks),)
    (found,) = limits.deviations([fakes.result(tensors=tensors)]).values()
    assert found.values[0] == found.values[1] > 0
    assert found.margins == (0.4, 0.4)
