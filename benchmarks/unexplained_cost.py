"""Measure how long the search for a cause takes if no known mistake explains the error.

    python benchmarks/unexplained_cost.py [--hosts llama,experts] [--strange wave,mixed] [--precision bf16,fp8_current]
        [--out benchmarks/results/unexplained_cost.json]

This is the longest time that anybody waits, because everything is tried, up to the budget. The output of a right port's
submodule, or its gradient, is changed in a way in which no port would change it. Times are processor time of one
thread, without the check itself.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import torch
import torch.nn.functional as F
from measuring import Measure, machine, median, parser, report
from torch import Tensor, nn

from lab.corpus import models
from parity import te
from parity.case.case import Case, Pair, Rng
from parity.case.validate import check_case
from parity.comparison import explain_at, judge_at
from parity.judge.limits import packaged
from parity.passes.prepare import forget
from parity.te import PRECISIONS

LIMIT = 10.0  # seconds that a diagnosis may take


class _WithLoss(nn.Module):
    """A model that returns only its loss."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor) -> Tensor:
        logits = self.model(tokens)
        return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten()).view(1)


PLACES = {
    "llama": "layers.1.1.inner",
    "llama_loss": "model.layers.1.1.inner",
    "granite": "layers.1.0.inner",
    "gemma": "layers.0.1.inner",
    "gpt": "layers.1.1.norm",
    "experts": "router",
    "attention": "o_proj",
    "norm_mlp": "inner.up_proj",
}
"""The submodule of each host that is changed. All but ``llama_loss`` are hosts of ``lab.corpus.models``."""


def _size(x: Tensor) -> Tensor:
    return x.detach().float().square().mean().sqrt().to(x.dtype)


def _wave(x: Tensor) -> Tensor:
    return x + 0.3 * _size(x) * torch.sin(5 * x / _size(x))


def _mixed(x: Tensor) -> Tensor:
    drawn = torch.randn(x.shape[-1], x.shape[-1], generator=torch.Generator().manual_seed(0)) / x.shape[-1] ** 0.5
    return x + 0.2 * x @ drawn.to(x)


def _blended(x: Tensor) -> Tensor:
    return 0.8 * x + 0.2 * x.roll(1, -2)


def _uneven(x: Tensor) -> Tensor:
    return x * (1 + 0.3 * torch.sin(torch.arange(x.shape[-2], device=x.device)).to(x)[:, None])


class _OtherGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> Tensor:
        return _wave(gradient)


STRANGE: dict[str, Callable[[Tensor], Tensor]] = {
    "wave": _wave,
    "mixed": _mixed,
    "blended": _blended,
    "uneven": _uneven,
    "gradient": lambda x: _OtherGradient.apply(x),
}
"""The changes to the submodule's output, ``[..., tokens, channels]``, by name."""


def strange_port(host: str, change: Callable[[Tensor], Tensor]) -> Case:
    """Return a host whose port has a submodule with a changed output."""

    def factory(kernels: ModuleType) -> Pair:
        reference, candidate = models.modules(kernels, host.removesuffix("_loss"), None)
        if host.endswith("_loss"):
            reference, candidate = _WithLoss(reference), _WithLoss(candidate)
        candidate.get_submodule(PLACES[host]).register_forward_hook(lambda module, given, returned: change(returned))
        theirs = models.names_in_port([name for name, _ in reference.named_parameters()], candidate)

        def inputs(rng: Rng) -> Tensor:
            if host in ("experts", "attention", "norm_mlp"):
                return rng.normal(models.BATCH, models.SEQ, models.HIDDEN)
            return rng.integers(models.BATCH, models.SEQ, high=models.VOCABULARY)

        return Pair(reference, candidate, weights={right: name for name, right in theirs.items()}, inputs=inputs)

    return Case(host, factory, sizes=({},), path=Path(__file__))


def diagnosed(host: str, change: Callable[[Tensor], Tensor], precision: str, kernels: te.Kernels) -> tuple[float, str]:
    """Return the seconds of the diagnosis, and the codes of its findings; ``passed`` if there is nothing to find."""
    case = strange_port(host, change)
    (checked,) = check_case(case, kernels.te)
    forget()
    judged = judge_at(case, checked, PRECISIONS[precision], 0, kernels, packaged())
    began = time.process_time()
    result = explain_at(judged, 0.0)
    seconds = time.process_time() - began
    told = " ".join(dict.fromkeys(one.code if one.sure else f"({one.code})" for one in result.findings))
    return seconds, "passed" if result.passed else told or "none"


def main() -> None:
    """Measure what the command line asks for."""
    made = parser(__doc__)
    made.add_argument("--hosts", default=",".join(PLACES))
    made.add_argument("--strange", default=",".join(STRANGE))
    made.add_argument("--precision", default="bf16,fp8_current")
    arguments = made.parse_args()
    torch.set_num_threads(1)
    kernels = te.kernels()
    rows = []
    for host in arguments.hosts.split(","):
        for name in arguments.strange.split(","):
            for precision in arguments.precision.split(","):
                seconds, told = diagnosed(host, STRANGE[name], precision, kernels)
                rows.append((host, name, precision, told, f"{seconds:.1f}"))
                print(*rows[-1], flush=True)
    rows.sort(key=lambda row: -float(row[-1]))
    searched = [float(row[-1]) for row in rows if row[3] != "passed"]
    report(
        __doc__,
        [
            Measure(f"the longest of {len(searched)} diagnoses", max(searched), LIMIT, " s"),
            Measure("the median one", median(searched), None, " s"),
        ],
        ("host", "strange", "precision", "findings", "diagnosis (s)"),
        rows,
        arguments.out,
        machine(torch.get_num_threads(), kernels.backend),
    )


if __name__ == "__main__":
    main()
