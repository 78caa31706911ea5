"""LoRA adapters beside linears."""
