"""Embeddings, classes and scores: what a checkpoint says, and what comes of the pooled rows."""
