"""TransformerEngine's own Triton wrappers and kernels, run by Triton's interpreter: an oracle for their replacements.

The interpreter must be chosen before Triton is imported, so a process of its own runs the kernels::

    python triton_oracle.py calls.pt results.pt

It reads ``{module: [(function, arguments), ...]}`` and writes each call's result, with gradients if any are required.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import types
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

Call = tuple[str, tuple[Any, ...]]


def run(calls: dict[str, list[Call]], folder: Path) -> dict[str, list[Any]]:
    """Run functions of ``transformer_engine/pytorch/triton/<module>.py`` in a new process, and return their results.

    Args:
        calls: by the file's name without ``.py``, the functions' names and positional arguments.
        folder: where the arguments and results are left.
    """
    arguments, results = folder / "calls.pt", folder / "results.pt"
    torch.save(calls, arguments)
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    command = [sys.executable, __file__, str(arguments), str(results)]
    subprocess.run(command, env=environment, check=True, timeout=900)
    return torch.load(results)


def result_and_gradients(
    function: Callable[..., Any], args: tuple[Any, ...], grads: Sequence[torch.Tensor] | None = None
) -> Any:
    """Call a function, and return its result or, if arguments require gradients, its outputs and these gradients.

    Args:
        grads: the outputs' gradients, in the outputs' order. Default: the outputs themselves.
    """
    leaves = [arg for arg in args if isinstance(arg, torch.Tensor) and arg.requires_grad]
    result = function(*args)
    if not leaves:
        return result
    outputs = result if isinstance(result, tuple) else (result,)
    given = grads or [output.detach() for output in outputs]
    gradients = torch.autograd.grad(
        outputs, leaves, [grad.to(output.dtype) for grad, output in zip(given, outputs, strict=False)]
    )
    return tuple(output.detach() for output in outputs) + gradients


def te_root() -> Path:
    """Return the folder of the installed package without importing it."""
    return Path(importlib.util.find_spec("transformer_engine").origin).parent


def _package(name: str, folder: Path) -> None:
    """Add a package to ``sys.modules`` without running its ``__init__``."""
    package = types.ModuleType(name)
    package.__path__ = [str(folder)]
    sys.modules[name] = package


def _product(a: torch.Tensor, b: torch.Tensor, out_dtype: torch.dtype, layout: str) -> tuple[torch.Tensor]:
    """Stand in for TE's GEMM, which is not a Triton kernel: it computes in FP32, in the only layout needed here."""
    assert layout == "NT"
    return ((b.float().t() @ a.float()).to(out_dtype),)


def _load(module: str, root: Path) -> dict[str, Any]:
    """Return the wrappers of ``module`` on the CPU, with the smallest block sizes that TE tries and without tuning."""
    import triton

    class Tuned:
        def __init__(self, kernel: Any, block: dict[str, int]) -> None:
            self.kernel, self.block = kernel, block

        def __getitem__(self, grid: Any) -> Any:
            chosen = grid(self.block) if callable(grid) else grid
            return lambda *args, **kwargs: self.kernel[chosen](*args, **kwargs, **self.block)

    triton.autotune = lambda configs, key, **_: lambda kernel: Tuned(kernel, configs[0].kwargs)
    for name in ("", ".common", ".common.triton", ".pytorch", ".pytorch.cpp_extensions"):
        _package(f"transformer_engine{name}", root / Path(*name.split(".")))
    gemm = types.ModuleType("transformer_engine.pytorch.cpp_extensions.gemm")
    gemm.general_gemm = _product  # type: ignore[attr-defined]
    sys.modules[gemm.__name__] = gemm
    torch.cuda.get_device_capability = lambda device=None: (8, 0)
    source = (root / "pytorch" / "triton" / f"{module}.py").read_text()
    namespace: dict[str, Any] = {"__name__": module}
    exec(compile(source.replace('"cuda"', '"cpu"'), module, "exec"), namespace)
    return namespace


if __name__ == "__main__":
    calls_file, results_file = sys.argv[1:]
    te, found = te_root(), {}
    for module_name, asked in torch.load(calls_file).items():
        wrappers = _load(module_name, te)
        found[module_name] = [result_and_gradients(wrappers[function], args) for function, args in asked]
    torch.save(found, results_file)
