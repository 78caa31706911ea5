"""Writes quantized checkpoints: from a model and a text to a folder in the compressed-tensors format."""
