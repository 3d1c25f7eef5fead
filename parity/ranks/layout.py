"""Say how many ranks compute a module together, and which part of each tensor or which stage a rank holds."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal, get_args

import torch
from torch import Tensor, distributed, nn
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten

from parity.te import emulation
from parity.user_error import UserError

# Stages of a pipeline: activations go forward from rank to rank, and their gradients back.


@dataclass(frozen=True)
class Pipeline:
    """Say how a pair is computed over ``pp`` ranks, each of which has a stage.

    Attributes:
        micro_batches: how many micro-batches the batch is divided into.
        dim: the batch's dimension in inputs and outputs.
        names: called with the name of a stage's parameter, returns its name in the whole candidate; None if they are
            the same.
        step: the port's own schedule, called as ``step(module, *inputs, target=, loss=)`` on each rank in place of
            parity's. It makes the forward and the backward passes of all micro-batches. The loss of each is
            ``loss(output, target)``, with its part of ``target``, and these losses are added up. The step returns the
            whole output on the last stage, and None on others.
    """

    micro_batches: int = 1
    dim: int = 0
    names: Callable[[str], str] | None = None
    step: Callable[..., Tensor | None] | None = None

    def parts(self, inputs: Any) -> list[Any]:
        """Return the micro-batches of inputs or outputs.

        Raises:
            UserError: if the batch does not divide evenly.
        """

        def chunks(x: Tensor) -> tuple[Tensor, ...]:
            if not -x.dim() <= self.dim < x.dim():
                return (x,) * self.micro_batches
            if x.shape[self.dim] % self.micro_batches:
                raise UserError(
                    f"dimension {self.dim} of {tuple(x.shape)} does not divide into {self.micro_batches} micro-batches"
                )
            return x.chunk(self.micro_batches, self.dim)

        leaves, spec = tree_flatten(inputs)
        divided = [chunks(x) if isinstance(x, Tensor) else (x,) * self.micro_batches for x in leaves]
        return [tree_unflatten([one[i] for one in divided], spec) for i in range(self.micro_batches)]


def summed_product(output: Tensor, target: Tensor) -> Tensor:
    """Return a loss whose gradient with respect to the output is the target."""
    return (output * target).sum()


class Stage:
    """Run one rank's stage forward and backward once."""

    def __init__(self, pipeline: Pipeline, axis: Axis) -> None:
        """Begin with nothing sent or received."""
        self._pipeline, self._axis = pipeline, axis
        self._received: list[list[Tensor]] = []
        self._sent: list[list[Tensor]] = []

    @property
    def is_first(self) -> bool:
        """Return whether the stage takes the inputs."""
        return self._axis.rank == 0

    @property
    def is_last(self) -> bool:
        """Return whether the stage has the outputs."""
        return self._axis.rank == self._axis.size - 1

    def forward(self, call: Callable[..., Any] | None, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Return the outputs of all micro-batches on the last stage, and nothing on others.

        A later stage gets the previous stage's output in place of the first input.
        """
        returned = []
        for some, named in self._pipeline.parts((args, kwargs)):
            if not self.is_first and args:
                some = (self._receive_input(), *some[1:])
            elif not self.is_first:
                named = {**named, next(iter(kwargs)): self._receive_input()}
            output = call(module, *some, **named) if call else module(*some, **named)
            if self.is_last:
                returned.append(output)
            else:
                self._send_output(output)
        return _concatenate_outputs(returned, self._pipeline.dim) if returned else None

    def backward(self) -> None:
        """Differentiate what was sent on, unless this is the last stage, and send gradients to the previous stage."""
        for i in range(self._pipeline.micro_batches):
            if not self.is_last:
                gradients = [self._receive_tensor(self._next_rank, torch.empty_like(x)) for x in self._sent[i]]
                torch.autograd.backward(self._sent[i], gradients)
            if not self.is_first:
                for x in self._received[i]:
                    self._send_tensor(self._previous_rank, torch.zeros_like(x) if x.grad is None else x.grad)

    @property
    def _previous_rank(self) -> int:
        return self._axis.ranks[self._axis.rank - 1]

    @property
    def _next_rank(self) -> int:
        return self._axis.ranks[self._axis.rank + 1]

    def _send_tensor(self, to: int, x: Tensor) -> None:
        distributed.send(x.contiguous(), to, group=self._axis.group)

    def _receive_tensor(self, of: int, like: Tensor) -> Tensor:
        distributed.recv(like, of, group=self._axis.group)
        return like

    def _send_output(self, output: Any) -> None:
        leaves, spec = tree_flatten(output)
        tensors = [x for x in leaves if isinstance(x, Tensor)]
        told = [(tuple(x.shape), x.dtype, x.requires_grad) if isinstance(x, Tensor) else None for x in leaves]
        others = [None if isinstance(x, Tensor) else x for x in leaves]
        distributed.send_object_list([told, others, spec], self._next_rank, group=self._axis.group)
        for x in tensors:
            self._send_tensor(self._next_rank, x.detach())
        self._sent.append([x for x in tensors if x.requires_grad])

    def _receive_input(self) -> Any:
        header: list[Any] = [None] * 3
        distributed.recv_object_list(header, self._previous_rank, group=self._axis.group)
        told, leaves, spec = header
        received = []
        for i, one in enumerate(told):
            if one is not None:
                shape, dtype, is_differentiable = one
                leaves[i] = self._receive_tensor(self._previous_rank, torch.empty(shape, dtype=dtype))
                if is_differentiable:
                    received.append(leaves[i].requires_grad_())
        self._received.append(received)
        # A module may write to its inputs, which autograd does not allow for leaves.
        return tree_map_only(Tensor, lambda x: x.clone(), tree_unflatten(leaves, spec))


def _concatenate_outputs(returned: Sequence[Any], dim: int) -> Any:
    """Return the outputs of all micro-batches as one output."""
    if len(returned) == 1:
        return returned[0]
    flat = [tree_flatten(one) for one in returned]
    leaves = [
        torch.cat(some, dim) if isinstance(some[0], Tensor) else some[0]
        for some in zip(*(leaves for leaves, _ in flat), strict=True)
    ]
    return tree_unflatten(leaves, flat[0][1])


# Ranks, and the part of each tensor that a rank holds.


AxisName = Literal["tp", "cp", "ep", "dp", "pp"]
# Neighbouring ranks differ in the first axis, as in Megatron.
AXES: tuple[AxisName, ...] = get_args(AxisName)
DIVIDING = AXES[:-1]  # whose ranks divide tensors; those of pp have stages
MOST_RANKS = 64


@dataclass(frozen=True)
class Degrees:
    """Say how many ranks there are along each axis.

    Attributes:
        tp: tensor parallel ranks, which divide weights.
        cp: context parallel ranks, which divide sequences.
        ep: expert parallel ranks, which divide experts.
        dp: data parallel ranks, which divide batches.
        pp: pipeline parallel ranks, each of which has a stage.
        sequence_parallel: whether tensor parallel ranks divide sequences between the layers whose weights they divide.
    """

    tp: int = 1
    cp: int = 1
    ep: int = 1
    dp: int = 1
    pp: int = 1
    sequence_parallel: bool = False

    @property
    def count(self) -> int:
        """Return the number of ranks."""
        return math.prod(self.of(axis) for axis in AXES)

    @property
    def label(self) -> str:
        """Return the label in items' names, such as ``tp2-sp`` or ``tp2xdp2``."""
        parts = "x".join(f"{axis}{self.of(axis)}" for axis in AXES if self.of(axis) > 1) or "tp1"
        return f"{parts}-sp" if self.sequence_parallel else parts

    def of(self, axis: AxisName) -> int:
        """Return the number of ranks along an axis."""
        size: int = getattr(self, axis)
        return size

    def place(self, rank: int) -> dict[AxisName, int]:
        """Return where a rank is along each axis."""
        found: dict[AxisName, int] = {}
        for axis in AXES:
            rank, found[axis] = divmod(rank, self.of(axis))
        return found

    def peers(self, axis: AxisName) -> list[list[int]]:
        """Return the groups of ranks that differ only along this axis."""
        groups: dict[tuple[int, ...], list[int]] = {}
        for rank in range(self.count):
            others = tuple(place for name, place in self.place(rank).items() if name != axis)
            groups.setdefault(others, []).append(rank)
        return list(groups.values())


def degrees(asked: object) -> Degrees:
    """Return the degrees that a pair asks for, such as ``dict(tp=2, sequence_parallel=True)``.

    Raises:
        UserError: if it asks for anything else.
    """
    if isinstance(asked, Degrees):
        return asked
    known = (*AXES, "sequence_parallel")
    if not isinstance(asked, Mapping) or not set(asked) <= set(known):
        raise UserError(f"ranks must be a dict such as dict(tp=2), of {', '.join(known)}, not {asked!r}")
    for axis in AXES:
        size = asked.get(axis, 1)
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise UserError(f"{axis} must be a whole number, at least 1, not {size!r}")
    if not isinstance(asked.get("sequence_parallel", False), bool):
        raise UserError(f"sequence_parallel must be True or False, not {asked['sequence_parallel']!r}")
    found = Degrees(**asked)
    if not 2 <= found.count <= MOST_RANKS:
        raise UserError(f"ranks={dict(asked)!r} are {found.count}, but there must be from 2 to {MOST_RANKS}")
    if found.sequence_parallel and found.tp == 1:
        raise UserError("sequence_parallel divides sequences over tensor parallel ranks, but tp is 1")
    return found


@dataclass(frozen=True)
class Axis:
    """One axis, as a rank sees it.

    Attributes:
        size: how many ranks there are along it.
        rank: which of them this one is.
        group: their process group; None if there is none, such as when a pair is compared in one process.
        ranks: their numbers among all ranks.
    """

    size: int = 1
    rank: int = 0
    group: Any = None
    ranks: tuple[int, ...] = (0,)


@dataclass(frozen=True)
class Ranks:
    """Hold what a pair's function is given as ``ranks``.

    Attributes:
        tp, cp, ep, dp, pp: the axes.
        sequence_parallel: as in ``Degrees``.
        world: all ranks.
        stage: all ranks that have the same stage of a pipeline.
    """

    tp: Axis = Axis()
    cp: Axis = Axis()
    ep: Axis = Axis()
    dp: Axis = Axis()
    pp: Axis = Axis()
    sequence_parallel: bool = False
    world: Axis = Axis()
    stage: Axis = Axis()

    @staticmethod
    def stream() -> Any:
        """Return a CUDA stream, which TE's ``set_context_parallel_group`` wants, or what stands in for it on a CPU."""
        return torch.cuda.Stream() if torch.cuda.is_available() else emulation.cuda.Stream()


WHOLE = Ranks()


def joined(made: Degrees) -> Ranks:
    """Return this rank's view of all axes; every rank of the default process group has to call this."""
    from torch import distributed

    rank = distributed.get_rank()
    axes: dict[str, Axis] = {}
    for axis in AXES:
        for peers in made.peers(axis):  # each rank takes part in making each group
            group = distributed.new_group(peers)
            if rank in peers:
                axes[axis] = Axis(len(peers), peers.index(rank), group, tuple(peers))
    world = Axis(made.count, rank, distributed.group.WORLD, tuple(range(made.count)))
    stage = world
    for place in range(made.pp) if made.pp > 1 else ():
        peers = [one for one in range(made.count) if made.place(one)["pp"] == place]
        group = distributed.new_group(peers)
        if rank in peers:
            stage = Axis(len(peers), peers.index(rank), group, tuple(peers))
    return Ranks(**axes, sequence_parallel=made.sequence_parallel, world=world, stage=stage)


# Which part of a tensor a rank holds.


@dataclass(frozen=True)
class Over:
    """See ``over``."""

    axis: AxisName
    dim: int = 0
    blocks: int = 1
    balanced: bool = False


Split = tuple[Over, ...]


def over(axis: AxisName, dim: int = 0, *, blocks: int = 1, balanced: bool = False) -> Over:
    """Divide a dimension of a tensor among the ranks of an axis.

    Args:
        axis: ``tp``, ``cp``, ``ep`` or ``dp``.
        dim: the dimension.
        blocks: how many blocks the dimension consists of, each of which is divided separately: 2 for the weight of a
            gated linear unit, whose gate and up projections follow each other.
        balanced: whether the dimension is cut into twice as many parts as ranks, and each rank holds one from the
            front and one from the back, as causal attention over context parallel ranks does, unless TE is told
            ``CPLoadBalancingStrategy.NO_LOAD_BALANCE``
            (``pytorch/attention/dot_product_attention/context_parallel.py`` of TE 2.20.2).

    Raises:
        UserError: if there is no such axis, or ``blocks`` and ``balanced`` are both given.
    """
    if axis not in DIVIDING:
        raise UserError(f"unknown axis {axis!r}; tensors are divided over {', '.join(DIVIDING)}")
    if isinstance(blocks, bool) or not isinstance(blocks, int) or blocks < 1:
        raise UserError(f"blocks must be a whole number, at least 1, not {blocks!r}")
    if balanced and blocks > 1:
        raise UserError("a dimension is split either in blocks or balanced, and not both")
    return Over(axis, dim, blocks, balanced)


def part(x: Tensor, split: Iterable[Over], made: Degrees, place: Mapping[AxisName, int]) -> Tensor:
    """Return the part of a whole tensor that a rank holds, which may share its memory.

    Args:
        x: the whole tensor.
        split: how it is divided, one axis after the other; if empty, each rank holds all of it.
        made: how many ranks there are.
        place: where the rank is, see ``Degrees.place``.

    Raises:
        UserError: if a dimension does not divide evenly.
    """
    for one in split:
        count, mine = made.of(one.axis), place[one.axis]
        parts = 2 * count if one.balanced else count * one.blocks
        if not -x.dim() <= one.dim < x.dim():
            raise UserError(f"a tensor of shape {tuple(x.shape)} has no dimension {one.dim} to divide over {one.axis}")
        if x.shape[one.dim] % parts:
            raise UserError(
                f"dimension {one.dim} of {tuple(x.shape)} does not divide into {parts} parts, for {count} ranks of "
                f"{one.axis}"
            )
        if one.balanced:
            pieces = x.chunk(parts, one.dim)
            x = torch.cat([pieces[mine], pieces[-1 - mine]], one.dim)
        else:
            blocks = [block.chunk(count, one.dim)[mine] for block in x.chunk(one.blocks, one.dim)]
            x = blocks[0] if len(blocks) == 1 else torch.cat(blocks, one.dim)
    return x


def whole_shape(shape: Sequence[int], split: Split, made: Degrees) -> torch.Size:
    """Return the shape of the whole tensor, given the shape of one rank's part."""
    whole = list(shape)
    for one in split:
        whole[one.dim] *= made.of(one.axis)
    return torch.Size(whole)


def places(shape: Sequence[int], split: Split, made: Degrees, rank: int) -> Tensor:
    """Return the place of each element of a rank's part in the whole tensor, seen as a vector."""
    everywhere = torch.arange(math.prod(shape)).view(tuple(shape))
    return part(everywhere, split, made, made.place(rank))


# The pieces of a tensor that ranks hold, and the whole that they make.


@dataclass(frozen=True, eq=False)
class Shard:
    """Hold one rank's part of a tensor.

    Attributes:
        rank: the rank's number.
        values: what it computed.
        split: how the whole is divided.
        places: the place of each value in the whole, seen as a vector.
    """

    rank: int
    values: Tensor
    split: Split
    places: Tensor


@dataclass(frozen=True, eq=False)
class GatheredTensor:
    """A tensor that ranks have computed.

    Attributes:
        kind: a kind as in results, or ``weight``.
        name: the name of an output, an input or a parameter of the candidate.
        exact: the right values, FP64.
        pieces: the pieces of all ranks that hold any of it.
        limit: the bound on its relative error; 0 if there is none.
    """

    kind: str
    name: str
    exact: Tensor
    pieces: list[Shard] = field(default_factory=list)
    limit: float = 0.0

    def joined(self) -> Tensor:
        """Return the tensor as the ranks computed it; where they disagree, the values that are farther off."""
        whole = torch.full((self.exact.numel(),), math.nan, dtype=self.pieces[0].values.dtype)
        for piece in sorted(self.pieces, key=lambda piece: self._compute_relative_error(piece.values, piece.places)):
            whole[piece.places.flatten()] = piece.values.flatten()
        return whole.view(self.exact.shape)

    def find_differing_ranks(self) -> tuple[int, int] | None:
        """Return two ranks that should have the same numbers but do not; None if all agree to the bit."""
        for one, other in itertools.combinations(self.pieces, 2):
            if torch.equal(one.places, other.places) and not torch.equal(one.values, other.values):
                return one.rank, other.rank
        return None

    def off(self, pieces: Sequence[Shard] | None = None) -> float:
        """Return the largest relative error of the pieces, which are those of all ranks by default."""
        some = self.pieces if pieces is None else pieces
        return max((self._compute_relative_error(piece.values, piece.places) for piece in some), default=math.inf)

    def _compute_relative_error(self, values: Tensor, at: Tensor) -> float:
        right = self.exact.flatten().to("cpu", torch.float64)[at.flatten()]
        if values.numel() != right.numel():
            return math.inf
        size, off = float(right.norm()), float((values.flatten().double() - right).norm())
        return off / size if size else math.inf if off else 0.0


# How a candidate's parameters are divided, from what TE says about them.


@dataclass(frozen=True)
class Held:
    """Say which part of which whole parameter one parameter of a rank is.

    Attributes:
        whole: the name of the whole parameter.
        split: how the whole is divided.
    """

    whole: str
    split: Split = ()


_WRAPPERS = ("module.", "_orig_mod.", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module.")


def marked(
    module: nn.Module,
    shapes: Mapping[str, tuple[int, ...]],
    made: Degrees,
    place: Mapping[AxisName, int],
    renamed: Mapping[str, str] = MappingProxyType({}),
) -> dict[str, Held]:
    """Return the whole parameter that each of a rank's parameters is a part of, by its name and by TE's marks.

    TE marks parameters that tensor parallel ranks divide (``set_tensor_model_parallel_attributes`` in
    ``pytorch/distributed.py`` of TE 2.20.2). A gated linear unit's first weight holds two projections, each of which is
    divided (``pytorch/module/layernorm_mlp.py``). Experts are known by their numbers: each rank counts its own from 0.

    Args:
        module: the rank's candidate.
        shapes: the shapes of the whole candidate's parameters, by name.
        made: how many ranks there are.
        place: where this rank is.
        renamed: the whole candidate's parameter names by the rank's own, if they do not follow from these.

    Raises:
        UserError: if the whole candidate has no such parameter.
    """
    parameters = dict(module.named_parameters())
    known = whole_names(list(parameters), list(shapes), made.ep, place["ep"])
    marks = tensor_parallel_marks(module)
    found: dict[str, Held] = {}
    for name, parameter in parameters.items():
        whole = renamed.get(name) or known.get(name, "")
        if whole not in shapes:
            raise UserError(f"a rank's candidate has a parameter {name} that the candidate in one process lacks")
        # A part that FSDP holds has the shape of the whole, too.
        is_whole = tuple(parameter.shape) == shapes[whole] or made.tp == 1
        found[name] = Held(whole, () if is_whole or name not in marks else (marks[name],))
    return found


def held_by(
    module: nn.Module,
    shapes: Mapping[str, tuple[int, ...]],
    declared: Mapping[str, Split],
    made: Degrees,
    place: Mapping[AxisName, int],
    renamed: Mapping[str, str] = MappingProxyType({}),
) -> dict[str, Held]:
    """Return the whole parameter that each of a rank's parameters is a part of: as the pair says, else as TE marks it.

    Args:
        module, shapes, made, place, renamed: see ``marked``.
        declared: how the pair says that whole parameters are divided, by their names.

    Raises:
        UserError: as ``marked``, and if a parameter's shape does not follow from that.
    """
    found: dict[str, Held] = {}
    for name, held in marked(module, shapes, made, place, renamed).items():
        whole, parameter = held.whole, module.get_parameter(name)
        split = declared.get(whole, held.split)
        expected = places(shapes[whole], split, made, 0).shape
        if tuple(parameter.shape) != tuple(expected):
            told = f"is {tuple(parameter.shape)} on a rank, and {shapes[whole]} in one process"
            raise UserError(
                f"{name} {told}; say how it is split, as in "
                f"parity.Parallel(weights={{{whole!r}: [parity.over('tp', dim=0)]}}); parity suggest-map proposes it"
            )
        found[name] = Held(whole, split)
    return found


def tensor_parallel_marks(module: nn.Module) -> dict[str, Over]:
    """Return how tensor parallel ranks divide a module's parameters, by the names of those that TE marks."""
    gated = {f"{path}.{name}" if path else name for path, name in _find_gated_units(module)}
    found: dict[str, Over] = {}
    for name, parameter in module.named_parameters():
        dim = getattr(parameter, "partition_dim", None)
        if getattr(parameter, "tensor_model_parallel", False) and isinstance(dim, int):
            found[name] = Over("tp", dim, 2 if name in gated and dim == 0 else 1)
    return found


def _find_gated_units(module: nn.Module) -> Iterator[tuple[str, str]]:
    """Yield the paths of TE's gated linear units and the names of their parameters that hold two projections."""
    for path, one in module.named_modules():
        activation = getattr(one, "activation", None)
        if isinstance(activation, str) and hasattr(one, "fc1_weight") and "glu" in activation:
            yield from ((path, name) for name in ("fc1_weight", "fc1_bias"))


def whole_names(names: Sequence[str], whole: Sequence[str], ranks: int, rank: int) -> dict[str, str]:
    """Return the whole parameters' names by a rank's own.

    Wrappers' prefixes are removed, and experts are numbered over all ranks.
    """
    known, found = set(whole), {}
    plain = {name: _remove_wrappers(name, known) for name in names}
    own, all_of_them = _collect_numbers(plain.values()), _collect_numbers(whole)
    for name, other in plain.items():
        found[name] = other
        for number in re.finditer(r"\d+", other):
            template = f"{other[: number.start()]}#{other[number.end() :]}"
            local = len(own[template])
            if ranks > 1 and len(all_of_them.get(template, ())) == ranks * local:
                counted = rank * local + int(number.group())
                found[name] = f"{other[: number.start()]}{counted}{other[number.end() :]}"
    return found


def _remove_wrappers(name: str, known: set[str]) -> str:
    if name in known:
        return name
    shorter = name
    for wrapper in _WRAPPERS:
        shorter = shorter.replace(wrapper, "")
    return shorter if shorter in known else name


def _collect_numbers(names: Iterable[str]) -> dict[str, set[str]]:
    """Return the numbers in the names, by the place in which they occur."""
    found: dict[str, set[str]] = {}
    for name, number in itertools.chain.from_iterable(((n, m) for m in re.finditer(r"\d+", n)) for n in names):
        found.setdefault(f"{name[: number.start()]}#{name[number.end() :]}", set()).add(number.group())
    return found


@dataclass(frozen=True)
class Parallel:
    """Say how a pair is computed over ranks.

    Attributes:
        splits: how inputs and outputs are divided, by their names in results (``input``, ``output``): a list of
            ``over(...)``. Inputs that are not named are given whole to each rank, and outputs are returned whole.
        weights: how parameters of the candidate are divided, by their names, if TE's marks do not say it;
            ``layers.{i}.weight`` names that of each layer.
        finish: called as ``finish(module)`` on each rank after the backward pass, for work that a port has to do itself
            then, such as reducing gradients over ranks.
        gradient_norm: called as ``gradient_norm(module)`` after that, if gradients are clipped; returns the norm of all
            gradients, over all ranks, as the port computes it on each.
        averages: whether the port averages gradients over data parallel ranks instead of adding them up. The gradient
            with respect to each rank's outputs is then multiplied by their number, as for a mean of means.
        amax_group: the process group that the port gives ``te.autocast`` as ``amax_reduction_group``; all ranks by
            default.
        pipeline: how stages run and how their parameters are named, for a pair that is computed over ``pp`` ranks.
        dropout: whether the pair's modules have dropout, as a port trains. All numbers are then compared with it
            switched off, and ranks make one more pass with it, in which only what they drop is judged.
    """

    splits: Mapping[str, Sequence[Over]] = field(default_factory=dict)
    weights: Mapping[str, Sequence[Over]] = field(default_factory=dict)
    finish: Callable[[nn.Module], None] | None = None
    averages: bool = False
    gradient_norm: Callable[[nn.Module], Tensor | float] | None = None
    amax_group: Any = None
    pipeline: Pipeline = field(default_factory=Pipeline)
    dropout: bool = False

    def check(self, names: Sequence[str]) -> None:
        """Check that ``splits`` only names these inputs and outputs.

        Raises:
            UserError: if it names another.
        """
        unknown = [name for name in self.splits if name not in names]
        if unknown:
            raise UserError(f"splits names {unknown[0]!r}, but the inputs and outputs are {', '.join(names)}")

    def split(self, name: str) -> Split:
        """Return how an input or output is divided."""
        return tuple(self.splits.get(name, ()))


IN_ONE_PROCESS = Parallel()
