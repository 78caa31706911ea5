"""The graph cut into pieces, and the plan that runs them."""
