"""Right and wrong ports whose model is divided over ranks: their steps, pipelines and trainings."""
