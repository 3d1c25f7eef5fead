"""Compare trainings step by step, and candidates that several ranks compute together; see README."""
