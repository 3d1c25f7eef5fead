"""Measure what becomes of runs, records and readers under whatever may happen to them; see docs/reliability.md.

``command`` runs all of it and draws the table: ``kills``, ``readers`` (on ``mutations``), ``mishaps`` and ``soak``.
"""
