"""Which requests run in a step, and who holds which KV blocks."""
