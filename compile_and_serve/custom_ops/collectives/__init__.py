"""Collectives over the ranks of a group, and the all-reduce with what follows it."""
