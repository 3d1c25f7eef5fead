"""Declare a pair: the reference, the candidate and their inputs. A case is a registered pair with its sizes."""

from __future__ import annotations

import copy
import hashlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from types import ModuleType
from typing import Any, BinaryIO, get_args

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from parity.case.map_check import share_memory_alike
from parity.case.patterns import expanded, has_patterns
from parity.case.weight_map import WeightMap
from parity.ranks.layout import IN_ONE_PROCESS, WHOLE, Degrees, Parallel, Ranks
from parity.result import UNDECLARED, Switch
from parity.settings import MOST_STEPS
from parity.te import Precision
from parity.te.attention_backend import AttentionBackend
from parity.te.debug_features import reset_debugging
from parity.te.devices import cuda_is_cpu_without_gpu
from parity.user_error import UserError

# Seeded random inputs, the same on every device and for every precision.


def mixed(seed: int, purpose: str) -> int:
    """Return a seed that depends on both, in 32 bits, since the CPU's generator takes no more."""
    digest = hashlib.blake2b(f"{purpose} {seed}".encode(), digest_size=4).digest()
    return int.from_bytes(digest, "big")


class Rng:
    """A stream of random tensors, drawn on the CPU in FP32.

    Args:
        seed: the run's seed.
        purpose: streams of one seed with different purposes are independent.
    """

    def __init__(self, seed: int, purpose: str = "inputs") -> None:
        self._generator = torch.Generator().manual_seed(mixed(seed, purpose))

    def normal(self, *shape: int | Sequence[int], std: float = 1.0, mean: float = 0.0) -> Tensor:
        """Return Gaussian values; the shape is given as numbers or as one tuple."""
        drawn = torch.empty(_flatten_shape(shape), dtype=torch.float32)
        drawn.normal_(generator=self._generator)  # ``parity.passes.draws`` recognises this operation
        return drawn if (std, mean) == (1.0, 0.0) else drawn * std + mean  # scaling takes longer than a repeated draw

    def uniform(self, *shape: int | Sequence[int], low: float = 0.0, high: float = 1.0) -> Tensor:
        """Return values evenly spread over [low, high)."""
        return torch.rand(_flatten_shape(shape), generator=self._generator, dtype=torch.float32) * (high - low) + low

    def integers(self, *shape: int | Sequence[int], low: int = 0, high: int) -> Tensor:
        """Return int64 values from low to high - 1."""
        return torch.randint(low, high, _flatten_shape(shape), generator=self._generator)

    def permutation(self, n: int) -> Tensor:
        """Return the numbers from 0 to n - 1 in random order, int64."""
        return torch.randperm(n, generator=self._generator)


def _flatten_shape(shape: Sequence[int | Sequence[int]]) -> tuple[int, ...]:
    """Return the sizes of a shape that is given as numbers or as one tuple."""
    return tuple(chain.from_iterable((one,) if isinstance(one, int) else one for one in shape))


# What a user declares: a pair of modules, and the case that builds it at a size.


Size = Mapping[str, Any]


MakeOptimizer = Callable[[nn.Module], Optimizer]


@dataclass(frozen=True)
class Training:
    """Say how a pair is trained, for comparisons of training steps.

    Attributes:
        optimizer: makes the reference's optimizer: ``lambda model: torch.optim.SGD(model.parameters(), lr=0.1)``.
            AdamW by default, see ``parity.case.training``.
        candidate_optimizer: makes the candidate's optimizer. By default what ``optimizer`` makes or, if that is left
            out as well, TE's FusedAdam, with FP32 master weights for weights in 16 bits.
        loss: called as ``loss(returned, *inputs)`` with what a module returned and the inputs; returns one number. By
            default, a single returned number is the loss itself; for anything else, the loss is half the squared
            distance to fixed targets.
        clip: the largest norm of all gradients together, to which both are clipped; None for no clipping.
        scheduler: makes an optimizer's learning rate schedule, which takes a step after each step of the optimizer.
        candidate_step: the port's own training step, ``step(model, optimizer, *inputs)``, which makes one step of the
            optimizer, and returns the loss. ``model(*inputs)`` calls the candidate as the pair says, under the
            precision's recipe, and ``model.loss(*inputs)`` returns its loss. By default a plain step.
        save: called as ``save(module, optimizer, file)`` with a binary file, when a training is interrupted to be
            resumed. By default ``torch.save`` of both states.
        load: called as ``load(module, optimizer, file)`` with a newly built candidate, its optimizer, and that file.
        graph: captures CUDA graphs for the switch ``graph``, called as ``graph(model, optimizer, *inputs)`` before the
            first step, with ``model`` as in ``candidate_step`` and a batch's inputs. It returns the step that replays
            them, which is called like ``candidate_step``; or None if calling the module replays them. By default, TE's
            ``make_graphed_callables`` captures the candidate.
        compile: compiles the candidate for the switch ``compile``, called as ``compile(module)``. By default
            ``module.compile()``, which on the CPU kernels generates no code.
        offload: lets the candidate offload its activations for the switch ``offload``, called once before the first
            step as ``offload(module)``. It may return a function that calls the candidate from then on,
            ``call(module, *inputs)``, such as a loop over layers. By default each of TE's modules is called in TE's
            ``get_cpu_offload_context``.
        recipes: precisions of later steps: ``{3: "bf16"}`` makes two steps under the precision that is compared, and
            the rest without a recipe. TE's modules must have each step's formats, apart from what ``formats`` says.
    """

    optimizer: MakeOptimizer | None = None
    candidate_optimizer: MakeOptimizer | None = None
    loss: Callable[..., Tensor] | None = None
    clip: float | None = None
    scheduler: Callable[[Optimizer], LRScheduler] | None = None
    candidate_step: Callable[..., Tensor] | None = None
    save: Callable[[nn.Module, Optimizer, BinaryIO], None] | None = None
    load: Callable[[nn.Module, Optimizer, BinaryIO], None] | None = None
    graph: Callable[..., Callable[..., Tensor] | None] | None = None
    compile: Callable[[nn.Module], object] | None = None
    offload: Callable[[nn.Module], Callable[..., Any] | None] | None = None
    recipes: Mapping[int, str | Precision] = field(default_factory=dict)


def checked_steps(steps: object) -> int:
    """Return a number of training steps, 0 for none."""
    if isinstance(steps, bool) or not isinstance(steps, int) or not 0 <= steps <= MOST_STEPS:
        raise UserError(f"steps must be a whole number from 0 to {MOST_STEPS}, not {steps!r}")
    return steps


SWITCHES_OVER_RANKS: tuple[Switch, ...] = ("resume", "resume-dcp", "resume-safetensors", "rollback", "recompute")
"""Switches that a training over ranks supports."""


def checked_switches(chosen: Sequence[str], steps: int) -> tuple[Switch, ...]:
    """Return the names of the chosen switches, which need a training of at least two steps."""
    known = [switch for switch in get_args(Switch) if switch]
    unknown = [name for name in chosen if name not in known]
    if unknown:
        raise UserError(f"unknown switch {unknown[0]!r}; there are {', '.join(known)}")
    if chosen and steps < 2:
        raise UserError(f"switches={list(chosen)} needs a training of at least two steps, but steps is {steps}")
    return tuple(switch for switch in known if switch in chosen)


@dataclass(frozen=True)
class Pair:
    """A plain PyTorch module and the TE module that is to replace it.

    Attributes:
        reference: the PyTorch module, as its author wrote it; it must run in FP64.
        candidate: the TE module, built in FP32 (parity casts it to each precision's dtype).
        inputs: called as ``inputs(rng, **sizes)`` with the sizes that it names; returns a tensor, a tuple (passed by
            position) or a dict (passed by keyword). Floating-point inputs are rounded to the precision and get
            gradients.
        weights: which reference parameters hold which TE parameters, see ``parity.case.weight_map``; an entry with
            names such as ``layers.{i}.weight`` stands for one entry for each layer of the reference.
        call_reference: called as ``call_reference(reference, *inputs)`` if calling the module is not enough.
        call_candidate: the same for the candidate, e.g. to pass TE its mask arguments.
        fill: whether the candidate is given the reference's weights, as the map says, before it runs. With False it
            runs with the weights that it holds, and the comparison fails if these are not what the map says. None means
            False for a pair that is passed to ``parity.compare``, and True for one that ``@parity.pair``'s function
            returns.
        training: how both are trained, for a comparison of steps.
        parallel: how the candidate is computed over ranks, for a pair that is declared with ``ranks=``.
        evaluation: whether both are called in evaluation mode and without gradients, so that only outputs are
            compared, for example of a model that decodes with a cache.
        formats: the precision whose formats TE's modules must have, by patterns of their names: ``{"layers.0.*":
            "bf16"}``. Modules that it does not name must have the formats of the precision that is compared, if it has
            a recipe; at others, it says nothing. Empty if any formats will do.
    """

    reference: nn.Module
    candidate: nn.Module
    inputs: Callable[..., Any]
    weights: WeightMap = field(default_factory=dict)
    call_reference: Callable[..., Any] | None = None
    call_candidate: Callable[..., Any] | None = None
    fill: bool | None = None
    training: Training = Training()
    parallel: Parallel = IN_ONE_PROCESS
    evaluation: bool = False
    formats: Mapping[str, str | Precision] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Expand the weight map's entries that stand for several layers; whether they fit is checked later."""
        modules = (self.reference, self.candidate)
        if has_patterns(self.weights) and all(isinstance(module, nn.Module) for module in modules):
            known = ([name for name, _ in module.named_parameters()] for module in modules)
            object.__setattr__(self, "weights", expanded(self.weights, *known))


@dataclass(frozen=True, eq=False)
class Case:
    """A registered pair with the sizes and precisions at which it is compared.

    Attributes:
        name: unique over all cases of a run.
        factory: ``factory(te, **size)`` builds the Pair; ``te`` is ``transformer_engine.pytorch``.
        sizes: keyword arguments of the factory, one mapping for each size.
        large_sizes: further sizes, at which it is compared where a GPU is, or if the run asks for them.
        precisions: names from ``parity.te``; None means all that the run asks for.
        marks: pytest marks, besides the precision's own.
        vary_constants: whether parameters whose elements are all equal (a norm's ones, a bias's zeros) get noise, so
            that one that was never copied shows.
        probe: whether the outputs are compared on probing inputs and with probing weights, too, see
            ``parity.passes.draws``; False if floating-point inputs may not take any value, such as probabilities.
        attention: the attention backends that TE must use, each in an item of its own; empty lets TE choose.
        accepts: titles of the mistakes that a comparison may pass, see ``parity.coverage``.
        invariance: names of ``parity.settings.AXES`` on which the candidate's results must not depend.
        path: the file that declares the case.
        line: the line of the declaration, from 1.
        steps: how many steps the pair is trained for, besides the single pass; 0 for none.
        switches: further ways in which it is trained, each in an item of its own, see ``train_at``.
        ranks: the layouts of ranks that compute the candidate, each in an item of its own; the factory is then called
            with ``ranks=`` as well.
        at: this process's place among the ranks, which the factory gets as ``ranks=``.
        is_step: whether both return the loss of a training step, so that its own gradient is 1.
        held: the candidate's quantized parameters before that step, by name, if it has any.
        cotangents: the gradient with respect to each output, by name, if a recorded pass had it; empty draws them.
        part_of: the whole case, if only some of its outputs are compared here; None for all outputs.
        outputs: names of the outputs of this part; empty for all.
        formats: as in ``Pair``, whose own come after these.
        golden: the name of the precision whose recipe golden rounds operands by; None for FP64 alone.
        reweighed: names of the reference's parameters that get probing weights, see ``parity.passes.draws``, with which
            only outputs are compared; empty for the weights as they are declared.
    """

    name: str
    factory: Callable[..., Pair]
    sizes: Sequence[Size]
    large_sizes: Sequence[Size] = ()
    precisions: tuple[str, ...] | None = None
    marks: tuple[str, ...] = ()
    vary_constants: bool = True
    probe: bool = True
    attention: tuple[AttentionBackend, ...] = ()
    accepts: tuple[str, ...] = ()
    invariance: tuple[str, ...] = ()
    path: Path = Path()
    line: int = 0
    steps: int = 0
    switches: tuple[Switch, ...] = ()
    ranks: tuple[Degrees, ...] = ()
    at: Ranks = WHOLE
    is_step: bool = False
    held: Mapping[str, Tensor] = field(default_factory=dict)
    cotangents: Mapping[str, Tensor] = field(default_factory=dict)
    part_of: Case | None = None
    outputs: tuple[str, ...] = ()
    formats: Mapping[str, str] = field(default_factory=dict)
    reweighed: frozenset[str] = frozenset()
    golden: str | None = None

    @property
    def whole(self) -> Case:
        """The declared case, even if this is only a part of it."""
        return self.part_of or self

    def build(self, te: ModuleType, size: Size) -> Pair:
        """Build the pair at one size."""
        reset_debugging()
        with cuda_is_cpu_without_gpu():
            pair = self.factory(te, **size, **({"ranks": self.at} if self.ranks else {}))
        return (
            replace(pair, formats={**self.formats, **pair.formats}) if self.formats and isinstance(pair, Pair) else pair
        )

    def runs_at(self, precision: str) -> bool:
        """Return whether the case is compared at the precision of this name if a run asks for it."""
        return self.precisions is None or precision in self.precisions

    def __str__(self) -> str:
        return f"{self.name} ({self.path.name}:{self.line})"


def are_same(entry: object, other: object) -> bool:
    """Return whether two sizes, or entries of theirs, are equal; tensors and arrays count as different."""
    try:
        return bool(entry == other)
    except (RuntimeError, ValueError):  # tensors and arrays compare element by element
        return False


def as_case(pair: Case | Pair) -> Case:
    """Return the case itself, or for a pair of modules a case that builds copies of both, with the weights they hold.

    Raises:
        UserError: if it is neither; from the build, if a module cannot be copied.
    """
    if isinstance(pair, Case):
        return pair
    if not isinstance(pair, Pair):
        raise UserError(f"expected a parity.Pair or a function decorated with @parity.pair, not {type(pair).__name__}")
    return Case("pair", lambda te: _copy_pair(pair), sizes=({},), vary_constants=False, path=Path(UNDECLARED))


def _copy_pair(pair: Pair) -> Pair:
    try:
        copied = replace(copy.deepcopy(pair), fill=False if pair.fill is None else pair.fill)
        for module, original in ((copied.reference, pair.reference), (copied.candidate, pair.candidate)):
            share_memory_alike(module, original)
        return copied
    except Exception as error:
        raise UserError(
            f"its modules cannot be copied, but each comparison needs its own (copy.deepcopy raised "
            f"{type(error).__name__}: {error}); build them in a function under @parity.pair"
        ) from error


def signed_as_call(
    function: Callable[..., Any], module: nn.Module, call: Callable[..., Any] | None
) -> Callable[..., Any]:
    """Return the function with the parameters of a pair's call of a module, since inputs are named by them.

    ``call`` is as in ``Pair``; None for calling the module itself.
    """
    itself = [] if call else [inspect.Parameter("_module", inspect.Parameter.POSITIONAL_ONLY)]
    called = inspect.signature(call or module.forward).parameters.values()
    function.__signature__ = inspect.Signature([*itself, *called])  # type: ignore[attr-defined]
    return function


def draw_inputs(pair: Pair, size: Size, rng: Rng) -> Any:
    """Call the pair's ``inputs`` with the sizes that it names.

    Raises:
        UserError: if it asks for a size that the case does not have.
    """
    with cuda_is_cpu_without_gpu():
        return _convert_mapping_to_dict(_call_inputs(pair, size, rng))


def _call_inputs(pair: Pair, size: Size, rng: Rng) -> Any:
    parameters = list(inspect.signature(pair.inputs).parameters.values())[1:]
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return pair.inputs(rng, **size)
    named = [parameter for parameter in parameters if parameter.name in size or parameter.default is parameter.empty]
    missing = [parameter.name for parameter in named if parameter.name not in size]
    if missing:
        has = f"has only {', '.join(size)}" if size else "is empty: name it in sizes=[dict(...)]"
        raise UserError(f"inputs() asks for {missing[0]!r}, but the size {has}")
    return pair.inputs(rng, **{parameter.name: size[parameter.name] for parameter in named})


def _convert_mapping_to_dict(inputs: Any) -> Any:
    """Return any mapping as a dict, since PyTorch finds no tensors in other mappings, such as a tokenizer's output."""
    return dict(inputs) if isinstance(inputs, Mapping) else inputs
