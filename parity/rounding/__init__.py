"""The rounding model: the plain reference with the roundings of a precision put in."""
