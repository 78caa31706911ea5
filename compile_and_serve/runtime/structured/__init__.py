"""Structured output: grammars that restrict a request's tokens, and the masks that they put on the logits."""
