"""From errors to a verdict: the statistics that are judged, their limits, and what else could explain a failure."""
