"""How a reference puts its blocks together, with their norms, and ports that put them together otherwise."""
