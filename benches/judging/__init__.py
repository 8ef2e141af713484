"""Runs against a baseline: what belongs together, how much times differ by themselves, and a verdict for each case."""
