"""Conversion of a transformers model's checkpoint to TE's and back, as docs/hugging-face.md describes it."""

from __future__ import annotations

import dataclasses
import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

import parity
from parity.case import registry
from parity.cli import app
from parity.weights.conversion import checkpoint

pytest.importorskip("transformers", reason="te-parity[examples] is not installed")

ROOT = Path(__file__).parents[2]
FILE = ROOT / "examples" / "hugging_face" / "llama_model.py"


@pytest.fixture(scope="module")
def example():
    """Yield the global names of the example's file."""
    declared = registry.cases()
    (case,) = registry.load_file(FILE)
    yield case.factory.__globals__
    registry.restore(declared)


@pytest.fixture(scope="module")
def files(example, tmp_path_factory):
    """Return a folder with a sharded BF16 checkpoint, its conversion to TE's, and the conversion of that back."""
    folder = tmp_path_factory.mktemp("llama")
    torch.manual_seed(0)
    model = example["LlamaForCausalLM"](example["config_of"](**{**example["TINY"], "layers": 3}))
    model.bfloat16().save_pretrained(folder / "original", max_shard_size="500KB")
    for source, target, to in (
        ("original", "te.safetensors", "te"),
        ("te.safetensors", "back.safetensors", "reference"),
    ):
        arguments = [str(FILE), str(folder / source), str(folder / target), "--to", to, "--size", "layers=3"]
        ended = CliRunner().invoke(app, ["convert", *arguments], catch_exceptions=False)
        assert ended.exit_code == 0
    return folder


def test_the_model_from_the_converted_file_computes_what_the_original_does(example, files):
    results = example["compare_checkpoints"](files / "original", files / "te.safetensors")
    assert [(result.precision, result.status) for result in results] == [("fp32", "passed"), ("bf16", "passed")]


def test_a_file_in_which_gate_and_up_are_exchanged_fails_and_is_told(example, files, tmp_path):
    tensors = load_file(files / "te.safetensors")
    name = "layers.2.layernorm_mlp.fc1_weight"
    tensors[name] = tensors[name].roll(len(tensors[name]) // 2, 0)
    save_file(tensors, tmp_path / "wrong.safetensors")
    (result,) = example["compare_checkpoints"](files / "original", tmp_path / "wrong.safetensors", ("fp32",))
    assert result.status == "failed"
    assert result.findings[0].code == "PAR112"
    assert name in result.findings[0].message


def test_the_converted_file_is_proven_layer_by_layer(example, files):
    arguments = [str(files / "original"), str(files / "te.safetensors"), "--port", str(FILE), "--size", "layers=3"]
    ended = CliRunner().invoke(app, ["prove", *arguments, "-q"], catch_exceptions=False)
    assert ended.exit_code == 0
    for block in ("model.embed_tokens", *(f"model.layers.{i}" for i in range(3)), "model.norm", "lm_head"):
        assert re.search(rf"^    {block} ", ended.stdout, re.MULTILINE)


def test_a_text_is_read_by_the_model_s_tokenizer(files, tmp_path):
    tokenizers, transformers = pytest.importorskip("tokenizers"), pytest.importorskip("transformers")
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 7, "b": 250, "?": 0}, unk_token="?"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    (tmp_path / "page.txt").write_text("a b a a b c")
    arguments = ["--port", str(FILE), "--size", "layers=3", "--text", str(tmp_path / "page.txt"), "-q"]
    ended = CliRunner().invoke(app, ["prove", str(files / "original"), *arguments])
    assert "--text needs the tokenizer in" in str(ended.exception)
    copied = shutil.copytree(files / "original", tmp_path / "with_tokenizer")
    transformers.PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(copied)
    ended = CliRunner().invoke(app, ["prove", str(copied), *arguments])
    assert ended.exit_code == 0, ended.exception
    assert "6 of 6 blocks" in ended.stdout


def test_the_way_back_gives_every_bit_of_the_original(files):
    assert len(list((files / "original").glob("*.safetensors"))) > 1
    original, back = checkpoint.read(files / "original"), load_file(files / "back.safetensors")
    assert back.keys() == original.keys()
    assert all(torch.equal(back[key].view(torch.int16), x.view(torch.int16)) for key, x in original.items())


def test_the_page_s_failure_is_named_as_the_page_says(example):
    layer = {left: right for left, right in example["LAYER"].items() if right != "layernorm_mlp.fc1_weight"}
    layer[parity.stack("mlp.up_proj.weight", "mlp.gate_proj.weight")] = "layernorm_mlp.fc1_weight"
    case = example["llama_model"]

    def swapped(te, **size):
        wrong = {
            **{name: example["WEIGHTS"][name] for name in example["WEIGHTS"] if isinstance(name, str)},
            **parity.under(layer, "model.layers.{i}.", "layers.{i}."),
        }
        pair = case.factory(te, **{**size, "layers": 1})
        return dataclasses.replace(pair, weights=wrong)

    (result,) = parity.compare(dataclasses.replace(case, factory=swapped), ["bf16"])
    page = (ROOT / "docs" / "hugging-face.md").read_text(encoding="utf-8")
    assert re.search(rf"^{result.findings[0].code} {result.findings[0].title}: margin", page, re.MULTILINE)


def test_the_page_has_the_map_that_is_suggested(example):
    case = example["llama_model"]
    without = dataclasses.replace(
        case, factory=lambda te, **size: dataclasses.replace(case.factory(te, **size), weights={})
    )
    suggestion = parity.suggest_map(without, backend="cpu")
    te = parity.te.kernels("cpu").te
    declared = dataclasses.replace(case.factory(te, **case.sizes[0]), weights=example["WEIGHTS"])
    assert suggestion.settled
    assert set(suggestion.weights.items()) == set(declared.weights.items())
    assert set(suggestion.written.items()) == set(example["WEIGHTS"].items())
