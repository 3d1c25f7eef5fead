"""Whether each stage of right ports is right, and the flagged stages of wrong ports hold their mistakes."""
