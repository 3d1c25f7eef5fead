"""The built-in pairs, installed as ``parity.cases``. Each module is found through the entry points ``parity.pairs``."""
