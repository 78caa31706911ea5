"""Model families, one plain `torch.nn` file each, and the registry from Hugging Face architecture to `ModelSpec`."""
