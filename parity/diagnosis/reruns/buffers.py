"""Buffers that a port holds with other values than the reference; a weight map is about parameters alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

from parity.diagnosis.codes import finding
from parity.diagnosis.failure import Failure
from parity.diagnosis.reruns.reruns import agree, run_changed
from parity.result import Finding


def buffer_findings(failure: Failure) -> Iterator[Finding]:
    """A finding if the outputs agree as soon as the candidate's buffers hold what the reference's hold.

    A buffer belongs to the reference's of its name; else to the only one of its shape, where it is the only one too.
    """
    right = dict(failure.prepared.reference.named_buffers())

    def copied(module: nn.Module) -> Iterator[str]:
        for name, buffer in module.named_buffers():
            of = _counterpart(name, dict(module.named_buffers()), right)
            if of is not None and not torch.equal(buffer, right[of].to(buffer)):
                with torch.no_grad():
                    buffer.copy_(right[of])
                yield name if of == name else f"{name} (the reference's {of})"

    ran = run_changed(failure, copied)
    if ran is not None and agree(failure, ran[0], ("output",)):
        yield finding(
            "buffer-not-copied",
            f"the candidate agrees with the reference's buffers: copy {', '.join(ran[1])}, which differ and which the "
            "weight map does not reach",
        )


def _counterpart(name: str, own: Mapping[str, Tensor], right: Mapping[str, Tensor]) -> str | None:
    """The name of the reference's buffer that a buffer of the candidate should equal; None if that cannot be told."""
    shape = own[name].shape
    if name in right:
        return name if right[name].shape == shape else None
    alike = [other for other, value in right.items() if value.shape == shape]
    is_only_one = sum(value.shape == shape for value in own.values()) == 1
    return alike[0] if len(alike) == 1 and is_only_one and shape.numel() > 1 else None
