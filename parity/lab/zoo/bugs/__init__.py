"""The planted bugs, one file a subject."""
