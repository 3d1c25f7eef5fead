"""Gated delta rules: the operations of cuDNN's Python frontend that TE's linear attentions call.

Stands for ``cudnn.linear_attention.ops``, which ``pytorch/attention/linear_attention/base.py`` of TE 2.20 imports
when an attention is first called. A state ``S``, ``[key features, value features]`` for each head, is updated token by
token; ``alpha`` is its decay and ``e`` what a key erases:

    S = alpha S;  S = S + k (w v - S^T e)^T;  o = scale S^T q

======================  =============================  ======================================================
TE's module             ``alpha``                      ``e``, ``w``
======================  =============================  ======================================================
GatedDeltaNet           ``exp(g)``, one for each head  ``beta k``, ``beta``
GatedDeltaNet2          ``exp(g)``, one for each key   ``beta * k`` feature by feature, ``w`` for each value
                        feature                        feature
GatedDeltaProduct       as GatedDeltaNet               as GatedDeltaNet, several keys and values for each token
======================  =============================  ======================================================

The kernels are open (nvidia-cudnn-frontend 1.32.0, ``cudnn/linear_attention``) and compute chunks of tokens at once:
within a chunk, ``(I + M) U = W V - E S`` gives the updates U, with M strictly lower triangular. They multiply 16-bit
operands, add in FP32, and carry the state in FP32. What they round to 16 bits between their products differs:

- ``cutile/kernels/gdn.py``, GatedDeltaNet on GPUs before Blackwell, in chunks of 64: the inverse of ``I + M``, after it
  was computed in FP32, and its products with values and keys. Gradients of the state are products in TF32.
- ``frost/kernel/gdn_*.py``, GatedDeltaNet and GatedDeltaProduct on a Blackwell, in chunks of 64: M and every block of
  its inverse, the decayed ``K S``, and ``V - K S``.
- ``frost/kernel/gdn2_*.py``, GatedDeltaNet2 on a Blackwell, in chunks of 16: as the former, and the decays are in the
  operands: ``beta k exp(G)``, ``k exp(-G)`` and ``q exp(G)`` with G the sum of g in the chunk, if these are in range.

Not modelled: GatedDeltaProduct reads the state once for several chunks, here for each; long sequences may be cut into
pieces that are computed at once; the gradients of gates are added in other orders. The cuTile kernels also ask for
CUDA 13.3, which is not checked.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad, softplus

from te_on_cpu import cuda
from te_on_cpu.graphs import recorded
from te_on_cpu.tensor_cores import round_to_tf32

_Round = Callable[[Tensor], Tensor]
_CHUNK, _CHUNK_OF_CHANNELS = 64, 16  # ``BT_CHUNK``, ``B_T``
_BLOCK, _BLOCK_OF_CHANNELS = 8, 4  # inverted in FP32, ``frost/common/blockwise_inverse.py``
_L2NORM_EPS = 1e-6
_LINEAR_GATE_EPS = 1e-10
_WIDEST_KEY = 256  # ``CUTILE_MAX_D_QK``
# Smallest sum of log2 decays in a chunk whose exponential, and whose inverse, an operand holds
# (``frost/common/steep_decay.py``), and the exponent that a key divided by it must not reach.
_STEEP = {torch.bfloat16: (-120.0, 127.0), torch.float16: (-14.0, 15.0)}
_GUARD_MARGIN, _GUARD_TOLERANCE = 1 / 32, 4.0  # ``frost/common/beta_guard.py``


class GraphNotSupportedError(RuntimeError):
    """Raised where cuDNN's frontend raises ``cudnnGraphNotSupportedError``: no kernel of the GPU computes this."""


def operation(op_name: str, variant: str) -> Callable[..., tuple[Tensor, Tensor]]:
    """Return the stand-in for an operation, in place of TE's ``_import_linear_attention_op``.

    Raises:
        ImportError: if cuDNN's frontend has an operation of this name that no module of TE 2.20 calls.
    """
    if op_name not in _OPERATIONS:
        raise ImportError(f"the CPU kernels have no counterpart to cudnn.linear_attention.ops.{op_name} ({variant})")
    return _OPERATIONS[op_name]


def gated_delta_net(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    cu_seqlens: Tensor,
    *,
    scale: float,
    initial_state: Tensor | None,
    output_final_state: bool,
    use_qk_l2norm_in_kernel: bool,
) -> tuple[Tensor, Tensor]:
    """Return the output and the final state of Gated DeltaNet.

    Args:
        q, k: ``[tokens, heads, key features]``, BF16 or FP16, as ``v``.
        v: ``[tokens, heads, value features]``.
        g, beta: ``[tokens, heads]``, FP32: the logarithm of the decay, and what part of a value is written.
        cu_seqlens: int32 ``[sequences + 1]``, where sequences begin and end.
        scale: of the output.
        initial_state: FP32 ``[sequences, heads, value features, key features]``; None for zeros.
        output_final_state: whether to return the states after the last tokens; else the second result is empty.
        use_qk_l2norm_in_kernel: whether to divide each query and key by its length first.

    Returns:
        The output, ``[tokens, heads, value features]`` in the dtype of ``q``, and the states as ``initial_state``.

    Raises:
        GraphNotSupportedError: if no kernel takes the sizes.
    """
    is_frost = _is_blackwell() and {q.shape[-1], v.shape[-1]} <= {64, 128}
    if not is_frost and q.shape[-1] > _WIDEST_KEY:
        raise _not_supported(f"GdnCuTileEngine: head dim K must be <= {_WIDEST_KEY}, got {q.shape[-1]}")
    chunks = _chunks_of_scalars if is_frost else _chunks_of_inverses
    compute = functools.partial(_scan_all, chunks, _CHUNK, use_qk_l2norm_in_kernel, scale, q.dtype)
    return _run_operation(compute, output_final_state, cu_seqlens, initial_state, q, k, v, g, beta)


def gated_delta_product(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    cu_seqlens: Tensor,
    num_householder: int,
    *,
    scale: float,
    initial_state: Tensor | None,
    output_final_state: bool,
    use_qk_l2norm_in_kernel: bool,
    use_beta_sigmoid_in_kernel: bool,
    allow_neg_eigval: bool,
    safe_gate: bool,
    gate_domain: str,
    a_log: Tensor | None,
    dt_bias: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Return the output and the final state of Gated DeltaProduct, which updates the state several times for a token.

    Arguments and results are those of ``gated_delta_net``, but for these:

    Args:
        k, v, beta: with ``num_householder`` rows for each token.
        use_beta_sigmoid_in_kernel: whether ``beta`` holds logits, of which the sigmoid counts.
        allow_neg_eigval: whether twice the sigmoid counts.
        safe_gate: whether the decay's logarithm is ``-exp(a_log) softplus(g + dt_bias)``.
        gate_domain: ``"log"``, or ``"linear"`` if ``g`` is the decay itself.
        a_log, dt_bias: ``[heads]``; None counts as 0.

    Raises:
        GraphNotSupportedError: if the GPU is no Blackwell.
    """
    _require_frost("GdpFrostEngine")

    def compute(
        layout: _Layout,
        state: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        g: Tensor,
        beta: Tensor,
        a_log: Tensor | None,
        dt_bias: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        decay = g.float()
        if safe_gate:
            decay = softplus(decay if dt_bias is None else decay + dt_bias.float())
            decay = -decay if a_log is None else -a_log.float().exp() * decay
        elif gate_domain == "linear":
            decay = (decay + _LINEAR_GATE_EPS).log()
        if use_beta_sigmoid_in_kernel:
            beta = _apply_sigmoid(beta, allow_neg_eigval)
        each = num_householder - 1  # a token decays the state before its first update, and reads it after its last
        rows = pad(q[:, None], (0, 0, 0, 0, each, 0)).flatten(0, 1)
        decays = pad(decay[:, None], (0, 0, 0, each)).flatten(0, 1)
        every = functools.partial(_scan_all, _chunks_of_scalars, _CHUNK, use_qk_l2norm_in_kernel, scale, q.dtype)
        output, final = every(layout, state, rows, k, v, decays, beta)
        return output[each::num_householder], final

    tensors = (q, k, v, g, beta, a_log, dt_bias)
    return _run_operation(compute, output_final_state, cu_seqlens * num_householder, initial_state, *tensors)


def gated_delta_net_v2(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    w: Tensor,
    cu_seqlens: Tensor,
    *,
    scale: float,
    initial_state: Tensor | None,
    output_final_state: bool,
    use_qk_l2norm_in_kernel: bool,
    use_beta_sigmoid_in_kernel: bool,
    allow_neg_eigval: bool,
    beta_guard: bool,
) -> tuple[Tensor, Tensor]:
    """Return the output and the final state of Gated DeltaNet 2, whose gates differ by feature.

    Arguments and results are those of ``gated_delta_net`` and ``gated_delta_product``, but for these:

    Args:
        g, beta: ``[tokens, heads, key features]``, ``beta`` in the dtype of ``q``.
        w: ``[tokens, heads, value features]`` in the dtype of ``q``, what part of a value is written.
        beta_guard: whether to shrink ``beta`` towards its mean where a token would enlarge the state.

    Raises:
        GraphNotSupportedError: if the GPU is no Blackwell.
    """
    _require_frost("Gdn2FrostEngine")

    def compute(
        layout: _Layout, state: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, w: Tensor
    ) -> tuple[Tensor, Tensor]:
        dtype, gates = q.dtype, beta.float()
        if use_beta_sigmoid_in_kernel:
            gates = _apply_sigmoid(beta, allow_neg_eigval)
        if beta_guard:
            gates = gates + (_guard_beta(gates, k, g, dtype) - gates).detach()
        every = functools.partial(
            _scan_all, _chunks_of_channels, _CHUNK_OF_CHANNELS, use_qk_l2norm_in_kernel, scale, dtype
        )
        return every(layout, state, q, k, v, g, gates, w)

    return _run_operation(compute, output_final_state, cu_seqlens, initial_state, q, k, v, g, beta, w)


_OPERATIONS = {each.__name__: each for each in (gated_delta_net, gated_delta_net_v2, gated_delta_product)}


def _is_blackwell() -> bool:
    return cuda.get_device_capability()[0] == 10


def _require_frost(engine: str) -> None:
    if not _is_blackwell():
        major, minor = cuda.get_device_capability()
        raise _not_supported(f"{engine} requires SM100 / SM103 / SM107 (found {10 * major + minor})")


def _not_supported(reason: str) -> GraphNotSupportedError:
    return GraphNotSupportedError(
        f"no engine — python or backend — proposed a plan for this graph (python engines declined: {reason})"
    )


def _apply_sigmoid(beta: Tensor, is_doubled: bool) -> Tensor:
    value = beta.float().sigmoid() * (2.0 if is_doubled else 1.0)
    return _Rounded.apply(value, lambda x: x.to(beta.dtype).float(), _keep_all)


def _guard_beta(beta: Tensor, k: Tensor, g: Tensor, dtype: torch.dtype) -> Tensor:
    """Return ``beta`` with the rows that would enlarge the state shrunk towards their mean.

    ``a`` and ``nu`` are the means of beta and of its square, weighted by the squares of the key's features. A row is
    safe if the weighted variance stays below a limit that the slowest decay sets.
    """
    weight = _make_unit(k.float()).square()
    room = (2 * g.float().amax(-1, keepdim=True)).exp()

    def moments(beta: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        a, nu = (beta * weight).sum(-1, keepdim=True), (beta.square() * weight).sum(-1, keepdim=True)
        limit = ((1 / room - 1) * (1 - (1 - a).square() * room)).clamp_min(0)
        return a, nu, (total * nu - a.square()).clamp_min(0), limit

    total = weight.sum(-1, keepdim=True)
    a, _, variance, limit = moments(beta)
    is_unsafe = (total > 1e-20) & (variance > limit)
    mean = a / total.clamp_min(1e-20)
    shrink = ((1 - _GUARD_MARGIN) * limit / variance.clamp_min(1e-30)).sqrt().clamp_max(1)
    rounded = torch.where(is_unsafe, mean + shrink * (beta - mean), beta).to(dtype).float()
    a, nu, variance, limit = moments(rounded)
    tolerance = _GUARD_TOLERANCE * torch.finfo(dtype).eps * (total * nu + a.square())
    mean = (a / total.clamp_min(1e-20)).to(dtype).float()
    return torch.where(is_unsafe & (variance > limit + tolerance), mean, rounded)


# Sequences of any lengths as one batch of whole chunks, forward and backward.


@dataclass(frozen=True)
class _Layout:
    """Where the tokens of sequences lie; ``is_token`` is ``[sequences, longest length]``."""

    begin: int
    tokens: int
    is_token: Tensor

    def chunked(self, x: Tensor, chunk: int) -> Tensor:
        """Return FP32 ``[sequences, heads, chunks, chunk, ...]`` of ``[tokens, heads, ...]``, with zeros added."""
        sequences, longest = self.is_token.shape
        rows = x.float()[self.begin : self.begin + int(self.is_token.sum())]
        whole = -(-longest // chunk) * chunk
        batch = rows.new_zeros(sequences, whole, *x.shape[1:])
        batch = batch.index_put(self.is_token.nonzero(as_tuple=True), rows)
        return batch.unflatten(1, (-1, chunk)).movedim(3, 1)

    def packed(self, x: Tensor) -> Tensor:
        """Return ``[tokens, heads, ...]`` of what ``chunked`` returns; tokens of no sequence are zero."""
        rows = x.movedim(1, 3).flatten(1, 2)[:, : self.is_token.shape[1]][self.is_token]
        return pad(rows, (0, 0) * (rows.dim() - 1) + (self.begin, self.tokens - self.begin - len(rows)))


_Compute = Callable[..., tuple[Tensor, Tensor]]


def _run_operation(
    compute: _Compute,
    output_final_state: bool,
    cu_seqlens: Tensor,
    initial_state: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *gates: Tensor | None,
) -> tuple[Tensor, Tensor]:
    output, state = _Operation.apply(compute, q.dtype, cu_seqlens, initial_state, q, k, v, *gates)
    return output, state if output_final_state else state.new_empty(0)


class _Operation(torch.autograd.Function):
    """One kernel, whose backward pass computes the forward pass again, as cuDNN's frontend does."""

    @staticmethod
    def forward(
        ctx: Any, compute: _Compute, dtype: torch.dtype, cu_seqlens: Tensor, *tensors: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        ctx.compute, ctx.dtype = compute, dtype
        ctx.save_for_backward(cu_seqlens, *tensors)
        return recorded(_compute_output_and_state)(compute, dtype, cu_seqlens, *tensors)

    @staticmethod
    def backward(ctx: Any, of_output: Tensor, of_state: Tensor) -> tuple[Tensor | None, ...]:
        cu_seqlens, *tensors = ctx.saved_tensors
        given = ctx.compute, ctx.dtype, of_output, of_state, ctx.needs_input_grad, cu_seqlens, *tensors
        gradients = recorded(_compute_gradients)(*given)
        return None, None, None, *gradients


def _compute_output_and_state(
    compute: _Compute,
    dtype: torch.dtype,
    cu_seqlens: Tensor,
    initial_state: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *gates: Tensor | None,
) -> tuple[Tensor, Tensor]:
    begin, *ends = cu_seqlens.tolist()
    lengths = torch.tensor([begin, *ends]).diff()
    layout = _Layout(begin, len(k), torch.arange(max(int(lengths.max()), 1)) < lengths[:, None])
    state = v.new_zeros(len(ends), *v.shape[1:], k.shape[-1], dtype=torch.float32)
    output, final = compute(layout, state if initial_state is None else initial_state, q, k, v, *gates)
    return output.to(dtype), final


def _compute_gradients(
    compute: _Compute,
    dtype: torch.dtype,
    of_output: Tensor,
    of_state: Tensor,
    is_wanted: Sequence[bool],
    cu_seqlens: Tensor,
    *tensors: Tensor | None,
) -> tuple[Tensor | None, ...]:
    leaves: list[Any] = [None if each is None else each.detach() for each in tensors]
    wanted = [
        each.requires_grad_() for each, is_one in zip(leaves, is_wanted[3:], strict=True) if each is not None and is_one
    ]
    with torch.enable_grad():
        results = _compute_output_and_state(compute, dtype, cu_seqlens, *leaves)
    gradients = iter(torch.autograd.grad(results, wanted, (of_output, of_state)))
    return tuple(next(gradients) if each is not None and each.requires_grad else None for each in leaves)


# Rounded products.


def _keep_all(x: Tensor) -> Tensor:
    return x


class _Rounded(torch.autograd.Function):
    """``value(x)``, whose gradient is ``gradient`` of what comes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, value: _Round, gradient: _Round) -> Tensor:
        ctx.gradient = gradient
        return value(x)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None, None]:
        return ctx.gradient(g), None, None


class _Product(torch.autograd.Function):
    """``a @ b`` of rounded operands in FP32; ``of_a`` and ``of_b`` round the gradient that theirs are computed from."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor, io: _Round, of_a: _Round, of_b: _Round) -> Tensor:
        a, b = io(a), io(b)
        ctx.save_for_backward(a, b)
        ctx.of_a, ctx.of_b = of_a, of_b
        return a @ b

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        a, b = ctx.saved_tensors
        return ctx.of_a(g) @ b.mT, a.mT @ ctx.of_b(g), None, None, None


def _multiply_rounded(a: Tensor, b: Tensor, io: _Round) -> Tensor:
    return _Product.apply(a, b, io, io, io)


def _inverse_in_blocks(lower: Tensor, block: int, io: _Round) -> Tensor:
    """Return the inverse of ``I + lower`` with every block rounded: those on the diagonal, then pairs of them."""
    size = lower.shape[-1]
    if size == block:
        unit = torch.eye(size).expand_as(lower)
        return io(torch.linalg.solve_triangular(lower, unit, upper=False, unitriangular=True))
    half = size // 2
    first = _inverse_in_blocks(lower[..., :half, :half], block, io)
    second = _inverse_in_blocks(lower[..., half:, half:], block, io)
    below = -io(io(second @ lower[..., half:, :half]) @ first)
    above = torch.zeros_like(below)
    return torch.cat([torch.cat([first, above], -1), torch.cat([below, second], -1)], -2)


class _Solved(torch.autograd.Function):
    """The solution U of ``(I + beta lower) U = beta y`` on a Blackwell; a ``beta`` of None counts as 1.

    Its gradients are those of y, r of ``beta y``, and ``-d U^T`` of ``lower``, d being the gradient of y.
    """

    @staticmethod
    def forward(ctx: Any, lower: Tensor, beta: Tensor | None, y: Tensor, block: int, io: _Round) -> Tensor:
        inverse = _inverse_in_blocks(io(lower if beta is None else beta[..., None] * lower), block, io)
        factor = inverse if beta is None else io(inverse * beta[..., None, :])
        solution = factor @ y
        ctx.save_for_backward(lower, beta, y, inverse, factor, io(solution))
        ctx.io = io
        return solution

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        lower, beta, y, inverse, factor, solution = ctx.saved_tensors
        g = ctx.io(g)
        of_y = factor.mT @ g
        of_lower = -(ctx.io(of_y) @ solution.mT).tril(-1)
        of_beta = None if beta is None else (inverse.mT @ g * (y - lower @ solution)).sum(-1)
        return of_lower, of_beta, of_y, None, None


class _TimesInverse(torch.autograd.Function):
    """``(I + lower)^-1 @ right`` by cuTile's kernels, which round the inverse once and differentiate through it."""

    @staticmethod
    def forward(ctx: Any, lower: Tensor, right: Tensor, io: _Round) -> Tensor:
        unit = torch.eye(lower.shape[-1]).expand_as(lower)
        inverse = io(torch.linalg.solve_triangular(lower, unit, upper=False, unitriangular=True))
        right = io(right)
        ctx.save_for_backward(inverse, right)
        ctx.io = io
        return io(inverse @ right)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor, None]:
        inverse, right = ctx.saved_tensors
        io, g = ctx.io, ctx.io(g)
        of_inverse = io((g @ right.mT).tril(-1))
        return -(inverse.mT @ io(of_inverse @ inverse.mT)).tril(-1), inverse.mT @ g, None


# The chunks of each kernel, and the scan over them.


@dataclass(frozen=True)
class _Chunks:
    """What a scan needs of each chunk; all tensors begin with ``[sequences, heads, chunks]``.

    With the state S that enters a chunk, ``update(n, read S)`` returns U of its n-th chunk, the output is
    ``scale (ask_scale (ask S) + attention U)``, and the next state ``last S + write^T (write_scale U)``.
    """

    read: Tensor
    update: Callable[[int, Tensor], Tensor]
    ask: Tensor
    ask_scale: Tensor
    attention: Tensor
    write: Tensor
    write_scale: Tensor
    last: Tensor
    scale: float
    of_state: _Round


def _scan_all(
    chunks_of: Callable[..., _Chunks],
    chunk: int,
    is_normalized: bool,
    scale: float,
    dtype: torch.dtype,
    layout: _Layout,
    state: Tensor,
    *tensors: Tensor,
) -> tuple[Tensor, Tensor]:
    """Return the packed output, FP32, and the final state, both as the operations return them."""

    def io(x: Tensor) -> Tensor:
        return x.to(dtype).float()

    chunks = chunks_of(*(layout.chunked(each, chunk) for each in tensors), is_normalized, scale, dtype, io)
    state, outputs = state.mT, []
    for n in range(chunks.ask.shape[2]):
        update = chunks.update(n, _Product.apply(chunks.read[:, :, n], state, io, io, chunks.of_state))
        asked = _Product.apply(chunks.ask[:, :, n], state, io, _keep_all, chunks.of_state) * chunks.ask_scale[:, :, n]
        outputs.append(chunks.scale * (asked + _multiply_rounded(chunks.attention[:, :, n], update, io)))
        written = _multiply_rounded(chunks.write[:, :, n].mT, update * chunks.write_scale[:, :, n], io)
        state = state * chunks.last[:, :, n] + written
    return layout.packed(torch.stack(outputs, 2)), state.mT


def _make_unit(x: Tensor) -> Tensor:
    return x * (x.square().sum(-1, keepdim=True) + _L2NORM_EPS).rsqrt()


def _compute_pair_decays(total: Tensor) -> Tensor:
    """Return the decay from each token to each later one or itself of sums ``[..., chunk]``, else 0."""
    size = total.shape[-1]
    later = torch.ones(size, size, dtype=torch.bool).triu(1)
    return (total[..., :, None] - total[..., None, :]).masked_fill(later, -torch.inf).exp()


def _chunks_of_inverses(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    is_normalized: bool,
    scale: float,
    dtype: torch.dtype,
    io: _Round,
) -> _Chunks:
    """Return the chunks of ``cutile/kernels/gdn.py``."""
    if is_normalized:
        q, k = _Rounded.apply(_make_unit(q), io, io), _Rounded.apply(_make_unit(k), io, io)
    k, solved = (
        _Rounded.apply(k, _keep_all, io),
        _Rounded.apply(k, _keep_all, io),
    )  # each adds a rounded part of its gradient
    total = g.cumsum(-1)
    pairs, decay = _compute_pair_decays(total), total.exp()[..., None]
    lower = (_multiply_rounded(solved, solved.mT, io) * pairs * beta[..., None]).tril(-1)
    right = torch.cat([v * beta[..., None], solved * beta[..., None] * decay], -1)
    values, keys = _TimesInverse.apply(lower, right, io).split([v.shape[-1], k.shape[-1]], -1)
    return _Chunks(
        read=keys,
        update=lambda n, read: values[:, :, n] - read,
        ask=q,
        ask_scale=decay,
        attention=_multiply_rounded(q, k.mT, io) * pairs,
        write=k,
        write_scale=(total[..., -1:] - total).exp()[..., None],
        last=decay[..., -1:, :],
        scale=scale,
        of_state=round_to_tf32,
    )


def _chunks_of_scalars(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    is_normalized: bool,
    scale: float,
    dtype: torch.dtype,
    io: _Round,
) -> _Chunks:
    """Return the chunks of ``frost/kernel/gdn_prefill_f16.py`` and ``gdn_bprop_f16.py``."""
    if is_normalized:
        q, k = (
            _Rounded.apply(_make_unit(q), io, _keep_all),
            _Rounded.apply(_make_unit(k), io, _keep_all),
        )
    total = g.cumsum(-1)
    pairs, decay = _compute_pair_decays(total), total.exp()[..., None]
    lower = (_multiply_rounded(k, k.mT, io) * pairs).tril(-1)

    def update(n: int, read: Tensor) -> Tensor:
        read = _Rounded.apply(read * decay[:, :, n], io, _keep_all)
        left = _Rounded.apply(v[:, :, n] - read, io, _keep_all)
        return _Solved.apply(lower[:, :, n], beta[:, :, n], left, _BLOCK, io)

    return _Chunks(
        read=k,
        update=update,
        ask=q,
        ask_scale=decay * scale,
        attention=_multiply_rounded(q, k.mT, io) * pairs * scale,
        write=k,
        write_scale=(total[..., -1:] - total).exp()[..., None],
        last=decay[..., -1:, :],
        scale=1.0,
        of_state=io,
    )


def _chunks_of_channels(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    w: Tensor,
    is_normalized: bool,
    scale: float,
    dtype: torch.dtype,
    io: _Round,
) -> _Chunks:
    """Return the chunks of ``frost/kernel/gdn2_prefill_f16.py`` and ``gdn2_bprop_f16.py``.

    The products within a chunk take decays apart, ``exp(G_t) exp(-G_s)``. Features for which ``exp(-G)`` is out of
    range are computed pair by pair in FP32.
    """
    if is_normalized:
        q, k = _make_unit(q), _make_unit(k)
    total = g.cumsum(-2)
    smallest, largest = _STEEP[dtype]
    magnitude = k.detach().abs().amax(-2, keepdim=True).clamp_min(1)
    lowest = total.detach()[..., -1:, :] / torch.tensor(2.0).log()
    is_steep = lowest < torch.maximum(torch.tensor(smallest), magnitude.log2() - largest)
    decay = total.exp()
    erase, ask = beta * k * decay, q * decay
    inverse = k * (-total.masked_fill(is_steep, 0)).exp()
    lower, attention = (_multiply_rounded(each.masked_fill(is_steep, 0), inverse.mT, io) for each in (erase, ask))
    if is_steep.any():
        later = torch.ones(total.shape[-2], total.shape[-2], dtype=torch.bool).triu(1)[..., None]
        pairs = (total[..., :, None, :] - total[..., None, :, :]).masked_fill(later, -torch.inf).exp()
        exact = functools.partial(torch.einsum, "...td,...sd,...tsd->...ts")
        lower = lower + exact(beta * k * is_steep, k, pairs)
        attention = attention + exact(q * is_steep, k, pairs)
    written = _Rounded.apply(w * v, io, _keep_all)

    def update(n: int, read: Tensor) -> Tensor:
        left = _Rounded.apply(written[:, :, n] - _Rounded.apply(read, io, _keep_all), io, _keep_all)
        return _Solved.apply(lower.tril(-1)[:, :, n], None, left, _BLOCK_OF_CHANNELS, io)

    return _Chunks(
        read=erase,
        update=update,
        ask=ask,
        ask_scale=torch.ones_like(q[..., :1]),
        attention=attention.tril(),
        write=k * (total[..., -1:, :] - total).exp(),
        write_scale=torch.ones_like(q[..., :1]),
        last=decay[..., -1, :, None],
        scale=scale,
        of_state=io,
    )
