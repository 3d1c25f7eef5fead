"""Record which attention kernels TE runs, and force one by TE's environment variables."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal, get_args

from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook

from parity.trace.whose import is_of_te
from parity.user_error import UserError

# TE's environment variables, set as long as something needs them.


@contextmanager
def te_variables(variables: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables within the context."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


# Which of its attention kernels TransformerEngine runs: flash-attention's, cuDNN's fused one, or its own unfused one.
#
# TE picks one for each configuration and remembers the last pick (``get_attention_backend`` and ``_attention_backends``
# in ``pytorch/attention/dot_product_attention`` of TE 2.14 to 2.20). It reads the environment variables
# ``NVTE_FLASH_ATTN``, ``NVTE_FUSED_ATTN`` and ``NVTE_UNFUSED_ATTN`` at each pick. So forcing one means setting them and
# making TE forget its last pick.


AttentionBackend = Literal["flash", "fused", "unfused"]
BACKENDS: tuple[AttentionBackend, ...] = get_args(AttentionBackend)
CHOICES = ("auto", *BACKENDS, "all")
"""What a run may ask for: TE's own choice, one backend, or each in turn."""

_VARIABLES = {"flash": "NVTE_FLASH_ATTN", "fused": "NVTE_FUSED_ATTN", "unfused": "NVTE_UNFUSED_ATTN"}
_CLASSES = {"flash": "FlashAttention", "fused": "FusedAttention", "unfused": "UnfusedDotProductAttention"}
_NONE_LEFT = "No dot product attention backend is available"
_TE = "transformer_engine"
_PACKAGE = f"{_TE}.pytorch.attention.dot_product_attention"
_UTILS = f"{_PACKAGE}.utils"


class NotOffered(Exception):
    """Raised if TE does not do here what was asked for; the message says why."""


def checked_choice(text: str) -> str:
    """Return the text, which must be one of ``CHOICES``.

    Raises:
        UserError: if it is not.
    """
    if text not in CHOICES:
        raise UserError(f"the attention backend is {text!r}, but must be one of {', '.join(CHOICES)}")
    return text


def attention_modules(module: nn.Module) -> list[nn.Module]:
    """Return the parts of the module in which TE picks an attention backend."""
    return [part for part in module.modules() if _is_of_te(part, "DotProductAttention")]


def has_attention(module: nn.Module) -> bool:
    """Return whether TE picks an attention backend somewhere in the module."""
    return bool(attention_modules(module))


@contextmanager
def attention_backends(forced: AttentionBackend | None = None) -> Iterator[dict[str, None]]:
    """Let TE pick its attention backends anew in this context, and only the forced one if there is one.

    Args:
        forced: the backend; None leaves the pick to TE.

    Yields:
        The backends that ran so far, such as ``fused (F16_arbitrary_seqlen)``, in the order of their first calls.

    Raises:
        NotOffered: within the context, if a module asks for attention and TE refuses the forced backend.
    """
    ran: dict[str, None] = {}

    def note(module: nn.Module, _: Any) -> None:
        for backend, name in _CLASSES.items():
            if _is_of_te(module, name):
                ran.setdefault(_describe_backend(backend), None)

    hook = register_module_forward_pre_hook(note)
    refusals: list[str] = []
    variables = {} if forced is None else {name: str(int(b == forced)) for b, name in _VARIABLES.items()}
    try:
        with te_variables(variables), _picked_anew(), _redirect_log(refusals if forced else None):
            yield ran
    except ValueError as error:
        if forced is None or _NONE_LEFT not in str(error):
            raise
        why = _find_reasons(forced, refusals)
        raise NotOffered(f"TransformerEngine does not offer {forced} attention here: {why}") from error
    finally:
        hook.remove()


def _is_of_te(module: nn.Module, name: str) -> bool:
    return type(module).__name__ == name and is_of_te(type(module))


def _describe_backend(backend: str) -> str:
    """Return the backend with what TE says about it: flash-attention's version, or which of cuDNN's kernels."""
    picked = sys.modules[_PACKAGE]._attention_backends
    if backend == "flash" and picked["flash_attention_backend"] is not None:
        return f"flash ({picked['flash_attention_backend']})"
    if backend == "fused" and picked["fused_attention_backend"] is not None:
        names = sys.modules[f"{_TE}_torch"].NVTE_Fused_Attn_Backend
        return f"fused ({names(int(picked['fused_attention_backend'])).name.removeprefix('NVTE_')})"
    return backend


@contextmanager
def _picked_anew() -> Iterator[None]:
    """Make TE forget its pick before and after."""
    _forget_pick()
    try:
        yield
    finally:
        _forget_pick()


def _forget_pick() -> None:
    package = sys.modules.get(_PACKAGE)
    if package is not None:
        package._attention_backends["backend_selection_requires_update"] = True


class _Collecting(logging.Handler):
    def __init__(self, add: Callable[[str], None]) -> None:
        super().__init__(logging.DEBUG)
        self._add = add

    def emit(self, record: logging.LogRecord) -> None:
        self._add(record.getMessage())


@contextmanager
def _redirect_log(messages: list[str] | None) -> Iterator[None]:
    """Send what TE logs about its picks in this context only to ``messages``; change nothing if that is None."""
    if messages is None or _UTILS not in sys.modules:
        yield
        return
    logging_of_te = sys.modules[_UTILS].AttentionLogging
    logger = logging.getLogger("DotProductAttention")
    before = logging_of_te._log_level, logger.level, logger.handlers, logger.propagate
    logging_of_te._log_level = logging.DEBUG
    logger.handlers, logger.propagate = [_Collecting(messages.append)], False
    try:
        yield
    finally:
        logging_of_te._log_level, level, logger.handlers, logger.propagate = before
        logger.setLevel(level)


def _find_reasons(backend: str, messages: list[str]) -> str:
    """Return TE's reasons in its own words."""
    if backend == "flash":
        installed = sys.modules[_UTILS].FlashAttentionUtils
        if not any(getattr(installed, f"{version}is_installed", False) for version in ("", "v3_", "v4_")):
            return "flash-attn is not installed"
    reasons = [text for text in messages if text.startswith("Disabling") and _CLASSES[backend] in text]
    return "; ".join(dict.fromkeys(reasons)) or "it gives no reason"
