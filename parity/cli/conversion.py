"""Convert a checkpoint file by a pair's weight map."""

from __future__ import annotations

import ast
import os
import re
import shutil
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import cast, get_args

import torch

from parity.case import registry
from parity.case.case import Case, Size
from parity.machine import files
from parity.plugin.options import check_file, parse_backend
from parity.report.numbers import plural
from parity.shown import few_of
from parity.user_error import UserError
from parity.weights.conversion import checkpoint
from parity.weights.conversion.conversion import Direction, planned_conversion
from parity.weights.conversion.manifest import Record
from parity.weights.conversion.plan import Plan

FORMATS = ("safetensors", "dcp")
DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def convert(
    target: str,
    source: Path,
    destination: Path,
    to: str,
    dtype: str,
    size: str,
    prefix: Sequence[str],
    te_prefix: Sequence[str],
    ignore: Sequence[str],
    within: str,
    shard_size: str,
    form: str,
    checksums: bool,
    backend: str,
) -> str:
    """Convert one checkpoint, and return the text to print about it.

    Args:
        target: ``my_pairs.py::my_model``, or only the file if it declares one pair.
        source: a path that ``checkpoint.read`` can read.
        destination: a safetensors file or, with ``shard_size`` or as ``dcp``, a folder.
        to: ``te`` or ``reference``.
        dtype: a key of ``DTYPES``; empty for the dtypes of the source.
        size: see ``parse_size``.
        prefix, te_prefix, ignore: as for ``parity.convert``.
        within: the entry that holds the model, see ``checkpoint.read``; empty for all of the source.
        shard_size: the largest size of a file, such as ``5GB``; empty for a single file.
        form: ``safetensors``, or ``dcp`` for a folder of ``torch.distributed.checkpoint``.
        checksums: whether the manifest has checksums, and the source is checked by those that its own has.
        backend: ``auto``, ``gpu`` or ``cpu``.

    Raises:
        UserError: if an argument is not as above, or the checkpoint cannot be converted. Nothing is written then.
    """
    sources = [source, *checkpoint.files_of(source)]
    beside = checkpoint.files_beside(source)
    largest = _parse_shard_size(shard_size)
    if form not in FORMATS:
        raise UserError(f"--format is {form!r}, but must be one of {', '.join(FORMATS)}")
    in_folder = largest is not None or form == "dcp"
    if largest is not None and form == "dcp":
        raise UserError("--shard-size is for safetensors; torch.distributed.checkpoint divides files by itself")
    if not in_folder:
        if destination.suffix != checkpoint.SAFETENSORS:
            raise UserError(
                f"{destination} should end in {checkpoint.SAFETENSORS}, the format that is written; "
                "for a folder with several files and an index, add --shard-size 5GB, and for one of "
                "torch.distributed.checkpoint --format dcp"
            )
        check_file(destination, "DST")
    elif destination.suffix == checkpoint.SAFETENSORS:
        option = "--format dcp" if largest is None else "--shard-size"
        raise UserError(f"with {option}, DST is a folder for the files and their index, not {destination}")
    if destination.exists() and any(os.path.exists(file) and destination.samefile(file) for file in sources):
        raise UserError(f"{destination} would replace its source; name another file")
    if to not in get_args(Direction):
        raise UserError(f"--to is {to!r}, but must be te or reference")
    if dtype and dtype not in DTYPES:
        raise UserError(f"--dtype is {dtype!r}, but must be one of {', '.join(DTYPES)}")
    case = registry.only(target)
    old = checkpoint.read(source, within)
    plan = planned_conversion(
        case,
        old,
        cast(Direction, to),
        parse_size(case, size),
        DTYPES.get(dtype),
        prefix,
        te_prefix,
        ignore,
        copy=False,  # tensors need not be copied before they are written
        backend=parse_backend(backend),
        saved=True,
    )
    told = dict(pair=target, to=to, dtype=dtype, size=size, prefix=[*prefix], te_prefix=[*te_prefix], ignore=[*ignore])
    record = Record({**told, "within": within, "source": str(source)}, sources[1:], checksums)
    folder = destination if in_folder else destination.parent
    is_new = not folder.exists() or not any(folder.iterdir())
    with files.ending_by_signals(), checkpoint.told_if_unwritten(folder):
        if form == "dcp":
            where, written = str(destination), checkpoint.write_folder(destination, plan, record, beside)
        elif largest is not None:
            written = checkpoint.write_shards(destination, plan, largest, record, beside)
            where = f"{destination}: {plural(len(written), 'file')} and their index"
        else:
            where, written = str(destination), [checkpoint.write(destination, plan, record)]
            for file in beside if is_new else ():
                shutil.copyfile(file, folder / file.name)
    copied = "copied" if is_new else f"not copied, as {folder.absolute()} is not a new folder"
    lines = _describe_conversion(where, plan, sum(written), copied, beside)
    continued = [f"continued: {plural(len(record.continued), 'file')} had been written"] if record.continued else []
    return "\n".join([*lines, *continued])


_SHARD = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(i?)B", re.IGNORECASE)


def _parse_shard_size(text: str) -> int | None:
    """Return the number of bytes in a text such as ``5GB`` or, in powers of 1,024, ``500MiB``; None for an empty text.

    Raises:
        UserError: if the text is neither, or means less than a byte.
    """
    if not text:
        return None
    found = _SHARD.fullmatch(text.strip())
    size = 0
    if found is not None:
        size = int(float(found[1]) * (1024 if found[3] else 1000) ** " KMGT".index(found[2].upper() or " "))
    if size < 1:
        raise UserError(f"--shard-size is {text!r}, but must be such as 5GB or 500MiB")
    return size


def _describe_conversion(where: str, plan: Plan, written: int, copied: str, beside: Sequence[Path]) -> list[str]:
    """Return sentences about what was written, left out and lost, and the files beside the source."""
    made = [one for step in plan.steps for one in step.made]
    dtypes = Counter(str(one.dtype).removeprefix("torch.") for one in made)
    kinds = ", ".join(f"{count} {name}" for name, count in dtypes.most_common())
    lines = [f"{where}: {plural(len(made), 'tensor')} ({kinds}), {written:,} bytes"]
    for reason in dict.fromkeys(plan.left_out.values()):
        lines.append(f"left out, {reason}: {few_of([key for key, why in plan.left_out.items() if why == reason])}")
    rounded = {key: error for key, error in plan.rounded.items() if error > 0}
    if rounded:
        keys = sorted(rounded, key=rounded.__getitem__, reverse=True)
        lines.append(
            f"rounded, as the map adds a number, so that there and back is not exact: {plural(len(keys), 'tensor')}, "
            f"at most by {rounded[keys[0]]:.2g}, in {few_of(keys)}"
        )
    if beside:
        lines.append(f"{copied}: {', '.join(file.name for file in beside)}")
    return lines


def parse_size(case: Case, text: str) -> Size | None:
    """Read a size such as ``hidden=4096,heads=32``, or the number, from 0, of one of the case's sizes.

    Returns:
        The arguments for the case's factories, those that the text leaves out as in the case's first size; None for an
        empty text.

    Raises:
        UserError: if the text is neither.
    """
    if not text:
        return None
    if text.isdecimal():
        return registry.size_of(case, int(text))
    found = dict(case.sizes[0])
    for part in text.split(","):
        name, _, value = part.partition("=")
        try:
            found[name.strip()] = ast.literal_eval(value.strip())
        except (ValueError, SyntaxError):
            raise UserError(
                f"--size is {text!r}, but must be such as hidden=4096,heads=32, or the number of one of its sizes"
            ) from None
    return found
