"""Splits the graph into pieces, and runs them by a plan."""
