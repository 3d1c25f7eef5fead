"""Read what other tools dump of a training, and judge TE's linear layers by it: their GEMMs and their quantizers.

TE's ``DumpTensors`` (``debug/features/dump_tensors.py`` of TE 2.20.2) writes a file for each tensor of a linear layer,
``tensor_dumps/rank_0/iter_000001/LAYER_activation.pt``, which holds the tensor before and after quantization. Neither
biases nor norms' weights nor the model's arguments are in it, so no reference could compute the same; but each GEMM can
be computed again from its operands. ``debug/pytorch/debug_quantization.py`` says which operands each GEMM reads.

SGLang's dumper (``python/sglang/srt/debug_utils/dumper.py``, as of 00d3554) writes whatever a model's code gives it,
``step=0___rank=0___dump_index=1___name=x.pt``; such dumps can only be compared.
"""

from __future__ import annotations

import pickle
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from parity.numerics.formats import OperandPart, Rounding
from parity.stages.judge import Judged, Stage, least_of, measure_error
from parity.te import PRECISIONS, precision_named
from parity.user_error import UserError

# The operands of each GEMM, by the name of its result, and the dimension of each that is summed over.
_GEMMS = {
    "output": (("activation", 1), ("weight", 1)),
    "dgrad": (("gradient", 1), ("weight", 0)),
    "wgrad": (("gradient", 0), ("activation", 0)),
}
_PARTS: dict[str, OperandPart] = {"activation": "inputs", "weight": "weights", "gradient": "gradients"}
_NAMES = ("activation", "weight", "output", "gradient", "dgrad", "wgrad")  # in the order in which TE computes them
_PRECISIONS = {
    "Float8Tensor": "fp8_current",  # delayed scaling rounds to the same formats
    "Float8BlockwiseQTensor": "fp8_block",
    "MXFP8Tensor": "mxfp8",
    "NVFP4Tensor": "nvfp4",
}


@dataclass(frozen=True)
class DumpedFile:
    """A file that another tool has written.

    Attributes:
        path: where it is.
        step, rank: of the training.
        layer: TE's layer, as it is written in the file's name; or the name and tags that SGLang's dumper was given.
        name: what it is of TE's layer, such as ``activation``; empty for SGLang's.
        order: files of the step with a smaller one were written before.
    """

    path: Path
    step: int
    rank: int
    layer: str
    name: str
    order: tuple[int, int]

    @property
    def place(self) -> str:
        """The step and rank, in words."""
        return f"step {self.step} on rank {self.rank}"

    @property
    def is_backward(self) -> bool:
        """Whether it is a gradient."""
        return self.name in _NAMES[3:] or self.layer.startswith("grad__")

    def read(self, device: torch.device) -> dict[str, Tensor]:
        """Read its tensors, by what they are; empty if it holds no tensor.

        TE's classes have to be imported, since what TE has quantized is pickled as an object of TE's.

        Raises:
            UserError: if the file is damaged, or holds something else.
        """
        try:
            held = torch.load(self.path, map_location=device, weights_only=True)
        except (RuntimeError, OSError, EOFError, pickle.UnpicklingError) as error:
            reason = str(error).split("\n", 1)[0]
            raise UserError(f"{self.path} is damaged, or holds more than tensors and numbers: {reason}") from error
        if not self.name:
            value = held["value"] if isinstance(held, dict) else held
            return {"value": value.detach()} if isinstance(value, Tensor) else {}
        if not isinstance(held, dict) or not held or held.keys() - {"high_precision", "quantized"}:
            raise UserError(
                f"{self.path} does not hold what TE 2.20's DumpTensors writes: a dictionary with high_precision, "
                "quantized, or both"
            )
        return {kind: x.detach() for kind, x in held.items()}

    def read_values(self, device: torch.device) -> dict[str, Tensor]:
        """Read its tensors, with quantized ones as the values that they stand for."""
        return {kind: x if type(x) is Tensor else x.dequantize() for kind, x in self.read(device).items()}


def find_files(folder: Path) -> list[DumpedFile]:
    """Return the files of another tool's dump, step by step, as they were written; none if it is no dump.

    Raises:
        UserError: if a file has a name that the tool does not give.
    """
    root = folder / "tensor_dumps" if (folder / "tensor_dumps").is_dir() else folder
    found = [_parse_te_path(path) for path in root.glob("rank_*/iter_*/*")]
    found += [_parse_sglang_path(path) for path in folder.glob("*___*.pt")]
    return sorted(found, key=lambda one: (one.step, one.order, one.path))


def _parse_te_path(path: Path) -> DumpedFile:
    layer, _, name = path.stem.rpartition("_")
    step, rank = (int(one.name.rpartition("_")[2]) for one in (path.parent, path.parent.parent))
    if name not in _NAMES or path.suffix != ".pt":
        raise UserError(f"{path} is no file that TE 2.20's DumpTensors writes: LAYER_{'.pt, LAYER_'.join(_NAMES)}.pt")
    return DumpedFile(path, step, rank, layer, name, (path.stat().st_mtime_ns, _NAMES.index(name)))


def _parse_sglang_path(path: Path) -> DumpedFile:
    found = re.fullmatch(r"(?:step|forward_pass_id)=(\d+)___rank=(\d+)___dump_index=(\d+)___name=(.+)", path.stem)
    if found is None:
        raise UserError(f"{path} is no file that SGLang's dumper writes: step=0___rank=0___dump_index=1___name=x.pt")
    step, rank, order, name = found.groups()
    return DumpedFile(path, int(step), int(rank), name.replace("___", ", "), "", (int(order), 0))


# The verdict on TE's linear layers.


def judge_files(
    files: Iterable[DumpedFile], device: torch.device, precision: str = ""
) -> tuple[list[Judged], list[str]]:
    """Judge TE's linear layers, each in each step and on each rank by itself.

    Args:
        files: of a dump of TE's.
        device: where to compute.
        precision: a key of ``PRECISIONS``; empty for that of a layer's quantized tensors, or of its dtype.

    Returns:
        The results of GEMMs and what quantizers have made of operands, judged; and which GEMMs are not, and why.

    Raises:
        UserError: if nothing can be judged, or a file is damaged.
    """
    layers: dict[str, dict[str, DumpedFile]] = {}
    for one in files:
        layers.setdefault(f"{one.layer} in {one.place}", {})[one.name] = one
    found: list[Judged | str] = []
    for layer, own in layers.items():
        held = {name: file.read(device) for name, file in own.items()}
        at = precision_named(precision or _find_precision(held))
        layer += f" at {at.name}"
        found += _judge_layer(layer, held, at.rounding)
    judged = [one for one in found if isinstance(one, Judged)]
    if not judged:
        raise UserError(
            "nothing of this dump can be judged: a GEMM needs its result and both operands, and a quantizer an operand "
            "with high_precision_tensor and quantized_tensor"
        )
    return judged, [one for one in found if isinstance(one, str)]


def _find_precision(held: Mapping[str, Mapping[str, Tensor]]) -> str:
    """Return the precision in which a layer was computed, by its tensors' classes."""
    tensors = [x for one in held.values() for x in one.values()]
    found = [_PRECISIONS[type(x).__name__] for x in tensors if type(x).__name__ in _PRECISIONS]
    # The first precision of a dtype has no recipe.
    found += [one.name for one in PRECISIONS.values() if one.dtype == tensors[0].dtype]
    if not found:
        raise UserError(f"the dump holds tensors of {tensors[0].dtype}: name the precision to judge it by with -p")
    return found[0]


def _judge_layer(layer: str, held: Mapping[str, Mapping[str, Tensor]], rounding: Rounding) -> Iterator[Judged | str]:
    """Yield the errors of quantized operands and of GEMMs, or why one is not known.

    A bias that TE adds in the GEMM is not dumped, so whatever all rows have in common may be one.
    """
    for result, sides in _GEMMS.items():
        operands: list[tuple[Tensor, Tensor]] = []
        for name, dim in sides:
            known = {
                kind: _as_matrix(x, dim).double()
                for kind, x in held.get(name, {}).items()
                if type(x).__name__ != "NVFP4Tensor"  # some are rotated, so that TE itself cannot give their values
            }
            to_format = rounding.operand_format(_PARTS[name])
            high = known.get("high_precision")
            mine = known.get("quantized", high)
            if mine is None:
                continue
            model = mine if high is None or to_format is None else to_format(high.float()).double()
            operands.append((mine, model if mine is high else mine))
            if mine is not high and high is not None and type(held[name]["quantized"]) is not Tensor:
                stage = _name_stage(layer, f"quantized {name} for {result}")
                # With another scale than the model's, as delayed scaling has it, errors add up otherwise.
                yield replace(measure_error(stage, mine, high, [model], least_of(rounding)), gain=0.0)
        mine = held.get(result, {}).get("high_precision")
        if mine is None or len(operands) < 2:
            continue
        (left, left_model), (right, right_model) = operands
        mine = mine.flatten(0, -2)
        if left.shape[1] != right.shape[1] or mine.shape != (len(left), len(right)) or len(mine) == 1:
            yield (
                f"the {result} of {layer} is {tuple(mine.shape)}, and its operands are {tuple(left.shape)} and "
                f"{tuple(right.shape)}: one row may be a bias, and ranks may have gathered a sequence"
            )
            continue
        exact, modelled = left @ right.T, left_model @ right_model.T
        if result == "output":
            common = (mine.double() - modelled).mean(0)
            exact, modelled = exact + common, modelled + common
        least = least_of(rounding, mine.dtype is torch.float32)
        yield measure_error(_name_stage(layer, result), mine.double(), exact, [modelled.to(mine.dtype).double()], least)


def _as_matrix(x: Any, dim: int) -> Tensor:
    """Return an operand as a GEMM reads it that sums over a dimension: a matrix in FP32, summed over columns."""
    if type(x) is not Tensor:
        x = x.detach()
        if dim == 0 and getattr(x, "_columnwise_data", None) is not None:  # has other scales along its rows
            x.update_usage(rowwise_usage=False, columnwise_usage=True)
        x = x.dequantize(dtype=torch.float32)
    x = x.float().flatten(0, -2)
    return x if dim else x.T


def _name_stage(layer: str, name: str) -> Stage:
    return Stage((layer, 0, name, 0), (), (), "output", name)
