"""Attention over a paged KV cache: the ops, and one backend a file."""
