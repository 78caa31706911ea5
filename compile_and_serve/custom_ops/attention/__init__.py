"""Attention over a paged KV cache: the ops, and one file per backend."""
