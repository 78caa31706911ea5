"""Tiers behind the device's memory, which keep blocks of the KV cache: the host's memory, and a folder on disk."""
