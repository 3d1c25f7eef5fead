"""PyTorch's modes that a comparison must not take over from the code around it.

Under ``torch.no_grad()`` every gradient would be 0 in all passes, and agree; under ``torch.autocast`` the rounding
model would round like BF16 at each precision, and take that for the error that a port must have.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch


@contextmanager
def usual_modes() -> Iterator[None]:
    """Within the context, gradients are recorded, and nothing is cast automatically; as before when it is left."""
    with ExitStack() as modes:
        modes.enter_context(torch.inference_mode(False))
        modes.enter_context(torch.enable_grad())
        for device in ("cpu", "cuda"):
            if torch.is_autocast_enabled(device):
                modes.enter_context(torch.autocast(device, enabled=False))
        yield
