"""How a reference puts its blocks together, and ports that put them together otherwise."""
