"""Anthropic's messages API: its requests as chat requests, and parser events as its events."""
