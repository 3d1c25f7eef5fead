"""Judge the formats that a candidate's modules were seen to compute in by those that the pair asks for."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from parity.case.formats import asked_format
from parity.mistakes.codes import repairable
from parity.numerics.formats import UNQUANTIZED, Role, Rounding, describe_format
from parity.result import OR, Finding, ModuleFormats
from parity.shown import few_of
from parity.te import Precision, precision_named

_MOST_TOLD = 4  # names in a message


@dataclass(frozen=True)
class _Unlike:
    """An operand with the format that it had and the one that it should have, in words."""

    operand: str
    seen: str
    asked: str


def findings_of_formats(
    seen: Sequence[ModuleFormats],
    formats: Mapping[str, str],
    precision: Precision,
    roles: Mapping[str, Collection[Role]] = MappingProxyType({}),
) -> tuple[Finding, ...]:
    """Return a finding if modules had other formats than they should.

    Args:
        seen: what each module computed in.
        formats: what the pair asks for; modules that it does not name should have the precision's own formats.
        precision: one with a recipe.
        roles: by module, the roles under which it asks a recipe for quantizers, as a recipe may tell these apart.
    """
    unlike: dict[tuple[str, tuple[_Unlike, ...]], list[str]] = defaultdict(list)
    for row in seen:
        for module in row.modules:
            asked = asked_format(formats, module)
            differing = tuple(
                _list_differing(row.operands, precision_named(asked) if asked else precision, roles.get(module))
            )
            if differing:
                by_default = f"as {precision.name} has it{' where formats says nothing' if formats else ''}"
                source = f"as formats asks ({asked})" if asked else by_default
                unlike[source, differing].append(module)
    if not unlike:
        return ()
    evidence = "; ".join(_describe_unlike(modules, *key) for key, modules in unlike.items())
    first = [differing[0] for _, differing in unlike]
    repairs = []
    if any(one.asked in UNQUANTIZED for one in first):
        repairs.append("call what should stay in 16 bits within te.autocast(enabled=False)")
    if any(one.asked not in UNQUANTIZED for one in first):
        repairs.append("call what should be quantized within te.autocast with the recipe that is asked for")
    return (repairable("other-format", evidence, ", and ".join(repairs)),)


def describe_mixed(
    seen: Sequence[ModuleFormats],
    formats: Mapping[str, str],
    precision: Precision,
    roles: Mapping[str, Collection[Role]] = MappingProxyType({}),
) -> str:
    """Say which modules quantized nothing though the recipe does and others did; empty if none, or there is a plan.

    The arguments are those of ``findings_of_formats``.
    """
    quantizing = [row for row in seen if not UNQUANTIZED.issuperset(row.operands.values())]
    plain = [
        module
        for row in seen
        if row not in quantizing
        for module in row.modules
        if any(_list_differing(row.operands, precision, roles.get(module)))
    ]
    if formats or not plain or not quantizing:
        return ""
    example = f'formats={{"{plain[0] or "*"}": "bf16"}}'
    return (
        f"{_name_modules(plain)} computed without quantization, and others with it (PAR308 recipe-disabled); if "
        f"{precision.name} is meant to spare them, say so: {example} in the pair makes any other format a failure"
    )


def _list_differing(operands: Mapping[str, str], asked: Precision, roles: Collection[Role] | None) -> Iterator[_Unlike]:
    """Yield each operand that has another format than the precision has in a module of these roles."""
    rounding = asked.rounding
    of_roles = [rounding.by_role(role) for role in roles or ()] if rounding.by_role else []
    each_asked = [_describe_operands(one) for one in of_roles or [rounding]]
    for operand, words in operands.items():
        wanted = {one[operand]: None for one in each_asked}
        right = {*wanted, *(UNQUANTIZED if UNQUANTIZED & wanted.keys() else ())}
        if not right.issuperset(words.split(OR)):
            yield _Unlike(operand, words, OR.join(wanted))


def _describe_operands(rounding: Rounding) -> dict[str, str]:
    """Return the format in words of each operand, by the names that ``ModuleFormats`` has for them."""
    formats = {
        "fprop weight": rounding.operand_format("weights"),
        "fprop input": rounding.operand_format("inputs"),
        "dgrad weight": rounding.operand_format("weights", columnwise=True),
        "dgrad gradient": rounding.operand_format("gradients"),
        "wgrad input": rounding.operand_format("inputs", columnwise=True),
        "wgrad gradient": rounding.operand_format("gradients", columnwise=True),
    }
    formats |= {f"attention {part}": to_format for part, to_format in vars(rounding.attention).items()}
    return {operand: describe_format(to_format, rounding.storage) for operand, to_format in formats.items()}


def _describe_unlike(modules: Sequence[str], source: str, differing: Sequence[_Unlike]) -> str:
    first, *others = differing
    more = f"; the same modules differ in {few_of([one.operand for one in others], 6)}" if others else ""
    where = f"in {_name_modules(modules)} the {first.operand} is in {first.seen!r}"
    return f"{where} and not in {first.asked!r}, {source}{more}"


def _name_modules(modules: Sequence[str]) -> str:
    return few_of([module or "the candidate" for module in modules], _MOST_TOLD)
