"""Which mistakes of trainings are detected and named, and whether right trainings pass."""
