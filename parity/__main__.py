"""``python -m parity`` is the command ``parity``."""

from parity.cli import main

main()
