"""The fallback: decoders of the transformers package, unmodified."""
