"""What faithful kernels do in one way or another: the rounding model runs both ways, and either loss is expected."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

from parity.rounding.choices import NONE_MADE, PortsChoices
from parity.rounding.steps import Steps

# Large next to what the order of sums changes, and small next to the rounding that follows.
JITTER = 1 / 64


@dataclass(frozen=True)
class Freedom:
    """What a faithful kernel may do in one way or another.

    Attributes:
        stores_scores: whether attention's scores, and their gradient, are rounded to the dtype: an unfused kernel
            stores them, flash and fused kernels hold them in FP32. Kernels also scale them by different constants
            (``1 / sqrt(head_dim)``, or that times log2(e)), each rounded to FP32: scores are one step larger with it.
        stores_sums: whether a residual sum is rounded by itself, or within a fused kernel goes on in FP32.
        stores_pointwise: whether each pointwise step between two GEMMs is rounded, as where nothing is fused, and
            RoPE's cosines and sines with it (``pytorch/attention/rope.py`` of TE 2.20.2 where not fused). The scale
            of a whole tensor then comes from what was stored; a fused kernel takes it from FP32, before (TE 2.20.2,
            ``csrc/extensions/activation.cpp``), so that values which many elements share fall elsewhere in a format.
            Norms alone take it from what they store in either case (``common/normalization/*/*_fwd_kernels.cuh``).
        splits_of_k: into how many parts a GEMM splits the summed dimension; FP32 partial sums are then added up.
        jitter: the seed of a little noise on each value before it is stored, ``JITTER`` of a roundoff (of FP32, two),
            as from sums in another order: which way single values are rounded changes, and what hangs on them, such as
            the side of a ReLU's kink. The largest value of a tensor is one of them, so that a scale that comes from it
            moves by up to a roundoff, and with it where every value of the tensor falls in its format; but a weight's,
            which every port holds exactly. None for none.
        dithers: whether the noise is as large as a rounding's error instead: a number between two of the dtype becomes
            the upper one the likelier the nearer it is, and one that the dtype has stays. Runs with other seeds then
            round independently, with twice the variance of rounding to the nearest (a sixth of a spacing's square on
            average, for a twelfth). Where the dtype is FP32, noise of a roundoff. What a linear layer's GEMMs read of
            inputs and gradients has errors of the format's that are drawn likewise; a weight is every port's.
        plain: names of ATen functions that a port calls by itself: what they return is stored, as are the gradients
            behind them, and on a CPU they compute in the dtype (``parity.rounding.plain_kernels``). Among them stands
            what it does that is no function's name (``parity.rounding.casts``, ``parity.rounding.biases_by_hand``).
        steps: how its optimizers hold what they write in place (``parity.rounding.steps``); None for FP32.
        kernels: what GEMM kernels do beyond the rounding of operands and results, by name
            (``parity.rounding.kernel_choices``).
    """

    stores_scores: bool
    stores_sums: bool
    stores_pointwise: bool
    splits_of_k: int = 1
    jitter: int | None = None
    dithers: bool = False
    plain: tuple[str, ...] = ()
    steps: Steps | None = None
    kernels: tuple[str, ...] = ()

    @classmethod
    def draw(cls, rng: random.Random) -> Freedom:
        """One of all the combinations, each as likely."""
        toss = (rng.random() < 0.5 for _ in range(3))
        return cls(next(toss), next(toss), next(toss), rng.choice((1, 2, 3, 4)))


FUSED = Freedom(stores_scores=False, stores_sums=False, stores_pointwise=False)
UNFUSED = Freedom(stores_scores=True, stores_sums=True, stores_pointwise=True, splits_of_k=3)
FUSED_POINTWISE = Freedom(stores_scores=True, stores_sums=True, stores_pointwise=False)


@dataclass(frozen=True)
class Port:
    """What a port rounds outside of TE's modules, and chooses.

    Attributes:
        plain, steps: as in ``Freedom``.
        choices: of the largest of many numbers, such as a token's experts.
        recipes: that it turns on by itself, with the lines where it does.
    """

    plain: tuple[str, ...] = ()
    steps: Steps | None = None
    choices: PortsChoices = NONE_MADE
    recipes: tuple[str, ...] = ()

    @property
    def freedoms(self) -> tuple[Freedom, Freedom]:
        """The two ways in which faithful kernels compute, with what the port rounds by itself."""
        return replace(FUSED, steps=self.steps), replace(UNFUSED, plain=self.plain, steps=self.steps)
