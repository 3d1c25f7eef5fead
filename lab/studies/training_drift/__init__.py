"""How far flash attention, low precision and TE move the weights that training ends with."""
