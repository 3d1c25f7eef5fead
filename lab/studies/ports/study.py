"""Write a port of each model, run it as it is and with each mistake that fits it, and report what parity says."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lab.studies import reporting
from lab.studies.ports.bugs import BUGS
from lab.studies.settings import check_names
from lab.threads import one_thread
from parity import te
from parity.api import compare
from parity.cli.ports import declared_pairs
from parity.measuring import record
from parity.measuring.record import Campaign, FourDigits
from parity.ports import pages, reading, writing
from parity.ports.form import Form
from parity.result import Result
from parity.te import PRECISIONS, Backend
from parity.user_error import UserError

RECORD = "ports.jsonl"
PAGES = tuple(sorted(path.stem for path in Path(pages.__file__).parent.glob("[a-z]*.py")))
MODELS = tuple(sorted({*pages.PLAIN, *PAGES}))
_SECONDS = 20.0  # of a search
# What default configurations lack: ESM's is for no model, since it has neither a vocabulary nor positions.
_SET: Mapping[str, Mapping[str, Any]] = {
    "esm": {"vocab_size": 33, "pad_token_id": 1, "mask_token_id": 32, "position_embedding_type": "rotary"}
}


@dataclass(frozen=True)
class Settings:
    """Options of the study.

    Attributes:
        models: types of models, as transformers names them.
        wrong_models: those of them whose ports get mistakes.
        precisions: the precisions at which right ports are judged.
        wrong_precisions: those at which wrong ones are.
        seeds: seeds of right ports; wrong ones have the first.
        backend: ``cpu``, or ``gpu`` for TE's compiled kernels.
        workers: how many processes judge in parallel; 0 to judge in this process.
    """

    models: tuple[str, ...] = MODELS
    wrong_models: tuple[str, ...] = MODELS
    precisions: tuple[str, ...] = ("fp32", "bf16", "fp8_current")
    wrong_precisions: tuple[str, ...] = ("bf16",)
    seeds: tuple[int, ...] = (0,)
    backend: Backend = "cpu"
    workers: int = 0


FULL = Settings()
QUICK = Settings(models=("qwen3",), wrong_models=("qwen3",), precisions=("bf16",))


@dataclass(frozen=True)
class Trial:
    """A port at one precision; ``bug`` is the name of a mistake, or empty for the port as it is."""

    model: str
    bug: str
    precision: str
    seed: int
    backend: Backend = "cpu"


@dataclass(frozen=True)
class Said:
    """What parity says of it: of each pair, its status; the largest margin; findings by title; the first words."""

    statuses: tuple[tuple[str, str], ...]
    margin: FourDigits
    titles: tuple[str, ...]
    words: str


def measured(settings: Settings, folder: Path) -> tuple[Mapping[Trial, Said], Settings]:
    """Judge what is missing from the folder's record, and return the arguments of ``write``, except the folder."""
    check_names("precisions", (*settings.precisions, *settings.wrong_precisions), PRECISIONS)
    campaign: Campaign[Trial, Said] = Campaign(folder / RECORD, Said, code=record.code_of(__name__))
    with one_thread():
        return campaign.complete(_list_trials(settings), _judge_trial, "judging", settings.workers or None), settings


def _list_trials(settings: Settings) -> list[Trial]:
    right = [
        Trial(model, "", precision, seed, settings.backend)
        for seed in settings.seeds
        for precision in settings.precisions
        for model in settings.models
    ]
    wrong = [
        Trial(model, bug.name, precision, settings.seeds[0], settings.backend)
        for precision in settings.wrong_precisions
        for model in settings.wrong_models
        for bug in BUGS
    ]
    return right + wrong


def write_port(one: Trial) -> tuple[str, Form, bool]:
    """Return the text of a port with its mistake, the model's form, and whether the mistake fits, if there is one."""
    config = reading.load_config(one.model)
    for name, value in _SET.get(one.model, {}).items():
        setattr(config, name, value)
    right, form = writing.write(config)
    text = next((bug.plant(right) for bug in BUGS if bug.name == one.bug), right)
    return text, form, not one.bug or text != right


def _judge_trial(one: Trial) -> Said:
    """Write the port, plant the mistake, and compare; ``not planted`` if the mistake fits nowhere."""
    text, form, is_planted = write_port(one)
    if not is_planted:
        return Said((), 0.0, (), "not planted")
    try:
        results = list(_compare_pairs(text, form.kind, one))
    except UserError as error:
        return Said((("", "does not run"),), 0.0, (), str(error))
    findings = [finding for _, result in results for finding in result.findings]
    words = next((finding.message for finding in findings), next((result.reason for _, result in results), ""))
    margins = [result.margin for _, result in results if result.status in ("passed", "failed")]
    return Said(
        tuple((name, result.status) for name, result in results),
        max(margins, default=0.0),
        tuple(finding.title for finding in findings),
        words,
    )


def _compare_pairs(text: str, kind: str, one: Trial) -> Iterator[tuple[str, Result]]:
    """Yield the names and results of a port's pairs; of a wrong port, only of the pass."""
    with declared_pairs(text, kind) as cases:
        for case in cases[: 1 if one.bug else None]:
            for result in compare(
                case, [one.precision], seeds=[one.seed], backend=one.backend, diagnosis_seconds=_SECONDS
            ):
                yield case.name, result


def write(found: Mapping[Trial, Said], settings: Settings, folder: Path) -> Path:
    """Write the report, and return its path."""
    return reporting.written(folder / "ports.md", _sections(found, settings))


def _sections(found: Mapping[Trial, Said], settings: Settings) -> Iterator[str]:
    yield "# Ports that are written from configurations"
    yield (
        "Of each model of transformers, `parity port` writes a port from its default configuration; it is compared in "
        "a small size with every kind of layer that the model has, and with each mistake that can be planted in its "
        "text. " + reporting.made_on(te.kernels(settings.backend))
    )
    right = {one: said for one, said in found.items() if not one.bug}
    judged = [(one, status) for one, said in right.items() for _, status in said.statuses]
    passed = sum(status == "passed" for _, status in judged)
    yield f"## Right ports\n\nOf {len(judged)} comparisons, {len(judged) - passed} did not pass."
    yield reporting.texts(
        [[model, *(_describe_right(right, model, name) for name in settings.precisions)] for model in settings.models],
        ["model", *(f"`{name}`" for name in settings.precisions)],
    )
    wrong = {one: said for one, said in found.items() if one.bug and said.words != "not planted"}
    detected = [one for one, said in wrong.items() if any(status == "failed" for _, status in said.statuses)]
    named = [one for one in detected if _is_named(one, wrong[one])]
    yield (
        f"## Wrong ports\n\nMistakes were planted in {len(settings.wrong_models)} of {len(settings.models)} models, "
        f"with one seed. Of {len(wrong)} wrong ports, {len(detected)} are detected, and {len(named)} of these are "
        "named. *Named*: a finding has the right title. Empty: the mistake fits nowhere in this port."
    )
    for precision in settings.wrong_precisions:
        rows = [
            [
                bug.name,
                *(
                    _describe_wrong(
                        found[Trial(model, bug.name, precision, settings.seeds[0], settings.backend)], bug.name
                    )
                    for model in settings.wrong_models
                ),
            ]
            for bug in BUGS
        ]
        yield reporting.texts(rows, [f"`{precision}`", *settings.wrong_models])
    others = [one for one in wrong if one not in named]
    rows = [
        [
            one.bug,
            one.model,
            ", ".join(dict(wrong[one].statuses).values()),
            f"{wrong[one].margin:.2g}",
            ", ".join(wrong[one].titles),
            _shorten(wrong[one].words),
        ]
        for one in others
    ]
    yield "## Not named"
    yield reporting.texts(rows, ["mistake", "model", "status", "margin", "findings", "in words"])


def _describe_right(right: Mapping[Trial, Said], model: str, precision: str) -> str:
    """Return the largest margin over seeds, or what else became of them."""
    said = [each for one, each in right.items() if (one.model, one.precision) == (model, precision)]
    others = sorted({status for each in said for _, status in each.statuses if status != "passed"})
    return ", ".join(others) if others else f"{max(each.margin for each in said):.2f}"


def _describe_wrong(said: Said, bug: str) -> str:
    if said.words == "not planted":
        return ""
    if all(status == "passed" for _, status in said.statuses):
        return "passes"
    titles = next(each.titles for each in BUGS if each.name == bug)
    return "named" if any(title in titles for title in said.titles) else "detected"


def _is_named(one: Trial, said: Said) -> bool:
    return _describe_wrong(said, one.bug) == "named"


def _shorten(text: str) -> str:
    text = " ".join(text.split()).replace("|", "\\|")
    return text if len(text) <= 160 else f"{text[:160]}…"
