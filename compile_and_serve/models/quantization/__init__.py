"""Checkpoint formats: one file each, which reads `quantization_config` and registers itself by its `quant_method`."""
