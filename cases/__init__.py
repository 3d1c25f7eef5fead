"""The built-in pairs, installed as ``parity.cases``; each module is found through the entry points ``parity.pairs``."""
