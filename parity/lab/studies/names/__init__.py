"""Judge how often a wrong port's mistake is named, on a fixed table of wrong ports."""
