"""A port is written from a configuration of transformers, and is right as it is written."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from parity.cli import app
from parity.cli.ports import run_port
from parity.ports import reading, writing
from parity.user_error import UserError

RUNNER = CliRunner()

# Each of these has something that the others do not: what, is in the comment.
MODELS: dict[str, dict[str, object]] = {
    "qwen3": {},  # a norm of each query and key
    "gpt2": {},  # learned positions, weights [in, out], fused projections, a tied head
    "gpt_neox": {},  # attention and MLP side by side, projections fused by head, GELU by erf
    "gemma2": {},  # sandwiched and zero-centered norms, caps, windows, scaled embeddings
    "olmo2": {},  # norms that follow, and one over the queries of all heads
    "cohere": {"logit_scale": 0.25},  # one LayerNorm without bias for both parts, neighbouring channels rotated
    "granite": {"residual_multiplier": 0.22, "embedding_multiplier": 12.0, "attention_multiplier": 0.0078125},
    "smollm3": {},  # layers that do not rotate
    "gpt_oss": {},  # sinks, YaRN, experts with biases and a clamp
    "deepseek_v3": {},  # latent attention, groups of experts, a layer without experts
    "bert": {},  # an encoder with norms of sums
    "modernbert": {},  # a first layer without a norm, two bases of rotation
    "esm": {"vocab_size": 33, "pad_token_id": 1, "mask_token_id": 32, "position_embedding_type": "rotary"},
    "vit": {},  # pixels
    "dinov2": {"use_swiglu_ffn": True},  # learned factors of channels, a width by a ratio
    "whisper": {},  # a half of a model, which the model's own convolutions and positions precede
    "bloom": {},  # ALiBi, a norm of embeddings
    "falcon": {"new_decoder_architecture": True, "num_kv_heads": 8},  # projections fused by group
    "apertus": {},  # an activation with parameters
    "phimoe": {},  # a router that draws experts in training
}


def written(kind: str, **changes: object) -> str:
    config = reading.load_config(kind)
    for name, value in changes.items():
        setattr(config, name, value)
    return writing.write(config)[0]


@pytest.mark.parametrize("kind", MODELS)
def test_a_port_is_right_as_it_is_written(kind: str) -> None:
    for result in run_port(written(kind, **MODELS[kind]), kind, ["bf16"], seconds=1.0):
        assert result.passed, result


@pytest.mark.parametrize(
    "changes",
    [{}, {"multi_query": False, "parallel_attn": False, "bias": True, "alibi": True}],
    ids=["queries first", "by head, with scaled ALiBi"],
)
def test_each_layout_of_falcon_is_ported(changes: dict[str, object]) -> None:
    for result in run_port(written("falcon", **changes), "falcon", ["fp32"], seconds=1.0):
        assert result.passed, result


@pytest.mark.parametrize("kind", ["olmo", "cohere2", "opt", "glm4", "qwen2_moe", "siglip_vision_model"])
def test_a_model_without_a_page_gets_a_port_that_says_so(kind: str) -> None:
    text, form = writing.write(reading.load_config(kind))
    assert any("does not know" in one for one in form.unknown)
    assert "needs your eye" in text
    for result in run_port(text, kind, ["fp32"], seconds=1.0):
        assert result.passed, result


def test_what_te_cannot_do_is_said_in_the_port() -> None:
    text = written("gpt_neox")
    assert "no fused MLP with gelu" in text
    assert "dropout is left out (classifier_dropout)" in text.replace("\n  ", " ")
    assert "this is the encoder alone" in written("whisper")
    text = written("phimoe")
    assert "the router draws experts at random" in text
    assert '"router_jitter_noise": 0.01' in text  # it is a threshold here


SCALED = {
    "llama3": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    "yarn": {"factor": 4.0, "beta_fast": 32.0, "beta_slow": 1.0},
    "longrope": {"short_factor": [1.0 + i for i in range(64)], "long_factor": [2.0 + i for i in range(64)]},
    "linear": {"factor": 3.0},
}


@pytest.mark.parametrize("scaling", SCALED)
def test_the_frequencies_of_a_scaled_rotation_are_those_of_transformers(scaling: str) -> None:
    parameters = {"rope_type": scaling, "rope_theta": 500000.0, "original_max_position_embeddings": 16}
    text = written("llama", rope_parameters=parameters | SCALED[scaling])
    assert f"no scaling of rotary frequencies by {scaling}" in text
    (result, *_) = run_port(text, "llama", ["fp32"], seconds=1.0)
    assert result.passed, result


def test_a_port_of_a_folder_is_printed_and_run_and_what_is_to_be_known_goes_to_stderr(tmp_path: Path) -> None:
    config = reading.load_config("gpt2").to_dict() | {
        "n_layer": 3,
        "architectures": ["GPT2LMHeadModel"],
        "dtype": "bfloat16",
    }
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    done = RUNNER.invoke(app, ["port", str(tmp_path)])
    assert done.exit_code == 0, done.output
    assert '"n_layer": 3' in done.stdout
    compile(done.stdout, "gpt2_port.py", "exec")
    assert "TE differs: dropout is left out" in done.stderr
    assert "✓ gpt2[bf16-2x32]: passed" in done.stderr
    assert "✓ gpt2_decoding[bf16-8x16]: passed" in done.stderr


@pytest.mark.parametrize(
    ("source", "told"),
    [
        ("no_such_model", "neither a config.json"),
        ("{folder}", "cannot read the configuration"),
        ("nemotron", "cannot build a model"),
        ("t5", "encoder and a decoder"),
        ("rwkv", "no norm was recognised"),
        ("minimax", "layers of linear_attention, which carry a state"),
    ],
)
def test_what_cannot_be_ported_is_an_error_that_says_so(source: str, told: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{", encoding="utf-8")
    done = RUNNER.invoke(app, ["port", source.format(folder=tmp_path)])
    assert isinstance(done.exception, UserError)
    assert told in str(done.exception)


def test_other_weights_of_experts_than_sparsemixer_gives_are_wrong() -> None:
    weights, ones = "        return weights, chosen\n", "        return torch.ones_like(weights), chosen\n"
    text = written("phimoe")
    assert text.count(weights) == 1
    assert [one.status for one in run_port(text.replace(weights, ones), "phimoe", ["bf16"], seconds=1.0)] == [
        "failed"
    ] * 2


def test_a_mistake_in_a_written_port_is_named() -> None:
    text = written("qwen3").replace('"mlp.gate_proj.weight", "mlp.up_proj', '"mlp.up_proj.weight", "mlp.gate_proj')
    result, _ = run_port(text, "qwen3", ["bf16"], seconds=30.0)
    assert [finding.title for finding in result.findings] == ["gate-up-swapped"]
