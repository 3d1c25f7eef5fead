"""See what TE's debug features make of the operands and products of a candidate's GEMMs.

nvdlfw_inspect's configuration turns features on by layers' names: ``DisableQuantizationGEMM``, ``FakeQuant`` and so on.
TE then wraps each quantizer of such a layer, and the wrapper says what it does with the tensor. Sources:
``debug/pytorch/debug_quantization.py`` and ``debug/features/`` of TE 2.14 to 2.20.2.
"""

from __future__ import annotations

import functools
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from parity.numerics.formats import (
    READ_ALONG_COLUMNS,
    READ_ALONG_ROWS,
    Format,
    LayerFormats,
    Quantized,
    describe_format,
)
from parity.shown import few_of
from parity.te.recipes import read_formats
from parity.te.state import Slot
from parity.user_error import UserError

_PARTS = {"activation": "inputs", "weight": "weights", "gradient": "gradients"}
_WRAPPERS = "transformer_engine.debug.pytorch.debug_quantization"


def find_debugger() -> Any:
    """Return the module ``nvdlfw_inspect.api`` if a configuration of it is in force, else None."""
    api = sys.modules.get("nvdlfw_inspect.api")
    return None if getattr(api, "DEBUG_MANAGER", None) is None else api


def reset_debugging() -> None:
    """Let TE ask anew whether there is a configuration; it refuses one that came after its first module."""
    state = getattr(sys.modules.get("transformer_engine.debug.pytorch.debug_state"), "TEDebugState", None)
    if state is not None:
        state.debug_enabled = None if find_debugger() is None else True


class SeenFeatures:
    """The formats that debug features gave the layers of a candidate in a context.

    Attributes:
        formats: by the name of a weight in the candidate, what features changed of its GEMMs; only weights of which
            they changed something.
    """

    def __init__(self) -> None:
        self.formats: dict[str, LayerFormats] = {}
        self._unknown: list[str] = []

    @contextmanager
    def watched(self, candidate: nn.Module) -> Iterator[None]:
        """Note what the features that are on do to every tensor of a candidate's layers in this context.

        Raises:
            UserError: at its end, if a feature changed a tensor in a way that has no rounding model.
        """
        api, wrappers = find_debugger(), sys.modules.get(_WRAPPERS)
        if api is None or wrappers is None:
            yield
            return
        weights = _list_weights(candidate)
        wrapper, features = wrappers.DebugQuantizer, api.transformer_engine
        made, called = wrapper.__init__, features.call_feature

        @functools.wraps(made)
        def make(self: Any, layer: str, tensor: str, *args: Any, **kwargs: Any) -> None:
            made(self, layer, tensor, *args, **kwargs)
            spared = {
                (gemm, _PARTS[tensor]): None
                for gemm, plan in _list_plans(self)
                if tensor in _PARTS and plan == wrappers.HIGH_PRECISION and self.parent_quantizer is not None
            }
            note(layer, spared)

        def call(feature: Callable[..., Any], config: Any, layer: str, **kwargs: Any) -> Any:
            result = called(feature, config, layer, **kwargs)
            if feature.__name__ == "modify_tensor":
                gemm, tensor = kwargs["gemm"], kwargs["tensor_name"]
                changed = kwargs.get("out") if result is None else result
                try:
                    to_format = _read_change(feature, config, gemm, tensor, changed)
                except UserError as error:
                    self._unknown.append(f"{layer}: {error}")
                else:
                    note(layer, {(gemm, _PARTS.get(tensor, "product")): to_format})
            return result

        def note(layer: str, formats: LayerFormats) -> None:
            if ".gemm_" in layer:  # ``general_grouped_gemm`` drops what features return of a product
                formats = {key: one for key, one in formats.items() if key[1] != "product"}
            for weight in weights.get(layer, ()) if formats else ():
                self.formats[weight] = {**self.formats.get(weight, {}), **formats}

        wrapper.__init__, features.call_feature = make, call
        try:
            yield
        finally:
            wrapper.__init__ = made
            del features.call_feature
        if self._unknown:
            raise UserError(
                f"a debug feature of nvdlfw_inspect changes tensors in a way that parity has no rounding model of, in "
                f"layer {few_of(list(dict.fromkeys(self._unknown)), 1)}; turn it off to compare the rest"
            )


def _list_weights(candidate: nn.Module) -> dict[str, list[str]]:
    """Return the names of the candidate's weights by the names by which nvdlfw_inspect knows their layers."""
    found = defaultdict(list)
    for path, module in candidate.named_modules():
        layer = getattr(module, "name", None)
        if not (isinstance(layer, str) and hasattr(module, "_get_debug_quantizers")):
            continue
        weights = [name for name, one in module.named_parameters(recurse=False) if one.dim() > 1]
        for weight in weights:
            part = weight.partition("_")[0]
            of_expert = weight.removeprefix("weight")
            suffix = f".{part}" if part in ("fc1", "fc2") else f".gemm_{of_expert}" if of_expert.isdigit() else ""
            found[layer + suffix].append(f"{path}.{weight}".lstrip("."))
    return found


def _list_plans(wrapper: Any) -> Iterator[tuple[str, str]]:
    """Yield each GEMM that reads a wrapper's tensor, and what the wrapper hands to it."""
    yield wrapper.rowwise_gemm_name, wrapper.rowwise_tensor_plan
    if wrapper.columnwise_gemm_name is not None:
        yield wrapper.columnwise_gemm_name, wrapper.columnwise_tensor_plan


def _read_change(feature: Callable[..., Any], config: Mapping[str, Any], gemm: str, tensor: str, made: Any) -> Format:
    """Return the format to which a feature has cast a tensor.

    Raises:
        UserError: if it is not one of TE's casts; names the feature.
    """
    name = type(getattr(feature, "__self__", None)).__name__
    quantizer = getattr(made, "_quantizer", None)
    if quantizer is not None:
        is_columnwise = gemm == "wgrad" or (gemm, tensor) == ("dgrad", "weight")
        to_format = read_formats(quantizer, torch.bfloat16)[is_columnwise]
        if to_format is not None:
            return to_format
    told = str(config.get("quant_format", ""))
    numbers = told.removeprefix("FP8")
    if name == "FakeQuant" and numbers in ("E4M3", "E5M2"):
        return Quantized(numbers)  # type: ignore[arg-type]
    raise UserError(f"{name}{told and f' ({told})'} of the {tensor} in {gemm}")


def keep_from_quantizer(formats: Mapping[str, LayerFormats], slot: Slot) -> bool:
    """Return whether features keep a tensor from the quantizer that has its scale, for all GEMMs that read it."""
    part = {"input": "inputs", "weight": "weights", "output gradient": "gradients"}.get(slot.role, "")
    read = {(along.get(part), part) for along in (READ_ALONG_ROWS, READ_ALONG_COLUMNS)}
    return any(read <= formats.get(weight, {}).keys() for weight in slot.weights)


def describe_features(formats: Mapping[str, LayerFormats]) -> str:
    """Return a note on what features changed, or an empty text if they changed nothing."""
    layers: dict[str, list[str]] = defaultdict(list)
    for weight, changed in formats.items():
        parts = defaultdict(list)
        for (gemm, part), to_format in changed.items():
            parts[describe_format(to_format, torch.bfloat16)].append(f"{gemm} {part}")
        layers["; ".join(f"{words}: {', '.join(those)}" for words, those in parts.items())].append(weight)
    each = "; ".join(f"{few_of(weights, 2)} ({told})" for told, weights in layers.items())
    return each and f"TE's debug features give layers other formats, by which they are judged: {each}"
