"""Whether TE models train like the plain models, recipe by recipe."""
