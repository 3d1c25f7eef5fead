"""Train a candidate over ranks, and hand out its steps like those of a candidate that one process trains.

The ranks make all steps by themselves, as the port does. Their tensors before and after each step are put together as
the pair says that they are divided, and ranks that should hold the same are compared with each other.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from parity.case import transfer
from parity.case.training import reference_optimizer
from parity.case.validate import CheckedSize
from parity.case.weight_map import names
from parity.judge.request import Request
from parity.mistakes.codes import repairable
from parity.passes.all_passes import Tensors
from parity.passes.one_pass import as_arguments, named_inputs, with_inputs
from parity.passes.prepare import Prepared, build
from parity.ranks.layout import Degrees, GatheredTensor, part, places
from parity.result import Finding, Result, Switch
from parity.shown import few_of
from parity.te.state import Kept
from parity.trainings.gathered import (
    TIMEOUT,
    changed_by,
    given_of,
    in_reference_layout,
    on_all_ranks,
    on_cpu,
    put_together,
    replicas_apart,
    unreached_by,
    with_limits,
)
from parity.trainings.micro_batches import shares_made
from parity.trainings.on_rank import GivenSteps, StepOnRank, steps_on_rank
from parity.trainings.optimized import followed_places, rates, steps_elements
from parity.trainings.steps import Named, Stepped, Update, batch_of
from parity.trainings.why_over_ranks import explained_over_ranks
from parity.trainings.why_stages import wrong_norm
from parity.trainings.why_steps import are_made_of, lost_state
from parity.user_error import UserError

# The largest relative error of a clipping factor, which comes from an FP32 norm of gradients in 16 bits.
_CLIPPING = 1e-2
# The largest relative error of a rank's share of a batch, as for micro-batches.
_SHARES = 0.02


class TraineeOverRanks:
    """A candidate that ranks have trained.

    Attributes:
        training: how its pair is trained.
        made: how many ranks there are.
        is_plain: whether its steps are parity's own plain ones.
    """

    def __init__(
        self, request: Request, checked: CheckedSize, prepared: Prepared, steps: int, made: Degrees, switch: Switch = ""
    ) -> None:
        """Let the ranks make all steps, in the way that ``switch`` says.

        Raises:
            RanksFailed: if a rank raised, died or did not answer in time.
            UserError: if the ranks have stages of a pipeline.
        """
        if made.pp > 1:
            raise UserError("trainings over the stages of a pipeline are not supported: leave out steps= or pp")
        case, dtype, seed, kernels = request.case, request.precision.dtype, request.seed, request.kernels
        pair = build(case, checked, seed, kernels)
        self.training, self.made = pair.training, made
        self.is_plain = pair.training.candidate_step is None
        self._pair, self._shapes = pair, transfer.parameter_shapes(pair.reference)
        self._whole_shapes = {name: tuple(x.shape) for name, x in prepared.candidate_weights.items()}
        self._are_whole = not steps_elements(pair.reference, reference_optimizer(pair.training))
        self._elements = {name: followed_places(name, shape, self._are_whole) for name, shape in self._shapes.items()}
        given = given_of(case, request, checked, prepared, made)
        batches = tuple(
            on_cpu(batch_of(pair, number, checked, dtype, seed, kernels.device, prepared.input_names).inputs)
            for number in range(1, steps + 1)
        )
        by_rank = on_all_ranks(steps_on_rank, GivenSteps(given, batches, switch), made, TIMEOUT * steps)
        self._steps: list[tuple[StepOnRank, ...]] = list(zip(*by_rank, strict=True))
        self._next = 0
        self._wholes: list[GatheredTensor] = []

    @property
    def weights(self) -> Named:
        """The weights that the ranks hold before the next step, in the reference's layout, in FP64."""
        held = self._assemble_tensors(self._steps[self._next], lambda one: one.weights)
        return transfer.to_reference(self._pair.weights, held, self._shapes)

    @property
    def buffers(self) -> Named:
        """Return the buffers that all ranks hold alike before the next step; none after the last."""
        step = self._steps[self._next] if self._next < len(self._steps) else ()
        every = [one.buffers for one in step]
        return {
            name: x
            for name, x in (every[0].items() if every else ())
            if all(name in one and torch.equal(one[name], x) for one in every)
        }

    @property
    def quantized(self) -> Named:
        """Return nothing: weights that ranks hold quantized are put together by their values."""
        return {}

    @property
    def settings(self) -> dict[str, dict[str, Any]]:
        """The settings of the ranks' optimizers for each parameter, by its name in the reference."""
        own = {one.ran.held[name].whole: some for one in self._last_step for name, some in one.settings.items() if some}
        found: dict[str, dict[str, Any]] = {}
        for left, right in self._pair.weights.items():
            settings = next((own[name] for name in names(right) if name in own), {})
            found |= {name: dict(settings) for name in names(left)}
        return found

    @property
    def _last_step(self) -> tuple[StepOnRank, ...]:
        """Return what the ranks recorded of the last step that was asked for."""
        return self._steps[self._next - 1]

    def step(self, prepared: Prepared) -> Stepped:
        """Return what the next step computed."""
        self._next += 1
        step, shapes, weights = self._last_step, self._shapes, self._pair.weights
        wholes = put_together([one.ran for one in step], self.made, prepared)
        self._wholes = [self._added_up(one) if one.kind == "output" else one for one in wholes]
        tensors = in_reference_layout(self._wholes, prepared)
        if self.training.candidate_step is not None:  # it may scale the loss, and undo that where gradients are used
            tensors = {key: x for key, x in tensors.items() if key[0] != "input gradient"}
        before, after, gradients = (self._assemble_tensors(step, partial(_select_tensors, i)) for i in range(3))
        update = Update(
            self._sample_elements(transfer.to_reference(weights, before, shapes)),
            self._sample_elements(transfer.gradients_to_reference(weights, gradients, shapes)),
            self._sample_elements(transfer.to_reference(weights, after, shapes)),
            {},
            {key: dtype for one in step for key, dtype in one.kept_in.items()},
            self._are_whole,
            rates(self.settings),
        )
        unreached = unreached_by([one.ran for one in step])
        apart = tuple(sorted({one.ran.held[name].whole for one in step for name in one.apart}))
        noise, changed = self._assemble_noise(step), changed_by([one.ran for one in step])
        rest = self._gather_scaling(step), noise
        return Stepped(tensors, unreached, step[0].clipping, update, *rest, apart=apart, changed=changed)

    def lost_state(self) -> Finding | None:
        """Return what ranks lost when the training was saved and loaded before the last step; None if nothing."""
        told = {
            rank: lost
            for rank, one in enumerate(self._last_step)
            if one.resumed is not None and (lost := lost_state(self._next, one.resumed)) is not None
        }
        if not told:
            return None
        first = next(iter(told.values()))
        alike = [rank for rank, lost in told.items() if lost.message == first.message]
        others = sorted(set(told) - set(alike))
        also = f"; {_name_ranks(others)} lost something else" if others else ""
        return replace(first, message=f"on {_name_ranks(alike)}, {first.message}{also}")

    def _gather_scaling(self, step: Sequence[StepOnRank]) -> tuple[tuple[Kept, Kept], ...]:
        """Return what the first rank's delayed scaling kept, with the magnitudes of the weights of all ranks."""
        largest: dict[Any, float] = {}
        for before, _ in (move for one in step for move in one.scaling):
            if before.weight is not None:
                key = before.slot.module, before.slot.place
                largest[key] = max(largest.get(key, 0.0), before.weight)
        return tuple(
            (replace(before, weight=largest.get((before.slot.module, before.slot.place))), after)
            for before, after in step[0].scaling
        )

    @property
    def gradients_scale(self) -> float:
        """Return the number by which ranks multiply their gradients before they average them."""
        return float(self.made.dp) if self._last_step[0].loss_over.get("dp") else 1.0

    def _added_up(self, loss: GatheredTensor) -> GatheredTensor:
        """Return the loss of the whole batch on each rank.

        Ranks that divide a batch or a sequence hold parts of the loss that add up, or the means of their parts. If the
        port has reduced the loss already, all of them hold the same.
        """
        values = {one.rank: one.values.double() for one in loss.pieces}
        for axis, is_mean in self._last_step[0].loss_over.items():
            for peers in self.made.peers(axis):
                parts = torch.stack([values[rank] for rank in peers])
                if bool((parts != parts[0]).any()):
                    values |= dict.fromkeys(peers, parts.mean(0) if is_mean else parts.sum(0))
        return replace(loss, pieces=[replace(one, values=values[one.rank].to(one.values)) for one in loss.pieces])

    def _assemble_noise(self, step: Sequence[StepOnRank]) -> Tensors:
        noise = self._assemble_tensors(step, lambda one: one.summed)
        if not noise:
            return {}
        noise = {name: noise.get(name, torch.zeros(shape)) for name, shape in self._whole_shapes.items()}
        moved = transfer.gradients_to_reference(self._pair.weights, noise, self._shapes)
        return {("weight gradient", name): x for name, x in moved.items() if bool(x.any())}

    def _sample_elements(self, tensors: Mapping[str, Tensor]) -> Named:
        return {name: x.reshape(-1)[self._elements[name]].double() for name, x in tensors.items()}

    def _assemble_tensors(
        self, step: Sequence[StepOnRank], parts: Callable[[StepOnRank], Mapping[str, Tensor]]
    ) -> Named:
        """Return whole tensors in the candidate's layout, FP64, with each element from the rank that steps it, if any.

        Args:
            step: what each rank recorded.
            parts: returns a rank's tensors by its parameters' names.
        """
        found: Named = {}
        for is_owner, (rank, one) in itertools.product((False, True), reversed(list(enumerate(step)))):
            for name, x in parts(one).items():
                held = one.ran.held[name]
                shape = self._whole_shapes[held.whole]
                whole = found.setdefault(held.whole, torch.full(shape, math.nan, dtype=torch.float64)).view(-1)
                at = places(shape, held.split, self.made, rank).flatten()
                mine = one.owned.get(name, at[:0]) if is_owner else torch.arange(len(at))
                whole[at[mine]] = x.flatten().double()[mine]
        return found

    # Checks that ranks agree in what they all hold.

    def between_ranks(self, judged: Result, prepared: Prepared) -> Finding | None:
        """Return what is wrong between the ranks in the last step; None if nothing is, or something else is.

        Args:
            judged: the verdict on the step's loss and gradients.
            prepared: the step.
        """
        step = f"in step {self._next} " if self._next > 1 else ""
        begun = self._describe_disagreement(lambda one: one.weights) if self._next == 1 else None
        if begun is not None:
            return repairable(
                "replicas-differ",
                f"before the first step {begun}",
                "use one seed on all of them, or broadcast the weights of the first of them",
            )
        if judged.status == "failed":
            wholes = with_limits(self._wholes, judged, prepared)
            found = explained_over_ranks(wholes, self.made, prepared.candidate_weights)
            if found:
                of_gradients = all(one.passed for one in judged.tensors if one.kind != "weight gradient")
                if of_gradients and any(one.clipping.is_changed_after for one in self._last_step):
                    return self._clipped_before_reduction()
                return replace(found[0], message=step + found[0].message)
            if not replicas_apart(self._wholes):
                return self._of_shares(judged, prepared) or self._of_reduction(judged)
        if told := replicas_apart(self._wholes):
            right = self._which_is_right(judged, prepared)
            evidence = told.message.removesuffix(f"; {told.repair}")
            return replace(told, message=f"{step}{evidence}{right}; {told.repair}")
        moved = self._find_exchanged_parts() if any(one.apart for one in self._last_step) else None
        return self._of_amaxes() or self._of_clipping() or moved or self._of_weights()

    def _which_is_right(self, judged: Result, prepared: Prepared) -> str:
        """Return which of the ranks that disagree have the right numbers, if some have."""
        wholes = with_limits(self._wholes, judged, prepared)
        differing = [one for one in wholes if one.find_differing_ranks() and one.limit]
        right = {one.rank for one in differing[0].pieces} if differing else set()
        for one in differing:
            right -= {piece.rank for piece in one.pieces if one.off([piece]) > one.limit}
        wrong = sorted({one.rank for whole in differing for one in whole.pieces} - right)
        if not right or not wrong:
            return ""
        return f"; those of {_name_ranks(sorted(right))} are right, and those of {_name_ranks(wrong)} are wrong"

    def _of_shares(self, judged: Result, prepared: Prepared) -> Finding | None:
        """Return a finding if ranks' parts of a batch count for more or less than they should in shared gradients."""
        ranks, whole = self.made.peers("dp")[0], named_inputs(prepared.inputs, prepared.input_names)
        splits = self._last_step[0].ran.splits
        of_dp = {name: [one for one in splits.get(name, ()) if one.axis == "dp"] for name in whole}
        calls = []
        for rank in ranks:
            own = {name: part(x, of_dp[name], self.made, self.made.place(rank)) for name, x in whole.items()}
            calls.append(as_arguments(with_inputs(prepared.inputs, prepared.input_names, own)))
        candidate = in_reference_layout(self._wholes, prepared)
        gradients = {name: x for (kind, name), x in candidate.items() if kind == "weight gradient"}
        made = shares_made(prepared, calls, gradients)
        limits = {
            one.name: one.tolerance_relative_l2 for one in judged.tensors if one.kind == "weight gradient" and one.numel
        }
        if made is None or not are_made_of(made, limits):
            return None
        if made.right is None:
            counts = ", ".join(f"{own:.3g}" for own in made.made[:4])
            return repairable(
                "shares-of-ranks",
                f"in step {self._next} the gradients are the sum of those of each rank's part of the batch, weighted "
                f"by {counts}, and no such weighted sum gives the gradients of the whole batch; a loss that multiplies "
                "averages over tokens, such as a router's load balancing loss, needs the averages over all ranks",
                "reduce the averages over dp before they are multiplied",
            )
        factors = [own / right if right else math.inf for own, right in zip(made.made, made.right, strict=True)]
        clip, left = self.training.clip, [self._last_step[rank].clipping.added for rank in ranks]
        for largest in (clip, clip / len(ranks)) if clip is not None else ():  # added up, or averaged
            if all(abs(f * norm - largest) <= _SHARES * largest for f, norm in zip(factors, left, strict=True)):
                return self._clipped_before_reduction()
        if all(abs(factor - 1.0) < _SHARES for factor in factors):
            return None
        told = " and ".join(f"{factor:.3g} for rank {rank}" for rank, factor in zip(ranks[:4], factors, strict=False))
        return repairable(
            "shares-of-ranks",
            f"in step {self._next} the ranks' parts of the batch are weighted wrongly in the gradients, by a factor of "
            f"{told}; the mean of the ranks' means is not the mean over all tokens if ranks have different numbers of "
            "them",
            "all-reduce the number of counted tokens over dp, and divide each rank's sum by the total",
        )

    def _clipped_before_reduction(self) -> Finding:
        return repairable(
            "gradient-clipping",
            f"in step {self._next} ranks clip their own gradients before these are reduced, so that the norm by which "
            "they are clipped is not that of all gradients",
            "clip once in each step, after gradients are reduced",
        )

    def unexplained(self, judged: Result, prepared: Prepared) -> Finding:
        """Return what is known of a step that is right in one process, but wrong over ranks for no known reason."""
        wrong = few_of([one.label for one in judged.tensors if not one.passed])
        told = (
            f"in step {self._next} the candidate is right in one process, but over {self.made.label} wrong in {wrong}"
        )
        for one in with_limits([one for one in self._wholes if one.kind == "output"], judged, prepared):
            if one.exact.numel() == 1 and one.off() > one.limit:
                total, right = float(one.joined()), float(one.exact)
                told += f"; the ranks' losses sum to {total:.5g}, and the loss of the whole batch is {right:.5g}"
        return repairable(
            "wrong-over-ranks",
            told,
            "check which parts of the loss are divided by the number of ranks or tokens, and which are reduced",
        )

    def _of_reduction(self, judged: Result) -> Finding | None:
        """Return a finding if gradients that ranks hold in FP32 are wrong and contain only BF16 numbers."""
        gradients = {one.name: one for one in self._wholes if one.kind == "weight gradient"}
        narrow = [
            name
            for name, one in gradients.items()
            if all(
                x.values.dtype is torch.float32 and torch.equal(x.values.bfloat16().float(), x.values)
                for x in one.pieces
            )
        ]
        wrong = [one.name for one in judged.tensors if one.kind == "weight gradient" and not one.passed]
        if not narrow or not wrong or any(not one.passed for one in judged.tensors if one.kind != "weight gradient"):
            return None
        return repairable(
            "reduced-in-16-bits",
            f"in step {self._next} {few_of(narrow)} {'is' if len(narrow) == 1 else 'are'} stored in FP32, but each "
            "element is a BF16 number: the ranks' gradients are reduced in 16 bits, which rounds their sums",
            "reduce them in FP32, such as with MixedPrecisionPolicy(reduce_dtype=torch.float32)",
        )

    def _of_amaxes(self) -> Finding | None:
        """Return a finding if ranks that compute one tensor together do not share its scale."""
        for axis in ("tp", "cp"):
            for a, b in (pair for peers in self.made.peers(axis) for pair in itertools.pairwise(peers)):
                for (_, x), (_, y) in zip(self._last_step[a].scaling, self._last_step[b].scaling, strict=False):
                    if x.scale != y.scale or not torch.equal(x.history[1:], y.history[1:]):
                        return repairable(
                            "amax-group",
                            f"after step {self._next} ranks {a} and {b} have different FP8 scales of {x.slot.name}, "
                            f"{x.scale:.4g} and {y.scale:.4g}, since amaxes are not reduced over {axis}",
                            "give te.autocast an amax_reduction_group with all ranks that compute a tensor together",
                        )
        return None

    def of_shards(self, wrong: Mapping[str, Tensor]) -> Finding | None:
        """Return which ranks step their parts of the weights wrongly; None if ranks do not divide the optimizer.

        Args:
            wrong: for each parameter, which of the followed elements are not stepped as by the reference's optimizer.
        """
        step = self._last_step
        owned = [sum(len(x) for x in one.owned.values()) for one in step]
        held = [sum(x.numel() for x in one.weights.values()) for one in step]
        if all(own in (0, all_of_them) for own, all_of_them in zip(owned, held, strict=True)) and len(set(owned)) < 2:
            return None
        if told := self._find_exchanged_parts():
            return told
        owners = self._assemble_tensors(
            step, lambda one: {n: torch.full_like(x, step.index(one)) for n, x in one.weights.items()}
        )
        by = self._sample_elements(transfer.gradients_to_reference(self._pair.weights, owners, self._shapes))
        ranks = sorted({int(rank) for name, x in wrong.items() for rank in by[name][x].unique()})
        right = sorted({int(rank) for x in by.values() for rank in x.unique()} - set(ranks))
        others = f"; those of {_name_ranks(right)} are right" if right else ""
        return repairable(
            "optimizer-shards",
            f"in step {self._next} the parts of the weights that {_name_ranks(ranks)} stepped are not what the "
            f"reference's optimizer makes of the same gradients{others}",
            "look at which part of the gradients, the weights and the moments these ranks take, and whether their "
            "state was loaded from their own file",
        )

    def _find_exchanged_parts(self) -> Finding | None:
        """Return a finding if one part of a weight holds another part's values after the step."""
        for one in self._last_step:
            for name, x in one.weights.items():
                size = len(one.owned.get(name, ()))
                if not 0 < size < x.numel() or x.numel() % size:
                    continue
                was, now = (y.double().flatten().view(-1, size) for y in (x, one.after[name]))
                apart = torch.cdist(now, was)
                nearest = apart.argmin(1)
                moved = (nearest != torch.arange(len(was))) & (apart.amin(1) < 0.5 * apart.diagonal())
                if bool(moved.any()):
                    to = int(moved.nonzero()[0])
                    return repairable(
                        "optimizer-shards",
                        f"after step {self._next} part {to} of {one.ran.held[name].whole} holds the new values of part "
                        f"{int(nearest[to])}",
                        "gather each rank's part to its own place",
                    )
        return None

    def _of_clipping(self) -> Finding | None:
        """Return a finding if ranks have clipped by a norm that is not that of all gradients."""
        clip = self.training.clip
        if clip is None:
            return None
        told = wrong_norm([one.ran.norm for one in self._last_step], self._wholes, self.made)
        factors = [one.clipping.factor for one in self._last_step]
        made = [clip / factor if factor < 1.0 - _CLIPPING else None for factor in factors]
        return told or wrong_norm(made, self._wholes, self.made, _CLIPPING)

    def _of_weights(self) -> Finding | None:
        """Return a finding if ranks hold different weights after a step from equal weights and gradients."""
        told = self._describe_disagreement(lambda one: one.after)
        if told is None:
            return None
        if (shards := self._not_taken_over()) is not None:
            return shards
        return repairable(
            "replicas-differ",
            f"after step {self._next} {told}, though they had the same before the step",
            "give all of them the same gradients, and optimizers with the same settings and state",
        )

    def _not_taken_over(self) -> Finding | None:
        """Return a finding if a rank still holds the old values of a part that another rank's optimizer stepped."""
        for owner, other in itertools.permutations(range(self.made.count), 2):
            one, stale = self._last_step[owner], self._last_step[other]
            for name, at in one.owned.items():
                now, was, same = (x[name].flatten()[at] for x in (stale.after, stale.weights, one.after))
                if bool((now != same).any()) and torch.equal(now, was):
                    return repairable(
                        "optimizer-shards",
                        f"after step {self._next} rank {other} still has the old values of the part of "
                        f"{one.ran.held[name].whole} that rank {owner} stepped",
                        "gather it after each step, before the next pass",
                    )
        return None

    def _describe_disagreement(self, parts: Callable[[StepOnRank], Mapping[str, Tensor]]) -> str | None:
        """Return which values ranks should share but do not; None if they share all of them."""
        held: dict[str, list[tuple[int, Tensor, Tensor]]] = {}
        for rank, one in enumerate(self._last_step):
            for name, x in parts(one).items():
                whole = one.ran.held[name].whole
                at = places(self._whole_shapes[whole], one.ran.held[name].split, self.made, rank)
                held.setdefault(whole, []).append((rank, at, x))
        for name, some in held.items():
            for (a, at, x), (b, other, y) in itertools.combinations(some, 2):
                if torch.equal(at, other) and not torch.equal(x, y):
                    return f"ranks {a} and {b} hold different values of {name}"
        return None


def _name_ranks(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"


def _select_tensors(which: int, one: StepOnRank) -> dict[str, Tensor]:
    return {name: some[which] for name, some in one.followed.items()}
