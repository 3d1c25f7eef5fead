"""Names of a module that look as if a weight map could use them, but are no parameters' own: what to say of each."""

from __future__ import annotations

from torch import nn


def other_names(module: nn.Module) -> dict[str, str]:
    """What a name means that ``module.named_parameters()`` does not give, by the name.

    Such are the further names of tied parameters, of which PyTorch gives the first, and buffers.
    """
    first = {id(parameter): name for name, parameter in module.named_parameters()}
    every = module.named_parameters(remove_duplicate=False)
    tied = {
        name: f'it is tied to "{first[id(parameter)]}"; map that'
        for name, parameter in every
        if name != first[id(parameter)]
    }
    buffers = {
        name: "it is a buffer, and buffers are not mapped; give both modules the same in the factory"
        for name, _ in module.named_buffers(remove_duplicate=False)
    }
    return buffers | tied
