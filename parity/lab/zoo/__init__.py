"""The bug zoo: planted mistakes of ports, to measure what a rule of comparison detects and how often it cries wolf."""
