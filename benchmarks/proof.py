"""Prove a Llama of 8B parameters with random weights, and say how long it takes and how much memory it needs.

``python benchmarks/proof.py FOLDER`` writes three checkpoints to FOLDER, once: the model in Hugging Face's layout, its
conversion to TE's, and the same with queries and keys of one layer exchanged as far as their shapes allow, whose other
files are links. It needs 33 GB. ``--layers 4`` makes a smaller one of the same widths.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import threading
import time
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from parity.weights.conversion import checkpoint
from parity.weights.conversion.plan import Made, Plan, Step

ROOT = Path(__file__).parents[1]
PORT = ROOT / "examples" / "hugging_face" / "llama_model.py"
HIDDEN, FFN, HEADS, GROUPS, VOCABULARY = 4096, 14336, 32, 8, 128256
KEYS = GROUPS * HIDDEN // HEADS
LAYER = {
    "input_layernorm.weight": (HIDDEN,),
    "self_attn.q_proj.weight": (HIDDEN, HIDDEN),
    "self_attn.k_proj.weight": (KEYS, HIDDEN),
    "self_attn.v_proj.weight": (KEYS, HIDDEN),
    "self_attn.o_proj.weight": (HIDDEN, HIDDEN),
    "post_attention_layernorm.weight": (HIDDEN,),
    "mlp.gate_proj.weight": (FFN, HIDDEN),
    "mlp.up_proj.weight": (FFN, HIDDEN),
    "mlp.down_proj.weight": (HIDDEN, FFN),
}


def list_shapes(layers: int) -> dict[str, tuple[int, ...]]:
    """Return the shape of each tensor of the model."""
    return {
        "model.embed_tokens.weight": (VOCABULARY, HIDDEN),
        **{f"model.layers.{i}.{name}": shape for i in range(layers) for name, shape in LAYER.items()},
        "model.norm.weight": (HIDDEN,),
        "lm_head.weight": (VOCABULARY, HIDDEN),
    }


def write_random(folder: Path, layers: int) -> None:
    """Write a checkpoint with random weights in BF16: norms around 1, and the rest as transformers initialises it."""
    generator = torch.Generator().manual_seed(0)

    def step(key: str, shape: tuple[int, ...]) -> Step:
        def draw() -> dict[str, torch.Tensor]:
            drawn = torch.empty(shape).normal_(generator=generator)
            return {key: (1.0 + 0.1 * drawn if len(shape) == 1 else drawn.mul_(0.02)).bfloat16()}

        return Step((Made(key, shape, torch.bfloat16),), draw)

    shapes = list_shapes(layers)
    checkpoint.write_shards(folder, Plan(tuple(shapes), [step(*entry) for entry in shapes.items()]), 5 * 10**9)


def write_wrong(folder: Path, right: Path, layer: int) -> None:
    """Write a copy of TE's checkpoint in which the layer's keys stand where the first rows of its queries belong."""
    folder.mkdir()
    index = json.loads((right / "model.safetensors.index.json").read_text())
    place = index["weight_map"][f"layers.{layer}.self_attention.layernorm_qkv.query_weight"]
    for file in right.iterdir():
        if file.name != place:
            (folder / file.name).symlink_to(file)
    tensors = load_file(right / place)
    query, key = (tensors[f"layers.{layer}.self_attention.layernorm_qkv.{name}_weight"] for name in ("query", "key"))
    query[:KEYS], key[:] = key.clone(), query[:KEYS].clone()
    save_file(tensors, folder / place, {"format": "pt"})


def run_watched(arguments: list[str]) -> None:
    """Run a command of parity, and print its time and the most memory that it had, apart from mapped files."""
    began, most = time.perf_counter(), {"RssAnon": 0, "VmRSS": 0}
    process = subprocess.Popen([sys.executable, "-m", "parity", *arguments], cwd=ROOT)
    while process.poll() is None:
        try:
            lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
        except OSError:
            break
        for name in most:
            found = next((int(line.split()[1]) for line in lines if line.startswith(f"{name}:")), 0)
            most[name] = max(most[name], found)
        threading.Event().wait(0.2)
    seconds = time.perf_counter() - began
    told = ", ".join(f"{name} {kib / 2**20:.1f} GiB" for name, kib in most.items())
    print(f"parity {arguments[0]}: exit code {process.wait()}, {seconds:.0f} s, at most {told}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--wrong", type=int, default=17, help="the wrong layer")
    parser.add_argument("--seq", type=int, default=64)
    given = parser.parse_args()
    source, right, wrong = (given.folder / name for name in ("llama", "te", "wrong"))
    size = f"layers={given.layers},hidden={HIDDEN},ffn={FFN},heads={HEADS},groups={GROUPS},vocabulary={VOCABULARY}"
    size += f",batch=1,seq={given.seq}"
    if not source.exists():
        write_random(source, given.layers)
    if not right.exists():
        run_watched(["convert", str(PORT), str(source), str(right), "--size", size, "--shard-size", "5GB"])
    if not wrong.exists():
        write_wrong(wrong, right, given.wrong)
    for converted in (right, wrong):
        run_watched(["prove", str(source), str(converted), "--port", str(PORT), "--size", size])


if __name__ == "__main__":
    main()
