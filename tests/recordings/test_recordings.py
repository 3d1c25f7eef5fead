"""Steps of a running training are recorded, and judged elsewhere by a pair's reference alone."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from typer.testing import CliRunner

import parity
from parity import te
from parity.case import registry
from parity.case.validate import check_case
from parity.cli import app
from parity.ranks.launch import launch
from parity.recordings import folder
from parity.recordings.folder import StoredPass
from parity.recordings.joined import find_degrees
from parity.recordings.judged import JudgedPass, judge_pass
from te_on_cpu.graphs import CUDAGraph, graph
from tests.recordings import pairs

KERNELS = te.kernels("cpu")
FILE = Path(pairs.__file__)
TARGET = f"{FILE}::model"


def ported(mistake: str = "", dtype: torch.dtype = torch.bfloat16) -> nn.Module:
    torch.manual_seed(1)
    return pairs.port(KERNELS.te, mistake).to(dtype)


def autocast(recipe: str) -> AbstractContextManager[Any]:
    if not recipe:
        return nullcontext()
    import transformer_engine.common.recipe as recipes

    return KERNELS.te.autocast(enabled=True, recipe=getattr(recipes, recipe)())


def train(
    path: Path,
    module: nn.Module,
    count: int = 2,
    recipe: str = "",
    pass_of: Callable[[nn.Module, Tensor], Any] = lambda module, x: module(x).float().square().mean().backward(),
    micro_batches: int = 1,
    optimizer: Callable[..., Any] = torch.optim.SGD,
    **options: Any,
) -> list[StoredPass]:
    """Train a model for some steps, record what is asked for, and return the recording."""
    made = optimizer(module.parameters(), lr=0.01)
    with parity.recording(path, **{"steps": [count - 1], **options}):
        for _ in range(count):
            for _ in range(micro_batches):
                with autocast(recipe):
                    pass_of(module, torch.randn(4, 16, pairs.WIDTH, dtype=next(module.parameters()).dtype))
            made.step()
            made.zero_grad()
    return folder.read(path)


def judge(*group: StoredPass, pair: str = "model", size: int = 0) -> JudgedPass:
    case = registry.only(f"{FILE}::{pair}")
    checked = check_case(case, KERNELS.te)[size]
    made = find_degrees(group[0].index, case, KERNELS, checked.size)
    return judge_pass(group, made, case, checked, KERNELS)


def is_right(one: JudgedPass) -> bool:
    return one.result.passed and one.stages is not None


def with_gradient(module: nn.Module, x: Tensor) -> None:
    module(x.requires_grad_() * 1.0).float().square().mean().backward()


def evaluated(module: nn.Module, x: Tensor) -> None:
    with torch.no_grad():
        module(x)


class Checkpointed(nn.Module):
    def __init__(self, module: nn.Module, checkpoint: Callable[..., Any]) -> None:
        super().__init__()
        self.layers, self.checkpoint = module.layers, checkpoint

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = self.checkpoint(layer, x)
        return x


class Wrapped(nn.Module):
    """Names its parameters as ``DistributedDataParallel`` does."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: Tensor) -> Tensor:
        return self.module(x)


def frozen(module: nn.Module, part: str) -> nn.Module:
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(part not in name)
    return module


def graphed(
    module: nn.Module, recipe: str = "", parts: Callable[[Any], Any] = lambda model: tuple(model.layers)
) -> Any:
    """Let parts of a model replay CUDA graphs, each with a sample of its own."""
    import transformer_engine.common.recipe as recipes

    of_module = parts(module)
    samples = [
        (torch.randn(4, 16, pairs.WIDTH, dtype=torch.bfloat16, requires_grad=True),)
        for _ in (of_module if isinstance(of_module, tuple) else (of_module,))
    ]
    given = tuple(samples) if isinstance(of_module, tuple) else samples[0]
    options = dict(enabled=True, recipe=getattr(recipes, recipe)()) if recipe else {}
    KERNELS.te.make_graphed_callables(of_module, given, **options)
    return module


def torchs_checkpoint(layer: nn.Module, x: Tensor) -> Any:
    return torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False)


@pytest.mark.parametrize(
    ("precision", "module", "options"),
    [
        ("bf16", ported, {}),
        ("fp32", lambda: ported(dtype=torch.float32), {}),
        ("fp16", lambda: ported(dtype=torch.float16), {}),
        ("fp8_current", ported, dict(recipe="Float8CurrentScaling")),
        ("fp8_delayed", ported, dict(recipe="DelayedScaling", count=4)),
        ("fp8_block", ported, dict(recipe="Float8BlockScaling")),
        ("bf16", ported, dict(micro_batches=3)),
        ("bf16", ported, dict(micro_batches=2, passes=2)),
        ("bf16", ported, dict(modules="layers.1")),
        ("bf16", ported, dict(modules=["layers.0.attn*", "layers.1.up"])),
        ("bf16", ported, dict(max_bytes=700_000)),
        ("bf16", ported, dict(pass_of=with_gradient)),
        ("bf16", ported, dict(pass_of=evaluated, count=1)),
        ("bf16", lambda: Wrapped(ported()), {}),
        ("bf16", lambda: frozen(ported(), "attn"), {}),
        ("bf16", lambda: Checkpointed(ported(), torchs_checkpoint), {}),
        ("bf16", lambda: Checkpointed(ported(), KERNELS.te.checkpoint), dict(pass_of=with_gradient)),
        ("bf16", lambda: graphed(ported()), dict(pass_of=with_gradient)),
        (
            "bf16",
            lambda: graphed(ported(), parts=lambda model: model),
            dict(pass_of=with_gradient, micro_batches=2, passes=2),
        ),
        ("fp8_current", lambda: graphed(ported(), "Float8CurrentScaling"), dict(pass_of=with_gradient)),
        (
            "fp8_delayed",
            lambda: graphed(ported(), "DelayedScaling"),
            dict(pass_of=with_gradient, recipe="DelayedScaling", count=4),
        ),
        (
            "fp8_current",
            lambda: graphed(ported(), "Float8CurrentScaling", lambda model: model.layers[1]),
            dict(pass_of=with_gradient, recipe="Float8CurrentScaling"),
        ),
    ],
    ids=lambda one: one if isinstance(one, str) else None,
)
def test_recorded_passes_of_a_right_port_are_right(precision: str, module: Any, options: Any, tmp_path: Path):
    found = [judge(one) for one in train(tmp_path, module(), **options)]
    assert len(found) == options.get("passes", 1)
    assert all(one.precision == precision for one in found)
    assert all(is_right(one) for one in found), [one.result for one in found]


@pytest.mark.parametrize("mistake", ["", "activation"])
def test_what_a_loss_is_computed_from_is_judged_beside_it(mistake: str, tmp_path: Path):
    module = pairs.Scored(list(ported(mistake).layers))
    (stored,) = train(tmp_path, module, pass_of=lambda module, x: module(x)["loss"].backward())
    assert stored.index.inner == ("output[prediction]",)
    found = judge(stored, pair="scored")
    assert is_right(found) == (not mistake), found.result
    assert [one.title for one in found.result.findings[:1]] == [mistake] * bool(mistake)


@pytest.mark.parametrize("mistake", ["", "activation"])
def test_a_pair_may_return_more_than_the_recorded_model(mistake: str, tmp_path: Path):
    (stored,) = train(tmp_path, ported(mistake))
    found = judge(stored, pair="mean_beside")
    assert is_right(found) == (not mistake), found.result
    assert [one.title for one in found.result.findings[:1]] == [mistake] * bool(mistake)
    unclear = judge(stored, pair="twice").result
    assert unclear.status == "error"
    assert "the reference returns output[y], output[beside], and the recorded model returned output" in unclear.reason


def test_a_first_step_of_delayed_scaling_is_not_judged(tmp_path: Path):
    (stored,) = train(tmp_path, ported(), recipe="DelayedScaling", count=1)
    with pytest.raises(parity.UserError, match=r"had no scale yet for gradients of layers\.0"):
        judge(stored)


@pytest.mark.parametrize("mistake", pairs.MISTAKES)
def test_a_mistake_of_a_running_training_is_found_in_its_layer(mistake: str, tmp_path: Path):
    (stored,) = train(tmp_path, ported(mistake))
    found = judge(stored)
    assert found.result.status == "failed"
    assert found.stages is not None
    assert found.stages.flagged
    first = found.stages.flagged[0].stage
    assert all("layers.1" in call.site[0] for call in first.calls), first
    if mistake in ("mask", "activation"):
        assert found.result.findings[0].title == mistake
    if mistake == "detached":
        assert first.backward
        assert found.result.findings[0].title == "gradient-path-missing"


@pytest.mark.parametrize("mistake", ["residual", "norm"])
def test_a_mistake_inside_a_cuda_graph_is_found_in_its_layer(mistake: str, tmp_path: Path):
    (stored,) = train(tmp_path, graphed(ported(mistake)), pass_of=with_gradient)
    found = judge(stored)
    assert found.result.status == "failed"
    assert found.stages is not None
    assert [stage.stage.watched for stage in found.stages.all[:2]] == ["te.Graphed"] * 2
    assert found.stages.flagged
    assert all("layers.0" not in call.site[0] for one in found.stages.flagged[:1] for call in one.stage.calls)


def test_layers_are_recorded_after_they_were_captured_in_the_same_context(tmp_path: Path):
    module, x = ported(), torch.randn(4, 16, pairs.WIDTH, dtype=torch.bfloat16)
    with parity.recording(tmp_path):
        with_gradient(graphed(module), x)
    (stored,) = folder.read(tmp_path)
    assert stored.index.number == 0
    assert is_right(judge(stored))


def test_a_graph_of_a_whole_step_is_an_error_that_says_what_to_do(tmp_path: Path):
    module, x = ported(), torch.randn(4, 16, pairs.WIDTH, dtype=torch.bfloat16)
    optimizer = torch.optim.SGD(module.parameters())

    def capture() -> CUDAGraph:
        made = CUDAGraph()
        with graph(made):
            module(x)
        return made

    def train_by_replays(made: CUDAGraph) -> None:
        with parity.recording(tmp_path / "replayed"):
            made.replay()
            optimizer.step()

    with (
        parity.recording(tmp_path / "captured"),
        pytest.raises(parity.UserError, match="Model cannot be recorded while"),
    ):
        capture()
    with pytest.raises(parity.UserError, match=r"step 0 was not recorded, .*make_graphed_callables"):
        train_by_replays(capture())


def test_the_writer_leaves_the_training_as_it_is(tmp_path: Path):
    weights = []
    for recorded in (True, False):
        torch.manual_seed(0)
        module = ported()
        with parity.recording(tmp_path / "dump", steps=[1]) if recorded else nullcontext():
            optimizer = torch.optim.Adam(module.parameters())
            for _ in range(3):
                module(torch.randn(4, 16, pairs.WIDTH, dtype=torch.bfloat16)).float().square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        weights.append([x.detach().clone() for x in module.parameters()])
    assert all(map(torch.equal, *weights))
    assert [path.name for path in (tmp_path / "dump").iterdir() if path.name.startswith(".")] == []


class Raising(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = KERNELS.te.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        raise ValueError("the training's own error")


def test_an_error_of_the_training_comes_through_and_what_was_recorded_stays(tmp_path: Path):
    right, wrong, x = ported(), Raising(), torch.randn(4, 16, pairs.WIDTH, dtype=torch.bfloat16)
    optimizer = torch.optim.SGD(right.parameters())

    def train_until_it_raises() -> None:
        with parity.recording(tmp_path, steps=[0, 1]):
            right(x).float().mean().backward()
            optimizer.step()
            wrong(x)

    with pytest.raises(ValueError, match="the training's own error"):
        train_until_it_raises()
    (stored,) = folder.read(tmp_path)
    assert is_right(judge(stored))
    assert not torch.nn.modules.module._global_forward_hooks


def train_on_rank(path: str) -> None:
    from torch import distributed

    module = ported()
    torch.manual_seed(distributed.get_rank())  # each rank has a batch of its own
    optimizer = torch.optim.SGD(module.parameters(), lr=0.01)
    with parity.recording(path, steps=[1]):
        for _ in range(2):
            module(torch.randn(4, 16, pairs.WIDTH, dtype=torch.bfloat16)).float().square().mean().backward()
            for x in module.parameters():
                distributed.all_reduce(x.grad)
            optimizer.step()
            optimizer.zero_grad()


def test_each_data_parallel_rank_records_its_own_batch(tmp_path: Path):
    launch(train_on_rank, 2, [str(tmp_path)])
    found = folder.read(tmp_path)
    assert [(one.index.rank, one.index.ranks) for one in found] == [(0, 2), (1, 2)]
    assert all(is_right(judge(one)) for one in found)
    for path in tmp_path.glob("*-rank-1.*"):
        path.unlink()
    with pytest.raises(parity.UserError, match=r"lacks rank 1 of 2 in pass 0 of step 1"):
        folder.read(tmp_path)


def train_sharded(path: str, by: str) -> None:
    """Train with FSDP, which gathers parameters while a part of the model runs: a layer, one of TE's modules.

    FSDP2 gathers each parameter, FSDP1 (``vector``) one vector of a layer's.
    """
    from torch import distributed
    from torch.distributed import fsdp
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    module = ported(dtype=torch.float32)
    if by == "vector":
        module = fsdp.FullyShardedDataParallel(
            module,
            auto_wrap_policy=ModuleWrapPolicy({pairs.Port}),
            mixed_precision=fsdp.MixedPrecision(param_dtype=torch.bfloat16),
            device_id=torch.device("cpu"),
            use_orig_params=True,
        )
    else:
        policy = fsdp.MixedPrecisionPolicy(param_dtype=torch.bfloat16)
        parts = module.layers if by == "layer" else [x for x in module.modules() if x._parameters]
        for part in (*parts, module):
            fsdp.fully_shard(part, mesh=init_device_mesh("cpu", (2,)), mp_policy=policy)
    torch.manual_seed(distributed.get_rank())
    optimizer = torch.optim.SGD(module.parameters(), lr=0.01)
    with parity.recording(path, steps=[1]):
        for _ in range(2):
            with autocast("Float8CurrentScaling" if by == "module" else ""):
                x = module(torch.randn(4, 16, pairs.WIDTH, dtype=torch.bfloat16))
            x.float().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.parametrize("by", ["layer", "module", "vector"])
def test_each_rank_of_fsdp_records_whole_parameters_and_its_own_gradients(by: str, tmp_path: Path):
    launch(train_sharded, 2, [str(tmp_path), by], timeout=300.0)
    found = [judge(one) for one in folder.read(tmp_path)]
    assert [one.precision for one in found] == ["fp8_current" if by == "module" else "bf16"] * 2
    assert all(is_right(one) for one in found), [one.result for one in found]
    assert all(sum(stage.stage.evidence == "weights" for stage in one.stages.all) > 8 for one in found if one.stages)


def average(parameter: Any) -> None:
    """Do what a wrapper does that averages gradients over ranks as they come."""
    parameter.main_grad.mul_(0.5)


@pytest.mark.parametrize("recipe", ["", "Float8CurrentScaling"])
@pytest.mark.parametrize("is_graphed", [False, True])
def test_what_te_adds_to_main_grad_is_judged_and_not_what_a_wrapper_makes_of_it(
    recipe: str, is_graphed: bool, tmp_path: Path
):
    module = ported()
    for part in module.modules():
        if hasattr(part, "fuse_wgrad_accumulation"):
            part.fuse_wgrad_accumulation = True
            part.weight.main_grad = torch.ones(part.weight.shape)  # an earlier micro-batch's
            part.weight.grad_added_to_main_grad = False  # as Megatron has it; TE then returns a tensor of anything
    held = [x for x in module.parameters() if hasattr(x, "main_grad")]
    if is_graphed:
        graphed(module, recipe)
        for x in held:
            x.grad_added_to_main_grad = False  # as Megatron does before each step; a replay does not set it
            x.main_grad.fill_(1.0)  # warming up has added to it
    for x in held:
        x.register_post_accumulate_grad_hook(average)
    if not is_graphed:
        del module.layers[0].up.weight.grad_added_to_main_grad  # otherwise it returns no gradient
    stored = train(tmp_path, module, recipe=recipe, pass_of=with_gradient, micro_batches=2, passes=2, count=1)
    assert not [name for one in stored for name in one.index.unreached]
    assert all(one.tensor("gradient of weight", "layers.0.up.weight").dtype == torch.float32 for one in stored)
    found = [judge(one) for one in stored]
    assert all(is_right(one) and not one.notes for one in found), [one.result for one in found]


@pytest.mark.parametrize("passes", [1, 2])
@pytest.mark.parametrize("is_fused", [False, True])
def test_gradients_of_several_passes_on_their_way_are_each_their_own(is_fused: bool, passes: int, tmp_path: Path):
    module = ported()
    for part in module.modules():
        if is_fused and hasattr(part, "fuse_wgrad_accumulation"):
            part.fuse_wgrad_accumulation, part.weight.main_grad = True, torch.ones(part.weight.shape)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.01)
    with parity.recording(tmp_path, passes=passes):
        outputs = [module(torch.randn(4, 16, pairs.WIDTH, dtype=torch.bfloat16)) for _ in range(3)]
        for one in (outputs[2], outputs[0], outputs[1]):
            one.float().square().mean().backward()
        optimizer.step()
    found = [judge(one) for one in folder.read(tmp_path)]
    assert len(found) == passes
    assert all(is_right(one) and not one.notes for one in found), [one.result for one in found]


def train_in_pipeline(path: str, mistake: str) -> None:
    """Train two stages of one layer each: all micro-batches forward, then all backward."""
    from torch import distributed

    rank = distributed.get_rank()
    torch.manual_seed(rank)
    stage = pairs.port(KERNELS.te, mistake if rank else "", layers=1).to(torch.bfloat16)
    optimizer = torch.optim.SGD(stage.parameters(), lr=0.01)
    shape = 4, 16, pairs.WIDTH
    with parity.recording(path, passes=2):
        given, returned = [], []
        for _ in range(2):
            x = torch.randn(shape).bfloat16()
            if rank:
                distributed.recv(x, 0)
                x.requires_grad_()
            given.append(x)
            returned.append(stage(x))
            if not rank:
                distributed.send(returned[-1].detach(), 1)
        for x, y in zip(given, returned, strict=True):
            gradient = torch.empty_like(y)
            if rank:
                y.float().square().mean().backward()
                distributed.send(x.grad, 0)
            else:
                distributed.recv(gradient, 1)
                y.backward(gradient)
        optimizer.step()


def test_each_stage_of_a_pipeline_is_judged_by_its_own_pair(tmp_path: Path):
    launch(train_in_pipeline, 2, [str(tmp_path), "norm"], timeout=300.0)
    for rank in (0, 1):
        code, told = run(
            *("judge", str(tmp_path), "--reference", TARGET, "--size", ("2", "layers=1")[rank]),
            *("--rank", str(rank), "--diagnosis", "1"),
        )
        assert code == rank, told
        assert f"pass 1 of step 0 on rank {rank} at bf16: {'failed' if rank else 'passed'}" in told


def train_divided(path: str, mistake: str, cp: int, sequence_parallel: bool, recipe: str) -> None:
    """Train layers whose weights two ranks divide, from the same weights as one process has."""
    from torch import distributed

    from parity.ranks.layout import Degrees, held_by, joined, part

    made = Degrees(tp=2, cp=cp, sequence_parallel=sequence_parallel)
    place, ranks = made.place(distributed.get_rank()), joined(made)
    parallel = dict(tp_group=ranks.tp.group, tp_size=2, sequence_parallel=sequence_parallel)
    torch.manual_seed(1)
    whole = dict(pairs.Layers(KERNELS.te, fuse_qkv_params=False).to(torch.bfloat16).named_parameters())
    module = pairs.Layers(KERNELS.te, mistake, fuse_qkv_params=False, **parallel).to(torch.bfloat16)
    for layer in module.layers if cp > 1 else ():
        layer.set_context_parallel_group(ranks.cp.group, list(ranks.cp.ranks), ranks.stream(), "p2p")
    module.count *= cp
    shapes = {name: tuple(x.shape) for name, x in whole.items()}
    with torch.no_grad():
        for name, held in held_by(module, shapes, {}, made, place).items():
            module.get_parameter(name).copy_(part(whole[held.whole], held.split, made, place))
    torch.manual_seed(0)
    x = torch.randn(16, 4, pairs.WIDTH, dtype=torch.bfloat16)
    with parity.recording(path), autocast(recipe):
        split = [parity.over("cp", balanced=True), *([parity.over("tp")] if sequence_parallel else [])]
        module(part(x, split, made, place)).float().square().sum().backward()


@pytest.mark.parametrize(
    ("mistake", "cp", "sequence_parallel", "recipe"),
    [("", 1, False, ""), ("", 2, True, "Float8CurrentScaling"), ("unscaled", 1, True, "")],
)
def test_what_tensor_parallel_ranks_recorded_is_put_together(
    mistake: str, cp: int, sequence_parallel: bool, recipe: str, tmp_path: Path
):
    launch(train_divided, 2 * cp, [str(tmp_path), mistake, cp, sequence_parallel, recipe], timeout=300.0)
    passes = folder.read(tmp_path)
    assert [one.index.tp for one in passes] == [2] * 2 * cp
    found = judge(*passes, pair="divided")
    assert is_right(found) == (not mistake), found.result
    assert found.stages is not None
    assert sum(one.stage.evidence == "weights" for one in found.stages.all) > 8
    with pytest.raises(parity.UserError, match=r"is of \d ranks \(tp2.*, and 1 of them are there"):
        judge(*passes[:1], pair="divided")


def train_sparse(path: str, cp: int, ep: int, mistake: str, takes_whole: bool, stacked: bool = False) -> None:
    """Train a layer over context and expert parallel ranks, from the same weights as one process has."""
    from torch import distributed

    from parity.ranks.layout import WHOLE, Degrees, joined, part, whole_names

    made = Degrees(cp=cp, ep=ep)
    place, ranks = made.place(distributed.get_rank()), joined(made)
    torch.manual_seed(1)
    whole = dict(pairs.Sparse(KERNELS.te, WHOLE, stacked=stacked).to(torch.bfloat16).named_parameters())
    module = pairs.Sparse(KERNELS.te, ranks, mistake, takes_whole, stacked).to(torch.bfloat16)
    names = whole_names([name for name, _ in module.named_parameters()], list(whole), ep, place["ep"])
    with torch.no_grad():
        for name, x in module.named_parameters():
            of_stack = [parity.over("ep")] if x.dim() > 2 else []
            x.copy_(part(whole[names[name]], of_stack, made, place))
    torch.manual_seed(0)
    batch = torch.randn(4, 16, pairs.WIDTH, dtype=torch.bfloat16), torch.randint(pairs.EXPERTS, (4, 16))
    split = [parity.over("ep", dim=0), *([] if takes_whole else [parity.over("cp", dim=1, balanced=True)])]
    with parity.recording(path):
        module(*(part(x, split, made, place) for x in batch)).float().square().sum().backward()


# The degrees; the mistake; whether each rank is given whole sequences, of which it takes its part; what is said of it.
SPARSE: dict[str, tuple[int, int, str, bool, str]] = {
    "attention and experts": (2, 2, "", False, ""),
    "a part of its own": (2, 1, "", True, ""),
    "neighbouring chunks": (2, 1, "contiguous", True, "between the inputs and the 1st 'scaled_dot_product_attention'"),
    "two experts of a rank exchanged": (1, 2, "experts", False, 'map "up.2.weight" to "fc1.weight3"'),
    "stacked experts": (1, 2, "", False, ""),
    "stacked experts and attention": (2, 2, "", False, ""),
    "two stacked experts exchanged": (1, 2, "experts", False, "up.2"),
}


@pytest.mark.parametrize("name", SPARSE)
def test_what_context_and_expert_parallel_ranks_recorded_is_put_together(name: str, tmp_path: Path):
    cp, ep, mistake, takes_whole, told = SPARSE[name]
    stacked = "stacked" in name
    launch(train_sparse, cp * ep, [str(tmp_path), cp, ep, mistake, takes_whole, stacked], timeout=300.0)
    pair = "sparse_of_whole" if takes_whole else "sparse_stacked" if stacked else "sparse"
    found = judge(*folder.read(tmp_path), pair=pair)
    assert is_right(found) == (not mistake), found.result
    assert any(told in finding.message for finding in found.result.findings) or not mistake, found.result
    assert any("neighbouring parts of a sequence" in note for note in found.notes) == (mistake == "contiguous")
    assert found.stages is not None
    assert sum(one.stage.evidence == "weights" for one in found.stages.all) > 8


def test_ranks_that_divide_what_the_pair_does_not_declare_are_an_error(tmp_path: Path):
    launch(train_sparse, 2, [str(tmp_path), 2, 1, "", False], timeout=300.0)
    with pytest.raises(parity.UserError, match=r"the ranks of cp have different tensors as argument 0.*over\(\"cp\""):
        judge(*folder.read(tmp_path), pair="sparse_of_whole")


# What may be wrong with a recording.


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("recorded")
    train(path, ported())
    return path


def change_index(path: Path, **changes: Any) -> None:
    (file,) = path.glob("*.json")
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def cut(path: Path, share: float) -> None:
    data = path.read_bytes()
    path.write_bytes(data[: int(share * len(data))])


def index_of(path: Path) -> Path:
    return next(path.glob("*.json"))


def tensors_of(path: Path) -> Path:
    return next(path.glob("*.safetensors"))


FAULTS: dict[str, tuple[Callable[[Path], Any], str]] = {
    "no folder": (shutil.rmtree, "is not a folder"),
    "empty": (lambda path: [file.unlink() for file in path.iterdir()], "holds no recorded pass"),
    "index missing": (lambda path: index_of(path).unlink(), "was cut off while it was written"),
    "tensors missing": (lambda path: tensors_of(path).unlink(), "is missing"),
    "tensors cut": (lambda path: cut(tensors_of(path), 0.9), "were recorded: copy it again"),
    "tensors longer": (lambda path: tensors_of(path).open("ab").write(b"more"), "were recorded: copy it again"),
    "header damaged": (
        lambda path: tensors_of(path).write_bytes(b"\xff" * 8 + tensors_of(path).read_bytes()[8:]),
        "is damaged",
    ),
    "index cut": (lambda path: cut(index_of(path), 0.5), "is not the index of a recorded pass"),
    "index empty": (lambda path: index_of(path).write_text(""), "is not the index of a recorded pass"),
    "index of something else": (lambda path: index_of(path).write_text("[1, 2]"), "is not the index"),
    "index lacks a field": (
        lambda path: index_of(path).write_text(json.dumps({"format": 1, "step": 1})),
        "is not the index of a recorded pass",
    ),
    "a newer format": (lambda path: change_index(path, format=2), "has format 2, and this version"),
    "renamed": (
        lambda path: [x.rename(path / x.name.replace("step-1", "step-7")) for x in list(path.iterdir())],
        "renamed",
    ),
    "another shape": (
        lambda path: change_index(path, tensors={**json.loads(index_of(path).read_text())["tensors"], "value 0": [1]}),
        "does not hold what its index says",
    ),
    "a value too many": (
        lambda path: change_index(path, values=2 * json.loads(index_of(path).read_text())["values"]),
        "has no tensor",
    ),
    "another run's rank": (lambda path: change_index(path, ranks=2), "lacks rank 1 of 2"),
    "two runs": (
        lambda path: [
            shutil.copy(tensors_of(path), path / "step-9-pass-0-rank-0.safetensors"),
            (path / "step-9-pass-0-rank-0.json").write_text(
                json.dumps({**json.loads(index_of(path).read_text()), "step": 9, "run": "another"})
            ),
        ],
        "holds passes of 2 recordings",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_damaged_recording_is_an_error_that_says_what_is_wrong(fault: str, recorded: Path, tmp_path: Path):
    path = tmp_path / "dump"
    shutil.copytree(recorded, path)
    damage, told = FAULTS[fault]
    damage(path)
    with pytest.raises(parity.UserError, match=told):
        folder.read(path)


def test_a_recording_of_another_model_is_told(recorded: Path, tmp_path: Path):
    (stored,) = folder.read(recorded)
    with pytest.raises(parity.UserError, match=r"only the pair has layers\.2\.attn"):
        judge(stored, size=1)
    (narrow,) = train(tmp_path, nn.Sequential(KERNELS.te.Linear(64, 64)).to(torch.bfloat16))
    with pytest.raises(parity.UserError, match=r"only the recording has 0\.bias"):
        judge(narrow)


def test_what_the_reference_does_not_take_is_told(tmp_path: Path):
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = ported().layers

        def forward(self, x: Tensor, is_first: bool = True, mask: Tensor | None = None) -> Tensor:
            return pairs.Model.forward(self, x)  # type: ignore[arg-type]

    mask = torch.zeros(4, 16, dtype=torch.bool)
    called = lambda module, x: module(x, is_first=True).float().mean().backward()  # noqa: E731
    assert is_right(judge(*train(tmp_path / "flag", Masked(), pass_of=called)))
    called = lambda module, x: module(x, mask=mask).float().mean().backward()  # noqa: E731
    assert is_right(judge(*train(tmp_path / "mask", Masked(), pass_of=called)))  # the reference takes anything by name


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (dict(steps=[]), "should be numbers of steps"),
        (dict(steps=[-1]), "should be numbers of steps"),
        (dict(passes=0), "should be at least 1"),
    ],
)
def test_arguments_of_a_recording_are_checked(options: Any, told: str, tmp_path: Path):
    with pytest.raises(parity.UserError, match=told):
        train(tmp_path, ported(), **options)


def test_a_folder_holds_one_recording(recorded: Path):
    with pytest.raises(parity.UserError, match="already holds a recording"):
        train(recorded, ported())


# The commands.


def run(*arguments: str) -> tuple[int, str]:
    done = CliRunner().invoke(app, [*arguments, "--backend", "cpu"] if arguments[0] != "environment" else arguments)
    return done.exit_code, done.output + str(done.exception or "")


def test_parity_judge_says_which_passes_are_right(recorded: Path, tmp_path: Path):
    code, told = run("judge", str(recorded), "--reference", TARGET)
    assert code == 0, told
    assert all(part in told for part in ("✓ pass 0 of step 1 at bf16: passed", "1 of 1 pass right")), told
    train(tmp_path, ported("sine"))
    code, told = run("judge", str(tmp_path), "--reference", TARGET)
    assert code == 1, told
    assert all(part in told for part in ("✗ pass 0 of step 1 at bf16: failed", "'gelu' of layers.1")), told


def test_parity_bisect_names_the_first_value_that_differs_and_which_side_is_off(tmp_path: Path):
    for name, mistake in (("before", ""), ("again", ""), ("after", "mask"), ("other", "sine")):
        torch.manual_seed(0)
        train(tmp_path / name, ported(mistake), count=1)
    code, told = run("bisect", str(tmp_path / "before"), str(tmp_path / "again"), "--reference", TARGET)
    assert code == 0, told
    assert "equal to the bit" in told
    code, told = run("bisect", str(tmp_path / "before"), str(tmp_path / "after"), "--reference", TARGET)
    assert code == 1, told
    assert "forward: first differs the result of FusedAttnFunc in layers.1.attn.core_attention" in told
    before, after = told.index("before: passed"), told.index("after: failed")
    assert "where they first differ, it is as right as rounding allows" in told[before:after]
    assert "where they first differ, it is off" in told[after:]
    code, told = run("bisect", str(tmp_path / "before"), str(tmp_path / "other"))
    assert code == 1, told
    assert "the two models make other calls from value" in told


def train_whole(path: str, mistake: str) -> None:
    """Train the layers of ``train_divided`` in one process, from the same weights and on the same batch."""
    torch.manual_seed(1)
    module = pairs.Layers(KERNELS.te, mistake, fuse_qkv_params=False).to(torch.bfloat16)
    torch.manual_seed(0)
    x = torch.randn(16, 4, pairs.WIDTH, dtype=torch.bfloat16)
    with parity.recording(path):
        module(x).float().square().sum().backward()


def test_parity_bisect_puts_ranks_together_that_divide_a_pass_otherwise(tmp_path: Path):
    one, tp, both = (str(tmp_path / name) for name in ("one", "tp", "both"))
    train_whole(one, "")
    launch(train_divided, 2, [tp, "unscaled", 1, False, ""], timeout=300.0)
    launch(train_divided, 4, [both, "", 2, True, ""], timeout=300.0)
    code, told = run("bisect", one, tp)
    assert code == 1
    assert f"{one} is of 1 rank and {tp} of 2 ranks (tp2): name the model's pair" in told
    pair = ("--reference", f"{FILE}::divided")
    code, told = run("bisect", one, tp, *pair)
    assert code == 1, told
    assert (
        "forward: first differs the result of _Linear in layers.0.self_attention.proj" in told
    )  # whose sum is divided
    assert "one: passed" in told
    after = told[told.index("tp: failed") :]
    assert "in gradients, it is off: up to the d 2nd 'add' of layers.1" in after
    code, told = run("bisect", one, both, *pair)
    assert code == 0, told
    assert "forward: first differs the result of _Linear in layers.0.self_attention.proj" in told
    assert all(part in told for part in ("one: passed", "both: passed", "it is as right as rounding allows")), told
    code, told = run("bisect", both, tp, *pair)
    assert code == 1, told
    assert "both: passed" in told
    assert "tp: failed" in told


def test_recordings_that_begin_otherwise_are_not_bisected(recorded: Path, tmp_path: Path):
    train(tmp_path, ported(), optimizer=torch.optim.Adam)
    code, told = run("bisect", str(recorded), str(tmp_path))
    assert code == 1, told
    assert "the two passes began with other parameters" in told


def test_parity_environment_says_in_what_two_differ(recorded: Path, tmp_path: Path):
    code, told = run("environment")
    assert code == 0, told
    assert json.loads(told)["torch"] == torch.__version__
    other = tmp_path / "there.json"
    other.write_text(json.dumps({**json.loads(told), "torch": "1.0", "NVTE_FUSED_ATTN": "0"}))
    code, told = run("environment", str(recorded), str(other))
    assert code == 1, told
    assert all(part in told for part in ("NVTE_FUSED_ATTN", "not set", "1.0")), told
