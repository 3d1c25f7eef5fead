"""Which error is normal: by TE module and precision, over width, length and depth."""
