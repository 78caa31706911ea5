"""Collectives over the ranks of a group, and the all-reduce fused with the residual and the norm after it."""
