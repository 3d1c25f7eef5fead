"""The known mistakes of ports, one subject per module: each recognises an operation in a trace and computes the
reference with a mistake in it.
"""
