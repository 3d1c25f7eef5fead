"""Know what ports get wrong, one subject per page: recognise an operation in a trace, and compute the
reference with a mistake in it.
"""
