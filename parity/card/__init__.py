"""The card of a port: what was compared, with what outcome, to be committed beside a model; see README.md."""
