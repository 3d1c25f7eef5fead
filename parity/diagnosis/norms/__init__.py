"""Norms in a reference, and what ports get wrong about them: which, where, eps and roundings."""
