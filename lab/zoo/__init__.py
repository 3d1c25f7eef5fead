"""The bug zoo: bugs planted in right ports, to measure what rules of comparison detect and how often they cry wolf."""
