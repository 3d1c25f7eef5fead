"""Right and wrong trainings: their models, optimizers, loops and what is switched on."""
