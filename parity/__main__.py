"""Run the command ``parity`` as ``python -m parity``."""

from parity.cli import main

main()
