"""Find the smallest case in which a pair fails as it does, as one file to paste into an issue."""
