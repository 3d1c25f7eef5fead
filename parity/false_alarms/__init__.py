"""How often right ports are rejected: counted on seeds, and at sizes, that no limit was fitted to."""
