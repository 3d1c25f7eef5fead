"""Moments of Adam that a port holds in less than the reference's optimizer: TE's ``exp_avg_dtype`` and its like."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from parity.diagnosis.hypothesis import Hypothesis, ModuleCall
from parity.diagnosis.training.optimizer_steps import optimizers_of
from parity.watching.trace import Trace

_MOMENTS = (("exp_avg", "exp_avg_sq"), ("exp_avg",), ("exp_avg_sq",))
_BFLOAT16, _FLOAT16, _FLOAT8 = torch.bfloat16, torch.float16, torch.float8_e4m3fn
# To what TE scales the largest of a tensor (``dtype_to_range_map`` of ``pytorch/optimizers/fused_adam.py``, 2.20.2).
_RANGE = {_FLOAT16: torch.finfo(_FLOAT16).max / 2.0, _FLOAT8: 448.0}


def optimizer_moment_hypotheses(trace: Trace, module: nn.Module) -> Iterator[Hypothesis]:
    """Moments in each format that TE's FusedAdam takes, where the reference steps by Adam or AdamW."""
    for one, edits in optimizers_of(trace)[:1]:
        for dtype in (_BFLOAT16, _FLOAT8, _FLOAT16) if issubclass(one.kind, torch.optim.Adam) else ():
            for names in _MOMENTS:
                held = str(dtype).removeprefix("torch.")
                arguments = ", ".join(f"{name}_dtype=torch.float32" for name in names)
                yield Hypothesis(
                    "optimizer",
                    f"optimizer: {', '.join(names)} in {held}",
                    f"give TE {arguments}, which the reference's optimizer has; the port's holds "
                    f"{' and '.join(names)} in {held}",
                    module,
                    edits,
                    around=_holding(names, dtype),
                )


def _holding(names: tuple[str, ...], dtype: torch.dtype) -> Callable[[ModuleCall], ModuleCall]:
    """The same call, in which moments are rounded after every step."""

    @torch.no_grad()
    def after_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        for state in optimizer.state.values():
            for moment in (state[name] for name in names if name in state):
                moment.copy_(_held_in(dtype, moment))

    def around(call: ModuleCall) -> ModuleCall:
        def under(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            handle = register_optimizer_step_post_hook(after_step)
            try:
                return call(module, *args, **kwargs)
            finally:
                handle.remove()

        return under

    return around


def _held_in(dtype: torch.dtype, x: Tensor) -> Tensor:
    if dtype not in _RANGE:
        return x.to(dtype).to(x.dtype)
    scale = x.abs().amax() / _RANGE[dtype]
    return torch.where(scale > 0, (x / scale).to(dtype).to(x.dtype) * scale, x)
