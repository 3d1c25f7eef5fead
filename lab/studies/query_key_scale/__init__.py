"""Where to scale queries and keys: overflow and error by magnitude, head width and dtype."""
