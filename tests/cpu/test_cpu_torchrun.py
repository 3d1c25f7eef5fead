"""Scripts that were written for GPUs run unchanged under ``torchrun``, on ranks that have no GPU."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

# A script that does what scripts for several GPUs usually do.
SCRIPT = """
    import os
    import torch
    import torch.distributed as dist
    import transformer_engine.pytorch as te
    from torch import cuda
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel as DDP

    local = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local)
    assert torch.cuda.device_count() == 2 and dist.is_nccl_available()
    dist.init_process_group("nccl", device_id=torch.device("cuda", local))
    rank = dist.get_rank()
    pairs = dist.new_group([0, 1], backend="cpu:gloo,cuda:nccl")
    print(f"started {rank}", flush=True)

    # Neighbours, all at once; work may be waited for again, as NCCL's may.
    sent, received = torch.full((4,), float(rank), device=f"cuda:{local}"), torch.empty(4).cuda(local)
    other = 1 - rank
    works = dist.batch_isend_irecv([dist.P2POp(dist.isend, sent, other), dist.P2POp(dist.irecv, received, other)])
    for work in works + works:
        work.wait()
    assert received.tolist() == [float(other)] * 4
    work = dist.isend(sent, other) if rank == 0 else dist.irecv(received, other)
    work.wait(), work.wait()
    with dist._coalescing_manager(group=pairs, device=torch.device("cuda"), async_ops=True) as joined:
        dist.all_reduce(sent, group=pairs)
        dist.all_reduce(received, group=pairs)
    joined.wait()
    mean = torch.cuda.FloatTensor([rank])
    dist.all_reduce(mean, op=dist.ReduceOp.AVG)
    assert (sent.tolist(), mean.item(), mean.type()) == ([1.0] * 4, 0.5, "torch.cuda.FloatTensor")

    # Gathering of what has a gradient, such as a weight.
    own = torch.full((4,), float(rank), device=f"cuda:{local}", requires_grad=True)
    whole = torch.empty(8).cuda(local)
    dist.all_gather_into_tensor(whole, own)
    assert whole.tolist() == [0.0] * 4 + [1.0] * 4 and not whole.requires_grad

    # Streams, generators, memory.
    before, after, side = cuda.Event(enable_timing=True), cuda.Event(enable_timing=True), torch.cuda.Stream()
    before.record()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        host = torch.ones(8, pin_memory=True).pin_memory()
        device = host.to(local, non_blocking=True)
        device.record_stream(side)
    after.record()
    torch.cuda.synchronize()
    assert before.elapsed_time(after) >= 0 and torch.cuda.max_memory_allocated() >= 0
    state = torch.cuda.random.get_rng_state()
    drawn = torch.rand(2, device=local)
    torch.cuda.set_rng_state(state, device=local)
    assert torch.equal(drawn, torch.rand(2, device="cuda"))

    # A model of TE under DDP and under FSDP2 has the same gradients.
    def gradients(wrap, **autocast):
        torch.cuda.manual_seed_all(0)
        model = torch.nn.Sequential(te.LayerNormMLP(64, 128), te.Linear(64, 64)).to(torch.cuda.current_device())
        model = wrap(model)
        x = torch.randn(16, 64, generator=torch.Generator().manual_seed(rank)).cuda()
        with torch.cuda.amp.autocast(dtype=torch.bfloat16, **autocast):
            model(x).float().square().mean().backward()
        found = [p.grad for p in model.parameters()]
        return torch.cat([getattr(g, "full_tensor", lambda g=g: g)().flatten() for g in found])

    def sharded(model):
        fully_shard(model, mesh=dist.init_device_mesh("cuda", (2,)))
        return model

    def replicated(model):
        return DDP(model, device_ids=[local], output_device=local)

    exact, in_bf16 = gradients(replicated, enabled=False), gradients(replicated)
    assert torch.allclose(exact, gradients(sharded, enabled=False), rtol=1e-5, atol=1e-6) and exact.abs().max() > 0
    assert 0 < (exact - in_bf16).norm() / exact.norm() < 10 * 2.0**-9  # ten roundings to BF16, at most
    dist.barrier(device_ids=[local])
    dist.destroy_process_group()
    print(f"ended {rank}", flush=True)
"""


def torchrun(folder: Path, script: str, *arguments: str) -> str:
    """Run a script on two ranks, and return what they print."""
    (folder / "script.py").write_text(re.sub(r"^    ", "", script, flags=re.MULTILINE))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "parity"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": "1"}
    ran = subprocess.run(
        [*command, "exec", "script.py", *arguments],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
    )
    assert ran.returncode == 0, ran.stdout
    return ran.stdout


def test_a_script_for_two_gpus_runs_on_two_ranks(tmp_path: Path) -> None:
    printed = torchrun(tmp_path, SCRIPT)
    assert sorted(re.findall(r"(?:started|ended) \d", printed)) == ["ended 0", "ended 1", "started 0", "started 1"]


# Megatron-Core's GPT, from its wheel.
GPT = """
    import os
    import sys

    import torch
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.pipeline_parallel.schedules import get_forward_backward_func
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from megatron.core.transformer.transformer_config import TransformerConfig

    tensor_parallel, sequence_parallel = int(sys.argv[1]), "sp" in sys.argv
    rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(rank)
    torch.distributed.init_process_group(backend="nccl", device_id=torch.device(f"cuda:{rank}"))
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=tensor_parallel)
    model_parallel_cuda_manual_seed(123)
    config = TransformerConfig(
        num_layers=2,
        hidden_size=64,
        num_attention_heads=4,
        num_query_groups=2,
        ffn_hidden_size=128,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        normalization="RMSNorm",
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=tensor_parallel,
        sequence_parallel=sequence_parallel,
        use_cpu_initialization=True,
        params_dtype=torch.float32,
        pipeline_dtype=torch.float32,
        gradient_accumulation_fusion=False,
    )
    torch.manual_seed(0)
    spec = get_gpt_layer_with_transformer_engine_spec()
    model = GPTModel(config, spec, vocab_size=128, max_sequence_length=32, position_embedding_type="rope").cuda(rank)
    ddp = DistributedDataParallel(config, DistributedDataParallelConfig(grad_reduce_in_fp32=True), model)
    optimizer = get_megatron_optimizer(OptimizerConfig(optimizer="adam", lr=1e-3, clip_grad=1.0), [ddp])
    tokens = torch.randint(0, 128, (2, 33), generator=torch.Generator().manual_seed(7)).pin_memory().cuda(rank)

    def forward_step(data, model):
        positions = torch.arange(32, device=torch.cuda.current_device()).expand(2, 32)
        losses = model(next(data)[:, :-1], positions, None, labels=tokens[:, 1:])
        return losses, lambda losses: (losses.mean(), {"loss": losses.mean().detach()})

    for step in range(5):
        ddp.zero_grad_buffer()
        optimizer.zero_grad()
        (reduced,) = get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=iter([tokens]),
            model=ddp,
            num_microbatches=1,
            seq_length=32,
            micro_batch_size=2,
            forward_only=False,
        )
        finalize_model_grads([ddp])
        _, norm, _ = optimizer.step()
        if rank == 0:
            print(f"loss {reduced['loss'].item():.6f} norm {norm:.6f}", flush=True)
    torch.distributed.barrier(device_ids=[rank])
    torch.distributed.destroy_process_group()
"""


def _has_megatron() -> bool:
    return importlib.util.find_spec("megatron") is not None and importlib.util.find_spec("megatron.core") is not None


@pytest.mark.skipif(not _has_megatron(), reason="megatron-core is not installed (pip install --no-deps megatron-core)")
def test_a_gpt_of_megatron_trains_alike_however_it_is_spread(tmp_path: Path) -> None:
    runs = {arguments: torchrun(tmp_path, GPT, *arguments.split()) for arguments in ("1", "2", "2 sp")}
    found = {
        arguments: [[float(number) for number in line] for line in re.findall(r"loss (\S+) norm (\S+)", printed)]
        for arguments, printed in runs.items()
    }
    assert len(found["1"]) == 5
    assert found["1"][-1][0] < found["1"][0][0]
    for arguments in ("2", "2 sp"):
        # Ranks add TF32 products in another order. Over five steps of Adam, the difference stays below TF32's eps.
        assert found[arguments] == [pytest.approx(step, rel=2.0**-10) for step in found["1"]]
