"""Judge right and wrong ports under each recipe, and the same under the built-in precision whose limits it has."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from lab.corpus.catalogue import PORTS, RIGHT
from lab.corpus.port import at_size
from lab.studies import reporting
from lab.studies.recipes.named import FACTORIES, RECIPES
from lab.studies.settings import check_names, gpu_with
from lab.threads import one_thread
from parity import te
from parity.api import compare
from parity.measuring import record
from parity.measuring.record import Campaign, FourDigits
from parity.te import PRECISIONS, Backend, precision_named

RECORD = "recipes.jsonl"
HOSTS = ("linear", "norm_linear", "swiglu_mlp", "causal_attention", "attention", "gpt_layer", "llama_layer")
# Mistakes that every precision shows, in modules, attention and layers.
BUGS = (
    ("linear", "bias-dropped"),
    ("swiglu_mlp", "gate-up-swapped"),
    ("swiglu_mlp", "sigmoid-for-silu-gate"),
    ("swiglu_mlp", "layernorm-for-rmsnorm"),
    ("causal_attention", "softmax-scale-missing"),
    ("causal_attention", "causal-mask-sees-the-next-key"),
    ("causal_attention", "gqa-heads-tiled"),
    ("attention", "key-value-swapped"),
    ("attention", "rope-base-wrong"),
    ("attention", "rope-keys-one-position-late"),
    ("gpt_layer", "residual-from-the-norm"),
    ("gpt_layer", "heads-transposed"),
)


@dataclass(frozen=True)
class Settings:
    """Options of the study.

    Attributes:
        recipes: names in ``named.RECIPES``.
        seeds: seeds of right ports; wrong ones have the first.
        backend: ``cpu``, or ``gpu`` for TE's compiled kernels.
        workers: how many processes judge in parallel; 0 to judge in this process.
    """

    recipes: tuple[str, ...] = tuple(RECIPES)
    seeds: tuple[int, ...] = (0, 1, 2)
    backend: Backend = "cpu"
    workers: int = 0


FULL = Settings()
QUICK = Settings(recipes=("current_backward_dequantized",), seeds=(0,))


@dataclass(frozen=True)
class Trial:
    """A host at one precision; ``bug`` is the name of a mistake, or empty for the right port."""

    precision: str
    host: str
    bug: str
    seed: int
    backend: Backend = "cpu"


@dataclass(frozen=True)
class Said:
    """What became of it: the status, the margin, and the reason of what is neither passed nor failed."""

    status: str
    margin: FourDigits
    reason: str


def measured(settings: Settings, folder: Path) -> tuple[Mapping[Trial, Said], Settings]:
    """Judge what is missing from the folder's record, and return the arguments of ``write``, except the folder."""
    check_names("recipes", settings.recipes, RECIPES)
    campaign: Campaign[Trial, Said] = Campaign(folder / RECORD, Said, code=record.code_of(__name__))
    with one_thread():
        return campaign.complete(_list_trials(settings), _judge_trial, "judging", settings.workers or None), settings


def _list_trials(settings: Settings) -> list[Trial]:
    precisions = [*_list_families(settings), *settings.recipes]
    right = [
        Trial(name, host, "", seed, settings.backend)
        for name in precisions
        for host in HOSTS
        for seed in settings.seeds
    ]
    return right + [
        Trial(name, host, bug, settings.seeds[0], settings.backend) for name in precisions for host, bug in BUGS
    ]


def _list_families(settings: Settings) -> list[str]:
    """Return the built-in precisions by whose limits these recipes are judged."""
    return list(dict.fromkeys(RECIPES[name].families[-1] for name in settings.recipes))


def _judge_trial(one: Trial) -> Said:
    case = PORTS[one.bug, one.host].case if one.bug else RIGHT[one.host]
    kernels, precision = te.kernels(one.backend), precision_named(one.precision)
    in_attention = precision.rounding.attention.qkv is not None and one.backend == "cpu"
    with gpu_with(PRECISIONS["mxfp8"] if in_attention else precision, kernels):
        anywhere = replace(at_size(case, "small"), precisions=None)
        (result,) = compare(anywhere, [precision], seeds=[one.seed], backend=one.backend, diagnose=False)
    return Said(result.status, result.margin if result.status in ("passed", "failed") else 0.0, result.reason)


def write(found: Mapping[Trial, Said], settings: Settings, folder: Path) -> Path:
    """Write the report, and return its path."""
    return reporting.written(folder / "recipes.md", _sections(found, settings))


def _sections(found: Mapping[Trial, Said], settings: Settings) -> Iterator[str]:
    yield "# Recipes with other arguments than the built-in ones"
    yield (
        f"Right ports of {len(HOSTS)} modules and layers at {len(settings.seeds)} seeds, and {len(BUGS)} wrong ones, "
        "under TE's quantizer factories and under recipes with other arguments. What each rounds is derived from its "
        "quantizers ([recipes of yours](../../docs/recipes.md)); the limits are those of the built-in precision in the "
        "last column. What needs a Blackwell, and attention in FP8, runs on an emulated one, the rest on an emulated "
        "Hopper. " + reporting.made_on(te.kernels(settings.backend))
    )
    of = {name: [(one, said) for one, said in found.items() if one.precision == name] for name in settings.recipes}
    right = [(one, said) for rows in of.values() for one, said in rows if not one.bug]
    wrong = [(one, said) for rows in of.values() for one, said in rows if one.bug]
    counts = {status: sum(said.status == status for _, said in right) for status in ("passed", "failed", "error")}
    yield (
        f"Of {len(right)} comparisons of right ports, {counts['failed']} failed, and TE refused {counts['error']}. Of "
        f"{sum(said.status != 'error' for _, said in wrong)} wrong ports that TE runs, "
        f"{sum(said.status == 'failed' for _, said in wrong)} failed."
    )
    families = _list_families(settings)
    yield "## By recipe"
    rows = [
        _describe_recipe(found, name, RECIPES[name].families[-1] if name in RECIPES else "itself")
        for name in (*families, *settings.recipes)
    ]
    yield reporting.texts(
        rows, ["recipe", "right: passed", "failed", "refused", "largest margin", "wrong: failed", "passed", "limits of"]
    )
    yield "## What failed though it is right, passed though it is wrong, or was refused"
    odd = [(one, said) for one, said in found.items() if said.status != ("failed" if one.bug else "passed")]
    reasons: dict[tuple[str, str, str], list[Trial]] = {}
    for one, said in odd:
        reasons.setdefault((one.bug or "right", said.status, said.reason.split("; in ")[0]), []).append(one)
    yield reporting.texts(
        [
            [port, status, ", ".join(dict.fromkeys(one.precision for one in trials)), _list_hosts(trials), reason]
            for (port, status, reason), trials in reasons.items()
        ],
        ["port", "status", "recipes", "hosts", "reason"],
    )
    yield (
        f"{len(FACTORIES)} of the recipes are TE's factories (`pytorch/custom_recipes`); the others are in "
        "`lab/studies/recipes/named.py`. No GPU has run any of this."
    )


def _list_hosts(trials: list[Trial]) -> str:
    return ", ".join(dict.fromkeys(one.host for one in trials))


def _describe_recipe(found: Mapping[Trial, Said], name: str, family: str) -> list[str]:
    right, wrong = (
        [said for one, said in found.items() if one.precision == name and bool(one.bug) == is_wrong]
        for is_wrong in (False, True)
    )

    def count(those: list[Said], status: str) -> str:
        return str(sum(said.status == status for said in those))

    largest = max((said.margin for said in right), default=0.0)
    return [
        f"`{name}`",
        count(right, "passed"),
        count(right, "failed"),
        count(right, "error"),
        f"{largest:.2f}",
        count(wrong, "failed"),
        count(wrong, "passed"),
        family,
    ]
