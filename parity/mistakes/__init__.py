"""Know what ports get wrong, a page a subject: recognise it in a trace, and compute the reference with it."""
