"""How far flash attention deviates from baseline attention, and which rounding does it."""
