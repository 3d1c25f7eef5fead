"""An MLP of Megatron-Core's TE layers, compared whole and over two tensor parallel ranks.

It needs Megatron-Core's wheel, of which its layers need nothing else: ``pip install --no-deps megatron-core``.
"""

from megatron.core.extensions.transformer_engine import TELayerNormColumnParallelLinear, TERowParallelLinear
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import distributed, nn
from torch.nn import functional as F

import parity


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.RMSNorm(64, eps=1e-5)
        self.up, self.down = nn.Linear(64, 128, bias=False), nn.Linear(128, 64, bias=False)

    def forward(self, x):
        return self.down(F.gelu(self.up(self.norm(x))))


class MegatronMlp(nn.Module):
    def __init__(self, ranks):
        super().__init__()
        config = TransformerConfig(
            num_layers=1,
            hidden_size=64,
            num_attention_heads=4,
            normalization="RMSNorm",
            add_bias_linear=False,
            tensor_model_parallel_size=ranks.tp.size,
            sequence_parallel=ranks.sequence_parallel,
            use_cpu_initialization=True,
            gradient_accumulation_fusion=False,
        )
        settings = dict(config=config, init_method=nn.init.xavier_normal_, bias=False, skip_bias_add=False)
        settings |= dict(is_expert=False, tp_group=ranks.tp.group)
        self.up = TELayerNormColumnParallelLinear(64, 128, gather_output=False, **settings)
        self.down = TERowParallelLinear(128, 64, input_is_parallel=True, **settings)

    def forward(self, x):
        y, _ = self.up(x)
        y, _ = self.down(F.gelu(y))
        return y


def mlp(ranks, adds_up):
    def finish(module):
        """Add up what Megatron's trainer adds up after the backward pass."""
        for one in module.parameters():
            if adds_up and getattr(one, "sequence_parallel", False):
                distributed.all_reduce(one.grad, group=ranks.tp.group)

    along = [parity.over("tp", dim=0)] if ranks.sequence_parallel else []
    return parity.Pair(
        reference=Mlp(),
        candidate=MegatronMlp(ranks),
        inputs=lambda rng: rng.normal(32, 2, 64),
        weights={"norm.weight": "up.layer_norm_weight", "up.weight": "up.weight", "down.weight": "down.weight"},
        parallel=parity.Parallel(splits={"input": along, "output": along}, finish=finish),
    )


@parity.pair("megatron_mlp", ranks=[dict(tp=2), dict(tp=2, sequence_parallel=True)])
def megatron_mlp(te, ranks):
    return mlp(ranks, adds_up=True)
