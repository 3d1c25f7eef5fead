"""Find where a port departs from its reference, stage by stage."""
