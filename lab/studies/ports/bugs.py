"""Mistakes to plant in the text of a port: each is what somebody could write instead, wherever it fits."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Bug:
    """A mistake.

    Attributes:
        name: what is wrong.
        pattern: what it replaces, as a regular expression over lines.
        wrong: what it writes there.
        titles: the titles of findings that name it.
    """

    name: str
    pattern: str
    wrong: str | Callable[[re.Match[str]], str]
    titles: tuple[str, ...]

    def plant(self, text: str) -> str:
        """Return the port with the mistake; the same text if it fits nowhere."""
        return re.sub(self.pattern, self.wrong, text, flags=re.MULTILINE)


def _exchange_key_and_value(found: re.Match[str]) -> str:
    return f'"attention.qkv.{"value" if found[1] == "key" else "key"}_'


def _exchange_activation(found: re.Match[str]) -> str:
    gated = found[1].endswith("glu")
    return f'activation="{"reglu" if gated else "relu"}"'


BUGS = (
    Bug("gate and up exchanged", r'stack\("(\S+gate\S+)", "(\S+up\S+)"\)', r'stack("\2", "\1")', ("gate-up-swapped",)),
    Bug(
        "keys and values exchanged",
        r'"attention\.qkv\.(key|value)_',
        _exchange_key_and_value,
        ("key-value-swapped", "parameters-exchanged", "qkv-layout"),
    ),
    Bug("an eps of 1e-3", r"\beps=[^,)]+", "eps=1e-3", ("norm-eps",)),
    Bug("another activation", r'activation="(\w+)"', _exchange_activation, ("activation",)),
    Bug("GELU by tanh", r"F\.gelu\((self\.fc1\(x\)|gate)\)", r'F.gelu(\1, approximate="tanh")', ("activation",)),
    Bug("a window one token longer", r"(config\.sliding_window)( - 1)?,", r"\1\2 + 1,", ("window",)),
    Bug(
        "another base of the rotation",
        r"base = .*\[\"rope_theta\"\]$",
        "base = 500.0",
        ("rope-base",),
    ),
    Bug("other channels rotated", r"interleaved=(True|False)", r"interleaved=not \1", ("rope-layout",)),
    Bug("no residual around the MLP", r"return x \+ (self\.mlp)", r"return \1", ("residual-placement",)),
    Bug(
        "a scale of scores of 0.2",
        r'(qkv_format="bshd",)$(?!(?:\n.*){1,6}softmax_scale)|softmax_scale=.*,$',
        r"\1 softmax_scale=0.2,",
        ("softmax-scale",),
    ),
    Bug("gains that are not zero-centered", r"zero_centered_gamma=True", "zero_centered_gamma=False", ("gamma-shift",)),
    Bug("every token seen", r'"(padding_)?causal"', '"no_mask"', ("mask",)),
    Bug("experts' weights that do not add up to 1", r"^ +weights = weights / .*\n", "", ("routing-weights",)),
    Bug("no cap of logits", r"torch\.tanh\(logits / cap\) \* cap", "logits", ("softcap",)),
)
