"""The names of ``parity`` are loaded late, and can be listed at once."""

from __future__ import annotations

import subprocess
import sys

import parity


def test_every_public_name_is_listed():
    assert set(parity.__all__) <= set(dir(parity))


def test_every_listed_name_is_there():
    assert all(hasattr(parity, name) for name in dir(parity))


def test_listing_the_names_loads_no_torch():
    code = "import sys, parity; assert 'compare' in dir(parity); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
