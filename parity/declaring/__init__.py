"""From a user's file to a checked case: what is declared, where, and whether it can be built."""
