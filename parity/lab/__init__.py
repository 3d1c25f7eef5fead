"""Measure the product and the field; nothing but the command line imports it, late."""
