"""Checkpoints as transformers saves them, with other names than the model and a weight for each expert, are taken."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from typer.testing import CliRunner

import parity
from parity.case import registry
from parity.cli import app
from parity.user_error import UserError
from parity.weights.conversion import checkpoint

transformers = pytest.importorskip("transformers", reason="te-parity[examples] is not installed")

EXAMPLE = Path(__file__).parents[2] / "examples" / "hugging_face" / "mixtral.py"


@pytest.fixture(autouse=True)
def declared():
    before = registry.cases()
    yield
    registry.restore(before)


def run(*arguments: object) -> str:
    ended = CliRunner().invoke(app, [*map(str, arguments), "--backend", "cpu", "-q"], catch_exceptions=False)
    assert ended.exit_code == 0, ended.stdout
    return ended.stdout


def write_port(kind: str, folder: Path) -> tuple[str, nn.Module]:
    """Return a port's pair, and the model as the pair has it, with weights that all differ."""
    from parity.ports import reading, writing

    file = folder / f"{kind}_port.py"
    file.write_text(writing.write(reading.load_config(kind))[0])
    case = registry.load_file(file)[0]
    model = case.factory(parity.te.kernels("cpu").te, **case.sizes[0]).reference.bfloat16()
    torch.manual_seed(0)
    for tensor in (*model.parameters(), *(x for name, x in model.named_buffers() if name in model.state_dict())):
        nn.init.normal_(tensor)
    return f"{file}::{case.name}", model


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for key, tensor in expected.items():
        assert torch.equal(found[key], tensor)


@pytest.mark.parametrize(
    ("kind", "saved"),
    [
        ("mixtral", "model.layers.1.block_sparse_moe.experts.2.w1.weight"),
        ("deepseek_v3", "model.layers.1.mlp.gate.e_score_correction_bias"),
        ("qwen3_moe", "model.layers.1.mlp.experts.3.up_proj.weight"),
        ("bert", "encoder.layer.0.output.LayerNorm.weight"),
        ("vit", "encoder.layer.1.attention.attention.query.weight"),
    ],
)
def test_a_model_s_checkpoint_is_the_same_after_it_was_converted_there_and_back(tmp_path, kind, saved):
    pair, model = write_port(kind, tmp_path)
    model.save_pretrained(tmp_path / "original", max_shard_size="200KB")
    original = checkpoint.read(tmp_path / "original")
    assert saved in original
    run("convert", pair, tmp_path / "original", tmp_path / "te", "--shard-size", "100KB")
    run("convert", pair, tmp_path / "te", tmp_path / "back", "--to", "reference", "--shard-size", "100KB")
    assert_same(checkpoint.read(tmp_path / "back"), original)


def test_a_checkpoint_in_the_model_s_own_names_gives_the_same(tmp_path):
    pair, model = write_port("mixtral", tmp_path)
    model.save_pretrained(tmp_path / "original")
    save_file(model.state_dict(), tmp_path / "joined.safetensors")
    for source in ("original", "joined.safetensors"):
        run("convert", pair, tmp_path / source, tmp_path / f"from_{source}.safetensors")
    first, second = (load_file(file) for file in sorted(tmp_path.glob("from_*.safetensors")))
    assert_same(first, second)


@pytest.mark.parametrize("kind", ["mixtral", "deepseek_v3"])
def test_a_checkpoint_with_a_weight_for_each_expert_is_proven(tmp_path, kind):
    pair, model = write_port(kind, tmp_path)
    model.save_pretrained(tmp_path / "original")
    assert "blocks add no more error" in run("prove", tmp_path / "original", "--port", pair)


def separate_experts(joined: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the example's block as Mixtral's checkpoints have it."""
    prefix = "model.layers.3.block_sparse_moe."
    found = {f"{prefix}gate.weight": joined["gate.weight"]}
    for i, (gate_up, down) in enumerate(zip(joined["experts.gate_up_proj"], joined["experts.down_proj"], strict=True)):
        w1, w3 = gate_up.chunk(2)
        found |= {f"{prefix}experts.{i}.{name}.weight": x for name, x in {"w1": w1, "w3": w3, "w2": down}.items()}
    return found


@pytest.fixture
def block(declared):
    (case,) = registry.load_file(EXAMPLE)
    return case, case.factory(parity.te.kernels("cpu").te, **case.sizes[0]).reference.state_dict()


def test_a_part_of_a_model_takes_its_part_of_the_checkpoint(block):
    case, joined = block
    prefix = "model.layers.3.mlp."  # as transformers calls it once the model is loaded
    found = parity.convert(case, separate_experts(joined), prefix=prefix, backend="cpu")
    assert_same(found, parity.convert(case, joined, backend="cpu"))
    back = parity.convert(case, found, to="reference", backend="cpu")
    assert_same(back, joined)


def lack(name):
    return lambda held: {key: x for key, x in held.items() if not key.endswith(name)}


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (
            lack("experts.2.w1.weight"),
            r'lacks "model.layers.3.block_sparse_moe.experts.2.w1.weight" \(256, 128\), which is a part',
        ),
        (
            lack("experts.3.w1.weight"),
            r'lacks "model.layers.3.block_sparse_moe.experts.3.w1.weight" \(256, 128\), which is a part',
        ),
        (lambda held: {key: x for key, x in held.items() if "experts.3" not in key}, "size=dict"),
        (lambda held: {key: x[:9] if "0.w2" in key else x for key, x in held.items()}, "cannot be made of .*0.w2"),
        (lambda held: {key: x.char() for key, x in held.items()}, "holds torch.int8, and the weight map moves"),
        (lambda held: held | {"model.layers.4.block_sparse_moe.experts.0.w1.weight": torch.ones(2)}, "no parameter"),
    ],
)
def test_experts_that_do_not_fit_are_named(block, change, told):
    case, joined = block
    with pytest.raises(UserError, match=told):
        parity.convert(case, change(separate_experts(joined)), prefix="model.layers.3.mlp.", backend="cpu")
