"""Mixtures of experts whose tokens are weighed or sent otherwise."""

from __future__ import annotations

import dataclasses
from types import ModuleType

import torch
from torch import Tensor, nn

from parity.case.case import Pair
from parity.lab.zoo.hosts.mixture import Route, TEMixture, route, weights_in
from parity.lab.zoo.planting import Bug, Plant, constructed_with, edited

MIXTURE = ("mixture",)


def _weighed(weights_of: Route) -> Plant:
    def edit(module: nn.Module) -> None:
        assert isinstance(module, TEMixture)
        module.weights_of = weights_of

    return edited(edit)


def _not_divided(logits: Tensor, chosen: int) -> tuple[Tensor, Tensor]:
    shares, experts = logits.softmax(dim=-1).topk(chosen, dim=-1)
    return shares, experts


def _sigmoids(logits: Tensor, chosen: int) -> tuple[Tensor, Tensor]:
    shares, experts = logits.sigmoid().topk(chosen, dim=-1)
    return shares / shares.sum(dim=-1, keepdim=True), experts


def _all_ones(logits: Tensor, chosen: int) -> tuple[Tensor, Tensor]:
    shares, experts = route(logits, chosen)
    return torch.ones_like(shares), experts


def _experts_reversed(pair: Pair, te: ModuleType) -> Pair:
    assert isinstance(pair.candidate, TEMixture)
    return dataclasses.replace(pair, weights=weights_in(reversed(range(pair.candidate.experts))))


BUGS = (
    Bug(
        "routing-weights-not-divided",
        "The chosen experts' weights are not divided by their sum.",
        MIXTURE,
        _weighed(_not_divided),
        "routing-weights",
    ),
    Bug(
        "routing-weights-by-sigmoid",
        "The router's scores are sigmoids, as in DeepSeek-V3, where the reference's are a softmax.",
        MIXTURE,
        _weighed(_sigmoids),
        "routing-weights",
    ),
    Bug(
        "routing-weights-missing",
        "The experts' results are summed as they are; the router gets no gradient.",
        MIXTURE,
        _weighed(_all_ones),
        "routing-weights",
    ),
    Bug(
        "one-expert-too-few",
        "Each token goes to its first expert alone.",
        MIXTURE,
        constructed_with(chosen=1),
        "top-k",
    ),
    Bug(
        "experts-reversed",
        "The experts' weights are in the reverse order of the router's rows.",
        MIXTURE,
        _experts_reversed,
        "experts-permuted",
    ),
)
