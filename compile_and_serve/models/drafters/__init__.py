"""Models that draft tokens for another model, the target: a file a kind."""
