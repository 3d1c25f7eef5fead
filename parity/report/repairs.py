"""Read a finding's repair as a change of lines: what to write, and what stands there now."""

from __future__ import annotations

import re
from dataclasses import dataclass

# A keyword and its value, as in code.
_ARGUMENT = re.compile(
    r"(?<![\w.])([A-Za-z_]\w*)=(\"[^\"]*\"|'[^']*'|\([^()]*\)|-?\d[\d.]*(?:e[+-]?\d+)?|[A-Za-z_][\w.]*)"
)
# What ``parity.mistakes.weight_maps`` says of an entry, and ``norms`` of a number that is the reference's own.
_ENTRY = re.compile(r"map (?P<left>.+) to (?P<right>.+?), in place of (?P<wrong>[^;]+)")
_NUMBER = r"\b{name}, (?P<value>-?\d[\d.]*(?:e[+-]?\d+)?)"
_CALL = re.compile(r"(?<![\w.])([a-z_]+)\(")  # parity's functions are told without their module
_NAME = re.compile(r"\"[^\"]*\"")


@dataclass(frozen=True)
class Repair:
    """Say what to change in the user's code.

    Attributes:
        sentence: in words.
        now: lines of code as they are; there may be none, since a default is not written.
        then: lines of code as they should be; none where the words name none.
    """

    sentence: str
    now: tuple[str, ...] = ()
    then: tuple[str, ...] = ()

    @property
    def to_copy(self) -> str:
        """Return the lines as they should be, or else the sentence."""
        return "\n".join(self.then) or self.sentence


def repair(sentence: str) -> Repair:
    """Return what a repair's sentence tells, such as ``pass normalization="RMSNorm"; TE subtracts the mean``."""
    entry = _ENTRY.search(sentence)
    if entry is not None:
        left, right, wrong = (_CALL.sub(r"parity.\1(", entry[part]) for part in ("left", "right", "wrong"))
        is_left = bool(set(_NAME.findall(wrong)) & set(_NAME.findall(left)))
        now = f"{wrong}: {right}," if is_left else f"{left}: {wrong},"
        return Repair(sentence, (now,), (f"{left}: {right},",))
    to_do, _, known = sentence.partition("; ")
    now_by_name = dict(_ARGUMENT.findall(known))
    then_by_name = dict(_ARGUMENT.findall(to_do))
    for name in now_by_name.keys() - then_by_name.keys():
        number = re.search(_NUMBER.format(name=re.escape(name)), to_do)
        if number is not None:
            then_by_name[name] = number["value"]
    return Repair(
        sentence,
        tuple(f"{name}={value}" for name, value in now_by_name.items() if name in then_by_name),
        tuple(f"{name}={value}" for name, value in then_by_name.items()),
    )
