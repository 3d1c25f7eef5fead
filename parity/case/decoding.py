"""Decode with TE's cache of keys and values, while the reference sees the whole sequence at once."""

from __future__ import annotations

import importlib
import inspect
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from parity.user_error import UserError

MASK = "padding_causal"  # TE takes no other causal mask with a cache, and aligns it at the bottom right
MASK_ARGUMENTS = ("attn_mask_type", "self_attn_mask_type")

_PROMPT: ContextVar[tuple[int, list[Decoding]] | None] = ContextVar("prompt", default=None)


@contextmanager
def prompted(tokens: int) -> Iterator[list[Decoding]]:
    """Let the first step of every decoding take so many tokens, and hand out which ones have run."""
    called: list[Decoding] = []
    before = _PROMPT.set((tokens, called))
    try:
        yield called
    finally:
        _PROMPT.reset(before)


@dataclass(frozen=True)
class Decoding:
    """A loop over the tokens of a batch, with ``te.InferenceParams``: whole prompts, then one token per sequence.

    It is called as ``decode(module, x)`` within a pair's ``call_candidate``. It joins the outputs of the module's steps
    into what one pass over ``x`` would return. TE counts one token for each sequence that goes on, so a prompt cannot
    be given in several parts (``pytorch/attention/inference.py`` of 2.20.2).

    Attributes:
        kv_heads: number of heads of keys and values.
        head_dim: width of a head of keys, and of values if ``head_dim_v`` is None.
        prompt: how many tokens the first step takes: one number for all sequences, or one for each.
        qkv_format: the format that TE's layers were built with.
        page_size: tokens in a page of a paged cache; None for one that is not paged.
        head_dim_v: width of a head of values.
        step: called as ``step(module, part, **given)`` for each part, in the format; ``given`` holds
            ``inference_params`` and, in format ``thd``, lengths. None calls the module with those of ``given`` that its
            forward names, and with a mask type that suits a cache.
    """

    kv_heads: int
    head_dim: int
    prompt: int | Sequence[int] = 1
    qkv_format: Literal["bshd", "sbhd", "thd"] = "bshd"
    page_size: int | None = None
    head_dim_v: int | None = None
    step: Callable[..., Tensor] | None = None

    def __call__(self, module: nn.Module, x: Tensor, lengths: Tensor | None = None, **given: Any) -> Tensor:
        """Return the outputs of all tokens, ``[batch, seq, ...]``; 0 beyond a sequence's length.

        Args:
            module: called with parts of ``x``.
            x: ids ``[batch, seq]`` or activations ``[batch, seq, width]``.
            lengths: how many tokens each sequence has; None for all of them.
            given: passed to each step, such as rotary angles.
        """
        batch, seq = x.shape[:2]
        ends = [seq] * batch if lengths is None else [int(length) for length in lengths]
        prompts = self._count_prompt_tokens(ends)
        cache = self._make_cache(module, batch, seq, max(prompts))
        done, joined = [0] * batch, None
        while rows := [row for row in range(batch) if done[row] < ends[row]]:
            counts = {row: prompts[row] if not done[row] else 1 for row in rows}
            cache.pre_step(OrderedDict(counts))
            tokens = [x[row, done[row] : done[row] + count] for row, count in counts.items()]
            returned = self._split_output(self._run_step(module, self._laid_out(tokens), cache, counts, given), counts)
            for row, part in zip(rows, returned, strict=True):
                joined = part.new_zeros(batch, seq, *part.shape[1:]) if joined is None else joined
                joined[row, done[row] : done[row] + len(part)] = part
                done[row] += len(part)
        if joined is None:
            raise UserError("a batch without tokens cannot be decoded")
        return joined

    def _count_prompt_tokens(self, ends: Sequence[int]) -> list[int]:
        instead = _PROMPT.get()
        prompt = self.prompt if instead is None else instead[0]
        if instead is not None:
            instead[1].append(self)
        prompts = [prompt] * len(ends) if isinstance(prompt, int) else list(prompt)
        if len(prompts) != len(ends) or any(prompt < 1 for prompt in prompts):
            raise UserError(
                f"prompt={self.prompt!r} must be one number of tokens, from 1, or one for each of {len(ends)} sequences"
            )
        return [min(prompt, end) for prompt, end in zip(prompts, ends, strict=True)]

    def _make_cache(self, module: nn.Module, batch: int, seq: int, longest_prompt: int) -> Any:
        te = importlib.import_module("transformer_engine.pytorch")
        page = self.page_size or 1
        pages = -(-seq // page)
        paged = {"is_paged": True, "page_size": page, "total_num_pages": batch * pages} if self.page_size else {}
        dtype = next((x.dtype for x in module.parameters() if x.is_floating_point()), torch.float32)
        return te.InferenceParams(
            batch,
            pages * page,
            num_heads_kv=self.kv_heads,
            head_dim_k=self.head_dim,
            head_dim_v=self.head_dim_v,
            dtype=dtype,
            qkv_format=self.qkv_format,
            max_ctx_len=longest_prompt,
            **paged,
        )

    def _run_step(
        self, module: nn.Module, part: Tensor, cache: Any, counts: Mapping[int, int], given: Mapping[str, Any]
    ) -> Tensor:
        passed: dict[str, Any] = {"inference_params": cache}
        if self.qkv_format == "thd":  # of the new tokens only: TE adds those in the cache
            longest = max(counts.values())
            passed |= {"cu_seqlens_q": cache.cu_seqlens_q, "cu_seqlens_kv": cache.cu_seqlens_q}
            passed |= {"max_seqlen_q": longest, "max_seqlen_kv": longest}
        if self.step is not None:
            return self.step(module, part, **passed, **given)
        named = inspect.signature(module.forward).parameters
        takes_all = any(one.kind is one.VAR_KEYWORD for one in named.values())
        passed = {name: value for name, value in passed.items() if name in named or takes_all}
        if "inference_params" not in passed:
            raise UserError(
                f"{type(module).__name__}.forward takes no inference_params, so it caches nothing: pass "
                "step=lambda module, part, inference_params: ... to parity.Decoding"
            )
        masks = {name: MASK for name in MASK_ARGUMENTS if name in named}
        returned: Tensor = module(part, **masks | passed | dict(given))
        return returned

    def _laid_out(self, tokens: Sequence[Tensor]) -> Tensor:
        """Return the new tokens of all sequences in one tensor of the format, with shorter ones padded with zeros."""
        if self.qkv_format == "thd":
            return torch.cat(list(tokens))
        return nn.utils.rnn.pad_sequence(list(tokens), batch_first=self.qkv_format == "bshd")

    def _split_output(self, returned: Tensor, counts: Mapping[int, int]) -> list[Tensor]:
        """Return a step's output for each sequence's tokens."""
        if self.qkv_format == "thd":
            return list(returned.split(list(counts.values())))
        by_row = returned if self.qkv_format == "bshd" else returned.transpose(0, 1)
        return [row[:count] for row, count in zip(by_row, counts.values(), strict=True)]
