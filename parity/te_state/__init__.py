"""What TransformerEngine holds for a whole process, or beside its modules: as new for each candidate."""
