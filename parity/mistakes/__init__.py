"""What ports get wrong, a page a subject: how to recognise it in a trace, and how the reference computes it wrongly."""
