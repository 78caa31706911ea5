"""Linears over packed weights, and the row-wise ops around them."""
