"""Whether right ports pass and wrong ones fail under TE's factories and under recipes with other arguments."""
