"""Connectors: they bring the blocks of the KV cache to other memory, or from there."""
