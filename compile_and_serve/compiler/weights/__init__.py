"""Weights as expressions of checkpoint tensors."""
