"""Linears over 8-bit weights."""
