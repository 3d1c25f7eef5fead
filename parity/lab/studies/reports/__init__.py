"""Draw the reports of studies, each from what its study measured."""
