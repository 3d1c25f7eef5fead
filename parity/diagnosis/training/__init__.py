"""Steps of an optimizer in a reference, and ports whose optimizer makes others."""
