"""Test what else TE exports, that docs/te-api.md names all of it, and that its errors reach the user unchanged."""

from __future__ import annotations

import ast
import gc
import importlib
import re
from collections import Counter
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import plain
import pytest
import torch
from agreement import gradient, te_on_cpu
from packaging.version import Version
from torch import Tensor, nn

from parity import te as backend
from parity.te.state import fresh_caches
from te_on_cpu import cuda, extension

# What else TE exports: RoPE, layouts, wrapping quantizers, offloading, export, and what a CPU cannot do.


WIDTH, ROWS = 64, 32
FROM_2_20 = pytest.mark.skipif(not backend.version().startswith("2.20"), reason="new in TransformerEngine 2.20")


@pytest.fixture
def one_process() -> Iterator[None]:
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def angles_of(embedding: nn.Module, seq: int) -> Tensor:
    """Return the angles ``[seq, dim / 2]`` in a ``RotaryPositionEmbedding``'s output, whose halves are equal."""
    full = embedding(seq)[:, 0, 0, :]
    first, second = full.chunk(2, dim=-1)
    assert torch.equal(first, second)
    return first


def test_rotary_angles_are_positions_over_wavelengths() -> None:
    te = te_on_cpu()
    torch.testing.assert_close(angles_of(te.RotaryPositionEmbedding(16), 12), plain.rotary_angles(12, 16))
    base_16 = torch.arange(12.0)[:, None] * 16.0 ** (-torch.arange(0, 16, 2) / 16)
    torch.testing.assert_close(angles_of(te.RotaryPositionEmbedding(16, rotary_base=16.0), 12), base_16)


def test_rotary_percent_rotates_the_first_part_of_a_head() -> None:
    embedding = te_on_cpu().RotaryPositionEmbedding(32, rotary_percent=0.5)
    torch.testing.assert_close(angles_of(embedding, 12), plain.rotary_angles(12, 16))


def test_rotary_positions_are_interpolated_by_a_factor_and_beyond_it_by_the_length() -> None:
    options = {"seq_len_interpolation_factor": 2, "pretrained_max_position_embeddings": 8}
    embedding = te_on_cpu().RotaryPositionEmbedding(16, **options)
    torch.testing.assert_close(angles_of(embedding, 12), plain.rotary_angles(12, 16) / 2)
    torch.testing.assert_close(angles_of(embedding, 24), plain.rotary_angles(24, 16) / 3)


def test_interleaved_rotary_angles_stand_in_pairs() -> None:
    full = te_on_cpu().RotaryPositionEmbedding(16, interleaved=True)(12)[:, 0, 0, :]
    torch.testing.assert_close(full, plain.rotary_angles(12, 16).repeat_interleave(2, dim=-1))


@pytest.mark.skipif(Version(backend.version()) < Version("2.18"), reason="exported from TransformerEngine 2.18 on")
def test_interleaved_gate_and_up_alternate_in_blocks() -> None:
    te, gate, up = te_on_cpu(), torch.randn(64, 3), torch.randn(64, 3)
    interleaved = te.interleave_glu_tensor(torch.cat([gate, up]), 32)
    assert torch.equal(interleaved, torch.cat([gate[:32], up[:32], gate[32:], up[32:]]))
    assert torch.equal(te.deinterleave_glu_tensor(interleaved, 32), torch.cat([gate, up]))


@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["AllGather", "AllReduce", "ReduceScatter"])
def test_communication_of_one_process_changes_nothing(name: str, dtype: torch.dtype) -> None:
    x = torch.randn(ROWS, WIDTH, dtype=dtype, requires_grad=True)
    y = getattr(te_on_cpu().ops, name)()(x)
    of_output = torch.randn_like(y)
    y.backward(of_output)
    assert torch.equal(y, x)
    assert torch.equal(gradient(x), of_output)


@FROM_2_20
def test_an_identity_quantizer_keeps_its_tensor() -> None:
    te, x = te_on_cpu(), torch.randn(ROWS, WIDTH)
    quantized = te.IdentityQuantizer()(x)
    assert isinstance(quantized, te.IdentityTensor)
    assert isinstance(quantized, te.IdentityTensorStorage)
    assert torch.equal(quantized.dequantize(), x)


@FROM_2_20
def test_a_hybrid_quantizer_has_a_format_for_each_direction() -> None:
    te, x = te_on_cpu(), torch.randn(ROWS, WIDTH)
    rowwise = te.Float8CurrentScalingQuantizer(te.DType.kFloat8E4M3, device="cpu")
    hybrid = te.HybridQuantizer(rowwise_quantizer=rowwise, columnwise_quantizer=te.IdentityQuantizer())(x)
    assert isinstance(hybrid, te.HybridQuantizedTensor)
    assert isinstance(hybrid, te.HybridQuantizedTensorStorage)
    assert torch.equal(hybrid.dequantize(), rowwise(x).dequantize())


def test_quantized_tensors_are_saved_for_the_backward_pass_as_plain_ones() -> None:
    te, x = te_on_cpu(), torch.randn(ROWS, WIDTH)
    from transformer_engine.pytorch.quantized_tensor import prepare_for_saving, restore_from_saved

    quantizer = te.Float8CurrentScalingQuantizer(rowwise_dtype(), device="cpu")
    quantizer.internal = True
    quantized = quantizer(x)
    expected = quantized.dequantize().clone()
    tensors, objects = prepare_for_saving(x, quantized)
    assert all(tensor is None or type(tensor) is Tensor for tensor in tensors)
    restored = restore_from_saved(objects, tensors)
    assert restored[0] is x
    assert torch.equal(restored[1].dequantize(), expected)


def rowwise_dtype() -> Any:
    import transformer_engine_torch as tex

    return tex.DType.kFloat8E4M3


def test_offloading_activations_changes_no_bit() -> None:
    te = te_on_cpu()
    layers = [te.LayerNormMLP(WIDTH, 96) for _ in range(3)]
    x, gradients = torch.randn(ROWS, WIDTH), []
    for enabled in (False, True):
        context, synchronize = te.get_cpu_offload_context(enabled=enabled, num_layers=1, model_layers=3)
        leaf = x.clone().requires_grad_()
        hidden = leaf
        for layer in layers:
            with context:
                hidden = layer(hidden)
            hidden = synchronize(hidden)
        hidden.sum().backward()
        gradients.append(gradient(leaf))
    assert torch.equal(*gradients)


@FROM_2_20
@pytest.mark.parametrize("recipe", [None, "Float8CurrentScaling"])
@pytest.mark.parametrize("path", ["v1", "v2"])
def test_activations_that_are_large_enough_to_be_offloaded_are_reloaded_to_the_bit(
    path: str, recipe: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    te, size = te_on_cpu(), 512
    for module in ("cpu_offload", "attention.dot_product_attention.backends"):
        loaded = importlib.import_module(f"transformer_engine.pytorch.{module}")
        monkeypatch.setattr(loaded, "NVTE_CPU_OFFLOAD_V1", path == "v1")
    made = recipe and getattr(importlib.import_module("transformer_engine.common.recipe"), recipe)()
    layers = [te.LayerNormMLP(size, size, params_dtype=torch.bfloat16) for _ in range(3)]
    x, gradients = torch.randn(size, size, dtype=torch.bfloat16), []
    copied: list[float] = []
    for enabled in (False, True):
        context, synchronize = te.get_cpu_offload_context(enabled=enabled, num_layers=2, model_layers=3)
        leaf = x.clone().requires_grad_()
        hidden = leaf
        with te.autocast(enabled=recipe is not None, recipe=made):
            for layer in layers:
                with context:
                    hidden = layer(hidden)
                hidden = synchronize(hidden)
        copied.append(getattr(context, "offload_synchronizer", None) and total_size(context))
        hidden.float().sum().backward()
        gradients.append(gradient(leaf))
    assert torch.equal(*gradients)
    assert path == "v1" or copied[1] > 1.0  # TE offloads no tensor of less than 256k elements


QUANTIZERS: dict[str, Callable[[Any], Any]] = {
    "none": lambda te: lambda values: values,
    "delayed": lambda te: te.Float8Quantizer(torch.ones(1), torch.zeros(1), te.DType.kFloat8E4M3),
    "current": lambda te: te.Float8CurrentScalingQuantizer(te.DType.kFloat8E4M3, device="cpu"),
    "block": lambda te: te.Float8BlockQuantizer(te.DType.kFloat8E4M3, rowwise=True, columnwise=True),
    "mxfp8": lambda te: te.MXFP8Quantizer(te.DType.kFloat8E4M3),
    "nvfp4": lambda te: te.NVFP4Quantizer(),
}


@FROM_2_20
@pytest.mark.parametrize("quantized", QUANTIZERS)
def test_a_tensor_of_each_format_comes_back_from_the_host_to_the_bit(quantized: str) -> None:
    te, size = te_on_cpu(), 768  # TE offloads no tensor of less than 256k elements, and counts FP4's bytes of two
    offloading = importlib.import_module("transformer_engine.pytorch.cpu_offload")
    layer = offloading.OffloadableLayerState(offload_stream=cuda.Stream())
    tensor = QUANTIZERS[quantized](te)(torch.randn(size, size, dtype=torch.bfloat16))
    number = layer.push_tensor(tensor)
    layer.start_offload()
    layer.release_activation_forward_gpu_memory()
    assert layer.get_offloaded_total_size_mb() > 0.0
    layer.start_reload()
    back = layer.pop_tensor(number)
    assert type(back) is type(tensor)
    torch.testing.assert_close(back, tensor, rtol=0.0, atol=0.0)


def total_size(context: Any) -> float:
    return float(context.offload_synchronizer.get_offloaded_total_size_mb())


@pytest.mark.parametrize("name", ["Linear", "LayerNormLinear", "LayerNormMLP"])
def test_modules_in_onnx_export_compute_the_same_up_to_tf32(name: str) -> None:
    te, x = te_on_cpu(), torch.randn(ROWS, WIDTH)
    module = getattr(te, name)(WIDTH, 96).eval()
    with torch.no_grad():
        expected = module(x)
        with te.onnx_export(enabled=True):
            actual = module(x)
    assert (actual - expected).norm() < 2.0**-9 * expected.norm()


def test_a_graph_that_cannot_be_captured_says_why() -> None:
    class Branching(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x if x.sum() > 0 else -x

    te = te_on_cpu()
    try:
        with fresh_caches(), pytest.raises(RuntimeError, match=r"when stream is capturing: .* reads a value"):
            te.make_graphed_callables(Branching(), (torch.ones(ROWS, WIDTH, requires_grad=True),))
    finally:
        gc.enable()  # TE disables it for a capture, and leaves it disabled if the capture fails
    assert not importlib.import_module(f"{te.__name__}.graph").is_graph_capturing()


@FROM_2_20
def test_an_operation_of_cudnns_frontend_that_is_missing_is_named() -> None:
    te_on_cpu()
    from transformer_engine.pytorch.attention.linear_attention import base

    with pytest.raises(ImportError, match=r"no counterpart to cudnn\.linear_attention\.ops\.mamba2"):
        base._import_linear_attention_op("mamba2", "Mamba-2")


@FROM_2_20
@pytest.mark.usefixtures("one_process")
def test_newton_schulz_needs_nccl() -> None:
    with pytest.raises(RuntimeError, match="NCCL"):
        te_on_cpu().CusolverMpCtx(torch.distributed.group.WORLD)


def test_te_tells_the_emulated_gpu_and_its_default_recipe() -> None:
    te = te_on_cpu()
    assert te.get_device_compute_capability() == (9, 0)
    assert te.get_cudnn_version() >= (9, 0, 0)
    assert type(te.get_default_recipe()).__name__ == "DelayedScaling"
    assert te.is_bf16_available()


@pytest.mark.parametrize("old", [True, False])
def test_old_names_of_autocast_and_model_init_do_the_same(old: bool) -> None:
    te, x = te_on_cpu(), torch.randn(ROWS, WIDTH)
    from transformer_engine.common import recipe

    current = recipe.Float8CurrentScaling()
    torch.manual_seed(0)
    with te.fp8_model_init(enabled=True, recipe=current) if old else te.quantized_model_init(recipe=current):
        module = te.Linear(WIDTH, ROWS)
    assert isinstance(module.weight, te.Float8Tensor)
    with te.fp8_autocast(enabled=True, fp8_recipe=current) if old else te.autocast(enabled=True, recipe=current):
        actual = module(x)
    with te.autocast(enabled=True, recipe=current):
        assert torch.equal(actual, module(x))
    assert not torch.equal(actual, module(x))


@FROM_2_20
@pytest.mark.parametrize("kind", ["forward", "backward", "forward_backward"])
def test_a_registered_fusion_is_offered_the_operations(kind: str) -> None:
    ops = te_on_cpu().ops
    from transformer_engine.pytorch.ops.fuser import OperationFuser

    offered: list[str] = []

    def fuse(operations: list[Any], **_: Any) -> list[Any]:
        offered.extend(type(operation).__name__ for operation in operations)
        return operations

    getattr(ops, f"register_{kind}_fusion")(fuse)
    try:
        x = torch.randn(ROWS, WIDTH, requires_grad=True)
        ops.Sequential(ops.GELU(), ops.ConstantScale(2.0))(x).sum().backward()
    finally:
        getattr(OperationFuser, f"{kind}_fusion_functions").remove(fuse)
    assert set(offered) == {"GELU", "ConstantScale"}


@FROM_2_20
def test_offloading_by_hand_changes_no_bit() -> None:
    te = te_on_cpu()
    layer, x = te.LayerNormMLP(WIDTH, 96), torch.randn(ROWS, WIDTH, requires_grad=True)
    layer(x).sum().backward()
    expected, x.grad = gradient(x), None
    context, synchronize, manual = te.get_cpu_offload_context(
        enabled=True, model_layers=1, num_layers=1, manual_synchronization=True
    )
    assert isinstance(manual, te.ManualOffloadSynchronizer)
    with context:
        output = layer(x)
    output = synchronize(output)
    manual.start_offload_layer(0)
    manual.release_activation_forward_gpu_memory(0)
    manual.start_reload_layer(0)
    output.sum().backward()
    assert torch.equal(gradient(x), expected)


@FROM_2_20
def test_grouped_tensors_are_for_blackwell() -> None:
    assert not te_on_cpu().ops.is_op_fuser_grouped_tensor_path_supported(None, torch.bfloat16)


@FROM_2_20
def test_marking_a_tensor_keeps_it_from_offloading() -> None:
    tensor: Any = torch.ones(4)
    te_on_cpu().mark_not_offload(tensor)
    assert tensor._TE_do_not_offload


def test_chunks_of_tokens_change_places() -> None:
    te, x = te_on_cpu(), torch.randn(6, 4, requires_grad=True)
    y = te.moe_sort_chunks_by_index(x, torch.tensor([1, 3, 2]), torch.tensor([2, 0, 1]))
    first, second, third = x.split([1, 3, 2])
    assert torch.equal(y, torch.cat([third, first, second]))
    y.backward(2 * y.detach())
    assert torch.equal(gradient(x), 2 * x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["multi_tensor_scale", "multi_tensor_scale_tensor"])
def test_a_list_of_tensors_is_scaled_through_the_applier(name: str, dtype: torch.dtype) -> None:
    optimizers = te_on_cpu().optimizers
    sources = [torch.randn(shape).to(dtype) for shape in ((3,), (2, 5))]
    targets = [torch.empty_like(source) for source in sources]
    factor = torch.tensor(0.5) if name.endswith("_tensor") else 0.5
    flag = torch.zeros(1, dtype=torch.int32)
    optimizers.MultiTensorApply(2048)(getattr(optimizers, name), flag, [sources, targets], factor)
    for source, target in zip(sources, targets, strict=True):
        assert torch.equal(target, source / 2)
    assert flag.item() == 0


# ``docs/te-api.md`` names everything that TE exports, and only tests that exist.


TESTS = Path(__file__).parents[2]
TABLE = TESTS.parent / "docs" / "te-api.md"
MODULES = (
    "transformer_engine.pytorch",
    "transformer_engine.pytorch.ops",
    "transformer_engine.pytorch.optimizers",
    "transformer_engine.pytorch.router",
    "transformer_engine.common.recipe",
)
# Names that the modules import for their own use: the extension, and the function that loads it.
INTERNAL = {"tex", "load_framework_extension"}
NO_TEST = "no test: "
OF_2_20_2 = pytest.mark.skipif(
    Version(backend.version()) != Version("2.20.2"), reason="the table is of TransformerEngine 2.20.2"
)


@cache
def rows() -> dict[str, list[list[str]]]:
    """Return a row for each name in the table, as its cells, by the module that a heading names."""
    found: dict[str, list[list[str]]] = {}
    module = ""
    for line in TABLE.read_text(encoding="utf-8").splitlines():
        if heading := re.fullmatch(r"## `([\w.]+)`", line):
            module = heading[1]
        elif module and line.startswith("| `"):
            names, *cells = (cell.strip() for cell in line.strip("|").split("|"))
            found.setdefault(module, []).extend([name, *cells] for name in names.split())
    return found


def all_rows() -> list[list[str]]:
    return [row for of_module in rows().values() for row in of_module]


@cache
def functions_in(file: Path) -> frozenset[str]:
    tree = ast.parse(file.read_text(encoding="utf-8"))
    return frozenset(node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))


def exported(module: str) -> set[str]:
    """Return the names of TE's own public classes and functions, but not of submodules."""
    te_on_cpu()
    return {
        name
        for name, value in vars(importlib.import_module(module)).items()
        if not name.startswith("_")
        and name not in INTERNAL
        and str(getattr(value, "__module__", "")).startswith(("transformer_engine", "te_on_cpu."))
    }


@OF_2_20_2
@pytest.mark.parametrize("module", MODULES)
def test_the_table_names_what_te_exports_each_once(module: str) -> None:
    named = Counter(row[0].strip("`") for row in rows()[module])
    assert set(named) == exported(module)
    assert max(named.values()) == 1


def documented() -> list[tuple[str, list[str], bool]]:
    """Return the names that NVIDIA documents, their members, and whether they run on the CPU kernels."""
    text = (Path(__file__).parent / "documented_names.txt").read_text(encoding="utf-8")
    lines = [line.split() for line in text.splitlines() if not line.startswith("#")]
    return [
        (words[1], words[2:], False) if words[0] == "-" else (words[0], words[1:], True) for words in lines if words
    ]


def found(name: str) -> Any:
    """Return the object that TE documents under a dotted name below ``transformer_engine.pytorch``."""
    place, _, last = name.rpartition(".")
    module = ".".join(filter(None, ("transformer_engine.pytorch", place)))
    # The documentation still names the former place of ``inference``.
    return getattr(importlib.import_module(module.replace(".dot_product_attention.", ".attention.")), last)


@OF_2_20_2
@pytest.mark.parametrize(("name", "members", "runs"), documented())
def test_what_nvidia_documents_is_there_and_its_row_says_whether_it_runs(
    name: str, members: list[str], runs: bool
) -> None:
    te_on_cpu()
    documented_one = found(name)
    assert [member for member in members if not hasattr(documented_one, member)] == []
    place, _, last = name.rpartition(".")
    of_module = rows().get(f"transformer_engine.pytorch.{place}") or rows()["transformer_engine.pytorch"]
    (row,) = [row for row in of_module if row[0] == f"`{last}`"]
    assert (row[1] != "no") is runs


def asked_for() -> set[str]:
    """Return the names that TE's Python for PyTorch reads from its extension."""
    root = Path(str(te_on_cpu().__file__)).parent
    names: set[str] = set()
    for file in root.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            match node:
                case ast.Attribute(value=ast.Name("tex"), attr=name) if file.name != "onnx_extensions.py":
                    names.add(name)
                case ast.ImportFrom(module=extension.NAME):
                    names.update(alias.name for alias in node.names if alias.name != "*")
    return names


@OF_2_20_2
def test_the_page_names_each_kernel_that_te_asks_for_and_that_is_missing() -> None:
    provided = vars(extension.build(Version(backend.version())))
    section = re.search(r"## Kernels that are missing\n(.*?)\n## ", TABLE.read_text(encoding="utf-8"), re.DOTALL)
    assert section is not None
    named = {name for row in re.findall(r"^\| (`.*?) \|", section[1], re.MULTILINE) for name in re.findall(r"\w+", row)}
    assert named == asked_for() - set(provided)


def test_every_row_has_a_test_or_says_why_not() -> None:
    for name, *_, proof in all_rows():
        assert "::" in proof or (len(proof) > len(NO_TEST) and proof.startswith(NO_TEST)), name


def test_every_test_that_the_table_names_exists() -> None:
    named = [match for row in all_rows() for match in re.findall(r"`([\w/]+\.py)::(\w+)`", row[-1])]
    assert len(named) > len(all_rows()) / 2
    missing = [f"{file}::{test}" for file, test in named if test not in functions_in(TESTS / file)]
    assert not missing


def test_te_tells_the_version_of_pytorch() -> None:
    assert te_on_cpu().torch_version()[:2] == Version(torch.__version__).release[:2]


# Errors that TransformerEngine itself raises reach the user unchanged.


BF16 = torch.bfloat16
# The classes of TE's errors have changed between its versions, but their messages have not.
TE_ERRORS = (AssertionError, ValueError, RuntimeError, NotImplementedError, TypeError)


def in_fp8(te: Any, module: Any, x: Tensor, recipe: Any = None) -> None:
    with te.autocast(enabled=True, recipe=recipe):
        module(x)


def recipes() -> Any:
    te_on_cpu()
    from transformer_engine.common import recipe

    return recipe


MISTAKES: dict[str, tuple[str, Callable[[Any], object]]] = {
    "FP8 with a width that is no multiple of 16": (
        "divisible by 16",
        lambda te: in_fp8(te, te.Linear(20, 32, params_dtype=BF16), torch.ones(8, 20, dtype=BF16)),
    ),
    "FP8 with a number of tokens that is no multiple of 8": (
        "divisible by 8",
        lambda te: in_fp8(te, te.Linear(32, 32, params_dtype=BF16), torch.ones(3, 32, dtype=BF16)),
    ),
    "FP8 with a weight that is no multiple of 16": (
        "divisible by",
        lambda te: in_fp8(te, te.LayerNormLinear(32, 20, params_dtype=BF16), torch.ones(8, 32, dtype=BF16)),
    ),
    "a recipe that the GPU lacks": (
        "compute capability 10.0 or higher",
        lambda te: in_fp8(
            te, te.Linear(32, 32, params_dtype=BF16), torch.ones(32, 32, dtype=BF16), recipes().MXFP8BlockScaling()
        ),
    ),
    "an activation that TE does not know": (
        "swoosh",
        lambda te: te.LayerNormMLP(32, 64, activation="swoosh")(torch.ones(8, 32)),
    ),
    "a normalization that TE does not know": (
        "normalization",
        lambda te: te.LayerNormLinear(32, 32, normalization="BatchNorm"),
    ),
    "a mask that TE does not know": (
        "mask",
        lambda te: te.DotProductAttention(2, 16, attn_mask_type="diagonal")(*3 * [torch.ones(8, 2, 2, 16, dtype=BF16)]),
    ),
    "an input of another width": (
        "GEMM not possible",
        lambda te: te.Linear(32, 32)(torch.ones(8, 16)),
    ),
    "heads that groups do not divide": (
        "divisible",
        lambda te: te.MultiheadAttention(64, 4, num_gqa_groups=3),
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_meets_te_s_own_error(mistake: str) -> None:
    words, make = MISTAKES[mistake]
    with pytest.raises(TE_ERRORS, match=words) as raised:
        make(te_on_cpu())
    assert "transformer_engine" in str(raised.traceback[-1].path)
