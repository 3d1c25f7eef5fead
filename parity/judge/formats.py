"""Judge the formats that a candidate's modules were seen to compute in by those that the pair asks for."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

from parity.case.formats import asked_format
from parity.mistakes.codes import repairable
from parity.numerics.formats import UNQUANTIZED, Rounding, describe_format
from parity.result import Code, Finding, ModuleFormats
from parity.shown import few_of
from parity.te import PRECISIONS, Precision

_MOST_TOLD = 4  # names in a message


def findings_of_formats(
    seen: Sequence[ModuleFormats], formats: Mapping[str, str], precision: Precision
) -> tuple[Finding, ...]:
    """Return a finding for each way in which modules had other formats than they should.

    Args:
        seen: what each module computed in.
        formats: what the pair asks for; modules that it does not name should have the precision's own formats. If it
            is empty, the pair asks for nothing.
        precision: one with a recipe.
    """
    unlike: dict[tuple[str | None, tuple[tuple[str, str, str], ...]], list[str]] = defaultdict(list)
    for row in seen if formats else ():
        for module in row.modules:
            asked = asked_format(formats, module)
            differing = tuple(_list_differing(row.operands, PRECISIONS.get(asked or "", precision)))
            if differing:
                unlike[asked, differing].append(module)
    return tuple(_describe_unlike(modules, *key, precision) for key, modules in unlike.items())


def describe_mixed(seen: Sequence[ModuleFormats], formats: Mapping[str, str], precision: Precision) -> str:
    """Say which modules quantized no GEMM's operand although others did, if the pair has no plan; empty if none."""
    plain, others = [], False
    for row in seen:
        of_gemms = {words for operand, words in row.operands.items() if not operand.startswith("attention")}
        if of_gemms and of_gemms <= UNQUANTIZED:
            plain += row.modules
        others |= not of_gemms <= UNQUANTIZED
    if formats or not plain or not others:
        return ""
    return (
        f"{_name_modules(plain)} computed without quantization, and others with it; if {precision.name} is meant to "
        f'spare them, say so: formats={{"{plain[0]}": "bf16"}} in the pair makes any other format a failure'
    )


def _list_differing(operands: Mapping[str, str], asked: Precision) -> Iterator[tuple[str, str, str]]:
    """Yield each operand whose format differs from the one asked for, with both formats."""
    wanted = _describe_operands(asked.rounding)
    for operand, words in operands.items():
        is_alike = words == wanted[operand] or (words in UNQUANTIZED and wanted[operand] in UNQUANTIZED)
        if not is_alike:
            yield operand, words, wanted[operand]


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


def _describe_unlike(
    modules: Sequence[str], asked: str | None, differing: Sequence[tuple[str, str, str]], precision: Precision
) -> Finding:
    name, (operand, words, wanted) = asked or precision.name, differing[0]
    others = few_of([each for each, _, _ in differing[1:]], 6)
    source = f"formats asks for {name}" if asked else f"formats does not name it, and the precision is {name}"
    evidence = (
        f"in {_name_modules(modules)} the {operand} is in {words} and not in {wanted}, although {source}"
        f"{f'; {others} differ as well' if others else ''}"
    )
    code = Code(then=("with te.autocast(enabled=False):",))
    if wanted in UNQUANTIZED:
        return repairable("other-format", evidence, "call it within te.autocast(enabled=False)", code)
    if words in UNQUANTIZED:
        repair = f"call it within te.autocast with the recipe of {name}, and outside of te.autocast(enabled=False)"
    else:
        repair = f"enter te.autocast with the recipe of {name} around it, and around te.quantized_model_init as well"
    return repairable("other-format", evidence, repair)


def _name_modules(modules: Sequence[str]) -> str:
    return few_of([module or "the candidate" for module in modules], _MOST_TOLD)
