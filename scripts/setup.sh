#!/bin/sh
# Make a virtual environment that holds parity and what it needs: setup.sh VENV
# A machine that has TransformerEngine's compiled kernels keeps its torch and TransformerEngine: the environment sees them.
set -eu
venv=$1
python=${PYTHON:-python3}

"$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' || {
    echo "parity needs Python 3.10 or newer; '$python' is $("$python" --version). Name another: make PYTHON=python3.12 ..." >&2
    exit 2
}
if "$python" -c 'import importlib.util as u, sys; sys.exit(u.find_spec("transformer_engine_torch") is None)'; then
    "$python" -m venv --system-site-packages "$venv"
    "$venv/bin/pip" install --quiet --disable-pip-version-check -e '.[dev]'
else
    "$python" -m venv "$venv"
    "$venv/bin/pip" install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
fi
