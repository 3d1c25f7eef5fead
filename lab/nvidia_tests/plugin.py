"""The pytest plugin for NVIDIA's tests: choose, shrink and record them, and compute as NVIDIA's container does.

Each line that it adds to the file of ``--nvidia-record`` is an object: tests that were ``collected``, why a file could
not be collected (``unread``), a test that has ``begun``, or a test's ``outcome``.
"""

from __future__ import annotations

import inspect
import json
import os
import re
import subprocess
import sys
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from te_on_cpu import cuda, gemm, tensor_cores
from te_on_cpu.enums import TORCH_DTYPE

_LONGEST = 400
RANKS = 2
_CHILD = ("-m", "lab.nvidia_tests.host")
_FUNCTION = re.compile(r"[^\[]*::(\w+)")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--nvidia-record", help="A file that lines are added to.")
    parser.addoption("--nvidia-tests", help="A file with the tests to run, a line each, in their order.")
    parser.addoption("--nvidia-wanted", type=int, help="How many of them are to run that are not skipped.")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(_Recorder(config))
    _run_children_on_the_cpu()
    compute_as_on_a_gpu()
    if "LOCAL_WORLD_SIZE" not in os.environ:
        cuda.device_count = lambda: RANKS


def compute_as_on_a_gpu() -> None:
    """Make PyTorch's own operations round as they do in NVIDIA's container, from now on."""
    _compute_products_as_a_gpu()
    _library.impl("native_layer_norm", _layer_norm, "CPU")
    _library.impl("native_layer_norm_backward", _layer_norm_backward, "CPU")
    _keep_scores_in_fp32()
    _library.impl("nll_loss_forward", _loss, "CPU")
    _library.impl("linalg_vector_norm", _vector_norm, "CPU")
    _allow_autocast_to_fp32()
    cuda.memory_allocated, cuda.max_memory_allocated = _memory_allocated, _max_memory_allocated
    cuda.reset_peak_memory_stats, cuda.pinned = _reset_peak_memory_stats, _pinned


class _Recorder:
    """Choose the tests, and record the outcome of each."""

    def __init__(self, config: pytest.Config) -> None:
        self._file = Path(config.getoption("--nvidia-record"))
        chosen = config.getoption("--nvidia-tests")
        self._chosen = None if chosen is None else Path(chosen).read_text(encoding="utf-8").splitlines()
        self._functions = {_FUNCTION.match(test)[1] for test in self._chosen or ()}  # type: ignore[index]
        self._wanted = config.getoption("--nvidia-wanted")
        self._reports: list[pytest.TestReport] = []
        self._smaller: dict[Any, str] = {}

    def _write(self, **content: Any) -> None:
        with self._file.open("a", encoding="utf-8") as file:
            file.write(json.dumps(content) + "\n")

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.outcome != "passed":
            self._write(unread=report.nodeid, outcome=report.outcome, why=_last_line(report))

    def pytest_pycollect_makeitem(self, name: str, obj: object) -> list[pytest.Item] | None:
        """Leave out functions without a chosen test, since some have ten thousand tests, which take long to collect."""
        is_left_out = self._chosen is not None and inspect.isfunction(obj) and name.startswith("test")
        return [] if is_left_out and name not in self._functions else None

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        for module in dict.fromkeys(item.getparent(pytest.Module) for item in items):
            if module is not None:
                self._smaller |= shrink(vars(module.obj))
        if self._chosen is None:
            self._write(collected=[item.nodeid for item in items])
        else:
            found = {item.nodeid: item for item in items}
            items[:] = [found[test] for test in self._chosen if test in found]

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        self._reports.clear()
        self._write(begun=item.nodeid)
        begin = _processor_time()
        if "memory_allocated" in inspect.getsource(item.obj):  # type: ignore[attr-defined]
            _Memory.of_test()
        result = yield
        _Memory.end()
        outcome, why = _outcome(self._reports)
        callspec = getattr(item, "callspec", None)
        values = callspec.params.values() if callspec is not None else ()
        smaller = [self._smaller[value] for value in values if isinstance(value, str) and value in self._smaller]
        seconds = round(_processor_time() - begin, 2)
        self._write(test=item.nodeid, outcome=outcome, why=why, seconds=seconds, smaller="; ".join(smaller))
        if self._wanted is not None:
            self._wanted -= outcome != "skipped"
            if self._wanted == 0:
                item.session.shouldstop = "as many have run as were wanted"
        return result

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._reports.append(report)


def _processor_time() -> float:
    """Return the processor time of this process and of all that it started or had the host fork and that have ended."""
    host = Path(f"/proc/{os.getppid()}/stat").read_text().rpartition(")")[2].split()
    return sum(os.times()[:4]) + sum(map(int, host[13:15])) / os.sysconf("SC_CLK_TCK")


def _outcome(reports: Sequence[pytest.TestReport]) -> tuple[str, str]:
    """Return a test's outcome, and why it did not pass."""
    for report in reports:
        if report.failed:
            return "failed", _last_line(report)
        if report.skipped:
            expected = getattr(report, "wasxfail", None)
            return "skipped", _last_line(report) if expected is None else f"NVIDIA expects it to fail: {expected}"
    return "passed", ""


def _last_line(report: pytest.CollectReport | pytest.TestReport) -> str:
    """Return what a test raised, and where."""
    said = report.longrepr
    if isinstance(said, tuple):  # for a skipped test: file, line, reason
        return said[2].removeprefix("Skipped: ")
    crash = getattr(said, "reprcrash", None)
    if crash is None:
        return str(said).strip().splitlines()[-1].removeprefix("E").strip()[:_LONGEST]
    lines = [line.strip() for line in crash.message.splitlines() if line.strip()]
    return f"{' '.join(lines)[:_LONGEST]} ({Path(crash.path).name}:{crash.lineno})"


# Sizes. NVIDIA's attention tests have a table of sizes that suit a GPU's memory. If a matrix of all scores would have
# more than 2^24 elements (64 MiB in FP32), first the heads and their groups are halved, then the batch, then lengths.

MOST_SCORES = 1 << 24
_FEWEST_TOKENS = 256


def shrink(names: dict[str, Any]) -> dict[str, str]:
    """Reduce the configurations in a module's tables that are too large, and return by name how they changed."""
    done: dict[str, str] = {}
    for table in [value for value in names.values() if isinstance(value, dict)]:
        for name, config in table.items():
            if hasattr(config, "max_seqlen_q") and hasattr(config, "num_gqa_groups"):
                before = _sizes(config)
                while _scores(config) > MOST_SCORES and _halve(config):
                    pass
                if _sizes(config) != before:
                    done[name] = f"{name}: {before} as {_sizes(config)}"
    return done


def _scores(config: Any) -> int:
    return config.batch_size * config.num_heads * config.max_seqlen_q * config.max_seqlen_kv


def _sizes(config: Any) -> str:
    return (
        f"batch {config.batch_size}, {config.max_seqlen_q} x {config.max_seqlen_kv} tokens, "
        f"{config.num_heads} heads in {config.num_gqa_groups} groups"
    )


def _halve(config: Any) -> bool:
    """Halve the first size that can be halved, in the order above, and return whether there was one."""
    ratio = config.num_heads // config.num_gqa_groups
    if config.num_heads % 2 == 0 and config.num_heads > max(4, 2 * ratio):
        config.num_heads //= 2
        config.num_gqa_groups = config.num_heads // ratio
        config.hidden_size = config.num_heads * config.head_dim_qk
        config.hidden_size_kv = config.num_gqa_groups * config.head_dim_v
    elif config.batch_size > 2:
        config.batch_size = (config.batch_size + 1) // 2
    elif (
        max(config.max_seqlen_q, config.max_seqlen_kv) > _FEWEST_TOKENS and getattr(config, "max_ctx_len", None) is None
    ):
        longer = max(config.max_seqlen_q, config.max_seqlen_kv)
        for name in ("max_seqlen_q", "max_seqlen_kv"):
            if getattr(config, name) == longer:
                setattr(config, name, longer // 2)
    else:
        return False
    return True


# Products outside of TE. NVIDIA's container sets TORCH_ALLOW_TF32_CUBLAS_OVERRIDE=1, so that PyTorch's own products of
# two FP32 tensors use TF32, forward and backward, as TE's do. A test that sets ``allow_tf32`` to False gets FP32.
# Products of FP16 are added in FP32 and rounded once, as on a GPU. A CPU's own FP16 products take up to 60 times as
# long.

_Products = {"mm": (0, 1), "bmm": (0, 1), "addmm": (1, 2), "baddbmm": (1, 2)}
_library = torch.library.Library("aten", "IMPL")
_KERNELS = Path(tensor_cores.__file__).parent
_TE_DTYPE = {dtype: number for number, dtype in TORCH_DTYPE.items()}


def _compute_products_as_a_gpu() -> None:
    for name, operands in _Products.items():
        _library.impl(name, _as_on_a_gpu(getattr(torch.ops.aten, name).out, operands), "CPU")
    _library.impl("_scaled_mm", _scaled_product, "CPU")


def _scaled_product(
    first: Tensor,
    second: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    bias: Tensor | None = None,
    scale_result: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    use_fast_accum: bool = False,
) -> Tensor:
    """Multiply FP8 tensors with one scale per tensor as TE's GEMM does, since PyTorch uses cuBLAS for them on a GPU.

    Tensors with a scale per row are multiplied in FP32, by a product that does not count as one of the test's.
    """
    if scale_a.numel() == scale_b.numel() == 1 and scale_result is None:
        left, right = _te_tensor(second.t(), scale_b), _te_tensor(first, scale_a)
        dtype = _TE_DTYPE[out_dtype or first.dtype]
        bias_type = _TE_DTYPE[torch.bfloat16 if bias is None else bias.dtype]
        options: dict[str, Any] = {"workspace": first.new_empty(0), "workspace_size": 0, "accumulate": False}
        options |= {"gelu": False, "gelu_in": None, "grad": False, "use_split_accumulator": not use_fast_accum}
        result: Tensor = gemm.generic_gemm(left, True, right, False, None, None, dtype, bias, bias_type, **options)[0]
        return result
    out = first.new_empty(0, dtype=out_dtype or first.dtype)
    others = (bias, scale_result, out_dtype, use_fast_accum)
    return torch.ops.aten._scaled_mm.out(first, second, scale_a, scale_b, *others, out=out)


def _te_tensor(codes: Tensor, scale: Tensor) -> Any:
    """Return FP8 codes with a scale in the form that TE's GEMM takes."""
    from transformer_engine.pytorch.tensor.storage.float8_tensor_storage import Float8TensorStorage

    data = codes.contiguous().view(torch.uint8)
    return Float8TensorStorage(data=data, fp8_scale_inv=scale.view(1), fp8_dtype=_TE_DTYPE[codes.dtype])


def _as_on_a_gpu(product: Any, operands: tuple[int, int]) -> Any:
    def rounded(*arguments: Any, **scalars: Any) -> Tensor:
        values = list(arguments)
        first = values[operands[0]]
        if first.dtype == torch.float16:
            values[: operands[1] + 1] = [value.float() for value in values[: operands[1] + 1]]
            return product(*values, **scalars, out=first.new_empty(0, dtype=torch.float32)).half()
        if first.dtype == torch.float32 and _uses_tf32() and not _is_called_by_kernel():
            for index in operands:
                values[index] = tensor_cores.round_to_tf32(values[index])
        return product(*values, **scalars, out=first.new_empty(0))

    return rounded


def _uses_tf32() -> bool:
    return os.environ.get("NVIDIA_TF32_OVERRIDE") != "0" and torch.backends.cuda.matmul.allow_tf32


def _is_called_by_kernel() -> bool:
    """Return whether the product is computed for one of the CPU kernels or for ``_scaled_product``."""
    frame = sys._getframe(2)
    while frame.f_back is not None and "/torch/" in frame.f_code.co_filename:
        frame = frame.f_back
    file = Path(frame.f_code.co_filename)
    return file.is_relative_to(_KERNELS) or file == Path(__file__)


# Layer norms outside of TE. A CPU adds the gradients of weight and bias row by row, in their own dtype. The sums of
# 4096 rows of FP32 are off by 1e-6, and of 256 rows of BF16 by a tenth, beyond the limits of NVIDIA's tests. A GPU's
# kernels have FP32 statistics and sums, and add by blocks (PyTorch 2.13,
# aten/src/ATen/native/cpu/layer_norm_kernel.cpp and cuda/layer_norm_kernel.cu).


def _layer_norm(
    values: Tensor, shape: Sequence[int], weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the normed values, and each row's mean and reciprocal standard deviation in at least FP32."""
    last = tuple(range(-len(shape), 0))
    exact = _widened(values)
    variance, mean = torch.var_mean(exact, last, correction=0, keepdim=True)
    factor = (variance + eps).rsqrt()
    normed = (exact - mean) * factor
    if weight is not None:
        normed = normed * weight
    if bias is not None:
        normed = normed + bias
    return normed.to(values.dtype), mean, factor


def _layer_norm_backward(
    grad: Tensor,
    values: Tensor,
    shape: Sequence[int],
    mean: Tensor,
    factor: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    needed: Sequence[bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Return the gradients of values, weight and bias, as far as they are needed."""
    last, exact = tuple(range(-len(shape), 0)), _widened(grad)
    normed = (values - mean) * factor
    scaled = exact if weight is None else exact * weight
    to_values = (scaled - scaled.mean(last, True) - normed * (scaled * normed).mean(last, True)) * factor
    to_weight, to_bias = ((each.reshape(-1, *shape).sum(0)) for each in (exact * normed, exact))
    found = ((to_values, values), (to_weight, weight), (to_bias, bias))
    grads = [
        each.to(of.dtype) if is_needed and of is not None else None
        for (each, of), is_needed in zip(found, needed, strict=True)
    ]
    return grads[0], grads[1], grads[2]


def _widened(values: Tensor) -> Tensor:
    return values.to(torch.promote_types(values.dtype, torch.float32))


# Attention outside of TE. A GPU's kernels keep the scores and the sums of FP16 and BF16 attention in FP32. A CPU's
# kernels round more of them, so that the gradients of test_mha_accuracy in BF16 exceed NVIDIA's limits even without TE.


def _keep_scores_in_fp32() -> None:
    attend: Any = torch.nn.functional.scaled_dot_product_attention

    def attended(
        query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, *rest: Any, **options: Any
    ) -> Tensor:
        mask = _widened(attn_mask) if attn_mask is not None and attn_mask.is_floating_point() else attn_mask
        result: Tensor = attend(_widened(query), _widened(key), _widened(value), mask, *rest, **options)
        return result.to(query.dtype)

    torch.nn.functional.scaled_dot_product_attention = attended


# Cross-entropy outside of TE. A CPU adds the losses of a batch in their dtype, a GPU in FP32 (PyTorch 2.13,
# aten/src/ATen/native/LossNLL.cpp and cuda/Loss.cu).


def _loss(values: Tensor, target: Tensor, weight: Tensor | None, reduction: int, ignored: int) -> tuple[Tensor, Tensor]:
    """Return the negative log-likelihood, and the total weight of all targets."""
    exact = _widened(values)
    loss, total = exact.new_empty(0), exact.new_empty(0)
    weights = None if weight is None else _widened(weight)
    torch.ops.aten.nll_loss_forward.output(exact, target, weights, reduction, ignored, output=loss, total_weight=total)
    return loss.to(values.dtype), total.to(values.dtype)


# Norms outside of TE. A CPU adds the absolute values, or the squares, one by one: the 1-norm of a million FP32 numbers
# is off by 2e-4, a hundred times the limit of test_statistics_multi_run. A GPU adds by blocks (PyTorch 2.13,
# aten/src/ATen/native/cpu/ReduceOpsKernel.cpp and cuda/ReduceNormKernel.cu).


def _vector_norm(
    values: Tensor,
    order: float = 2,
    dim: Sequence[int] | None = None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Return the norm, summed in FP64 and then rounded."""
    exact = values.to(torch.promote_types(values.dtype, torch.float64))
    out = exact.real.new_empty(0)
    norm: Tensor = torch.ops.aten.linalg_vector_norm.out(exact, order, dim, keepdim, out=out)
    return norm.to(dtype or values.real.dtype)


# Autocast. On a CPU it supports FP16 and BF16 and is off for other dtypes. On a GPU it supports FP32 as well
# (PyTorch 2.13, torch/amp/autocast_mode.py:297).


def _allow_autocast_to_fp32() -> None:
    begin = torch.autocast.__init__

    def begun(self: Any, device_type: str, dtype: torch.dtype | None = None, *rest: Any, **options: Any) -> None:
        begin(self, device_type, None if dtype == torch.float32 else dtype, *rest, **options)
        self.fast_dtype = dtype or self.fast_dtype

    torch.autocast.__init__ = begun  # type: ignore[method-assign]


# The GPU's memory. The allocated memory is that of the tensors that a test has made or, if other code asks for it on
# the test's behalf, of those made since it first asked. The peak is taken at operations outside of kernels, since a
# GPU's kernels would not need the same temporary memory. Pinned tensors lie in the host's memory.


class _Memory(TorchDispatchMode):
    """Track the tensors that have been made since it began."""

    _running: _Memory | None = None

    def __init__(self) -> None:
        super().__init__()
        self._made: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()
        self.most = self._most_before = 0

    @classmethod
    def of_test(cls) -> _Memory:
        if cls._running is None:
            cls._running = cls().__enter__()
        return cls._running

    @classmethod
    def end(cls) -> None:
        if cls._running is not None:
            cls._running.__exit__(None, None, None)
            cls._running = None

    @property
    def now(self) -> int:
        return sum(storage.nbytes() for storage in self._made)

    def __torch_dispatch__(self, operation: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        result = operation(*arguments, **(options or {}))
        made = (_storages(result) - _storages(arguments)).difference(self._made)
        if made:
            self._made.update(made)
            if not _is_called_by_kernel():
                self._most_before, self.most = self.most, max(self.most, self.now)
        return result

    def leave_out(self, tensor: Any) -> None:
        """Stop counting a tensor that the last operation has made."""
        self._made.difference_update(_storages(tensor))
        self.most = max(self._most_before, self.now)


def _storages(values: Any) -> set[torch.UntypedStorage]:
    """Return the storages of the tensors among the values, including those that quantized tensors consist of."""
    found: set[torch.UntypedStorage] = set()
    for value in tree_leaves(values):
        if hasattr(value, "get_metadata"):
            found |= _storages(value.get_metadata())
        elif isinstance(value, Tensor) and value.is_cpu:
            found.add(value.untyped_storage())
    return found


def _memory_allocated(device: Any = None) -> int:
    return _Memory.of_test().now


def _max_memory_allocated(device: Any = None) -> int:
    memory = _Memory.of_test()
    return max(memory.most, memory.now)


def _reset_peak_memory_stats(device: Any = None) -> None:
    memory = _Memory.of_test()
    memory.most = memory._most_before = memory.now


_as_ever = cuda.pinned


def _pinned(x: Any, is_asked: bool = True) -> Any:
    if is_asked and _Memory._running is not None:
        _Memory._running.leave_out(x)
    return _as_ever(x, is_asked)


# Processes that tests start run on the CPU kernels as well.


def _run_children_on_the_cpu() -> None:
    start = subprocess.Popen.__init__

    def started(self: Any, args: Any, *rest: Any, **options: Any) -> None:
        start(self, on_the_cpu(args) if isinstance(args, list | tuple) else args, *rest, **options)

    subprocess.Popen.__init__ = started  # type: ignore[method-assign]


def on_the_cpu(command: Sequence[Any]) -> list[str]:
    """Return a command that starts Python, by ``torchrun`` or not, changed so that it runs on the CPU kernels."""
    words = list(map(str, command))
    if words[0] == "torchrun":
        words[:1] = [sys.executable, "-m", "torch.distributed.run"]
    at = 0
    while at < len(words) and not (words[at] == "-m" or words[at].endswith(".py")):
        at += 1
    is_launcher = words[at : at + 1] == ["-m"] and words[at + 1].startswith("torch.distributed")
    rest = words[at + 2 :] if is_launcher else []
    run = words[at : at + 2] + on_the_cpu(rest) if rest else words[at:]
    return [*words[:at], *_CHILD, *run] if run else words
