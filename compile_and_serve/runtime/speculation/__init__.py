"""Speculative decoding: who drafts tokens, how many, and when it pays. docs/speculation.md describes the whole."""
