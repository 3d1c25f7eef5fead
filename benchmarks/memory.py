"""Measure the peak memory of comparing one large layer: ``python benchmarks/memory.py [PRECISION...]``.

Compares the built-in Llama layer at the width of Llama 3 8B (hidden 4096, ffn 14336, 32 heads in 8 groups, 218 million
parameters) on 256 tokens, at each precision in a new process, and prints in markdown by how much the process grew: its
peak resident set, minus the resident set before the comparison. ``--small`` uses an eighth of the width.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

from tabulate import tabulate

ROOT = Path(__file__).parents[1]
LARGE = dict(batch=2, seq=128, hidden=4096, ffn=14336, heads=32, groups=8)
SMALL = dict(batch=2, seq=128, hidden=512, ffn=1792, heads=4, groups=1)
ONE = """
import dataclasses, resource, sys
import parity
from cases import layer

def resident():  # bytes; the largest so far, which nothing before the comparison comes near
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

parity.te.kernels("cpu")
before = resident()
(result,) = parity.compare(dataclasses.replace(layer.llama, sizes=({size},)), precisions=[{precision!r}])
parameters = sum(t.numel for t in result.tensors if t.kind == "weight gradient")
print(resident() - before, parameters, result.status, file=sys.stderr)
"""


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("precisions", nargs="*", default=["bf16", "fp8_current"], metavar="PRECISION")
    parser.add_argument("--small", action="store_true", help="an eighth of the width, in a minute")
    arguments = parser.parse_args()
    rows = []
    for precision in arguments.precisions:
        program = ONE.format(size=SMALL if arguments.small else LARGE, precision=precision)
        ran = subprocess.run([sys.executable, "-c", program], cwd=ROOT, stderr=subprocess.PIPE, text=True, check=True)
        grown, parameters, status = ran.stderr.split()[-3:]
        rows.append((precision, status, f"{int(grown) / 2**30:.2f}", f"{int(grown) / int(parameters):.1f}"))
    print(tabulate(rows, ["precision", "verdict", "GiB", "bytes a parameter"], tablefmt="github"))


if __name__ == "__main__":
    main()
