#!/usr/bin/env bash
# All that a GPU machine can tell, in one folder with an index.md: scripts/gpu_report.sh [FOLDER] [--minutes 7.5] [--quick]
# Needs no network and no installation of parity: Python must find PyTorch, TransformerEngine and parity's dependencies.
set -eu
root=$(cd "$(dirname "$0")/.." && pwd)
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"
exec "${PYTHON:-python3}" -m parity gpu-report "$@"
