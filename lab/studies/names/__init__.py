"""Which mistakes in a fixed table of wrong ports are named: constants, local mistakes, and kinds."""
