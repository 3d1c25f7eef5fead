"""What shows when the candidate runs again, otherwise than before."""
