"""Norms in a reference, and what ports get wrong about one: its kind, its groups, its eps and roundings."""
