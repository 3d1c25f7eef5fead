"""Checkpoints of FP8 codes with scales are converted as the numbers that these stand for."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from typer.testing import CliRunner

import parity
from parity.cli import app
from parity.weights.conversion import checkpoint
from tests.conversion.test_saved import assert_same, declared, write_port
from tests.conversion.test_saved import run as run_command

__all__ = ["declared"]  # a fixture

ROWS, COLUMNS = 300, 200  # of which the last blocks are not whole

PAIR = f"""
import parity
from torch import nn


@parity.pair("scaled_linear")
def scaled_linear(te):
    return parity.Pair(
        reference=nn.Linear({COLUMNS}, {ROWS}, bias=False),
        candidate=te.Linear({COLUMNS}, {ROWS}, bias=False),
        weights={{"weight": "weight"}},
        inputs=lambda rng: rng.normal(16, {COLUMNS}),
    )
"""


def pair() -> parity.Pair:
    te = parity.te.kernels("cpu").te
    return parity.Pair(
        reference=nn.Linear(COLUMNS, ROWS, bias=False),
        candidate=te.Linear(COLUMNS, ROWS, bias=False),
        weights={"weight": "weight"},
        inputs=lambda rng: rng.normal(16, COLUMNS),
    )


def checkpoint_of(kind: str) -> dict[str, Tensor]:
    """Return codes and their scales as DeepSeek-V3 or compressed-tensors write them."""
    torch.manual_seed(0)
    codes = (100.0 * torch.randn(ROWS, COLUMNS)).clamp(-448.0, 448.0).to(torch.float8_e4m3fn)
    if kind == "blocks":
        return {"weight": codes, "weight_scale_inv": torch.rand(3, 2) / 448.0 + 1e-5}
    if kind == "powers":  # as DeepSeek-V3.1 has them
        return {
            "weight": codes,
            "weight_scale_inv": torch.tensor([[0.25, 0.5], [1.0, 2.0], [4.0, 8.0]]).to(torch.float8_e8m0fnu),
        }
    scales = torch.rand(ROWS, 1) + 0.1 if kind == "rows" else torch.tensor([0.0123]).bfloat16()
    return {"weight": codes, "weight_scale": scales}


def multiplied(given: dict[str, Tensor], kind: str) -> Tensor:
    """Return the numbers, one block, row or tensor after the other, in FP32."""
    codes, scales = given["weight"].float(), next(x for key, x in given.items() if "scale" in key).float()
    sizes = {"blocks": (128, 128), "powers": (128, 128), "rows": (1, COLUMNS)}.get(kind, (ROWS, COLUMNS))
    scales = scales.reshape(scales.shape if scales.dim() == 2 else (1, 1))
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            codes[i * sizes[0] : (i + 1) * sizes[0], j * sizes[1] : (j + 1) * sizes[1]] *= scales[i, j]
    return codes


@pytest.mark.parametrize("dtype", [None, torch.float32, torch.float16])
@pytest.mark.parametrize("kind", ["blocks", "powers", "rows", "tensor"])
def test_codes_become_their_products_with_their_scales(kind: str, dtype: torch.dtype | None):
    given = checkpoint_of(kind)
    made = parity.convert(pair(), given, dtype=dtype)
    assert made.keys() == {"weight", "_extra_state"}
    assert torch.equal(made["weight"], multiplied(given, kind).to(dtype or torch.bfloat16))


WRONG: dict[str, tuple[dict[str, Tensor], str]] = {
    "no scale": (
        {"weight": checkpoint_of("blocks")["weight"]},
        r'and no "weight_scale_inv" or "weight_scale".*downloaded whole',
    ),
    "blocks of another size": (
        checkpoint_of("blocks") | {"weight_scale_inv": torch.ones(5, 4)},
        r'"weight_scale_inv" is \(5, 4\), and "weight" \(300, 200\).*128x128 would be \(3, 2\)',
    ),
    "a scale that is none": (
        checkpoint_of("blocks") | {"weight_scale_inv": torch.full((3, 2), torch.nan)},
        '"weight_scale_inv" holds scales that are not positive numbers',
    ),
    "no codes": (
        {"weight": torch.ones(ROWS, COLUMNS), "weight_scale_inv": torch.ones(3, 2)},
        '"weight_scale_inv" .*, which is no parameter',
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_codes_and_scales_that_do_not_fit_together_are_named(name: str):
    given, told = WRONG[name]
    with pytest.raises(parity.UserError, match=f"(?s){told}"):
        parity.convert(pair(), given)


@pytest.mark.usefixtures("declared")
def test_experts_are_multiplied_before_they_are_joined(tmp_path: Path):
    target, model = write_port("deepseek_v3", tmp_path)
    model.save_pretrained(tmp_path / "original")
    original = checkpoint.read(tmp_path / "original")
    coded, plain = dict(original), dict(original)
    for key, x in original.items():
        if x.dim() == 2 and ".layers." in key and "gate.weight" not in key:
            scales = torch.rand(-(-x.shape[0] // 128), -(-x.shape[1] // 128)) + 0.1
            coded |= {key: x.to(torch.float8_e4m3fn), f"{key}_scale_inv": scales}
            of_each = scales.repeat_interleave(128, 0)[: x.shape[0]].repeat_interleave(128, 1)[:, : x.shape[1]]
            plain[key] = (coded[key].float() * of_each).bfloat16()
    assert sum(".experts." in key and key.endswith("_scale_inv") for key in coded) > 3
    made = []
    for name, tensors in (("coded", coded), ("plain", plain)):
        save_file(tensors, tmp_path / f"{name}.safetensors")
        run_command("convert", target, tmp_path / f"{name}.safetensors", tmp_path / f"te_{name}.safetensors")
        made.append(load_file(tmp_path / f"te_{name}.safetensors"))
    assert_same(*made)


def test_the_command_says_what_the_way_back_gives(tmp_path: Path):
    (tmp_path / "scaled_pairs.py").write_text(PAIR)
    given = checkpoint_of("blocks")
    save_file(given, tmp_path / "model.safetensors")

    def run(source: str, destination: str, *arguments: str) -> str:
        paths = (str(tmp_path / name) for name in ("scaled_pairs.py", source, destination))
        ended = CliRunner().invoke(app, ["convert", *paths, *arguments], catch_exceptions=False)
        assert ended.exit_code == 0, ended.stdout
        return ended.stdout

    told = run("model.safetensors", "te.safetensors")
    assert "left out, scales of FP8 codes, which stand for BF16 numbers now" in told
    assert "no codes are made on the way back: weight_scale_inv" in told
    run("te.safetensors", "back.safetensors", "--to", "reference")
    back = load_file(tmp_path / "back.safetensors")
    assert back.keys() == {"weight"}
    assert torch.equal(back["weight"], multiplied(given, "blocks").bfloat16())
