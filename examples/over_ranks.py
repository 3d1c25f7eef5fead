"""Declare TransformerEngine's modules over ranks, each as a port would write it.

``make parity-ranks`` compares them all and writes reports/parity_ranks.md. Sequences come first in all inputs, as
``[seq, batch, hidden]``, since sequence parallelism divides the first dimension.
"""

from dataclasses import replace
from functools import partial

import torch
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import parity
from parity import over, reference, stack

HIDDEN, FFN, HEADS, GROUPS = 128, 256, 8, 4
SEQ, BATCH = 64, 4
EXPERTS, TOKENS = 4, 32

TP, TP_SP, CP, DP, EP = dict(tp=2), dict(tp=2, sequence_parallel=True), dict(cp=2), dict(dp=2), dict(ep=2)
TP_CP, TP_DP = dict(tp=2, cp=2), dict(tp=2, dp=2)
# Only TE's fused and flash attention can divide sequences over ranks, and they compute in 16 bits.
IN_16_BITS = ("bf16", "fp16", "fp8_delayed", "fp8_current", "fp8_block", "mxfp8", "nvfp4")

# What a port does itself: it divides the batch and the sequences into parts, and adds up gradients.


def parts(ranks):
    """Divide the sequences over context parallel ranks, each of which has a part from the front and one from the back,
    and the batch over data parallel ranks. With sequence parallelism, tensor parallel ranks divide the sequences, too.
    """
    divided = [over("cp", dim=0, balanced=True), over("dp", dim=1)]
    return [*divided, over("tp", dim=0)] if ranks.sequence_parallel else divided


def features(ranks):
    """Divide the features over tensor parallel ranks, as between a column-parallel layer and a row-parallel one."""
    return [over("cp", dim=0, balanced=True), over("dp", dim=1), over("tp", dim=-1)]


def add_up_gradients(ranks, module):
    """Add up what TE leaves to the port: gradients over parts of the sequences and of the batch.

    TE marks the weights that tensor parallel ranks apply to their own parts of the sequences.
    """
    for parameter in module.parameters():
        if getattr(parameter, "sequence_parallel", False):
            distributed.all_reduce(parameter.grad, group=ranks.tp.group)
        distributed.all_reduce(parameter.grad, group=ranks.cp.group)
        distributed.all_reduce(parameter.grad, group=ranks.dp.group)


def parallel(ranks, first=None, last=None):
    """Divide inputs and outputs as ``first`` and ``last`` say, by default like the residual stream."""
    splits = {"input": first or parts(ranks), "output": last or parts(ranks)}
    return parity.Parallel(splits=splits, finish=partial(add_up_gradients, ranks))


def over_tp(ranks):
    return dict(tp_group=ranks.tp.group, tp_size=ranks.tp.size, sequence_parallel=ranks.sequence_parallel)


def hidden_states(rng):
    return rng.normal(SEQ, BATCH, HIDDEN)


# Linear layers: a column-parallel one divides its outputs, a row-parallel one its inputs.

WHOLE_MODULES = [TP, TP_SP, CP, DP, TP_CP, TP_DP]


@parity.pair("linear_column", ranks=WHOLE_MODULES)
def linear_column(te, ranks):
    return parity.Pair(
        reference=nn.Linear(HIDDEN, FFN),
        candidate=te.Linear(HIDDEN, FFN, parallel_mode="column", **over_tp(ranks)),
        weights={"weight": "weight", "bias": "bias"},
        inputs=hidden_states,
        parallel=parallel(ranks, last=features(ranks)),
    )


@parity.pair("linear_row", ranks=WHOLE_MODULES)
def linear_row(te, ranks):
    return parity.Pair(
        reference=nn.Linear(FFN, HIDDEN),
        candidate=te.Linear(FFN, HIDDEN, parallel_mode="row", **over_tp(ranks)),
        weights={"weight": "weight", "bias": "bias"},
        inputs=lambda rng: rng.normal(SEQ, BATCH, FFN),
        parallel=parallel(ranks, first=features(ranks)),
    )


@parity.pair("layernorm_linear", ranks=WHOLE_MODULES)
def layernorm_linear(te, ranks):
    return parity.Pair(
        reference=reference.NormLinear(nn.LayerNorm(HIDDEN), HIDDEN, FFN),
        candidate=te.LayerNormLinear(HIDDEN, FFN, parallel_mode="column", **over_tp(ranks)),
        weights={
            "norm.weight": "layer_norm_weight",
            "norm.bias": "layer_norm_bias",
            "linear.weight": "weight",
            "linear.bias": "bias",
        },
        inputs=hidden_states,
        parallel=parallel(ranks, last=features(ranks)),
    )


# An MLP is both: its first layer is column-parallel, its second row-parallel.

OF_MLP = {
    "norm.weight": "layer_norm_weight",
    stack("gate_proj.weight", "up_proj.weight"): "fc1_weight",
    "down_proj.weight": "fc2_weight",
}


@parity.pair("layernorm_mlp_swiglu", ranks=WHOLE_MODULES)
def layernorm_mlp_swiglu(te, ranks):
    return parity.Pair(
        reference=reference.SwiGLUMLP(HIDDEN, FFN),
        candidate=te.LayerNormMLP(
            HIDDEN,
            FFN,
            normalization="RMSNorm",
            activation="swiglu",
            bias=False,
            set_parallel_mode=True,
            **over_tp(ranks),
        ),
        weights=OF_MLP,
        inputs=hidden_states,
        parallel=parallel(ranks),
    )


# Attention: tensor parallel ranks divide the heads. Context parallel ranks divide the sequences, and exchange what
# attention needs from other ranks in one of several ways, each of which has a pair.


def communicate(ranks, module, way):
    """Tell a module how context parallel ranks communicate. RoPE still gets the angles of whole sequences."""
    if ranks.cp.size == 1:
        return
    group = ranks.cp.group
    if way == "a2a+p2p":  # all-to-all within pairs of neighbours, and point to point between the pairs
        all_to_all, _ = distributed.new_subgroups_by_enumeration([[0, 1], [2, 3]])
        point_to_point, _ = distributed.new_subgroups_by_enumeration([[0, 2], [1, 3]])
        group = [all_to_all, point_to_point]
    module.set_context_parallel_group(group, list(ranks.cp.ranks), ranks.stream(), way)


WAYS = {"p2p": [CP, TP_CP, dict(cp=4)], "all_gather": [CP, TP_CP], "a2a": [CP, TP_CP], "a2a+p2p": [dict(cp=4)]}


def with_attention(name, build):
    """Declare a pair over tensor and data parallel ranks, and one for each way in which context parallel ranks talk."""
    parity.pair(name, ranks=[TP, TP_SP, DP, TP_DP])(partial(build, way=""))
    for way, ranks in WAYS.items():
        parity.pair(f"{name}_{way.replace('+', '_')}", ranks=ranks, precisions=IN_16_BITS)(partial(build, way=way))


QKV = (("q", "query"), ("k", "key"), ("v", "value"))


def multihead_attention(te, ranks, way):
    rope = te.RotaryPositionEmbedding(HIDDEN // HEADS)
    candidate = te.MultiheadAttention(
        HIDDEN,
        HEADS,
        num_gqa_groups=GROUPS,
        bias=False,
        attention_dropout=0.0,
        attn_mask_type="causal",
        qkv_format="sbhd",
        fuse_qkv_params=False,
        set_parallel_mode=True,
        **over_tp(ranks),
    )
    communicate(ranks, candidate, way)
    return parity.Pair(
        reference=reference.Attention(HIDDEN, HEADS, GROUPS),
        candidate=candidate,
        weights={f"{x}_proj.weight": f"qkv.{name}_weight" for x, name in QKV} | {"o_proj.weight": "proj.weight"},
        inputs=hidden_states,
        call_reference=lambda module, x: module(x.transpose(0, 1)).transpose(0, 1),
        call_candidate=lambda module, x: module(x, rotary_pos_emb=rope(SEQ)),
        parallel=parallel(ranks),
    )


with_attention("multihead_attention_gqa", multihead_attention)


# Whole layers.


def te_layer(te, ranks, **settings):
    return te.TransformerLayer(
        HIDDEN,
        FFN,
        HEADS,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        self_attn_mask_type="causal",
        attn_input_format="sbhd",
        set_parallel_mode=True,
        **settings,
        **over_tp(ranks),
    )


def transformer_layer(te, ranks, way):
    """Return the pair of a GPT layer, with LayerNorm, GELU and biases everywhere."""
    candidate = te_layer(te, ranks)
    communicate(ranks, candidate, way)
    weights = {
        "attention_norm.weight": "self_attention.layernorm_qkv.layer_norm_weight",
        "attention_norm.bias": "self_attention.layernorm_qkv.layer_norm_bias",
        "mlp.norm.weight": "layernorm_mlp.layer_norm_weight",
        "mlp.norm.bias": "layernorm_mlp.layer_norm_bias",
    }
    for kind in ("weight", "bias"):
        weights |= {f"attention.{x}_proj.{kind}": f"self_attention.layernorm_qkv.{name}_{kind}" for x, name in QKV}
        weights |= {
            f"attention.o_proj.{kind}": f"self_attention.proj.{kind}",
            f"mlp.up_proj.{kind}": f"layernorm_mlp.fc1_{kind}",
            f"mlp.down_proj.{kind}": f"layernorm_mlp.fc2_{kind}",
        }
    return parity.Pair(
        reference=reference.GPTLayer(HIDDEN, FFN, HEADS),
        candidate=candidate,
        weights=weights,
        inputs=hidden_states,
        call_reference=lambda module, x: module(x.transpose(0, 1)).transpose(0, 1),
        parallel=parallel(ranks),
    )


with_attention("transformer_layer_gpt", transformer_layer)


LLAMA = dict(num_gqa_groups=GROUPS, normalization="RMSNorm", activation="swiglu", bias=False)


def of_llama(layer):
    to = f"{layer}.self_attention.layernorm_qkv"
    return {f"{layer}.attention.{x}_proj.weight": f"{to}.{name}_weight" for x, name in QKV} | {
        f"{layer}.attention_norm.weight": f"{to}.layer_norm_weight",
        f"{layer}.attention.o_proj.weight": f"{layer}.self_attention.proj.weight",
        f"{layer}.mlp.norm.weight": f"{layer}.layernorm_mlp.layer_norm_weight",
        stack(f"{layer}.mlp.gate_proj.weight", f"{layer}.mlp.up_proj.weight"): f"{layer}.layernorm_mlp.fc1_weight",
        f"{layer}.mlp.down_proj.weight": f"{layer}.layernorm_mlp.fc2_weight",
    }


def llama(te, ranks, way):
    """Return the pair of two Llama layers."""
    rope = te.RotaryPositionEmbedding(HIDDEN // HEADS)
    layers = nn.ModuleList(te_layer(te, ranks, **LLAMA) for _ in range(2))
    for layer in layers:
        communicate(ranks, layer, way)

    def call(module, x):
        for layer in module:
            x = layer(x, rotary_pos_emb=rope(SEQ))
        return x

    return parity.Pair(
        reference=nn.Sequential(*(reference.LlamaLayer(HIDDEN, FFN, HEADS, GROUPS) for _ in range(2))),
        candidate=layers,
        weights=of_llama(0) | of_llama(1),
        inputs=hidden_states,
        call_reference=lambda module, x: module(x.transpose(0, 1)).transpose(0, 1),
        call_candidate=call,
        parallel=parallel(ranks),
    )


with_attention("llama_2_layers", llama)


# FSDP2 gathers each module's weights when it runs, and averages gradients over the data parallel ranks.


def fully_sharded(name, build, modules):
    """Declare the pair once more, with the given modules of its candidate sharded."""

    @parity.pair(f"{name}_fsdp2", ranks=[DP])
    def sharded(te, ranks):
        pair = build(te, ranks)
        if ranks.dp.size > 1:
            mesh = init_device_mesh("cpu", (ranks.dp.size,))
            for module in modules(pair.candidate):
                fully_shard(module, mesh=mesh)
        splits = {"input": [over("dp", dim=1)], "output": [over("dp", dim=1)]}
        return replace(pair, parallel=parity.Parallel(splits=splits, averages=True))

    return sharded


def itself(module):
    return [module]


fully_sharded("linear", linear_column.factory, itself)
fully_sharded("layernorm_linear", layernorm_linear.factory, itself)
fully_sharded("layernorm_mlp_swiglu", layernorm_mlp_swiglu.factory, itself)
fully_sharded("multihead_attention_gqa", partial(multihead_attention, way=""), itself)
fully_sharded("transformer_layer_gpt", partial(transformer_layer, way=""), itself)
fully_sharded("llama_2_layers", partial(llama, way=""), list)


# Experts: each expert parallel rank has some of the experts, and the tokens that are routed to them, sorted by expert.


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate_and_up = nn.ModuleList(nn.Linear(HIDDEN, 2 * FFN, bias=False) for _ in range(EXPERTS))
        self.down = nn.ModuleList(nn.Linear(FFN, HIDDEN, bias=False) for _ in range(EXPERTS))

    def forward(self, x):
        results = []
        for tokens, gate_and_up, down in zip(x.chunk(EXPERTS), self.gate_and_up, self.down, strict=True):
            gate, up = gate_and_up(tokens).chunk(2, dim=-1)
            results.append(down(nn.functional.silu(gate) * up))
        return torch.cat(results)


@parity.pair("grouped_linear_experts", ranks=[EP])
def grouped_linear_experts(te, ranks):
    local = EXPERTS // ranks.ep.size
    candidate = nn.ModuleDict(
        {
            "fc1": te.GroupedLinear(local, HIDDEN, 2 * FFN, bias=False),
            "fc2": te.GroupedLinear(local, FFN, HIDDEN, bias=False),
        }
    )

    def call(module, x):
        gate, up = module["fc1"](x, [TOKENS] * local).chunk(2, dim=-1)
        return module["fc2"](nn.functional.silu(gate) * up, [TOKENS] * local)

    return parity.Pair(
        reference=Experts(),
        candidate=candidate,
        weights={f"gate_and_up.{i}.weight": f"fc1.weight{i}" for i in range(EXPERTS)}
        | {f"down.{i}.weight": f"fc2.weight{i}" for i in range(EXPERTS)},
        inputs=lambda rng: rng.normal(EXPERTS * TOKENS, HIDDEN),
        call_candidate=call,
        parallel=parity.Parallel(splits={"input": [over("ep", dim=0)], "output": [over("ep", dim=0)]}),
    )
