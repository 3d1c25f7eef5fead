"""Judge ports of language models, right and wrong ones, by parity and by the rules that people use for models."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from lab.studies import reporting
from lab.studies.ports.bugs import BUGS
from lab.studies.ports.study import Trial, write_port
from lab.studies.rivals.rules import RULES, Compared, Scores
from lab.studies.settings import check_names
from lab.threads import one_thread
from lab.zoo import rivals
from parity import te
from parity.case.validate import check_case
from parity.cli.ports import declared_pairs
from parity.comparison import judge_at
from parity.judge.limits import packaged
from parity.measuring import record
from parity.measuring.record import Campaign
from parity.passes.prepare import prepare
from parity.te import PRECISIONS, Backend
from parity.user_error import UserError

RECORD = "rivals.jsonl"
PARITY, PROBED = "te-parity", "te-parity --probe-weights"
MODELS = (
    *("cohere", "deepseek_v3", "gemma2", "gemma3_text", "gpt2", "gpt_neox", "gpt_oss", "granite", "llama", "mistral"),
    *("mixtral", "olmo2", "phi3", "qwen2", "qwen3", "qwen3_moe", "smollm3"),
)


@dataclass(frozen=True)
class Settings:
    """Options of the study.

    Attributes:
        models: types of models, as transformers names them.
        precisions: the precisions at which all ports are judged.
        seeds: seeds of right ports; wrong ones have the first.
        backend: ``cpu``, or ``gpu`` for TE's compiled kernels.
        workers: how many processes judge in parallel; 0 to judge in this process.
    """

    models: tuple[str, ...] = MODELS
    precisions: tuple[str, ...] = ("fp32", "bf16", "fp8_current")
    seeds: tuple[int, ...] = (0,)
    backend: Backend = "cpu"
    workers: int = 0


FULL = Settings()
QUICK = Settings(models=("qwen3",), precisions=("bf16",))


@dataclass(frozen=True)
class Said:
    """What became of a port: who rejects it; ``why`` it could not be judged, or was given no mistake."""

    rejected_by: tuple[str, ...]
    why: str = ""


def measured(settings: Settings, folder: Path) -> tuple[Mapping[Trial, Said], Settings]:
    """Judge what is missing from the folder's record, and return the arguments of ``write``, except the folder."""
    check_names("precisions", settings.precisions, PRECISIONS)
    campaign: Campaign[Trial, Said] = Campaign(folder / RECORD, Said, code=record.code_of(__name__))
    trials = [
        Trial(model, bug, precision, seed, settings.backend)
        for bug in ("", *(bug.name for bug in BUGS))
        for precision in settings.precisions
        for model in settings.models
        for seed in (settings.seeds[:1] if bug else settings.seeds)
    ]
    with one_thread():
        return campaign.complete(trials, _judge_trial, "judging", settings.workers or None), settings


def _judge_trial(one: Trial) -> Said:
    text, form, is_planted = write_port(one)
    if not is_planted:
        return Said((), "not planted")
    try:
        with declared_pairs(text, form.kind) as (case, *_):
            kernels, precision = te.kernels(one.backend), PRECISIONS[one.precision]
            checked = check_case(case, kernels.te)[0]
            at = case, checked, precision, one.seed, kernels, packaged()
            verdict = judge_at(*at, unwritten=False).result
            probed = (
                verdict if verdict.status == "failed" else judge_at(*at, unwritten=False, probe_weights=True).result
            )
            if verdict.status not in ("passed", "failed"):
                return Said((), verdict.reason)
            prepared = prepare(case, checked, precision.dtype, one.seed, kernels)
            port = rivals.candidate(case, checked, prepared, precision, one.seed, kernels)
            plain = rivals.low_precision(prepared, precision.dtype)
            exact = rivals.golden(prepared)
    except UserError as error:
        return Said((), str(error))
    compared = Compared(*map(_read_scores, (port, exact, plain)))
    others = tuple(name for name, rejects in RULES.items() if rejects(compared))
    ours = [name for name, result in ((PARITY, verdict), (PROBED, probed)) if result.status == "failed"]
    return Said((*ours, *others))


def _read_scores(tensors: rivals.Tensors) -> Scores:
    return Scores(tensors["output[logits]"].double(), tensors["output[loss]"].item())


def write(found: Mapping[Trial, Said], settings: Settings, folder: Path) -> Path:
    """Write the report, and return its path."""
    return reporting.written(folder / "rivals.md", _sections(found, settings))


def _sections(found: Mapping[Trial, Said], settings: Settings) -> Iterator[str]:
    judged = {one: said for one, said in found.items() if not said.why}
    yield "# Rules that people use for whole models"
    yield (
        f"{len(settings.models)} language models of transformers, in a small size with fresh weights, ported by "
        "`parity port`: as they are, and with each mistake that fits their text. Each rule judges logits and, where it "
        "does, the loss, against the reference as plain PyTorch computes it; te-parity judges gradients and probing "
        "inputs as well. The sources of the rules are in `lab/studies/rivals/rules.py`. "
        + reporting.made_on(te.kernels(settings.backend))
    )
    for title, wrong in (("Wrong ports that are rejected", True), ("Right ports that are rejected", False)):
        yield f"## {title}"
        rows = [
            [name, *(_count_rejected(judged, name, precision, wrong) for precision in settings.precisions)]
            for name in (PARITY, PROBED, *RULES)
        ]
        yield reporting.texts(rows, ["rule", *(f"`{name}`" for name in settings.precisions)])
    missed = [one for one, said in judged.items() if one.bug and PARITY not in said.rejected_by]
    yield "## Wrong ports that te-parity passes"
    rows = [[one.bug, one.model, one.precision, ", ".join(judged[one].rejected_by)] for one in missed]
    yield reporting.texts(rows, ["mistake", "model", "precision", "rejected by"]) if rows else "None."
    refused = [(one, said) for one, said in found.items() if said.why not in ("", "not planted")]
    if refused:
        yield "## Not judged"
        yield reporting.texts(
            [[one.model, one.bug, one.precision, " ".join(said.why.split())[:160]] for one, said in refused],
            ["model", "mistake", "precision", "why"],
        )


def _count_rejected(judged: Mapping[Trial, Said], rule: str, precision: str, wrong: bool) -> str:
    of = [said for one, said in judged.items() if one.precision == precision and bool(one.bug) == wrong]
    return f"{sum(rule in said.rejected_by for said in of)} of {len(of)}"
