"""The first module of a candidate that computes something that its reference does not."""
