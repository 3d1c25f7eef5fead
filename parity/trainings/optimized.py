"""Find the tensors that an optimizer steps in place of a module's parameters, and read its state for each."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from parity.case.case import MakeOptimizer, Rng
from parity.case.weight_map import WeightMap, names
from parity.shown import few_of
from parity.te import emulation, state
from parity.user_error import UserError

Named = dict[str, Tensor]

# The error that a quantized parameter may have, in errors of one quantization. A cast to BF16 before it adds 0.2 %
# (E4M3).
_QUANTIZED_TWICE = 1.02
# A step of a training is judged by this many elements of each parameter. The reference's optimizer steps them as well,
# in FP64, from the candidate's weights and gradients, and both must arrive at the same values.
FOLLOWED = 1024


class Optimized:
    """A module's parameters as its optimizer has them.

    Attributes:
        stepped: the tensor that the optimizer steps for each parameter, by the module's names: the parameter itself, or
            a copy in FP32.
    """

    def __init__(self, module: nn.Module, optimizer: Optimizer, weights: WeightMap) -> None:
        """Find the tensors that the optimizer steps, before its first step; ``weights`` is the pair's weight map."""
        self._module, self._weights = module, weights
        self._optimizers = list(_with_inner(optimizer))
        self._parameters = dict(module.named_parameters())
        self.stepped = _find_stepped_tensors(module, optimizer)

    def find_replaced(self) -> None:
        """Find the parameters that ``load`` has replaced by others.

        Raises:
            UserError: if the optimizer still steps the old parameters, or the names of the module's parameters have
                changed, for example because tied ones are no longer tied.
        """
        parameters, before = dict(self._module.named_parameters()), self._parameters
        steps = {id(one) for group in self._optimizers[0].param_groups for one in group["params"]}
        replaced = {name: one for name, one in parameters.items() if one is not before.get(name)}
        left = [name for name, one in replaced.items() if id(before.get(name)) in steps and id(one) not in steps]
        wrong = [*(before.keys() - parameters.keys()), *(parameters.keys() - before.keys()), *left]
        if wrong:
            raise UserError(
                f"load= replaces parameters of the module, so that its optimizer still steps the old ones, or tied "
                f"ones are no longer tied: {few_of(sorted(wrong))}; "
                "copy the loaded values into the existing parameters, as load_state_dict does without assign=True"
            )
        self.stepped |= {name: one for name, one in replaced.items() if self.stepped[name] is before[name]}
        self._parameters = parameters

    def copies(self) -> Named:
        """Return the copies that the optimizer steps in place of the module's parameters, by the parameters' names."""
        own = dict(self._module.named_parameters())
        return {name: one for name, one in self.stepped.items() if one is not own[name]}

    def read_stepped_weights(self) -> Named:
        """Return the weights that the optimizer steps, in FP64. They may be FP32 copies of the module's weights."""
        held = held_by(self._module)
        for name, parameter in self.stepped.items():
            master = self._find_master_copy(parameter)
            if master is not None:
                held[name] = master[1].detach().reshape(parameter.shape).double()
            elif not state.is_quantized(parameter):
                held[name] = parameter.detach().double()
        return held

    def quantized_from(self, name: str) -> Tensor | None:
        """Return the numbers that TE quantizes for a weight, or None if there is only a quantized copy of it."""
        parameter = self._module.get_parameter(name)
        if not state.is_quantized(parameter):
            return parameter
        stepped = self.stepped[name]
        master = self._find_master_copy(stepped)
        return master[1] if master else None if stepped is parameter else stepped

    def kept_of(self, parameter: nn.Parameter) -> Mapping[str, Any]:
        """Return the optimizer's state for a parameter; its values may be None if another rank steps the parameter."""
        return next((one.state[parameter] for one in self._optimizers if one.state.get(parameter)), {})

    def find_diverged_parameters(self) -> tuple[str, ...]:
        """Return the parameters that differ from the optimizer's copies by more than an ulp.

        A port may round a copy either way. A quantized parameter is judged by the error of all its elements together.
        """
        found = []
        for name, one in self._module.named_parameters():
            master = self._find_master_copy(self.stepped[name])
            copy = master[1] if master else self.stepped[name]
            if copy is one:
                continue
            if state.is_quantized(one):
                if state.over_quantization(one, copy.detach().double()) > _QUANTIZED_TWICE:
                    found.append(name)
                continue
            step = max(one.numel() // FOLLOWED, 1) | 1
            if not is_rounded(*(gather_whole(x.detach()).reshape(-1)[::step] for x in (one, copy))):
                found.append(name)
        return tuple(found)

    def read_state_dtypes(self) -> dict[str, torch.dtype]:
        """Return the dtypes of the optimizer's elementwise state, by the state's name in the optimizer."""
        return {
            key: emulation.fp8_dtype(value) if emulation.is_float8_tensor(value) else value.dtype
            for parameter in self.stepped.values()
            for key, value in self.kept_of(parameter).items()
            if isinstance(value, Tensor) and value.dim() and value.dtype is not torch.int16  # bits of master weights
        }

    @property
    def settings(self) -> dict[str, dict[str, Any]]:
        """Return the optimizer's settings for each parameter, by its name in the reference."""
        groups: dict[int, dict[str, Any]] = {}
        for group in (group for one in reversed(self._optimizers) for group in one.param_groups):
            groups |= {id(one): {**groups.get(id(one), {}), **group} for one in group["params"]}
        found = {}
        for left, right in self._weights.items():
            own = next((self.stepped[name] for name in names(right) if name in self.stepped), None)
            for name in names(left):
                group = groups.get(id(own), {})
                found[name] = {key: x for key, x in group.items() if isinstance(x, (bool, int, float, tuple))}
        return found

    @property
    def rates(self) -> dict[str, float]:
        """Return the learning rate of each parameter, by its name in the reference."""
        return rates(self.settings)

    def moments(self) -> dict[str, Named]:
        """Return the optimizer's moments, by the name of the moment and of the parameter; 0 for one without state."""
        found: dict[str, Named] = {}
        for name, parameter in self.stepped.items():
            master = self._find_master_copy(parameter)
            for key, value in self.kept_of(parameter).items():
                if master and key == master[0]:
                    continue
                if isinstance(value, Tensor) and value.numel() == parameter.numel():
                    found.setdefault(key, {})[name] = self._unscale_state(parameter, key, value)
        nothing = {name: torch.zeros_like(one) for name, one in self._module.named_parameters()}
        return {key: nothing | some for key, some in found.items()}

    def _find_master_copy(self, parameter: nn.Parameter) -> tuple[str, Tensor] | None:
        """Return the wider copy of a parameter in the optimizer's state, with its name there, or None if there is none.

        TE's FusedAdam calls it ``master_param``, and may keep only the bits that BF16 leaves out. The copy of another
        optimizer is recognised by its values, which round to the parameter's.
        """
        kept = self.kept_of(parameter)
        own = kept.get("master_param")
        if isinstance(own, Tensor):
            if own.dtype is torch.int16:  # ``AdamFunctorMasterParamRemainder`` in ``multi_tensor/adam.cu`` of TE 2.20.2
                upper = parameter.detach().view(torch.int16).int() << 16
                return "master_param", (upper + own.reshape(parameter.shape).int()).view(torch.float32)
            return "master_param", self._unscale_state(parameter, "master_param", own)
        if state.is_quantized(parameter) or parameter.dtype.itemsize >= 4:
            return None
        for key, value in kept.items():
            is_wider = isinstance(value, Tensor) and value.dtype in (torch.float32, torch.float64)
            if is_wider and value.shape == parameter.shape and torch.equal(value.to(parameter.dtype), parameter):
                return key, value
        return None

    def _unscale_state(self, parameter: nn.Parameter, key: str, value: Tensor) -> Tensor:
        owner = next((one for one in self._optimizers if one.state.get(parameter)), self._optimizers[0])
        read = getattr(owner, "get_unscaled_state", None)  # TE's FusedAdam may hold it in FP8
        own = (read(parameter, key) if read else value).detach()
        return _divided_as(parameter, own).reshape(parameter.shape).double()


def rates(settings: Mapping[str, Mapping[str, Any]]) -> dict[str, float]:
    """Return the learning rates among an optimizer's settings for each parameter."""
    return {name: float(some["lr"]) for name, some in settings.items() if "lr" in some}


def is_rounded(held: Tensor, right: Tensor) -> bool:
    """Return whether ``held`` is ``right`` rounded to the dtype of ``held`` in either direction, so to an ulp."""
    numbers = torch.finfo(held.dtype)
    ulp = numbers.eps * right.double().abs().clamp(min=numbers.smallest_normal)  # below that, the spacing is constant
    return bool(((held.double() - right.double()).abs() <= ulp).all())


def _with_inner(optimizer: Optimizer, known: tuple[Optimizer, ...] = ()) -> Iterator[Optimizer]:
    """Yield an optimizer and the optimizers that it wraps; ``known`` are those that wrap it."""
    yield optimizer
    for value in vars(optimizer).values():
        for one in value if isinstance(value, (list, tuple)) else [value]:
            if isinstance(one, Optimizer) and not any(one is other for other in (*known, optimizer)):
                yield from _with_inner(one, (*known, optimizer))


@contextmanager
def standing_still(optimizer: Optimizer) -> Iterator[None]:
    """Keep the optimizer from making steps within the context, and restore its settings afterwards."""
    own, attributes = [dict(group) for group in optimizer.param_groups], vars(optimizer)
    step = attributes.get("step")  # a schedule sets this attribute of the instance
    attributes["step"] = lambda closure=None, *_, **__: closure() if closure is not None else None
    try:
        yield
    finally:
        del attributes["step"]
        if step is not None:
            attributes["step"] = step
        for group, before in zip(optimizer.param_groups, own, strict=True):
            group.update(before)


def _find_stepped_tensors(module: nn.Module, optimizer: Optimizer) -> dict[str, nn.Parameter]:
    """Return the tensor that the optimizer steps for each of the module's parameters: itself, or a port's FP32 copy.

    A copy is recognised by its shape and values. A parameter that the optimizer does not step stands for itself.
    """
    parameters = dict(module.named_parameters())
    own = {id(one) for one in parameters.values()}
    copies = [one for group in optimizer.param_groups for one in group["params"] if id(one) not in own]
    found = {}
    for name, one in parameters.items():
        alike = (x for x in copies if x.shape == one.shape and torch.equal(x.detach().to(one.dtype), one.detach()))
        found[name] = next(alike, one) if copies else one
        copies = [x for x in copies if x is not found[name]]
    return found


def _divided_as(parameter: Any, value: Tensor) -> Tensor:
    """Return a state of TE's FusedAdam divided like its parameter, if FSDP divides that and the state is one part."""
    if not hasattr(parameter, "to_local") or hasattr(value, "to_local"):
        return value
    from torch.distributed.tensor import DTensor

    own, how = value.reshape(parameter.to_local().shape), (parameter.device_mesh, parameter.placements)
    return DTensor.from_local(own, *how, shape=parameter.shape, stride=parameter.stride())


def gather_whole(x: Any) -> Tensor:
    """Return the whole of a tensor that FSDP divides, or any other tensor unchanged. Every rank must call this."""
    whole: Tensor = x.full_tensor() if hasattr(x, "full_tensor") else x
    return whole


def held_by(module: nn.Module) -> Named:
    """Return the weights that the module computes with, in FP64; quantized ones are dequantized to FP32 first."""
    held = {name: one.detach() for name, one in module.named_parameters()}
    return {name: state.dequantized_tensor(x, torch.float32).double() for name, x in held.items()}


def steps_elements(reference: nn.Module, make: MakeOptimizer) -> bool:
    """Return whether an optimizer steps each element of a parameter independently, as Adam does.

    Muon, Adafactor, LAMB and the like step whole matrices. To find out, this steps a copy of the reference whose
    parameters have at most 8 elements along each dimension, and another in which every second element of each parameter
    forms a vector.
    """
    small = {
        id(one): nn.Parameter(Rng(0, name).normal(*(min(size, 8) for size in one.shape)).double(), one.requires_grad)
        for name, one in reference.named_parameters()
    }
    whole = copy.deepcopy(reference, dict(small))
    some = copy.deepcopy(whole)
    try:
        optimizers = make(whole), make(some)
        for step in range(3):
            for (name, one), other in zip(whole.named_parameters(), some.parameters(), strict=True):
                if one.requires_grad:
                    one.grad = Rng(step, name).normal(*one.shape).double()
                    other.grad = None  # because it still has the parameter's old shape
                    other.data = one.detach().reshape(-1)[::2].clone()
                    other.grad = one.grad.reshape(-1)[::2].clone()
            for optimizer in optimizers:
                optimizer.step()
            for one, other in zip(whole.parameters(), some.parameters(), strict=True):
                if one.requires_grad and not torch.allclose(one.detach().reshape(-1)[::2], other.detach(), 1e-9, 1e-12):
                    return False
    except Exception:  # the optimizer may need the parameter's old shape, or accept only matrices
        return False
    return True


def followed_places(name: str, shape: tuple[int, ...], all_of_them: bool = False) -> Tensor:
    """Return the indices, in the parameter as a vector, of the elements by which the optimizer's steps are judged."""
    count = torch.Size(shape).numel()
    if count <= FOLLOWED or all_of_them:
        return torch.arange(count)
    return Rng(0, f"elements of {name}").integers(FOLLOWED, high=count)
