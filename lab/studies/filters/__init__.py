"""Whether any linear filter could detect the wrong ports that pass: signal to noise ratios."""
