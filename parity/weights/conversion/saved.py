"""Checkpoints as transformers saves them: under names of its own, and with a weight for each expert.

transformers renames and joins tensors while it loads a model, and separates them when it saves it, by rules for each
type of model (``transformers/conversion_mapping.py`` and ``core_model_loading.py``, transformers 5.23). A weight map
names what the model holds, so the same rules are applied to a checkpoint before the map sees it, and to what it makes,
to one joined tensor at a time. The rules are asked of the pair's reference, so that both directions have them.
"""

from __future__ import annotations

import copy
import importlib
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from parity.case.map_check import Problem, lines
from parity.shown import few_of, one_line
from parity.weights.conversion.plan import (
    OF_ANOTHER_SIZE,
    ConversionError,
    Layout,
    Made,
    Plan,
    Prefixes,
    Step,
    remembering,
)
from parity.weights.conversion.unread import UnreadTensor


@dataclass(frozen=True)
class _Rules:
    """How transformers renames and joins what a model's checkpoint holds, or the other way round.

    Attributes:
        model: the model; None for a part of one.
        config: its configuration.
        renamings, converters: transformers' ``WeightRenaming`` and ``WeightConverter``, in the order of their use.
        order: the key by which transformers sorts names.
        is_back: whether they lead from the model to its checkpoint, where names are changed last.
    """

    model: nn.Module | None
    config: Any
    renamings: list[Any]
    converters: list[Any]
    order: Callable[[str], Any]
    is_back: bool

    def rename(self, name: str) -> str:
        """Return a name after all renamings."""
        for one in self.renamings:
            name, _ = one.rename_source_key(name)
        return name


@dataclass
class _Group:
    """Tensors that become others together.

    Attributes:
        rules: those that say so.
        converter: transformers' converter; None if the only tensor is renamed.
        target: what the converter, or the tensor, is called.
        members: the tensors' keys, each with the converter's pattern that fits it.
        made: what becomes of them, on the meta device; empty if they do not fit together.
        problem: why they do not.
    """

    rules: _Rules
    converter: Any
    target: str
    members: list[tuple[str, str]] = field(default_factory=list)
    made: dict[str, Tensor] = field(default_factory=dict)
    problem: str = ""

    def compute(self, given: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return what becomes of the members, which are read one after the other."""
        if self.converter is None:
            return {self.target: given[self.members[0][1]]}
        converter = copy.deepcopy(self.converter)
        for pattern, key in self.members:
            converter.add_tensor(self.target, key, pattern, given[key].detach())
        with torch.no_grad():
            made = converter.convert(self.target, model=self.rules.model, config=self.rules.config)
        tensors = {name: one[0] if isinstance(one, list) else one for name, one in made.items()}
        return {self.rules.rename(name): one for name, one in tensors.items()} if self.rules.is_back else tensors


def join(old: Mapping[str, Tensor], reference: nn.Module, layout: Layout, prefixes: Prefixes) -> Mapping[str, Tensor]:
    """Return the reference's checkpoint under the names that its module has, with joined tensors that are not yet read.

    Args:
        old: the checkpoint, which is returned as it is if it has all parameters, or transformers has no rule for it.
        reference: the module.
        layout: what it holds.
        prefixes: those of the checkpoint's keys.

    Raises:
        ConversionError: if a joined tensor lacks some of its parts, with their names.
    """
    held = {prefixes.inside(key) for key in old}
    if all(held.intersection(layout.further(name)) for name in layout.parameters):
        return old
    rules = _find_rules(reference)
    if rules is None:
        return old
    loading, saving = rules
    wanted = {*layout.order, *layout.parameters, *layout.tied}
    shapes = {prefixes.outside(name): torch.empty(shape, device="meta") for name, shape in layout.parameters.items()}
    found, problems = dict[str, Tensor](), list[Problem]()
    for group in _regroup_tensors(old, loading):
        if group.converter is not None and prefixes.inside(group.target) in wanted:
            problems += _report_misfit(group, saving, old, shapes)
        if not any(prefixes.inside(key) in wanted for key in group.made):
            found.update({key: old[key] for _, key in group.members})
            continue
        for key, made in group.made.items():
            source = old[group.members[0][1]]
            found[key] = (
                source
                if group.converter is None
                else UnreadTensor(partial(_compute_one, group, old, key), tuple(made.shape), made.dtype, source.device)
            )
    if problems:
        raise ConversionError("\n".join(lines(problems)))
    return found


def separate(plan: Plan, reference: nn.Module) -> Plan:
    """Return a plan that makes the reference's checkpoint as transformers saves it.

    It is the same plan if transformers has no rule for the module, or cannot undo what it would write.
    """
    rules = _find_rules(reference)
    if rules is None:
        return plan
    held = {
        made.key: torch.empty(made.shape, dtype=made.dtype, device="meta") for step in plan.steps for made in step.made
    }
    try:
        groups = list(_regroup_tensors(held, rules[1]))
        made = {key: tensor for group in groups for key, tensor in group.made.items()}
        again = {key: tensor for group in _regroup_tensors(made, rules[0]) for key, tensor in group.made.items()}
    except Exception:  # some of transformers' rules have no inverse, and raise anything
        return plan
    if any(group.problem for group in groups) or _shapes_of(again) != _shapes_of(held):
        return plan
    place = {made.key: i for i, step in enumerate(plan.steps) for made in step.made}
    compute = remembering(plan.steps)

    def compute_group(group: _Group) -> dict[str, Tensor]:
        return group.compute({key: compute(place[key])[key] for _, key in group.members})

    def make_step(group: _Group) -> Step:
        made = tuple(Made(key, tuple(one.shape), one.dtype) for key, one in group.made.items())
        return Step(made, partial(compute_group, group))

    of_key = {key: group for group in groups for _, key in group.members}
    order = dict.fromkeys(key for old in plan.order if old in of_key for key in of_key[old].made)
    groups.sort(key=lambda group: min(place[key] for _, key in group.members))  # so that each step is computed once
    return replace(plan, order=tuple(order), steps=[make_step(group) for group in groups])


def _find_rules(module: nn.Module) -> tuple[_Rules, _Rules] | None:
    """Return transformers' rules to load and to save a model of its own, or a part of one; None if it has none."""
    if "transformers" not in sys.modules:  # then no module is of it
        return None
    try:
        mapping = importlib.import_module("transformers.conversion_mapping")
        core = importlib.import_module("transformers.core_model_loading")
        model_class = importlib.import_module("transformers").PreTrainedModel
    except (ImportError, AttributeError):  # transformers before 5, which joins nothing
        return None
    model = next((part for part in module.modules() if isinstance(part, model_class)), None)
    configs = [part.config for part in module.modules() if hasattr(part, "config")]
    if model is not None:
        # Names of old checkpoints are read and not written, as transformers does, nor prefixes that some lack.
        loading, own = (mapping.get_model_conversion_mapping(model, add_legacy=legacy) for legacy in (True, False))
    else:
        types = dict.fromkeys(getattr(config, "model_type", None) for config in configs)
        own = [one for kind in types if kind for one in mapping.get_checkpoint_conversion_mapping(kind) or ()]
        loading = own
    if not loading:
        return None
    saving = [one.reverse_transform() for one in own[::-1] if not isinstance(one, core.PrefixChange)]
    config = configs[0] if configs else None

    def sort(transforms: list[Any], is_back: bool) -> _Rules:
        renamings = [one for one in transforms if isinstance(one, core.WeightRenaming)]
        converters = [one for one in transforms if isinstance(one, core.WeightConverter)]
        return _Rules(model, config, renamings, converters, core.dot_natural_key, is_back)

    return sort(loading, False), sort(saving, True)


def _regroup_tensors(tensors: Mapping[str, Tensor], rules: _Rules) -> Iterator[_Group]:
    """Yield which tensors become which, in transformers' order, with the shapes and dtypes of what is made."""
    groups: dict[str, _Group] = {}
    for key in sorted(tensors, key=rules.order):
        name = key if rules.is_back else rules.rename(key)
        for converter in rules.converters:
            target, pattern = converter.rename_source_key(name)
            if pattern is not None:
                groups.setdefault(target, _Group(rules, converter, target)).members.append((pattern, key))
                break
        else:
            target = rules.rename(key) if rules.is_back else name
            target = key if target in groups or target in tensors else target
            groups[target] = _Group(rules, None, target, [("", key)])
    for group in groups.values():
        shapes = {
            key: torch.empty(tensors[key].shape, dtype=tensors[key].dtype, device="meta") for _, key in group.members
        }
        try:
            group.made = group.compute(shapes)
        except Exception as error:  # transformers and PyTorch raise anything for tensors that do not fit together
            group.problem = one_line(error)
        yield group


def _report_misfit(
    group: _Group, saving: _Rules, old: Mapping[str, Tensor], shapes: Mapping[str, Tensor]
) -> Iterator[Problem]:
    """Yield the parts of a joined parameter that the checkpoint lacks, if it does not have the parameter's shape."""
    own = shapes.get(group.target)
    if own is None or (group.made and group.made[group.target].shape == own.shape):
        return
    lacking = [
        (key, tuple(part.shape))
        for back in _regroup_tensors({group.target: own}, saving)
        for key, part in back.made.items()
        if key not in old
    ]
    for key, shape in lacking:
        joined = f'"{group.target}" {tuple(own.shape)}'
        yield Problem(f'the checkpoint lacks "{key}" {shape}, which is a part of {joined}', OF_ANOTHER_SIZE)
    if group.problem and not lacking:
        keys = few_of([key for _, key in group.members])
        yield Problem(f'"{group.target}" cannot be made of {keys}: {group.problem}')


def _compute_one(group: _Group, old: Mapping[str, Tensor], key: str) -> Tensor:
    return group.compute(old)[key]


def _shapes_of(tensors: Mapping[str, Tensor]) -> dict[str, tuple[object, ...]]:
    return {key: (tensor.shape, tensor.dtype) for key, tensor in tensors.items()}
