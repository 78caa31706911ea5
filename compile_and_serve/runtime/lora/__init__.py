"""LoRA adapters: their files, where they lie, and which requests use them."""
