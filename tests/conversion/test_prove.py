"""``parity prove``: a port is proven on a checkpoint's own weights, block by block, and a wrong block is named."""

from __future__ import annotations

import json
import textwrap
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from typer.testing import CliRunner

import parity
from parity.case import registry
from parity.cli import app
from parity.proof.blocks import Blocks
from parity.user_error import UserError

PAIR = """
    import parity
    import torch
    from torch import nn

    class Block(nn.Module):
        def __init__(self, hidden):
            super().__init__()
            self.norm = nn.LayerNorm(hidden)
            self.up, self.down = nn.Linear(hidden, 2 * hidden), nn.Linear(2 * hidden, hidden)

        def forward(self, x):
            return x + self.down(nn.functional.gelu(self.up(self.norm(x)), approximate="tanh"))

    class Port(nn.Module):
        def __init__(self, te, hidden, **wrong):
            super().__init__()
            self.mlp = te.LayerNormMLP(hidden, 2 * hidden, **wrong)

        def forward(self, x):
            return x + self.mlp(x)

    class Model(nn.Module):
        def __init__(self, blocks, hidden, head, scale, turned, tied):
            super().__init__()
            self.embedding = nn.Embedding(64, hidden)
            self.blocks, self.head = nn.ModuleList(blocks), head
            self.scale, self.turned = scale, turned
            self.register_buffer("gain", torch.linspace(0.5, 1.0, hidden), persistent=False)
            if tied:
                self.head.weight = self.embedding.weight

        def forward(self, ids):
            x = self.embedding(ids.T if self.turned else ids) * self.scale * self.gain.to(self.embedding.weight.dtype)
            for block in self.blocks:
                x = block(x)
                x *= 0.5  # writes to what the block has returned
            logits = self.head(x)
            return logits.transpose(0, 1) if self.turned else logits

    BLOCK = {
        "norm.weight": "mlp.layer_norm_weight",
        "norm.bias": "mlp.layer_norm_bias",
        "up.weight": "mlp.fc1_weight",
        "up.bias": "mlp.fc1_bias",
        "down.weight": "mlp.fc2_weight",
        "down.bias": "mlp.fc2_bias",
    }

    @parity.pair("model", sizes=[dict(layers=2)])
    def model(te, layers, wrong=-1, eps=1e-5, activation="gelu", scale=3.0, turned=False, tied=False, skipped=-1):
        hidden = 32

        def port(i):
            return Port(te, hidden, **(dict(eps=eps, activation=activation) if i == wrong else {}))

        def candidate_calls(model, ids):
            kept = model.blocks
            model.blocks = nn.ModuleList(block for i, block in enumerate(kept) if i != skipped)
            try:
                return model(ids)
            finally:
                model.blocks = kept

        heads = nn.Linear(hidden, 64, bias=False), te.Linear(hidden, 64, bias=False)
        return parity.Pair(
            Model([Block(hidden) for _ in range(layers)], hidden, heads[0], 3.0, False, tied),
            Model([port(i) for i in range(layers)], hidden, heads[1], scale, turned, tied is True),
            lambda rng: rng.integers(3, 8, high=64),
            {
                "embedding.weight": parity.copies("embedding.weight", "head.weight")
                if tied == "here"
                else "embedding.weight",
                **parity.under(BLOCK, "blocks.{i}."),
                **({} if tied else {"head.weight": "head.weight"}),
            },
            call_candidate=candidate_calls if skipped >= 0 else None,
        )
"""


@pytest.fixture
def pair(tmp_path):
    """Yield a file with a small pair of language models, whose arguments make it wrong or lay it out otherwise."""
    declared = registry.cases()
    registry.restore([])  # other tests' pairs may have the same name
    (tmp_path / "pairs.py").write_text(textwrap.dedent(PAIR))
    yield tmp_path / "pairs.py"
    registry.restore(declared)


def write_checkpoints(file: Path, **size: object) -> dict[str, Path]:
    """Write random weights in both layouts, and return their files."""
    declared = registry.cases()
    (case,) = registry.load_file(file)
    registry.restore(declared)
    torch.manual_seed(0)
    reference = case.factory(parity.te.kernels("cpu").te, **{"layers": 3, **size}).reference
    with torch.no_grad():
        for parameter in reference.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    weights = {name: x.bfloat16() for name, x in reference.named_parameters()}
    save_file(weights, file.parent / "original.safetensors")
    converted = parity.convert(case, weights, size={"layers": 3, **size}, backend="cpu")
    save_file(
        {name: x.clone() for name, x in converted.items() if not name.endswith("_extra_state")},
        file.parent / "te.safetensors",
    )
    return {name: file.parent / f"{name}.safetensors" for name in ("original", "te")}


def prove(file: Path, *arguments: object, size: str = "layers=3", diagnosis: float = 5.0):
    given = [*map(str, arguments), "--port", str(file), "--size", size, "--backend", "cpu", "-q"]
    return CliRunner().invoke(app, ["prove", *given, "--diagnosis", str(diagnosis)])


def rows_of(ended) -> dict[str, str]:
    """Return the mark of each row of the table."""
    table = ended.stdout.split("\n\n")[0].splitlines()[1:]
    return {row[4:].split("  ")[0].strip(): row[:1] for row in table}


BLOCKS = ["embedding", "between embedding and blocks.0", "blocks.0", "blocks.1", "blocks.2", "head"]


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp8_current"])
@pytest.mark.parametrize("converted", [False, True])
def test_a_right_port_is_proven(pair, precision, converted):
    files = write_checkpoints(pair)
    ended = prove(pair, files["original"], *([files["te"]] if converted else []), "-p", precision)
    assert ended.exit_code == 0, ended.output
    assert list(rows_of(ended)) == BLOCKS
    assert "5 of 5 blocks add no more error than their precision costs" in ended.stdout
    assert "perplexity" in ended.stdout


@pytest.mark.parametrize("size", [dict(turned=True), dict(tied=True), dict(tied="here")], ids=str)
def test_tokens_before_batches_and_tied_heads_are_right(pair, size):
    files = write_checkpoints(pair, **size)
    ended = prove(pair, *files.values(), size=",".join(["layers=3", *(f"{name}={x!r}" for name, x in size.items())]))
    assert ended.exit_code == 0, ended.output
    assert list(rows_of(ended)) == BLOCKS


def spoil(file: Path, change) -> None:
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file)


def test_one_block_with_other_weights_in_dst_is_named(pair):
    files = write_checkpoints(pair)

    def change(tensors):
        tensors["blocks.1.mlp.fc1_weight"] = tensors["blocks.1.mlp.fc1_weight"].flip(0).contiguous()

    spoil(files["te"], change)
    ended = prove(pair, *files.values())
    assert ended.exit_code == 1
    assert [place for place, mark in rows_of(ended).items() if mark == "✗"] == ["blocks.1"]
    assert "PAR112" in ended.stdout
    assert "the port departs from the reference first in blocks.1" in ended.stdout


@pytest.mark.parametrize(
    ("wrong", "named"), [("eps=0.5", "PAR201"), ("activation='relu'", "PAR202"), ("activation='silu'", "PAR202")]
)
def test_one_block_that_computes_otherwise_is_named(pair, wrong, named):
    files = write_checkpoints(pair)
    ended = prove(pair, *files.values(), size=f"layers=3,wrong=2,{wrong}", diagnosis=0)
    assert ended.exit_code == 1
    assert [place for place, mark in rows_of(ended).items() if mark == "✗"] == ["blocks.2"]
    assert named in ended.stdout, ended.stdout


@pytest.mark.parametrize(
    ("wrong", "place"),
    [("scale=2.9", "between embedding and blocks.0"), ("skipped=1", "between blocks.0 and blocks.2")],
)
def test_what_is_wrong_between_blocks_is_told(pair, wrong, place):
    files = write_checkpoints(pair)
    ended = prove(pair, files["original"], size=f"layers=3,{wrong}")
    assert ended.exit_code == 1, ended.output
    assert f"the port departs from the reference first {place}" in ended.stdout


def test_a_checkpoint_that_does_not_fit_is_refused(pair):
    files = write_checkpoints(pair)
    ended = prove(pair, files["original"], size="layers=4")
    assert isinstance(ended.exception, UserError)
    assert 'lacks "blocks.3.norm.weight"' in str(ended.exception)
    spoil(files["te"], lambda tensors: tensors.pop("blocks.1.mlp.fc2_bias"))
    ended = prove(pair, *files.values())
    assert 'lacks "blocks.1.mlp.fc2_bias"' in str(ended.exception)


@pytest.mark.parametrize("suffix", ["txt", "json", "pt"])
def test_ids_come_from_a_file(pair, tmp_path, suffix):
    rows = [[1, 2, 3, 63], [4, 5, 6, 7]]
    file = tmp_path / f"ids.{suffix}"
    if suffix == "pt":
        torch.save(torch.tensor(rows), file)
    else:
        file.write_text(json.dumps(rows) if suffix == "json" else "1 2 3 63\n4, 5, 6, 7\n")
    ended = prove(pair, write_checkpoints(pair)["original"], "--ids", file)
    assert ended.exit_code == 0, ended.output


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ("1 2 64", "embedding has 64 rows, and is asked for number 64"),
        ("1 2\n3", "cannot be read"),
        ("-1 2", "from 0"),
        ("", "rows"),
    ],
)
def test_wrong_ids_are_told(pair, tmp_path, content, told):
    (tmp_path / "ids.txt").write_text(content)
    ended = prove(pair, write_checkpoints(pair)["original"], "--ids", tmp_path / "ids.txt")
    assert isinstance(ended.exception, UserError)
    assert told in str(ended.exception)


def test_only_the_running_block_has_its_parameters_in_memory():
    held: list[list[str]] = []

    class Noting(nn.Linear):
        def forward(self, x):
            held.append([name for name, parameter in model.named_parameters() if not parameter.is_meta])
            return super().forward(x)

    model = nn.Sequential(*(Noting(4, 4) for _ in range(3))).to("meta")
    tensors = {name: torch.randn(x.shape) for name, x in model.named_parameters()}
    blocks = Blocks(model, lambda names: tensors, torch.device("cpu"))
    with torch.no_grad():
        calls, returned = blocks.run(lambda module: module(torch.ones(1, 4)), torch.float32)
    assert list(calls) == [(str(i), 0) for i in range(3)]
    assert held == [[f"{i}.weight", f"{i}.bias"] for i in range(3)]
    assert all(x.is_meta for x in model.parameters())
    model.to_empty(device="cpu").load_state_dict(tensors)
    assert torch.equal(returned, model(torch.ones(1, 4)))


def test_blocks_that_hand_over_several_values_are_refused():
    class Block(nn.Linear):
        def forward(self, x, residual):
            return super().forward(x), x + residual

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList(Block(4, 4) for _ in range(2))

        def forward(self, x):
            residual = torch.zeros(())
            for block in self.blocks:
                x, residual = block(x, residual)
            return x + residual

    model = Model().to("meta")
    tensors = {name: torch.randn(x.shape) for name, x in model.named_parameters()}
    blocks = Blocks(model, lambda names: tensors, torch.device("cpu"))
    with torch.no_grad(), pytest.raises(UserError, match=r"blocks.1 is given several values"):
        blocks.run(lambda module: module(torch.ones(1, 4)), torch.float32)


def test_delayed_scaling_is_refused(pair):
    ended = prove(pair, write_checkpoints(pair)["original"], "-p", "fp8_delayed")
    assert "scales by earlier passes" in str(ended.exception)


def test_a_block_is_judged_with_what_follows_it_if_a_port_divides_both_otherwise(pair):
    """The reference's embedding scales what it returns, and the port scales what its embedding has returned."""
    scaled = """
    class Scaled(nn.Embedding):
        def forward(self, ids):
            return 3.0 * super().forward(ids)

    class Block(nn.Module):"""
    text = pair.read_text().replace("\nclass Block(nn.Module):", textwrap.dedent(scaled), 1)
    text = text.replace("nn.Embedding(64, hidden)", "(Scaled if scale == 1.0 else nn.Embedding)(64, hidden)")
    pair.write_text(text.replace("heads[0], 3.0,", "heads[0], 1.0,"))
    ended = prove(pair, write_checkpoints(pair)["original"])
    assert ended.exit_code == 0, ended.output
    assert "embedding and what follows it" in rows_of(ended)
    ended = prove(pair, write_checkpoints(pair)["original"], size="layers=3,scale=2.0")
    assert ended.exit_code == 1
    assert rows_of(ended)["embedding"] == "✗"


def test_a_parameter_that_is_used_without_its_module_is_refused(pair):
    """PyTorch computes with a parameter on the meta device, and returns what happens to be in memory."""
    pair.write_text(pair.read_text().replace("self.head(x)", "nn.functional.linear(x, self.embedding.weight)"))
    ended = prove(pair, write_checkpoints(pair, tied=True)["original"], size="layers=3,tied=True")
    assert "without calling this module" in str(ended.exception)
