"""Find which known mistakes explain a failure, at a bounded cost, and where the error is if none does."""
