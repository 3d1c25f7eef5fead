"""Say what a recipe costs in a model, and which layers to keep in BF16."""
