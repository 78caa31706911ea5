"""What layers keep from step to step: groups of layers, the kinds of state, and what a step tells their ops."""
