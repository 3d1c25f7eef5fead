"""Write the tables of ``docs/normal-error.md`` from the record of the study ``expected_error``.

Only the text between the two marks in the page is replaced. A test checks that the page agrees with the record.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RECORD = ROOT / "reports" / "studies" / "expected_error.jsonl"
PAGE = ROOT / "docs" / "normal-error.md"
BEGIN, END = "<!-- begin: scripts/normal_errors.py -->", "<!-- end: scripts/normal_errors.py -->"

MODULES = {
    "layernorm": "LayerNorm",
    "rmsnorm": "RMSNorm",
    "linear": "Linear",
    "grouped_linear": "GroupedLinear",
    "layernorm_linear": "LayerNormLinear",
    "layernorm_mlp_gelu": "LayerNormMLP with GELU",
    "layernorm_mlp_swiglu": "LayerNormMLP with RMSNorm and SwiGLU",
    "dot_product_attention": "DotProductAttention, causal",
    "multihead_attention": "MultiheadAttention, causal, grouped queries, RoPE",
    "transformer_layer_gpt": "TransformerLayer as in GPT",
    "transformer_layer_llama": "TransformerLayer as in Llama",
}
# Precisions with about the same errors share a column, which has the larger one.
COLUMNS = (("fp32",), ("bf16",), ("fp16",), ("fp8_delayed", "fp8_current"), ("fp8_block", "mxfp8"), ("nvfp4",))
BASE = (256, 128, 1)
DEEPER = ((256, 128, 4), (256, 128, 16))  # width and length hardly matter; the record has these sizes as well

Size = tuple[int, int, int]
Key = tuple[str, Size, str, str]


def measured(record: Path = RECORD) -> dict[Key, float]:
    """Return the errors of TE's modules, as root mean squares over seeds, by module, size, precision and kind."""
    found: dict[Key, list[float]] = defaultdict(list)
    for line in record.read_text(encoding="utf-8").splitlines():
        entry = json.loads(line)
        run = entry.get("run", {})
        if run.get("way") == "te" and run["module"] in MODULES:
            size = tuple(run["shape"][name] for name in ("hidden", "seq", "depth"))
            for kind, error in entry["result"]["relative_l2"].items():
                found[run["module"], size, run["precision"], kind].append(error)
    return {key: math.sqrt(sum(error**2 for error in errors) / len(errors)) for key, errors in found.items()}


def tables(errors: dict[Key, float]) -> str:
    """Return a table of each kind of tensor for one module, and one of outputs for several modules in a row."""
    kinds = {kind: [(name, BASE) for name in MODULES] for kind in ("output", "input gradient", "weight gradient")}
    drawn = [_table(f"{kind.capitalize()} of one module", errors, kind, rows) for kind, rows in kinds.items()]
    deeper = [(name, size) for name in MODULES for size in DEEPER]
    return "\n".join([*drawn, _table("Output of several modules in a row", errors, "output", deeper)])


def page(text: str, drawn: str) -> str:
    """Return the page with these tables between its marks."""
    before, rest = text.split(BEGIN)
    _, after = rest.split(END)
    return f"{before}{BEGIN}\n\n{drawn}\n{END}{after}"


def _table(title: str, errors: dict[Key, float], kind: str, rows: list[tuple[str, Size]]) -> str:
    """Return the table of these modules at these sizes, without those that were not measured."""
    heads = " | ".join(map(", ".join, COLUMNS))
    lines = [f"### {title}\n", f"| module | {heads} |", f"| --- |{' --- |' * len(COLUMNS)}"]
    for name, size in rows:
        row = [max(errors.get((name, size, each, kind), math.nan) for each in column) for column in COLUMNS]
        if not all(map(math.isnan, row)):
            count = f"{size[2]} × " if size[2] > 1 else ""
            lines.append(f"| {count}{MODULES[name]} | {' | '.join(map(_short, row))} |")
    return "\n".join(lines) + "\n"


def _short(error: float) -> str:
    """Return an error with two digits, or a dash if there is none."""
    if math.isnan(error):
        return "–"
    return f"{error:.1e}".replace("e-0", "e-") if error < 1e-4 else f"{error:.2g}"


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8"), tables(measured())), encoding="utf-8")
